"""Drafts the TOML file that describes the user's own data, by what the files hold."""

import csv
import os
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import tomli_w
from scipy.stats import skew

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import DataError, UsageError
from vflsec.data.description import MAX_CATEGORIES, Format
from vflsec.data.tables import RawTable, read_table

LABELS = ("label", "target", "y", "class", "outcome", "default", "defaulted", "churn", "fraud", "click", "response")
"""Usual names of a label."""
DATES = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M")
"""Usual ways to write a date, of which the first that fits all values is taken."""

SAMPLE = 1000
"""Rows whose values are looked up in all columns of other files."""
CODE = r"(^|_)(id|code|zip|plz|postcode|nr|no)$"
"""Names of whole numbers that are codes."""


def draft(
    files: Sequence[Path],
    folder: Path,
    *,
    label: str | None = None,
    keys: Sequence[list[str]] = (),
    active: str | None = None,
) -> str:
    """Return the text of a TOML file in ``folder`` that describes ``files``, one for each party.

    Args:
        files: CSV or Parquet.
        folder: to which paths in the TOML file are relative.
        label: the column of labels; by default a column with a usual name, or the only one of two values.
        keys: the columns that identify a row, in all files or in each in its turn; by default those that all files
            share and that differ in all rows, or one of each file with mostly the same values.
        active: the file of the active party; by default the one with the label.

    Raises:
        UsageError: fewer than two files, or a name that no file has.
        DataError: a file cannot be read, or label or id cannot be guessed.
    """
    if len(files) < 2:
        raise UsageError(f"expected a file for each of two parties or more, got {len(files)}: add the others")
    tables = {path: read_table(path, _format(path), toml=False) for path in files}
    names = _list_names(files)
    if active is not None and Path(active) not in tables:
        raise UsageError(describe_unknown("--active", active, [str(path) for path in files]))
    if len(keys) not in (0, 1, len(files)):
        raise UsageError(f"expected --id once, or once for each of {len(files)} files, got {len(keys)}")
    ids = dict(zip(files, keys if len(keys) > 1 else [*keys] * len(files), strict=True)) if keys else _find_keys(tables)
    for path, key in ids.items():
        for column in key:
            if column not in (known := list(tables[path].frame.columns)):
                raise UsageError(f"--id: {describe_unknown('column', column, known)} in {path.name}")
    holder, label = _locate(tables, ids, label, Path(active) if active else None)
    ordered = [holder, *(path for path in files if path != holder)]
    shared = ids[holder] if all(key == ids[holder] for key in ids.values()) else None
    parts = [_write_head(names[holder], shared, label, tables[holder])]
    parts += [
        _write_section(names[path], path, folder, tables[path], ids[path], label, shared=bool(shared))
        for path in ordered
    ]
    return "\n".join(parts)


def _format(path: Path) -> Format:
    """Return how a CSV file is written: its encoding and separator."""
    if path.suffix == ".parquet" or not path.is_file():
        return Format()
    with path.open("rb") as stream:
        sample = stream.read(1 << 20)
    try:
        text, encoding = sample[: sample.rfind(b"\n") + 1].decode("utf-8-sig"), None
    except UnicodeDecodeError:
        text, encoding = sample.decode("latin-1"), "latin-1"
    header = next(csv.reader([text.partition("\n")[0]]), [])
    counts = {mark: text.partition("\n")[0].count(mark) for mark in ";\t|,"}
    separator = max(counts, key=lambda mark: counts[mark])
    return Format(
        encoding=encoding, separator=None if separator == "," or (counts[separator] == 0 and header) else separator
    )


def _list_names(files: Sequence[Path]) -> dict[Path, str]:
    """Return a party's name for each file: its stem."""
    names: dict[Path, str] = {}
    for path in files:
        stem = re.sub(r"[^\w-]+", "_", path.stem, flags=re.ASCII).strip("_")
        stem = stem if re.match(r"[A-Za-z]", stem) else f"party_{stem}"
        number = sum(name == stem for name in names.values())
        names[path] = stem if not number else f"{stem}_{len(names) + 1}"
    return names


def _find_keys(tables: dict[Path, RawTable]) -> dict[Path, list[str]]:
    """Return the fewest columns that all files have and that identify a row in each, or a column of each file."""
    frames = [table.frame for table in tables.values()]
    shared = [name for name in frames[0].columns if all(name in frame.columns for frame in frames[1:])]
    for size in (1, 2, 3):
        fitting = [
            list(columns)
            for columns in combinations(shared if size == 1 else shared[:12], size)
            if not any(frame.duplicated(list(columns)).any() for frame in frames)
        ]
        if fitting:
            return dict.fromkeys(tables, max(fitting, key=lambda columns: _count_common(frames, columns)))
    expected = "expected columns that all files have and that differ in all rows"
    if not shared:
        if matching := _match_columns(tables):
            return matching
        raise DataError(f"{expected}, found none in all files: name that of each file with --id, once for each")
    raise DataError(
        f"{expected}, found {', '.join(shared)}, whose values repeat: name the id with --id, and drop repeated rows"
    )


def _match_columns(tables: dict[Path, RawTable]) -> dict[Path, list[str]]:
    """Return the column of each file whose values differ in all rows and are mostly those of the other files."""
    frames = {path: table.frame for path, table in tables.items()}
    unique = {p: [c for c in f if all(f[c][:n].is_unique for n in (SAMPLE, None))] for p, f in frames.items()}
    first, *others = frames
    for name in unique[first]:
        rows, chosen = len(frames[first]), {first: [str(name)]}
        sample = frames[first][name].iloc[:: max(1, rows // SAMPLE)].astype(str)
        for path in others:
            shares = {c: frames[path][c].astype(str).isin(sample).sum() / len(sample) for c in unique[path]}
            best = max(shares, key=lambda column: shares[column], default="")
            if shares and 2 * shares[best] * rows >= min(rows, len(frames[path])):
                chosen[path] = [str(best)]
        if len(chosen) == len(frames):
            return chosen
    return {}


def _count_common(frames: list[pd.DataFrame], columns: list[str]) -> int:
    known = [set(map(tuple, frame[columns].astype(str).to_numpy())) for frame in frames]
    return len(set.intersection(*known))


def _locate(
    tables: dict[Path, RawTable], ids: dict[Path, list[str]], label: str | None, active: Path | None
) -> tuple[Path, str]:
    """Return the active party's file, and its column of labels."""
    places = [active] if active else list(tables)
    if label is not None:
        holders = [path for path in places if label in tables[path].frame.columns]
        if len(holders) == 1:
            return holders[0], label
        got = "none" if not holders else " and ".join(path.name for path in holders)
        way_out = "name the active party's file with --active" if holders else "name another with --label"
        raise UsageError(f"expected one file with the label {label!r}, got {got}: {way_out}")
    columns = [(path, str(name)) for path in places for name in tables[path].frame.columns if name not in ids[path]]
    binary = [(path, name) for path, name in columns if tables[path].frame[name].nunique() == 2]
    usual = [(path, name) for path, name in columns if name.lower() in LABELS]
    few = [(path, name) for path, name in binary if name == tables[path].frame.columns[-1]]
    for candidates in (usual, few):
        if len(candidates) == 1:
            return candidates[0]
    named = ", ".join(f"{name} ({path.name})" for path, name in binary[:10])
    known = f"columns of two values are {named}" if named else "no column has two values"
    raise DataError(f"expected a label, could not guess it: name it with --label COLUMN; {known}")


def _write_head(active: str, key: list[str] | None, label: str, table: RawTable) -> str:
    classes = table.frame[label].nunique(dropna=True)
    values = ", ".join(map(str, sorted(table.frame[label].astype(str).unique())[:5]))
    lines = [
        _write_line("label", label, f"{classes} values: {values}{', ...' * (classes > 5)}"),
        *([_write_id(key, "in every file, different in every row")] if key else []),
        _write_line("active", active, "the party that has the labels"),
    ]
    return "\n".join(lines) + "\n"


def _write_id(key: list[str], why: str) -> str:
    return _write_line("id", key[0] if len(key) == 1 else key, why)


def _write_section(
    name: str, path: Path, folder: Path, table: RawTable, key: list[str], label: str, *, shared: bool
) -> str:
    """Return the section of one party, with its id unless it is ``shared``."""
    columns = [str(column) for column in table.frame.columns if column not in (*key, label)]
    style = _find_style(table, columns)
    table = table._replace(style=style)
    guesses = {column: _guess(table, column) for column in columns}
    forms = {c: _find_date_format(table, c) or "" for c, (guess, _) in guesses.items() if guess == "dates"}
    several = len(set(forms.values())) > 1
    style = msgspec.structs.replace(style, date_format=None) if several else style
    relative = Path(os.path.relpath(path, folder)).as_posix()
    lines = [f"[parties.{name}]", _write_line("file", relative, f"{len(table.frame):,} rows, {len(columns)} columns")]
    lines += [] if shared else [_write_id(key, "different in every row")]
    lines += [_write_line(key, value) for key, value in msgspec.structs.asdict(style).items() if value is not None]
    if several:
        lines += [f"# {column}: {guesses[column][1]}" for column in forms]
        shown = ", ".join(f"{_write_key(column)} = {_write_value(form)}" for column, form in forms.items())
        lines.append(f"dates = {{ {shown} }}")
    for role in ("drop", "categorical", *(() if several else ("dates",)), "signed_log"):
        chosen = [column for column, (guess, _) in guesses.items() if guess == role]
        if chosen:
            lines.append(f"{role} = [")
            lines += [f"    {_write_value(column)},  # {guesses[column][1]}" for column in chosen]
            lines.append("]")
    rare = {column: why for column, (guess, why) in guesses.items() if guess == "group_rare"}
    if rare:
        shown = ", ".join(f"{_write_key(column)} = {MAX_CATEGORIES}" for column in rare)
        lines += [f"# {column}: {why}" for column, why in rare.items()]
        lines.append(f"group_rare = {{ {shown} }}")
    gaps = [
        c for c, (g, _) in guesses.items() if g in ("number", "signed_log", "dates") and table.find_missing(c).any()
    ]
    if gaps:
        shares = ", ".join(f"{column} {table.find_missing(column).mean():.1%}" for column in gaps[:5])
        lines.append(_write_line("impute", "mean", f"missing: {shares}{', ...' * (len(gaps) > 5)}"))
    return "\n".join(lines) + "\n"


def _find_style(table: RawTable, columns: list[str]) -> Format:
    """Return how numbers and dates are written, besides encoding and separator."""
    style = table.style
    numbers = [c for c in columns if not _is_number(table, c)]
    for decimal, thousands in ((None, ","), (",", None), (",", "."), (None, "'"), (",", " ")):
        tried = msgspec.structs.replace(style, decimal=decimal, thousands=thousands)
        if any(_is_number(table._replace(style=tried), c) for c in numbers):
            style = tried
            break
    texts = [c for c in columns if not _is_number(table._replace(style=style), c)]
    for form in (None, *DATES[1:]):
        tried = msgspec.structs.replace(style, date_format=form)
        if any(_is_date(table._replace(style=tried), c) for c in texts):
            return tried
    return style


def _guess(table: RawTable, column: str) -> tuple[str, str]:
    """Return the role that a column seems to have, and why."""
    raw = table.frame[column]
    missing = table.find_missing(column)
    known = raw[~missing].astype(str).str.strip()
    different = known.nunique()
    if different + bool(missing.any()) < 2:
        return ("drop", "the same in every row")
    if _is_number(table, column):
        values = table.numbers(column, gaps=True)
        values = values[~np.isnan(values)]
        if different < 2:
            return ("drop", "the same wherever it is known")
        whole = (values % 1 == 0).all()
        if whole and different <= MAX_CATEGORIES and re.search(CODE, column.lower()):
            return ("categorical", f"{different} whole numbers that seem to be codes")
        heavy = np.abs(values).max() > 1000 and abs(skew(values)) > 3
        return ("signed_log", f"heavy-tailed, up to {np.abs(values).max():.3g}") if heavy else ("number", "")
    if _find_date_format(table, column) is not None:
        return ("dates", f"for example {known.iloc[0]}")
    if different > 0.5 * len(known):
        return ("drop", f"{different:,} different texts in {len(known):,} rows")
    example = ", ".join(known.value_counts().index[:3])
    if different + bool(missing.any()) > MAX_CATEGORIES:
        return ("group_rare", f"{different:,} values, of which the most frequent are kept")
    return ("categorical", f"{different} values: {_clean(example)}{', ...' * (different > 3)}")


def _is_number(table: RawTable, column: str) -> bool:
    try:
        table.numbers(column, gaps=True)
    except DataError:
        return False
    return True


def _is_date(table: RawTable, column: str) -> bool:
    try:
        return bool(table.dates(column, gaps=True).notna().any())
    except DataError:
        return False


def _find_date_format(table: RawTable, column: str) -> str | None:
    """Return how the dates of a column are written, by choice as in its file: empty for ISO 8601, None for others."""
    for form in (table.style.date_format, None, *DATES[1:]):
        if _is_date(table._replace(style=msgspec.structs.replace(table.style, date_format=form)), column):
            return form or ""
    return None


def _write_line(key: str, value: Any, why: str = "") -> str:
    text = f"{_write_key(key)} = {_write_value(value)}"
    return f"{text:34}# {_clean(why)}" if why else text


def _write_value(value: Any) -> str:
    """Return a TOML value in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_write_value, value))}]"
    return tomli_w.dumps({"x": value}).strip().removeprefix("x = ")


def _write_key(name: str) -> str:
    """Return a TOML key, quoted where it must be."""
    return tomli_w.dumps({name: 0}).strip().removesuffix(" = 0")


def _clean(text: str) -> str:
    """Return a text without line breaks and control characters, which a comment cannot hold."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)[:120]
