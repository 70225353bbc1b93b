"""Turns a raw column of a user's file into the columns that a party holds, by its role."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from vflsec.base.errors import DataError
from vflsec.data.description import PartyFile
from vflsec.data.tables import MISSING, RawTable


class Columns(NamedTuple):
    """The columns of a party by name, and which of them are categories."""

    values: dict[str, Any]
    categorical: list[str]


def read_columns(
    table: RawTable,
    party: str,
    roles: PartyFile,
    columns: list[str],
    max_categories: int | None,
    caught: Callable[[], AbstractContextManager[None]],
) -> Columns:
    """Return the values of ``columns`` in their order.

    Args:
        table: the file.
        party: whose file it is.
        roles: of the columns.
        columns: their names in the file.
        max_categories: how many values a category may have, or None for any number.
        caught: a context that keeps a DataError, so that the other columns are read, too.
    """
    read = Columns({}, [])
    for column in columns:
        with caught():
            made = _read(table, party, roles, column, max_categories)
            double = sorted(set(made.values) & set(read.values))
            if double:
                raise DataError(f"{table.file}: expected different columns, got {double[0]!r} twice; rename one")
            # Pixels may be constant: the margins of many images are blank.
            if roles.image is None and pd.Series(made.values[column]).nunique(dropna=False) == 1:
                leave = "columns" if table.settings == "options" else "drop"
                way_out = f"drop it, or leave it out with {table.setting(leave)}"
                found = made.values[column][0]
                raise DataError(
                    f"{table.file}, column {column!r}: expected values that differ, got {found} only; {way_out}"
                )
            read.values.update(made.values)
            read.categorical.extend(made.categorical)
    return read


def _read(table: RawTable, party: str, roles: PartyFile, column: str, limit: int | None) -> Columns:
    several = [r for r in ("categorical", "dates", "group_rare", "hash") if column in getattr(roles, r)]
    if column in roles.signed_log and set(several) & {"dates", "group_rare", "hash"}:
        several.append("signed_log")
    if len(several) > 1 and several != ["categorical", "group_rare"] and several != ["categorical", "hash"]:
        raise DataError(
            f"{table.setting(several[0], party)}: expected one role for {column!r}, got {' and '.join(several)}"
        )
    gaps = bool(roles.impute or table.style.impute)
    if column in roles.dates:
        return _dates(table, column, gaps=gaps)
    if not several:
        return Columns({column: table.numbers(column, gaps=gaps)}, [])
    texts = table.categories(column)
    if column in roles.hash:
        texts = _hashed(texts, _at_least_two(table, party, "hash", roles.hash[column]))
    elif column in roles.group_rare:
        _at_least_two(table, party, "group_rare", roles.group_rare[column])
    elif limit is not None and (found := texts.nunique()) > limit:
        raise DataError(f"{table.file}, column {column!r}: expected at most {limit} categories, got {found}; "
                        f"{_way_out(table, column, found)}")  # fmt: skip
    return Columns({column: pd.Categorical(texts)}, [column])


def _at_least_two(table: RawTable, party: str, role: str, number: int) -> int:
    if number < 2:
        raise DataError(f"{table.setting(role, party)}: expected 2 or more, got {number}")
    return number


def _way_out(table: RawTable, column: str, found: int) -> str:
    """Return what to do with a category of too many values."""
    key = column if column.replace("-", "_").isidentifier() and column.isascii() else f'"{column}"'
    try:
        table.dates(column, gaps=True)
    except DataError:
        pass
    else:
        return f"list it in {table.setting('dates')}"
    start = "it looks like an id: " if found > len(table.frame) / 2 else ""
    ways = [f"{table.setting('group_rare')} = {{ {key} = 50 }}", f"{table.setting('hash')} = {{ {key} = 32 }}"]
    if table.settings == "arguments":
        ways = [f"group_rare={{{column!r}: 50}}", f"hash={{{column!r}: 32}}"]
    return (
        f"{start}leave it out with {table.setting('drop')}, keep the most frequent with {ways[0]}, hash it with "
        f"{ways[1]}, or raise max_categories"
    )


def _hashed(texts: pd.Series, buckets: int) -> pd.Series:
    """Return the bucket of each text; the same on every machine."""
    known = pd.Index(texts.unique())
    digits = len(str(buckets - 1))
    found: Mapping[str, str] = {text: f"{zlib.crc32(text.encode()) % buckets:0{digits}}" for text in known}
    return texts.map(found)


def _dates(table: RawTable, column: str, *, gaps: bool) -> Columns:
    """Return days since 1970, and as categories month and weekday, and the hour if there are times."""
    dates = table.dates(column, gaps=gaps)
    days = (dates - pd.Timestamp(0)) / pd.Timedelta(days=1)
    values: dict[str, Any] = {column: days.to_numpy(dtype=np.float64)}
    parts = {"month": dates.dt.strftime("%m"), "weekday": dates.dt.day_name().str[:3], "hour": dates.dt.strftime("%H")}
    for part, texts in parts.items():
        known = texts.dropna()
        if known.nunique() > 1:
            values[f"{column}.{part}"] = pd.Categorical(texts.fillna(MISSING))
    return Columns(values, [name for name in values if name != column])
