"""What looks wrong in the user's own data although it can be used; an evaluation and an audit say it as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from vflsec.base.checks import count
from vflsec.base.errors import DataError
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.data.description import DataFile, PartyFile
from vflsec.data.outliers import Odd, odd_values
from vflsec.data.spelling import alike, canonical
from vflsec.data.tables import RawTable, more_rows

MOST_ALIKE = 0.01
"""If more than this share of the ids that could be used is lost to spelling, no number is of the right rows."""

FEWEST = 50
"""Ids are told from other columns in tables of so many rows."""


def review(dataset: VerticalDataset, raw: Mapping[str, RawTable], config: DataFile) -> list[str]:
    """Return warnings of ids, unused rows and columns.

    Args:
        dataset: made of the files.
        raw: the file of each party by its given name, row by row as in its table.
        config: the roles of its columns.

    Raises:
        DataError: ids of more than a few rows differ only in spelling.
    """
    indices = {dataset.given(table.name): table.frame.index for table in dataset.parties}
    found = [*lost_ids(indices), *_unused(indices)]
    for table in dataset.parties:
        name = dataset.given(table.name)
        if config.parties[name].image is None:  # pixels are what they are
            found += _columns(name, raw[name], table, config.parties[name])
    return found


def _columns(name: str, raw: RawTable, table: PartyTable, roles: PartyFile) -> Iterator[str]:
    """Yield a warning of each oddity of a column; the way out for codes names those of all columns at once."""
    odd = {
        column: [one for one in odd_values(table.frame[column].to_numpy(dtype=np.float64))
                 if one.is_code or column not in table.signed_log]
        for column in table.frame.columns if column not in table.categorical
    }  # fmt: skip
    codes = [
        _written(one.value, is_date=column in roles.dates)
        for column, several in odd.items()
        for one in several
        if one.is_code
    ]
    merged = _as_missing(codes, raw) if len(codes) > 1 else ""
    for column in table.frame.columns:
        yield from _column(name, raw, table, column, roles, odd.get(column, []), merged)
    if merged:
        yield f"{name}: {raw.file}: if these {len(codes)} codes stand for missing values, {merged}"


def _column(
    name: str, raw: RawTable, table: PartyTable, column: str, roles: PartyFile, odd: list[Odd], merged: str
) -> Iterator[str]:
    values = raw.categories(column) if column in roles.hash else table.frame[column]
    is_category, is_date = column in table.categorical, column in roles.dates
    place = f"{name}: {raw.file}, column {column!r}"
    if is_category:
        yield from _spellings(place, values)
    else:
        yield from _odd_numbers(name, raw, column, odd, merged, is_date=is_date)
    if not is_date and _is_id(values, is_category=is_category):
        got = f"{values.nunique():,} different values in {count(len(values), 'row')}"
        yield f'{place}: it looks like an id, {got}; leave it out with drop = ["{column}"]'


def lost_ids(indices: Mapping[str, pd.Index]) -> Iterator[str]:
    """Yield a warning of ids that are common only in another spelling.

    Args:
        indices: the ids of each party by its given name.

    Raises:
        DataError: more than a few are.
    """
    first, *others = indices.values()
    common = first
    for index in others:
        common = common[common.isin(index)]
    left = [{_canonical_id(text): text for text in index[~index.isin(common)]} for index in indices.values()]
    lost = sorted(set.intersection(*map(set, left)))
    if not lost:
        return
    written = " and ".join(f"{own[lost[0]]!r} in {name}" for name, own in zip(indices, left, strict=True))
    ids = count(len(lost), "id matches", "ids match")
    text = f"{ids} only if written the same way in all files, such as {written}"
    if len(lost) > MOST_ALIKE * (len(lost) + len(common)):
        raise DataError(f"{text}; write zeros in front, capital letters, spaces and numbers alike")
    yield text


def _canonical_id(text: str) -> str:
    """Return the canonical form of an id, part by part."""
    return " | ".join(map(canonical, text.split(" | ")))


def _unused(indices: Mapping[str, pd.Index]) -> Iterator[str]:
    first, *others = indices.values()
    common = int(np.logical_and.reduce([first.isin(index) for index in others]).sum())
    shares = [f"{common / len(index):.0%} of the rows of {name}" for name, index in indices.items()
              if common < 0.5 * len(index)]  # fmt: skip
    if common and shares:
        forms = ", ".join(f"{name} has {index[0]!r}" for name, index in indices.items())
        yield f"only {' and '.join(shares)} are used, those of ids that all parties hold: are ids of one form? {forms}"


def _spellings(place: str, values: pd.Series) -> Iterator[str]:
    groups = alike(map(str, pd.unique(values)))
    if groups:
        example = " and ".join(map(repr, groups[0][:2]))
        several = count(len(groups), "category is", "categories are")
        yield f"{place}: {several} written in several ways, such as {example}; write each alike"


def _odd_numbers(
    name: str, raw: RawTable, column: str, several: list[Odd], merged: str, *, is_date: bool
) -> Iterator[str]:
    for odd in several:
        value, low, high = (_written(one, is_date=is_date) for one in (odd.value, *odd.others))
        place = f"{name}: {raw.place(column, odd.rows[0])}{more_rows(odd.rows)}"
        what = "looks like a code beside" if odd.is_code else "is far from"
        way_out = f"; if it stands for a missing value, {_as_missing([value], raw)}" if odd.is_code else "; correct it"
        yield f"{place}: {value} {what} the other values, {low} to {high}{'' if odd.is_code and merged else way_out}"


def _written(value: float, *, is_date: bool) -> str:
    return str(pd.Timestamp(value, unit="D").date()) if is_date else f"{value:.10g}"


def _as_missing(codes: list[str], raw: RawTable) -> str:
    """Return how a party says that ``codes`` are missing values, beside those that it names already."""
    texts = ", ".join(f'"{text}"' for text in dict.fromkeys([*(raw.style.missing or ()), *codes]))
    nan = "make it NaN" if len(codes) == 1 else f"make {texts} NaN"
    mark = nan if raw.settings == "arguments" else f"set {raw.setting('missing')} = [{texts}]"
    return f'{mark} and {raw.setting("impute")} = "mean"'


def _is_id(values: pd.Series, *, is_category: bool) -> bool:
    """Whether a column numbers or names the rows: nearly all values differ, and whole numbers are dense or in order."""
    rows, different = len(values), values.nunique()
    if rows < FEWEST or different < 0.99 * rows or is_category:
        return rows >= FEWEST and different >= 0.99 * rows
    numbers = values.to_numpy(dtype=np.float64)
    if not (numbers % 1 == 0).all():
        return False
    low, high, steps = numbers.min(), numbers.max(), np.sign(np.diff(numbers)).mean()
    is_long = different == rows and low >= 1e5 and len(f"{low:.0f}") == len(f"{high:.0f}")
    return bool(high - low < 2 * rows or abs(steps) > 0.98 or is_long)
