"""Encodes a party's raw columns as the float32 matrix that its network reads, by statistics of training rows alone.

A matrix of more than ``WIDE`` columns is sparse: it has one entry for each raw column, so that time and memory grow
with rows and raw columns, not with categories.

    kind of column              becomes
    number                      (x - mean) / std, clipped to the median +- ``FAR`` spreads, of which a few wild rows
                                cannot move any; mean and std are those of the rows within
    heavy-tailed number         the same, after sign(x) log(1 + |x|)
    category                    one-hot, the first slot for categories that do not occur in training
    category with rare values   one-hot of the most frequent values in training, the first slot for all others
    word at a position of text  one-hot of the vocabulary, the first slots for padding and unknown words
    number with gaps            as a number, gaps filled with the mean, median or mode in training; where there are gaps
                                in training, also a column ``NAME (missing)`` of 0 and 1, standardized

Edge cases:

    number constant in training                 zeros, also in the test set
    pixel                                       has no bounds
    category unseen in training                 1 in the first slot
    word unseen in training                     1 in the second slot, if the vocabulary is learned
    no rows                                     shape (0, d)
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from scipy.sparse import csr_array, hstack

from vflsec.base.checks import count
from vflsec.base.errors import DataError
from vflsec.base.layout import PADDING, UNKNOWN, EncodedColumn, Layout
from vflsec.base.sparse_rows import WIDE
from vflsec.data.dataset import GAPS, PartyTable

Matrix: TypeAlias = np.ndarray | csr_array
"""Encoded rows (n, d), float32."""

SMALLEST = 1e-300
"""Columns that vary less than this are constant: the inverse of their standard deviation overflows."""

FAR = 10.0
"""Numbers beyond so many spreads, for a normal column 23 standard deviations, are clipped."""

NO_BOUNDS = (-np.inf, np.inf)

FARTHEST = 1e12
"""A number that is farther away than so many standard deviations is a mistake, and stays an error."""

SPREAD = 0.98
"""This quantile of the distances from the median is the spread of a column; fewer than 2 % of rows cannot move it."""

ROUNDING = 1e-12
"""Values that differ from the median by less than this share of it are equal to it, as computed."""


class Scale(NamedTuple):
    """How a number is encoded: clipped to ``low`` and ``high``, less the mean, times 1 / std."""

    low: float
    high: float
    mean: float
    inverse: float


class ColumnEncoder:
    """Encodes rows of one party.

    Args:
        table: names the categorical and the heavy-tailed columns.
        fit_rows: the party's training rows; mean, std and known categories come from them alone.

    Attributes:
        layout: of the encoded columns, in the table's order.
    """

    def __init__(self, table: PartyTable, fit_rows: pd.DataFrame) -> None:
        """Learn the statistics and lay out the encoded columns."""
        self._signed_log: Final = table.signed_log
        self._fill: Final[dict[str, float]] = {}
        self._scales: Final[dict[str, Scale]] = {}
        self._known: Final[dict[str, pd.Index]] = {}
        columns: list[EncodedColumn] = []
        start = 0
        words = np.arange(len(table.vocabulary))  # also those that no training row has
        if table.learned:
            words = np.union1d(words[: UNKNOWN + 1], fit_rows)
        for name in fit_rows.columns:
            if name in table.categorical:
                rare = table.rare.get(name)
                self._known[name] = pd.Index(words[1:]) if len(words) else _list_categories(fit_rows[name], rare)
                column = EncodedColumn(name, "categorical", start, 1 + len(self._known[name]))
            else:
                numbers = self._read_number(fit_rows, name)
                gaps = np.isnan(numbers)
                bounds = NO_BOUNDS if table.image else _find_bounds(numbers[~gaps])
                if table.impute:
                    self._fill[name] = _find_typical(_select_between(numbers[~gaps], *bounds), table.impute)
                self._scales[name] = _scale(np.where(gaps, self._fill.get(name, np.nan), numbers), bounds)
                column = EncodedColumn(name, "numeric", start, 1)
                if gaps.any():
                    columns.append(column)
                    start += 1
                    column = EncodedColumn(f"{name}{GAPS}", "numeric", start, 1)
                    self._scales[column.name] = _scale(gaps.astype(np.float64), NO_BOUNDS)
            columns.append(column)
            start += column.width
        vocabulary = tuple(table.vocabulary[word] for word in words)
        self.layout: Final = Layout(tuple(columns), table.image, table.grouping, vocabulary)

    def __call__(self, rows: pd.DataFrame) -> Matrix:
        """Return ``rows`` as float32 (n, d): C-contiguous, or sparse with an entry for each raw column.

        Raises:
            DataError: a number that is far too large, or texts without any word that occurs in training rows.
        """
        entries = np.ones((len(rows), len(self.layout.columns)), dtype=np.float32)
        places = np.empty(entries.shape, dtype=np.int64)
        for k, (name, kind, start, _) in enumerate(self.layout.columns):
            if kind == "categorical":
                places[:, k] = start + self._assign_slots(rows[name], name)
            else:
                places[:, k], entries[:, k] = start, self._scale_column(rows, name)
        words = len(self.layout.vocabulary)
        if words and len(rows) and (places % words <= UNKNOWN).all():
            got = f"only words that none of these has in {count(len(rows), 'other text')}"
            raise DataError(f"expected texts with words of the training rows, got {got}: are they of one kind?")
        if self.layout.width > WIDE:
            ends = np.arange(0, entries.size + 1, max(1, entries.shape[1]))
            return csr_array((entries.ravel(), places.ravel(), ends), shape=(len(rows), self.layout.width))
        encoded = np.zeros((len(rows), self.layout.width), dtype=np.float32)
        np.put_along_axis(encoded, places, entries, axis=1)
        return encoded

    def _scale_column(self, rows: pd.DataFrame, name: str) -> np.ndarray:
        low, high, mean, inverse = self._scales[name]
        numbers = self._fill_gaps(rows, name)
        far = np.flatnonzero(np.abs((numbers - mean) * inverse) > FARTHEST)
        if len(far):
            scale = f"{1 / inverse:.3g} around {mean:.3g}"
            raise DataError(
                f"column {name!r}: expected numbers on the scale of the training rows ({scale}), got "
                f"{numbers[far[0]]:.3g}; correct it, or list it in signed_log"
            )
        return np.asarray((np.clip(numbers, low, high) - mean) * inverse)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what was learned of each column: bounds, mean, 1 / std and what fills its gaps; or categories."""
        numbers: dict[str, dict[str, Any]] = {
            name: scale._asdict() | ({"fill": self._fill[name]} if name in self._fill else {})
            for name, scale in self._scales.items()
        }
        numbers |= {name: {**numbers[name], "signed_log": True} for name in self._signed_log if name in numbers}
        return {**numbers, **{name: {"categories": known.astype(str).tolist()} for name, known in self._known.items()}}

    def _fill_gaps(self, rows: pd.DataFrame, name: str) -> np.ndarray:
        """Return a column without gaps, or where the gaps of another are."""
        raw = name.removesuffix(GAPS)
        if raw != name and name not in rows:
            return np.asarray(np.isnan(self._read_number(rows, raw)).astype(np.float64))
        numbers: np.ndarray = self._read_number(rows, name)
        if name in self._fill:
            numbers[np.isnan(numbers)] = self._fill[name]
        return numbers

    def _read_number(self, rows: pd.DataFrame, name: str) -> np.ndarray:
        values: np.ndarray = rows[name].to_numpy(dtype=np.float64, copy=True)
        return np.sign(values) * np.log1p(np.abs(values)) if name in self._signed_log else values

    def _assign_slots(self, values: pd.Series, name: str) -> np.ndarray:
        # Look up each category once, not each row: a table of 300,000 rows has a few dozen categories.
        coded = pd.Categorical(values)
        slots = self._known[name].get_indexer(coded.categories) + 1
        if self.layout.vocabulary:
            slots[(slots == PADDING) & (coded.categories != PADDING)] = UNKNOWN
        return np.asarray(slots[coded.codes])


def _list_categories(values: pd.Series, most: int | None) -> pd.Index:
    """Return the sorted categories that occur, or the most frequent ones of them."""
    known = pd.Categorical(values).remove_unused_categories()
    if most is None or len(known.categories) <= most:
        return known.categories
    counts = np.bincount(known.codes, minlength=len(known.categories))
    return known.categories[np.sort(np.argsort(-counts, kind="stable")[:most])]


def _find_typical(values: np.ndarray, kind: str) -> float:
    """Return the mean, median or mode of training values; 0 if there are none."""
    if len(values) == 0:
        return 0.0
    if kind == "mode":
        different, counts = np.unique(values, return_counts=True)
        return float(different[counts.argmax()])
    return float(values.mean() if kind == "mean" else np.median(values))


def measure_spread(values: np.ndarray) -> tuple[float, float]:
    """Return the median, and how far 98 % of the values are from it at most.

    Where so many are equal to it, the spread is the median distance of the others, such as 1 of a rare indicator; it is
    0 of a constant.
    """
    center = float(np.median(values))
    distances = np.abs(values - center)
    apart = distances[distances > ROUNDING * abs(center)]
    spread = float(np.quantile(distances, SPREAD, method="lower"))
    if spread > ROUNDING * abs(center):
        return center, spread
    return center, float(np.median(apart)) if len(apart) else 0.0


def _find_bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the least and the largest training value that is not clipped."""
    if len(values) == 0:
        return NO_BOUNDS
    center, spread = measure_spread(values)
    return (center - FAR * spread, center + FAR * spread) if spread else NO_BOUNDS


def _select_between(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return values[(values >= low) & (values <= high)]


def _scale(values: np.ndarray, bounds: tuple[float, float]) -> Scale:
    """Return how training values are encoded: 1 / std is 0 for a constant, whose float std may be a tiny non-zero."""
    values = _select_between(values, *bounds)
    spread = float(np.abs(values - values.mean()).max()) if len(values) else 0.0
    if len(values) == 0 or values.min() == values.max() or spread < SMALLEST:
        return Scale(*bounds, 0.0, 0.0)
    std = spread * float(((values - values.mean()) / spread).std()) if spread < SMALLEST**0.5 else float(values.std())
    return Scale(*bounds, float(values.mean()), 1 / std)


def join_columns(tables: Sequence[Matrix]) -> Matrix:
    """Return the columns of several tables of the same rows as one, sparse if one of them is."""
    if all(isinstance(table, np.ndarray) for table in tables):
        return np.concatenate(tables, axis=1)
    return hstack(tables, format="csr")


def densify(rows: Matrix) -> np.ndarray:
    """Return a matrix as an array."""
    return rows if isinstance(rows, np.ndarray) else rows.toarray()
