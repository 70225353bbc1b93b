"""Reads the user's own data: the files that a TOML file describes (see ``vflsec.data.description``)."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import count, describe_unknown
from vflsec.base.errors import DataError
from vflsec.base.layout import PADDING, SPECIAL
from vflsec.data.dataset import PartyTable, VerticalDataset, align
from vflsec.data.description import ROLES, DataFile, Format, PartyFile, read_description
from vflsec.data.review import check_id_spelling, group_alike, review
from vflsec.data.tables import RawTable, count_more, read_columns, read_table

NO_COLUMN = "(constant)"
"""The column of a party that has nothing but labels; its network learns an offset."""


class Faults(list[str]):
    """What is wrong, each in one line; reading goes on after a fault to find the others."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the DataError of the block as one more fault."""
        try:
            yield
        except DataError as error:
            self.append(str(error))

    def check(self, more: str = "") -> None:
        """Raise DataError with the first fault, if there is one, and how many more there are."""
        if self:
            others = f" (and {len(self) - 1} more: {more})" if len(self) > 1 and more else ""
            raise DataError(self[0] + others)


@dataclass
class Reading:
    """What could be read of the files of a description.

    Attributes:
        config: the description.
        order: its parties, the active party first.
        raw: each party's file; parties may share one.
        columns: the feature columns of each party, by their names in its file.
        dataset: None if something is wrong.
    """

    config: DataFile
    faults: Faults = field(default_factory=Faults)
    order: list[str] = field(default_factory=list)
    raw: dict[str, RawTable] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    dataset: VerticalDataset | None = None


def load_toml(path: Path) -> VerticalDataset:
    """Return the dataset of the TOML file ``path``; each party keeps the row order of its file.

    Raises:
        DataError: a file is wrong; the line names file, column and row.
    """
    reading = read_all(path)
    reading.faults.check(f"vflsec data check {path.name}")
    assert reading.dataset is not None
    return reading.dataset


def read_all(path: Path) -> Reading:
    """Read the files that the TOML file ``path`` names, and collect what is wrong with them.

    Raises:
        DataError: the TOML file itself is wrong.
    """
    config = read_description(path)
    reading = Reading(config)
    shared: dict[str, RawTable] = {}
    texts = {config.label}.union(*(party.list_texts(config.key(name)) for name, party in config.parties.items()))
    for name, party in config.parties.items():
        with reading.faults.collect():
            file, style = party.file or config.file or "", party.fill_from(config)
            reading.raw[name] = table = shared.get(file) or read_table(path.parent / file, style, texts)
            shared |= {file: table} if config.file else {}
    incomplete = bool(reading.faults)
    try:
        reading.order = _order(path.name, config, reading.raw)
    except DataError as error:
        reading.faults += [] if incomplete else [str(error)]  # the file that is lacking may have the label
    else:
        assemble(reading, config.name or path.stem)
    return reading


def assemble(reading: Reading, name: str) -> None:
    """Make the dataset of the tables that were read, or collect what is wrong with them."""
    config, faults, active = reading.config, reading.faults, reading.order[0]
    tables: list[PartyTable] = []
    labels: pd.Series | None = None
    classes: tuple[str, ...] = ()
    indices: dict[str, pd.Index] = {}
    for standard, given in _name_parties(reading.order).items():
        if given not in reading.raw:
            continue
        raw, ids = reading.raw[given], None
        with faults.collect():
            indices[given] = ids = _get_ids(raw, config.key(given))
            _expect_once(raw, config.key(given), ids, given)
        index = pd.RangeIndex(len(raw.frame)) if ids is None else ids
        with faults.collect():
            reading.columns[given] = columns = _list_columns(config, given, active, raw, faults)
            tables.append(_make_table(standard, given, config.parties[given], config, raw, columns, index, faults))
        if given == active and config.label in raw.frame.columns:
            with faults.collect():
                labels, classes = _read_labels(raw, config.label, index)
        # The table has the values by now; the review reads the texts that were hashed.
        kept = [*config.parties[given].hash, config.parties[given].text]
        reading.raw[given] = raw._replace(frame=raw.frame.filter(items=kept))
    if faults or labels is None:
        with faults.collect():  # what is wrong with the ids does not depend on the other faults
            if indices.keys() == set(reading.order):
                different = {given: ids.unique() for given, ids in indices.items()}
                list(check_id_spelling(different))
                align([PartyTable(given, pd.DataFrame(index=ids)) for given, ids in different.items()])
        return
    names = _name_parties(reading.order)
    names = names if any(standard != given for standard, given in names.items()) else {}
    with faults.collect():
        dataset = VerticalDataset(name, tuple(tables), labels, classes, names=names)
        dataset = replace(dataset, warnings=tuple(review(dataset, reading.raw, config)))
        _reject_label_copies(dataset, reading)
        if not faults:
            reading.dataset = dataset


def load_party(
    path: Path, name: str, party: PartyFile, *, key: str, label: str | None = None
) -> tuple[PartyTable, pd.Series | None, tuple[str, ...]]:
    """Return one party's table alone, with its labels and their names if it has a ``label`` column.

    Args:
        path: of its file.
        name: of the party.
        party: names and roles of its columns; ``party.file`` is not read.
        key: the column of row ids.
        label: the column of labels, or None.

    Raises:
        DataError: the file is wrong; the line names column and row.
    """
    raw, faults = read_table(path, party, {*party.list_texts([key]), label or key}, toml=False), Faults()
    ids = _get_ids(raw, [key])
    _expect_once(raw, [key], ids, name)
    if label is not None:
        _expect_column(raw, label, "the label")
    columns = _list_features(party, name, raw, {key: "id"} if label is None else {key: "id", label: "label"}, faults)
    table = _make_table(name, name, party, None, raw, columns, ids, faults)
    faults.check()
    return (table, None, ()) if label is None else (table, *_read_labels(raw, label, ids))


def _order(file: str, config: DataFile, raw: Mapping[str, RawTable]) -> list[str]:
    """Return the parties' names, the active party first; passive parties by number or in the order of the file."""
    names = list(config.parties)
    holders = [name for name in raw if config.file is None and config.label in raw[name].frame.columns]
    active = config.active or ("active" if "active" in names else holders[0] if len(holders) == 1 else None)
    if active is None:
        got = f"the label {config.label!r} in {len(holders)} of their files" if config.file is None else "one file"
        way_out = f'write active = "{names[0]}" at the top'
        raise DataError(
            f"{file}: expected to know which of {', '.join(names)} is the active party, got {got}; {way_out}"
        )
    passive = [name for name in names if name != active]
    numbered = all(re.fullmatch(r"passive_\d+", name) for name in passive)
    return [active, *(sorted(passive, key=lambda name: int(name[8:])) if numbered else passive)]


def _name_parties(order: list[str]) -> dict[str, str]:
    """Return the given name of ``active``, ``passive_1``, ``passive_2``..."""
    return {f"passive_{k}" if k else "active": name for k, name in enumerate(order)}


def _get_ids(table: RawTable, key: list[str]) -> pd.Index:
    """Return the ids as text, so that 7 in a CSV file and 7 in a Parquet file are equal."""
    parts = []
    for column in key:
        _expect_column(table, column, "the id")
        parts.append(table._replace(style=Format()).keys(column, "an id"))  # a number that is missing may be an id
    if len(parts) > 1:  # a bar within a part is doubled, so that different keys stay different
        parts = [part.str.replace("|", "||", regex=False) for part in parts]
    ids = parts[0]
    for part in parts[1:]:
        ids = ids + " | " + part
    index: pd.Index = pd.Index(ids, dtype=object, name="id")  # faster to hash than Arrow text
    return index


def _expect_once(table: RawTable, key: list[str], ids: pd.Index, party: str) -> None:
    """Raise DataError if a party has several rows of one id."""
    double = np.flatnonzero(ids.duplicated())
    if len(double):
        place, way_out = table.place(", ".join(key), double[0]), f"{party} must hold one row per id"
        raise DataError(f"{place}: expected each id once, got {ids[double[0]]!r} again; {way_out}{count_more(double)}")


def _read_labels(table: RawTable, column: str, ids: pd.Index) -> tuple[pd.Series, tuple[str, ...]]:
    texts = table.keys(column, "a label")
    names = sorted(texts.unique(), key=_make_key)
    place = f"{table.file}, column {column!r}"
    if len(names) < 2:
        raise DataError(f"{place}: expected two classes or more, got {names[0]!r} in every row")
    if _is_continuous(names, len(texts)):
        way_out = "vflsec has no regression yet: cut it into classes, for example above and below its median"
        raise DataError(f"{place}: expected classes, got {len(names)} different numbers; {way_out}")
    if groups := group_alike(names):
        numbers = [texts[texts.isin(group)].value_counts() for group in groups]
        rows = count(int(sum(n.sum() - n.max() for n in numbers)), "row")  # all but those of the usual spelling
        got = ", ".join(" and ".join(map(repr, group[:5])) for group in groups[:5])
        raise DataError(f"{place}: expected each class written alike, got {got}; correct it in {rows}")
    codes = pd.Categorical(texts, categories=names).codes
    return pd.Series(codes, index=ids, name="label", dtype="int64"), tuple(names)


def _is_continuous(names: list[str], rows: int) -> bool:
    """Whether labels are numbers of a continuous scale: many, and not whole, or different in every few rows."""
    values = pd.to_numeric(pd.Series(names), errors="coerce")
    return len(names) > 20 and bool(values.notna().all()) and (bool((values % 1 != 0).any()) or rows < 20 * len(names))


def _make_key(text: str) -> tuple[bool, int, str]:
    """Return a sorting key: integers by value, before text."""
    is_number = text.removeprefix("-").isdecimal() and len(text) < 1000
    return (not is_number, int(text) if is_number else 0, text)


def _list_columns(config: DataFile, name: str, active: str, table: RawTable, faults: Faults) -> list[str]:
    """Return the party's feature columns, after checking them and the label's place."""
    if name == active or config.file is not None:
        _expect_column(table, config.label, "the label")
    elif config.label in table.frame.columns:
        place = f"{table.file}, column {config.label!r}"
        raise DataError(
            f"{place}: expected the label with the active party only, got it with {name}; drop it there, or set "
            f'active = "{name}"'
        )
    reserved = {**dict.fromkeys(config.key(name), "id"), config.label: "label"}
    return _list_features(config.parties[name], name, table, reserved, faults, optional=name == active)


def _list_features(
    party: PartyFile, name: str, table: RawTable, reserved: dict[str, str], faults: Faults, *, optional: bool = False
) -> list[str]:
    """Return the party's feature columns, ``optional`` if labels will do; roles of unknown columns become faults."""
    left = [c for c in table.frame.columns if c not in reserved]
    features = [c for c in left if c not in party.drop] if party.columns is None else party.columns
    if party.text is not None:
        if party.columns not in (None, [party.text]) or party.image or any(getattr(party, role) for role in ROLES):
            raise DataError(
                f"{table.setting('text', name)}: expected no other column and no other role beside a text, got some; "
                f"leave them out"
            )
        features = [party.text]
    for column in party.drop:
        _expect_column(table, column, f"a column of {name} to drop")
        if column in (party.columns or ()):
            raise DataError(f"{table.setting('drop', name)}: expected other columns than in columns, got {column!r}")
    if not features and not optional:
        raise DataError(f"{table.file}: expected a column for {name} besides id and label, got none; add one")
    for column in features:
        _expect_column(table, column, f"a column of {name}")
        if column in reserved:
            where = table.setting("columns", name)
            raise DataError(f"{where}: expected features, got the {reserved[column]} {column!r}; drop it there")
    for role in ROLES:
        for column in getattr(party, role):
            if column not in features:
                faults.append(f"{table.setting(role, name)}: {describe_unknown('column', column, features)}")
    return features


def _make_table(
    standard: str,
    name: str,
    party: PartyFile,
    config: DataFile | None,
    table: RawTable,
    columns: list[str],
    ids: pd.Index,
    faults: Faults,
) -> PartyTable:
    """Return a party's table; a column that is wrong is left out and becomes a fault."""
    if party.text is not None:
        return _make_text_table(standard, table.words(party.text, party.max_words), party.text, ids)
    image = None if party.image is None else _check_image(name, party.image, len(columns))
    read = read_columns(table, name, party, columns, config.max_categories if config else None, faults.collect)
    if faults:
        return PartyTable(standard, pd.DataFrame(index=ids))
    frame = pd.DataFrame(read.values or {NO_COLUMN: 0.0}, index=ids)
    impute = party.impute or (config.impute if config else None)
    roles = frozenset(read.categorical), frozenset(party.signed_log)
    return PartyTable(standard, frame, *roles, image, impute=impute, rare=dict(party.group_rare))


def _make_text_table(standard: str, texts: list[list[str]], column: str, ids: pd.Index) -> PartyTable:
    """Return the table of a party with a text, whose vocabulary is that of the training rows."""
    if all(words == texts[0] for words in texts):
        raise DataError(f"column {column!r}: expected texts that differ, got the same in each row; name another column")
    if all(len(words) == 1 and words[0].lstrip("-").replace(".", "", 1).isdecimal() for words in texts):
        raise DataError(f"column {column!r}: expected texts, got a number in each row; leave out text = {column!r}")
    vocabulary = [*SPECIAL, *sorted({word for words in texts for word in words})]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    tokens = np.full((len(texts), max(map(len, texts))), PADDING)
    for row, words in zip(tokens, texts, strict=True):
        row[: len(words)] = [numbers[word] for word in words]
    frame = pd.DataFrame(tokens, ids, [f"{column}_{position}" for position in range(tokens.shape[1])])
    return PartyTable(standard, frame, frozenset(frame.columns), vocabulary=tuple(vocabulary), learned=True)


def _check_image(name: str, sizes: list[int], columns: int) -> tuple[int, int, int]:
    if len(sizes) != 3 or min(sizes) < 1:
        expected, way_out = "[channels, height, width]", "a gray image of 28 x 14 pixels is [1, 28, 14]"
        raise DataError(f"parties.{name}.image: expected {expected}, got {sizes}; {way_out}")
    channels, height, width = sizes
    if channels * height * width != columns:
        expected = f"{channels * height * width} columns for {channels} x {height} x {width} pixels"
        way_out = "correct it, or name the pixels in their order with columns = [...]"
        raise DataError(f"parties.{name}.image: expected {expected}, got {columns}; {way_out}")
    return channels, height, width


def _reject_label_copies(dataset: VerticalDataset, reading: Reading) -> None:
    """Reject passive columns that are copies of the label: the passive party would have nothing to infer."""
    common = dataset.common
    labels = dataset.labels.loc[common].to_numpy()
    for party in dataset.parties[1:]:
        name = dataset.display_name(party.name)
        rows = party.frame.index.get_indexer(common)
        for column, values in party.frame.items() if not party.vocabulary else ():
            # Few rows tell of nearly every column that it is no copy.
            if all(_is_copy(values.iloc[rows[:n]], labels[:n]) for n in (1000, None)):
                place = f"{reading.raw[name].file}, column {column!r}"
                got = f"a copy of the label on the {len(common)} common rows"
                reading.faults.append(f"{place}: expected features of {name}, got {got}; drop it")


def _is_copy(values: pd.Series, labels: np.ndarray) -> bool:
    """Whether each value has a label (n,) of its own."""
    codes, different = pd.factorize(values, use_na_sentinel=False)
    pairs = np.unique(codes * (labels.max() + 1) + labels)
    return len(pairs) == len(different) == len(np.unique(labels))


def _expect_column(table: RawTable, column: str, role: str) -> None:
    known = list(map(str, table.frame.columns)) if column not in table.frame.columns else [column]
    if column not in known:
        raise DataError(f"{table.file}: expected {role}, got an {describe_unknown('column', column, known)}")
