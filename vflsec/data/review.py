"""What looks wrong in the user's own data although it can be used; an evaluation and an audit say it as well."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from decimal import Context, Decimal
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vflsec.base.checks import count, group
from vflsec.base.errors import DataError
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.data.description import MAX_WORDS, DataFile, PartyFile
from vflsec.data.encode import SPREAD, measure_spread
from vflsec.data.tables import RawTable, count_more

MAX_LOST_SHARE = 0.01
"""If more than this share of the ids that could be used is lost to spelling, no number is of the right rows."""

MIN_ID_ROWS = 50
"""Ids are told from other columns in tables of so many rows."""

WILD, GAP = 50.0, 4.0
"""Wild values are farther from the median than so many spreads, and than so many times the next nearer value."""

USUAL = frozenset([1.0, 9.0, 88.0, 99.0, 888.0, *(float(10**k - 1) for k in range(3, 10)), 1e6, 1e9])
"""What usually stands for a missing value, with either sign."""

ENOUGH, LARGE, DIFFERENT, APART, MAX_CODES = 3, 999, 10, 5.0, 4
"""Rows of a code, unless it is large; values beside the only negative one; how much farther or more frequent than
others a code is; codes of a column."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?")
_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-")


def review(dataset: VerticalDataset, raw: Mapping[str, RawTable], config: DataFile) -> list[str]:
    """Return warnings of ids, unused rows and columns.

    Args:
        dataset: made of the files.
        raw: the file of each party by its given name, row by row as in its table.
        config: the roles of its columns.

    Raises:
        DataError: ids of more than a few rows differ only in spelling.
    """
    indices = {dataset.display_name(table.name): table.frame.index for table in dataset.parties}
    warnings = [*check_id_spelling(indices), *_warn_unused(indices)]
    for table in dataset.parties:
        name = dataset.display_name(table.name)
        if table.vocabulary:
            warnings += _check_texts(name, raw[name], config.parties[name])
        elif config.parties[name].image is None:  # pixels are what they are
            warnings += _check_columns(name, raw[name], table, config.parties[name])
    return warnings


def _check_texts(name: str, raw: RawTable, roles: PartyFile) -> Iterator[str]:
    """Yield a warning if texts are cut off."""
    assert roles.text is not None
    lengths = np.array([len(words) for words in raw.words(roles.text, MAX_WORDS + 1)])
    cut = np.flatnonzero(lengths > roles.max_words)
    if len(cut):
        longest: object = f"more than {MAX_WORDS}" if lengths.max() > MAX_WORDS else lengths.max()
        place = f"{name}: {raw.place(roles.text, cut[0])}{count_more(cut)}"
        yield f"{place}: of {longest} words the first {roles.max_words} are used; set max_words to use more"


def _check_columns(name: str, raw: RawTable, table: PartyTable, roles: PartyFile) -> Iterator[str]:
    """Yield a warning of each oddity of a column; the way out for codes names those of all columns at once."""
    odd = {
        column: [number for number in find_odd(table.frame[column].to_numpy(dtype=np.float64))
                 if number.is_code or column not in table.signed_log]
        for column in table.frame.columns if column not in table.categorical
    }  # fmt: skip
    codes = [
        _format_value(number.value, is_date=column in roles.dates)
        for column, several in odd.items()
        for number in several
        if number.is_code
    ]
    merged = _as_missing(codes, raw) if len(codes) > 1 else ""
    for column in table.frame.columns:
        yield from _check_column(name, raw, table, column, roles, odd.get(column, []), merged)
    if merged:
        yield f"{name}: {raw.file}: if these {len(codes)} codes stand for missing values, {merged}"


def _check_column(
    name: str, raw: RawTable, table: PartyTable, column: str, roles: PartyFile, odd: list[Odd], merged: str
) -> Iterator[str]:
    values = raw.categories(column) if column in roles.hash else table.frame[column]
    is_category, is_date = column in table.categorical, column in roles.dates
    place = f"{name}: {raw.file}, column {column!r}"
    groups = group_alike(map(str, pd.unique(values))) if is_category else []
    if groups:
        example = " and ".join(map(repr, groups[0][:2]))
        several = count(len(groups), "category is", "categories are")
        yield f"{place}: {several} written in several ways, such as {example}; write each alike"
    for number in odd:
        value, low, high = (_format_value(each, is_date=is_date) for each in (number.value, *number.others))
        where = f"{name}: {raw.place(column, number.rows[0])}{count_more(number.rows)}"
        what = "looks like a code beside" if number.is_code else "is far from"
        way_out = "; correct it"
        if number.is_code:
            way_out = "" if merged else f"; if it stands for a missing value, {_as_missing([value], raw)}"
        yield f"{where}: {value} {what} the other values, {low} to {high}{way_out}"
    if not is_date and _is_id(values, is_category=is_category):
        got = f"{values.nunique():,} different values in {count(len(values), 'row')}"
        yield f'{place}: it looks like an id, {got}; leave it out with drop = ["{column}"]'


def check_id_spelling(indices: Mapping[str, pd.Index]) -> Iterator[str]:
    """Yield a warning of ids, each party's by its given name, that are common only in another spelling.

    Raises:
        DataError: more than a few are.
    """
    first, *others = indices.values()
    common = first
    for index in others:
        common = common[index.get_indexer(common) >= 0]
    left = [
        {" | ".join(map(normalize, text.split(" | "))): text for text in index[common.get_indexer(index) < 0]}
        for index in indices.values()
    ]
    lost = sorted(set.intersection(*map(set, left)))
    if not lost:
        return
    written = " and ".join(f"{ids[lost[0]]!r} in {name}" for name, ids in zip(indices, left, strict=True))
    text = f"{count(len(lost), 'id matches', 'ids match')} only if written the same way in all files, such as {written}"
    if len(lost) > MAX_LOST_SHARE * (len(lost) + len(common)):
        raise DataError(f"{text}; write zeros in front, capital letters, spaces and numbers alike")
    yield text


def _warn_unused(indices: Mapping[str, pd.Index]) -> Iterator[str]:
    first, *others = indices.values()
    common = int(np.logical_and.reduce([index.get_indexer(first) >= 0 for index in others]).sum())
    shares = [f"{common / len(index):.0%} of the rows of {name}" for name, index in indices.items()
              if common < 0.5 * len(index)]  # fmt: skip
    if common and shares:
        forms = ", ".join(f"{name} has {index[0]!r}" for name, index in indices.items())
        yield f"only {' and '.join(shares)} are used, those of ids that all parties hold: are ids of one form? {forms}"


def _format_value(value: float, *, is_date: bool) -> str:
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
    if rows < MIN_ID_ROWS or different < 0.99 * rows or is_category:
        return rows >= MIN_ID_ROWS and different >= 0.99 * rows
    numbers = values.to_numpy(dtype=np.float64)
    if not (numbers % 1 == 0).all():
        return False
    low, high, steps = numbers.min(), numbers.max(), np.sign(np.diff(numbers)).mean()
    is_long = different == rows and low >= 1e5 and len(f"{low:.0f}") == len(f"{high:.0f}")
    return bool(high - low < 2 * rows or abs(steps) > 0.98 or is_long)


class Odd(NamedTuple):
    """A number far from the others of its column.

    Attributes:
        value: the farthest.
        rows: where it is, or where wild values are, the farthest first: positions (k,).
        others: the least and the largest of the other values.
        is_code: whether it may stand for a missing value.
    """

    value: float
    rows: NDArray[np.integer]
    others: tuple[float, float]
    is_code: bool


def find_odd(values: np.ndarray) -> list[Odd]:
    """Return the codes of a column (n,) and its wild values; NaN is none."""
    left, codes = ~np.isnan(values), []
    for _ in range(MAX_CODES):
        code = _find_code(values[left])
        if code is None:
            break
        rows = np.flatnonzero(values == code)
        left[rows] = False
        codes.append((code, rows))
    if left.any():
        rows = np.flatnonzero(left)[_find_wild(values[left])]
        left[rows] = False
        others = float(values[left].min()), float(values[left].max())
        odd = [Odd(code, where, others, is_code=True) for code, where in codes]
        return odd + [Odd(float(values[k]), rows, others, is_code=False) for k in rows[:1]]
    return []


def _find_code(values: np.ndarray) -> float | None:
    """Return the least or the largest value if it looks like a code, else None."""
    for code in (float(values.min()), float(values.max())) if len(values) else ():
        others = values[values != code]
        if len(others) and others.min() < others.max() and _is_code(code, len(values) - len(others), others):
            return code
    return None


def _is_code(code: float, rows: int, others: np.ndarray) -> bool:
    """Whether a value of so many rows, less or larger than ``others``, looks as if it stood for a missing one."""
    nearest = np.abs(others - code).min()
    if abs(code) not in USUAL:
        return bool(ENOUGH <= rows < len(others) and code and nearest > APART * 2 * measure_spread(others)[1])
    if code < 0 <= others.min() and rows >= ENOUGH:  # the only negative value of many
        different = np.unique(others)
        is_apart = bool(nearest > np.diff(different).max()) or rows > APART * len(others) / len(different)
        return len(different) >= DIFFERENT and is_apart
    return bool((rows >= ENOUGH or abs(code) >= LARGE) and nearest > 2 * measure_spread(others)[1])


def _find_wild(values: np.ndarray) -> NDArray[np.integer]:
    """Return the rows of the values that are very far from all others, the farthest first."""
    center, spread = measure_spread(values)
    distances = np.abs(values - center)
    if distances.max() <= WILD * spread:
        return np.arange(0)
    order = np.argsort(distances)[int(SPREAD * (len(values) - 1)) :]
    nearer, farther = distances[order[:-1]], distances[order[1:]]
    gaps = np.flatnonzero((farther > WILD * spread) & (farther > GAP * nearer) & (spread > 0))
    return order[: gaps[0] : -1] if len(gaps) else order[:0]


def normalize(text: str) -> str:
    """Return the form that all spellings of ``text`` share: of ``297.0``, ``2.97e2`` and full-width digits ``297``."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).translate(_SIGNS)
        text = "".join(sign for sign in text if unicodedata.category(sign) != "Cf")  # invisible characters
    text = " ".join(text.casefold().split())
    if not _NUMBER.fullmatch(text):
        return text
    number = Decimal(text)
    return str(number.normalize(Context(prec=len(text)))) if number else "0"


def group_alike(texts: Iterable[str]) -> list[list[str]]:
    """Return the groups of different texts that differ only in how they are written."""
    return [alike for alike in group(dict.fromkeys(texts), normalize).values() if len(alike) > 1]
