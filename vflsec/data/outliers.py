"""Numbers that do not fit the others of a column: wild values, and codes that stand for a missing value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SPREAD = 0.98
"""This quantile of the distances from the median is the spread of a column; fewer than 2 % of rows cannot move it."""

ROUNDING = 1e-12
"""Values that differ from the median by less than this share of it are equal to it, as computed."""

WILD, GAP = 50.0, 4.0
"""Wild values are farther from the median than so many spreads, and than so many times the next nearer value."""

USUAL = frozenset([1.0, 9.0, 88.0, 99.0, 888.0, *(float(10**k - 1) for k in range(3, 10)), 1e6, 1e9])
"""What usually stands for a missing value, with either sign."""

FEWEST, LARGE, DIFFERENT, APART, MOST_CODES = 3, 999, 10, 5.0, 4
"""Rows of a code, unless it is large; values beside the only negative one; how much farther or more frequent than
others a code is; codes of a column."""


def center_and_spread(values: np.ndarray) -> tuple[float, float]:
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


def odd_values(values: np.ndarray) -> list[Odd]:
    """Return the codes of a column (n,) and its wild values; NaN is none."""
    left, found = ~np.isnan(values), []
    for _ in range(MOST_CODES):
        code = _code(values[left])
        if code is None:
            break
        rows = np.flatnonzero(values == code)
        left[rows] = False
        found.append((code, rows))
    if left.any():
        rows = np.flatnonzero(left)[_wild(values[left])]
        left[rows] = False
        others = float(values[left].min()), float(values[left].max())
        odd = [Odd(code, where, others, is_code=True) for code, where in found]
        return odd + [Odd(float(values[k]), rows, others, is_code=False) for k in rows[:1]]
    return []


def _code(values: np.ndarray) -> float | None:
    """Return the least or the largest value if it looks like a code, else None."""
    for code in (float(values.min()), float(values.max())) if len(values) else ():
        others = values[values != code]
        if len(others) and others.min() < others.max() and _is_code(code, len(values) - len(others), others):
            return code
    return None


def _is_code(code: float, rows: int, others: np.ndarray) -> bool:
    """Whether a value of so many rows, less or larger than ``others``, looks as if it stood for a missing one."""
    nearest, spread = np.abs(others - code).min(), 2 * center_and_spread(others)[1]
    if abs(code) not in USUAL:
        return bool(FEWEST <= rows < len(others) and code and nearest > APART * spread)
    if code < 0 <= others.min() and rows >= FEWEST:  # the only negative value of many
        different = np.unique(others)
        is_apart = bool(nearest > np.diff(different).max()) or rows > APART * len(others) / len(different)
        return len(different) >= DIFFERENT and is_apart
    return bool(nearest > spread and (rows >= FEWEST or abs(code) >= LARGE))


def _wild(values: np.ndarray) -> NDArray[np.integer]:
    """Return the rows of the values that are very far from all others, the farthest first."""
    center, spread = center_and_spread(values)
    distances = np.abs(values - center)
    order = np.argsort(distances)[int(SPREAD * (len(values) - 1)) :]
    nearer, farther = distances[order[:-1]], distances[order[1:]]
    gaps = np.flatnonzero((farther > WILD * spread) & (farther > GAP * nearer) & (spread > 0))
    return order[: gaps[0] : -1] if len(gaps) else order[:0]
