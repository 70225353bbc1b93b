"""Drafts the TOML file that describes the user's own data, by what the files hold."""

from __future__ import annotations

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

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import DataError, UsageError
from vflsec.data.description import MAX_CATEGORIES, Format
from vflsec.data.tables import RawTable, read_table

LABELS = ("label", "target", "y", "class", "outcome", "default", "defaulted", "churn", "fraud", "click", "response")
"""Usual names of a label."""
DATES = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M")
"""Usual ways to write a date, of which the first that fits all values is taken."""

CODE = r"(^|_)(id|code|zip|plz|postcode|nr|no)$"
"""Names of whole numbers that are codes."""


def draft(
    files: Sequence[Path],
    folder: Path,
    *,
    label: str | None = None,
    key: list[str] | None = None,
    active: str | None = None,
) -> str:
    """Return the text of a TOML file in ``folder`` that describes ``files``, one for each party.

    Args:
        files: CSV or Parquet.
        folder: to which paths in the TOML file are relative.
        label: the column of labels; by default a column with a usual name, or the only one of two values.
        key: the columns that identify a row; by default those that all files share and that differ in all rows.
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
    key = key or _find_key(tables)
    for column in key:
        for path, table in tables.items():
            if column not in table.frame.columns:
                known = list(table.frame.columns)
                raise UsageError(f"--id: {describe_unknown('column', column, known)} in {path.name}")
    holder, label = _locate(tables, key, label, Path(active) if active else None)
    ordered = [holder, *(path for path in files if path != holder)]
    parts = [_write_head(names[holder], key, label, tables[holder])]
    parts += [_write_section(names[path], path, folder, tables[path], [*key, label]) for path in ordered]
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


def _find_key(tables: dict[Path, RawTable]) -> list[str]:
    """Return the fewest columns that all files have and that identify a row in each."""
    frames = [table.frame for table in tables.values()]
    shared = [name for name in frames[0].columns if all(name in frame.columns for frame in frames[1:])]
    for size in (1, 2, 3):
        fitting = [
            list(columns)
            for columns in combinations(shared[:12], size)
            if not any(frame.duplicated(list(columns)).any() for frame in frames)
        ]
        if fitting:
            return max(fitting, key=lambda columns: _count_common(frames, columns))
    expected = "expected columns that all files have and that differ in all rows"
    if not shared:
        raise DataError(f"{expected}, found none in all files: give the ids the same name in each")
    raise DataError(
        f"{expected}, found {', '.join(shared)}, whose values repeat: name the id with --id, and drop repeated rows"
    )


def _count_common(frames: list[pd.DataFrame], columns: list[str]) -> int:
    known = [set(map(tuple, frame[columns].astype(str).to_numpy())) for frame in frames]
    return len(set.intersection(*known))


def _locate(tables: dict[Path, RawTable], key: list[str], label: str | None, active: Path | None) -> tuple[Path, str]:
    """Return the active party's file, and its column of labels."""
    places = [active] if active else list(tables)
    if label is not None:
        holders = [path for path in places if label in tables[path].frame.columns]
        if len(holders) == 1:
            return holders[0], label
        got = "none" if not holders else " and ".join(path.name for path in holders)
        way_out = "name the active party's file with --active" if holders else "name another with --label"
        raise UsageError(f"expected one file with the label {label!r}, got {got}: {way_out}")
    columns = [(path, str(name)) for path in places for name in tables[path].frame.columns if name not in key]
    binary = [(path, name) for path, name in columns if tables[path].frame[name].nunique() == 2]
    usual = [(path, name) for path, name in columns if name.lower() in LABELS]
    few = [(path, name) for path, name in binary if name == tables[path].frame.columns[-1]]
    for candidates in (usual, few):
        if len(candidates) == 1:
            return candidates[0]
    named = ", ".join(f"{name} ({path.name})" for path, name in binary[:10])
    known = f"columns of two values are {named}" if named else "no column has two values"
    raise DataError(f"expected a label, could not guess it: name it with --label COLUMN; {known}")


def _write_head(active: str, key: list[str], label: str, table: RawTable) -> str:
    classes = table.frame[label].nunique(dropna=True)
    values = ", ".join(map(str, sorted(table.frame[label].astype(str).unique())[:5]))
    lines = [
        _write_line("label", label, f"{classes} values: {values}{', ...' * (classes > 5)}"),
        _write_line("id", key[0] if len(key) == 1 else key, "in every file, different in every row"),
        _write_line("active", active, "the party that has the labels"),
    ]
    return "\n".join(lines) + "\n"


def _write_section(name: str, path: Path, folder: Path, table: RawTable, reserved: list[str]) -> str:
    """Return the section of one party."""
    columns = [str(column) for column in table.frame.columns if column not in reserved]
    style = _find_style(table, columns)
    table = table._replace(style=style)
    guesses = {column: _guess(table, column) for column in columns}
    relative = Path(os.path.relpath(path, folder)).as_posix()
    lines = [f"[parties.{name}]", _write_line("file", relative, f"{len(table.frame):,} rows, {len(columns)} columns")]
    lines += [_write_line(key, value) for key, value in msgspec.structs.asdict(style).items() if value is not None]
    for role in ("drop", "categorical", "dates", "signed_log"):
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
        heavy = np.abs(values).max() > 1000 and abs(_compute_skew(values)) > 3
        return ("signed_log", f"heavy-tailed, up to {np.abs(values).max():.3g}") if heavy else ("number", "")
    if _is_date(table, column):
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


def _compute_skew(values: np.ndarray) -> float:
    spread = values.std()
    return float((((values - values.mean()) / spread) ** 3).mean()) if spread else 0.0


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
