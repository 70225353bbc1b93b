"""The user's own data: one TOML file that names each party's file, or its columns of one file.

    name = "loans"                  # default: the TOML file's stem
    label = "defaulted"             # a column of the active party's file
    id = "customer_id"              # in every file

    [parties.active]
    file = "bank.csv"               # CSV with a header line, or .parquet; relative to the TOML file
    categorical = ["job"]           # all other columns are numbers
    signed_log = ["income"]         # heavy-tailed numbers, such as money

    [parties.passive_1]
    file = "bureau.parquet"
    columns = ["score", "age"]      # default: all but id and label

or with one ``file = "all.csv"`` at the top and ``columns`` for every party. ``encoding`` (default utf-8) and
``separator`` (default a comma) are set at the top or beside a party's own file. A missing category is a category of its
own; a missing number is an error, as are a constant column and a passive column that is a copy of the label.

``image`` declares that a party's columns are the pixels of an image, for networks that read images:

    [parties.passive_1]
    file = "scans.parquet"
    image = [1, 28, 14]             # channels, height, width: channel by channel, each row by row; may be constant
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from vflsec.core.checks import unknown
from vflsec.core.errors import DataError
from vflsec.core.files import parse_toml, read
from vflsec.data.alignment import align
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.data.tables import RawTable, read_table


class PartyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[parties.NAME]`` section."""

    file: str | None = None
    columns: list[str] | None = None
    categorical: list[str] = []
    signed_log: list[str] = []
    image: list[int] | None = None
    encoding: str | None = None
    separator: str | None = None


class DataFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole TOML file."""

    label: str
    id: str
    parties: dict[str, PartyFile]
    name: str | None = None
    file: str | None = None
    encoding: str = "utf-8"
    separator: str = ","


def load_toml(path: Path) -> VerticalDataset:
    """Return the dataset of the TOML file ``path``; each party keeps the row order of its file.

    Raises:
        DataError: a file is wrong; the line names file, column and row.
    """
    config = _read_config(path)
    names = _party_names(path.name, config)
    raw = _read_files(path.parent, config, names)
    ids = {name: _ids(table, config.id, name) for name, table in raw.items()}
    columns = {name: _columns(config, name, raw[name]) for name in names}
    tables = tuple(_party_table(name, config.parties[name], raw[name], columns[name], ids[name]) for name in names)
    labels, classes = _labels(raw["active"], config.label, ids["active"])
    dataset = VerticalDataset(config.name or path.stem, tables, labels, classes)
    _reject_label_copies(dataset, raw)
    return dataset


def load_party(
    path: Path, name: str, own: PartyFile, *, key: str, label: str | None = None
) -> tuple[PartyTable, pd.Series | None, tuple[str, ...]]:
    """Return one party's table alone, with its labels and their names if it has a ``label`` column.

    Args:
        path: of its file.
        name: of the party.
        own: names and roles of its columns; ``own.file`` is not read.
        key: the column of row ids.
        label: the column of labels, or None.

    Raises:
        DataError: the file is wrong; the line names column and row.
    """
    raw = read_table(path, own.encoding or "utf-8", own.separator or ",", toml=False)
    ids = _ids(raw, key, name)
    if label is not None:
        _expect_column(raw, label, "the label")
    columns = _features(own, name, raw, {key: "id"} if label is None else {key: "id", label: "label"})
    table = _party_table(name, own, raw, columns, ids)
    return (table, None, ()) if label is None else (table, *_labels(raw, label, ids))


def _read_config(path: Path) -> DataFile:
    try:
        return msgspec.convert(parse_toml(read(path).decode()), DataFile)
    except OSError:
        raise DataError(f"expected a TOML file {path}, found none") from None
    except msgspec.ValidationError as error:
        found = re.match(r"Object contains unknown field `([^`]+)`", str(error))
        of_party = " - at `$.parties" in str(error)
        known = (PartyFile if of_party else DataFile).__struct_fields__
        text = unknown(f"key{' in [parties.*]' * of_party}", found[1], known) if found else str(error)
        raise DataError(f"{path.name}: {text}; see the form in the documentation of vflsec.data.files") from None
    except ValueError as error:
        raise DataError(f"{path.name}: expected TOML in utf-8: {error}") from None


def _party_names(file: str, config: DataFile) -> list[str]:
    """Return active, passive_1, ... after checking that these are the sections, in one of the two forms."""
    names = ["active", *(f"passive_{k}" for k in range(1, max(2, len(config.parties))))]
    if sorted(config.parties) != sorted(names):
        got = ", ".join(config.parties) or "none"
        raise DataError(f"{file}: expected [parties.*] sections {', '.join(names)}, got {got}; rename or add them")
    for name in names:
        party = config.parties[name]
        if (party.file is None) == (config.file is None):
            got = "none" if party.file is None else "two"
            way_out = "give file either at the top or with every party"
            raise DataError(f"{file}: expected one file for parties.{name}, got {got}; {way_out}")
        if config.file is not None and (party.encoding or party.separator):
            raise DataError(f"{file}: expected encoding and separator beside file at the top, got them in {name}")
    if config.file is not None:
        _reject_shared_columns(file, config)
    return names


def _reject_shared_columns(file: str, config: DataFile) -> None:
    owner: dict[str, str] = {}
    for name, party in config.parties.items():
        if party.columns is None:
            raise DataError(f"{file}: expected columns = [...] for parties.{name}, got none, and all share one file")
        for column in party.columns:
            if column in owner:
                got = f"{owner[column]} and {name}"
                raise DataError(f"{file}: expected one party for column {column!r}, got {got}; drop it from one")
            owner[column] = name


def _read_files(folder: Path, config: DataFile, names: list[str]) -> dict[str, RawTable]:
    if config.file is not None:
        return dict.fromkeys(names, read_table(folder / config.file, config.encoding, config.separator))
    parties = {name: config.parties[name] for name in names}
    return {
        name: read_table(folder / str(own.file), own.encoding or config.encoding, own.separator or config.separator)
        for name, own in parties.items()
    }


def _ids(table: RawTable, column: str, party: str) -> pd.Index:
    """Return the ids as text, so that 7 in a CSV file and 7 in a Parquet file are equal."""
    _expect_column(table, column, "the id")
    ids = table.keys(column, "an id")
    double = np.flatnonzero(ids.duplicated())
    if len(double):
        place, way_out = table.place(column, double[0]), f"{party} must hold one row per id"
        raise DataError(f"{place}: expected each id once, got {ids[double[0]]!r} again; {way_out}")
    index: pd.Index = pd.Index(ids, dtype=object, name="id")  # faster to hash than Arrow text
    return index


def _labels(table: RawTable, column: str, ids: pd.Index) -> tuple[pd.Series, tuple[str, ...]]:
    texts = table.keys(column, "a label")
    names = sorted(set(texts), key=_natural)
    if len(names) < 2:
        raise DataError(f"{table.file}, column {column!r}: expected two classes or more, got {names[0]!r} in every row")
    codes = pd.Index(names).get_indexer(pd.Index(texts))
    return pd.Series(codes, index=ids, name="label", dtype="int64"), tuple(names)


def _natural(text: str) -> tuple[bool, int, str]:
    """Return a sorting key: integers by value, before text."""
    is_number = text.removeprefix("-").isdecimal()
    return (not is_number, int(text) if is_number else 0, text)


def _columns(config: DataFile, name: str, table: RawTable) -> list[str]:
    """Return the party's feature columns, after checking them and the label's place."""
    if name == "active" or config.file is not None:
        _expect_column(table, config.label, "the label")
    elif config.label in table.frame.columns:
        place = f"{table.file}, column {config.label!r}"
        raise DataError(
            f"{place}: expected the label with the active party only, got it with {name} too; drop it there"
        )
    return _features(config.parties[name], name, table, {config.id: "id", config.label: "label"})


def _features(party: PartyFile, name: str, table: RawTable, reserved: dict[str, str]) -> list[str]:
    own = [c for c in table.frame.columns if c not in reserved] if party.columns is None else party.columns
    if not own:
        raise DataError(f"{table.file}: expected a column for {name} besides id and label, got none; add one")
    for column in own:
        _expect_column(table, column, f"a column of {name}")
        if column in reserved:
            where = table.setting("columns", name)
            raise DataError(f"{where}: expected features, got the {reserved[column]} {column!r}; drop it there")
    for role in ("categorical", "signed_log"):
        for column in getattr(party, role):
            if column not in own:
                raise DataError(f"{table.setting(role, name)}: {unknown('column', column, own)}")
    return own


def _party_table(name: str, party: PartyFile, table: RawTable, columns: list[str], ids: pd.Index) -> PartyTable:
    image = None if party.image is None else _image(name, party.image, len(columns))
    frame = pd.DataFrame({column: _values(table, column, party) for column in columns}, index=ids)
    return PartyTable(name, frame, frozenset(party.categorical), frozenset(party.signed_log), image)


def _image(name: str, sizes: list[int], columns: int) -> tuple[int, int, int]:
    if len(sizes) != 3 or min(sizes) < 1:
        expected, way_out = "[channels, height, width]", "a gray image of 28 x 14 pixels is [1, 28, 14]"
        raise DataError(f"parties.{name}.image: expected {expected}, got {sizes}; {way_out}")
    channels, height, width = sizes
    if channels * height * width != columns:
        expected = f"{channels * height * width} columns for {channels} x {height} x {width} pixels"
        way_out = "correct it, or name the pixels in their order with columns = [...]"
        raise DataError(f"parties.{name}.image: expected {expected}, got {columns}; {way_out}")
    return channels, height, width


def _values(table: RawTable, column: str, party: PartyFile) -> pd.Categorical | np.ndarray:
    values = pd.Categorical(table.categories(column)) if column in party.categorical else table.numbers(column)
    # Pixels may be constant: the margins of many images are blank.
    if party.image is None and pd.Series(values).nunique() == 1:
        way_out = f"drop it, or leave it out with {table.setting('columns')}{' = [...]' if table.toml else ''}"
        raise DataError(
            f"{table.file}, column {column!r}: expected values that differ, got {values[0]} only; {way_out}"
        )
    return values


def _reject_label_copies(dataset: VerticalDataset, raw: dict[str, RawTable]) -> None:
    """Reject a passive column that is a copy of the label: the passive party would have nothing to infer."""
    common = align(dataset.parties)
    labels = dataset.labels.loc[common].to_numpy()
    for party in dataset.parties[1:]:
        shared = party.frame.loc[common]
        for column in shared.columns:
            codes, values = pd.factorize(shared[column])
            pairs = np.unique(codes * len(dataset.classes) + labels)
            if len(pairs) == len(values) == len(np.unique(labels)):
                place = f"{raw[party.name].file}, column {column!r}"
                got = f"a copy of the label on the {len(common)} common rows"
                raise DataError(f"{place}: expected features of {party.name}, got {got}; drop it")


def _expect_column(table: RawTable, column: str, role: str) -> None:
    known = [str(name) for name in table.frame.columns]
    if column not in known:
        raise DataError(f"{table.file}: expected {role}, got an {unknown('column', column, known)}")


def source_files(path: Path) -> list[Path]:
    """Return ``path`` and every file that it names. If one changes, stored results are invalid.

    Raises:
        DataError: the TOML file is missing or wrong.
    """
    config = _read_config(path)
    named = [config.file, *(party.file for party in config.parties.values())]
    return [path, *sorted({path.parent / name for name in named if name})]
