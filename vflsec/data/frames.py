"""Makes a dataset of pandas data frames, one for each party, and keeps it for this process."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from numbers import Number
from typing import Any, get_args

import msgspec
import numpy as np
import pandas as pd

from vflsec.base.checks import describe_unknown, expect_known
from vflsec.base.errors import DataError, UsageError
from vflsec.data.dataset import VerticalDataset
from vflsec.data.description import MAX_CATEGORIES, DataFile, Format, Imputation, PartyFile, check_name, check_title
from vflsec.data.files import Reading, assemble
from vflsec.data.tables import RawTable, is_text

_INDEX = "(index)"
PREFIX = "memory:"
_KEPT: dict[str, VerticalDataset] = {}


def dataset(
    *,
    active: pd.DataFrame | Mapping[str, pd.DataFrame],
    passive: pd.DataFrame | Mapping[str, pd.DataFrame],
    label: str,
    id: str | Sequence[str] | None = None,
    name: str = "frames",
    categorical: Iterable[str] = (),
    signed_log: Iterable[str] = (),
    dates: Iterable[str] | Mapping[str, str] = (),
    date_format: str | None = None,
    drop: Iterable[str] = (),
    group_rare: Mapping[str, int] | None = None,
    hash: Mapping[str, int] | None = None,
    impute: Imputation | None = None,
    max_categories: int = MAX_CATEGORIES,
) -> VerticalDataset:
    """Return a dataset of pandas data frames, for ``evaluate`` and ``train``.

    Columns of text or of dtype ``category`` are categories, columns of dates become numbers and parts, booleans are 0
    and 1. The frames are copied and stay in this process: nothing of them is written to disk.

    Example:
        >>> import pandas as pd
        >>> bank = pd.DataFrame({"age": [25, 41, 58, 33], "defaulted": ["yes", "no", "no", "yes"]}, index=[1, 2, 3, 4])
        >>> bureau = pd.DataFrame({"score": [3, 9, 8, 5]}, index=[4, 3, 2, 1])
        >>> dataset(active={"bank": bank}, passive={"bureau": bureau}, label="defaulted", name="loans")
        VerticalDataset('loans', 2 classes; bank 4 x 1, bureau 4 x 1)

    Args:
        active: the columns of the active party and the label; ``{name: frame}`` gives the party a name.
        passive: the columns of the passive party, or of several by their names.
        label: the column of labels, in the active party's frame only.
        id: the columns that identify a row, in every frame; by default the index.
        name: of the dataset, in tables and pictures.
        categorical: further columns of categories, for example numbers that are codes.
        signed_log: heavy-tailed numbers, such as money.
        dates: columns of dates as text; ``{column: format}`` where they are written in several ways.
        date_format: how dates are written, as for ``datetime.strptime``; by default ISO 8601.
        drop: columns that are not used.
        group_rare: categories of which only the most frequent values are told apart, and how many.
        hash: categories that are hashed, and into how many buckets.
        impute: ``mean``, ``median`` or ``mode`` of training rows in place of missing numbers; None if none are missing.
        max_categories: how many values a category may have without ``group_rare`` or ``hash``.

    Raises:
        DataError: a frame is wrong; the line names frame, column and row.
        UsageError: a column that no frame has.
    """
    check_title(name)
    if impute is not None:
        expect_known(get_args(Imputation), impute=impute)
    if not isinstance(max_categories, int) or max_categories < 2:
        raise UsageError(f"expected max_categories of 2 or more, got {max_categories!r}")
    for role, sizes in (("group_rare", group_rare), ("hash", hash)):
        if not all(isinstance(size, int) and not isinstance(size, bool) for size in (sizes or {}).values()):
            raise UsageError(f"expected {role} to give a whole number for each column, got {sizes!r}")
    key = [_INDEX] if id is None else [str(id)] if isinstance(id, str | int) else [str(column) for column in id]
    if not key or len(set(key)) < len(key):
        raise UsageError(f"expected id to name one column or several, got {id!r}")
    holders = dict(active) if isinstance(active, Mapping) else {"active": active}
    others = dict(passive) if isinstance(passive, Mapping) else {"passive_1": passive}
    if len(holders) != 1:
        raise UsageError(f"expected one active party, got {', '.join(holders) or 'none'}")
    frames = {**holders, **others}
    if not others or len(frames) != 1 + len(others):
        raise UsageError(f"expected passive parties with names of their own, got {', '.join(others) or 'none'}")
    for party in frames:
        check_name(str(party))
        if not isinstance(party, str):
            raise UsageError(f"expected a text as the name of a party, got {party!r}")
    style = Format(impute=impute, date_format=date_format)
    raw = {party: _to_raw(party, frame, style, indexed=id is None) for party, frame in frames.items()}
    roles: dict[str, dict[str, Any]] = {
        "categorical": dict.fromkeys(categorical),
        "signed_log": dict.fromkeys(signed_log),
        "dates": dict(dates) if isinstance(dates, Mapping) else dict.fromkeys(dates),
        "drop": dict.fromkeys(drop),
        "group_rare": dict(group_rare or {}),
        "hash": dict(hash or {}),
    }
    known = [str(column) for frame in frames.values() for column in frame.columns]
    for role, columns in roles.items():
        for column in columns:
            if column not in known:
                raise UsageError(f"{role}: {describe_unknown('column', column, known)}")
    label = str(label)
    parties = {party: _assign_roles(table, roles, {*key, label}) for party, table in raw.items()}
    config = DataFile(label=label, id=key, parties=parties, impute=impute, max_categories=max_categories)
    reading = Reading(config, order=list(frames), raw=raw)
    assemble(reading, name)
    if reading.faults:
        raise DataError("; ".join(reading.faults))
    assert reading.dataset is not None
    return reading.dataset


def _to_raw(party: str, frame: pd.DataFrame, style: Format, *, indexed: bool) -> RawTable:
    if not isinstance(frame, pd.DataFrame):
        raise UsageError(f"expected a pandas data frame for {party}, got {type(frame).__name__}")
    if frame.empty:
        raise DataError(f"{party}: expected data rows, got none")
    for axis, way_out in ((frame.columns, "join the levels of its names"), (frame.index, "reset it, and name id=")):
        if isinstance(axis, pd.MultiIndex):
            raise DataError(f"{party}: expected one level of {axis.names}, got several; {way_out}")
    named = frame.set_axis(pd.Index(frame.columns.astype(str)), axis=1)
    double = sorted(set(named.columns[named.columns.duplicated()]))
    if double:
        raise DataError(f"{party}: expected different column names, got {double[0]!r} twice; rename one")
    if indexed and _INDEX in named.columns:
        raise DataError(f"{party}: expected no column {_INDEX!r} beside the index; rename it, or name id=")
    if indexed:
        named = named.rename_axis(_INDEX).reset_index()
    return RawTable(named.reset_index(drop=True), party, 1, "arguments", style)


def _assign_roles(table: RawTable, roles: Mapping[str, Mapping[str, Any]], reserved: set[str]) -> PartyFile:
    """Return the roles of a party's columns, those that nobody names by their types."""
    frame = table.frame.drop(columns=[c for c in reserved if c in table.frame.columns])
    given = {role: {c: v for c, v in columns.items() if c in frame.columns} for role, columns in roles.items()}
    unnamed = [c for c in frame.columns if not any(c in columns for columns in given.values())]
    for column in unnamed:
        kind = frame[column].dtype
        if pd.api.types.is_datetime64_any_dtype(kind) or _is_date(frame[column]):
            given["dates"][column] = None
        elif isinstance(kind, pd.CategoricalDtype) or _is_text(frame[column]):
            given["categorical"][column] = None
    lists: dict[str, Any] = {role: list(given[role]) for role in ("categorical", "signed_log", "dates", "drop")}
    if any(given["dates"].values()):
        lists["dates"] = {column: form or table.style.date_format or "" for column, form in given["dates"].items()}
    return msgspec.convert({**lists, "group_rare": given["group_rare"], "hash": given["hash"]}, PartyFile)


def _is_date(values: pd.Series) -> bool:
    """Whether a column holds Python's own dates."""
    known = values.dropna() if pd.api.types.is_object_dtype(values.dtype) else values[:0]
    return len(known) > 0 and bool(known.map(lambda value: isinstance(value, date)).all())


def _is_text(values: pd.Series) -> bool:
    """Whether a column holds text; one of true and false with gaps is of numbers."""
    return is_text(values) and not values.dropna().map(lambda value: isinstance(value, bool | Number | np.bool_)).all()


def keep(dataset: VerticalDataset) -> str:
    """Keep ``dataset`` for this process, and return the name that settings use for it.

    The name ends in a hash of the content, so that results of other data are never taken for results of these.
    """
    name = f"{PREFIX}{dataset.name}-{_hash(dataset)}"
    _KEPT[name] = dataset
    return name


def has(name: str) -> bool:
    """Whether this process has the dataset that ``keep`` has named so."""
    return name in _KEPT


def get_kept(name: str) -> VerticalDataset:
    """Return the dataset that ``keep`` has named so.

    Raises:
        UsageError: this process has none.
    """
    if name not in _KEPT:
        raise UsageError(
            f"expected the data frames of {name.removeprefix(PREFIX)} in this process, found none: make them again "
            f"with vflsec.dataset(...), or save them as files"
        )
    return _KEPT[name]


def _hash(dataset: VerticalDataset) -> str:
    tables = [*dataset.parties, *([dataset.source] if dataset.source else [])]
    hashed = hashlib.sha256(repr((dataset.classes, dataset.test_ids is None)).encode())
    for table in tables:
        roles = (
            sorted(table.categorical),
            sorted(table.signed_log),
            table.image,
            table.impute,
            sorted(table.rare.items()),
        )
        hashed.update(repr((table.name, list(table.frame.columns), roles)).encode())
        hashed.update(pd.util.hash_pandas_object(table.frame).to_numpy().tobytes())
    hashed.update(pd.util.hash_pandas_object(dataset.labels).to_numpy().tobytes())
    if dataset.test_ids is not None:
        hashed.update(pd.util.hash_pandas_object(dataset.test_ids).to_numpy().tobytes())
    return hashed.hexdigest()[:12]
