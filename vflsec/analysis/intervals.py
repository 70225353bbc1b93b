"""Means with their 95 % intervals, over seeds, rows or both, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vflsec.core.statistics import over_seeds
from vflsec.records.schema import Block

Ends = tuple[float | None, float | None]

ANY: Ends = (None, None)
SHARE: Ends = (0.0, 1.0)
"""The bounds of a metric between 0 and 1."""

R2: Ends = (None, 1.0)
"""The bounds of an R2, which may be negative."""

UNKNOWN = (math.nan, math.nan)
"""Stands for an interval over rows that was not measured."""


def interval(
    values: Sequence[float],
    rows_ci: tuple[float, float],
    seeds: int,
    bounds: Ends = ANY,
    *,
    extended: float = 0.0,
    one_model: bool = False,
) -> dict[str, Any]:
    """Return mean, ``ci95`` (t over seeds, or the bootstrap over rows if one seed was asked for), n and its kind.

    If one of several seeds gave a number, there is no interval, since its rows say nothing about other seeds.

    Seeds that share one model also share its training and test rows. They vary by the draw of the auxiliary samples
    only, so the interval over rows is added in quadrature.

    Args:
        values: by seed.
        rows_ci: the interval over rows of the first seed.
        seeds: how many were asked for.
        bounds: of the metric, to which the interval is clipped.
        extended: how much more an attack leaks on the rows that chose it than on others. Noise may choose an attack
            that is not the strongest, so the mean can only be too small: the upper side is extended, in quadrature.
        one_model: whether the seeds are draws of auxiliary samples for one trained model.
    """
    if not values:
        return {"mean": None, "ci95": (None, None), "n": 0, "interval": "none"}
    mean, low, high, n = over_seeds(values)
    if n == 1 and seeds > 1:
        return {"mean": mean, "ci95": (None, None), "n": 1, "interval": "none"}
    if n == 1:
        low, high = min(rows_ci[0], mean), max(rows_ci[1], mean)  # the score of all rows is subject to rounding
    elif one_model:
        low = mean - math.hypot(mean - low, values[0] - rows_ci[0])
        high = mean + math.hypot(high - mean, rows_ci[1] - values[0])
    if extended:
        high = mean + math.hypot(high - mean, extended)
    lowest, highest = bounds
    low = low if lowest is None else max(lowest, low)
    high = high if highest is None else min(highest, high)
    return {"mean": mean, "ci95": (low, high), "n": n, "interval": _kind(n, one_model)}


def of_difference(a: Sequence[Block], b: Sequence[Block]) -> tuple[float, float]:
    """Return the interval over rows of the headline of ``a`` minus that of ``b``, both of their first blocks.

    The errors of both are on the same rows. They are added in quadrature, which is too wide if they are correlated.
    """
    if not a or not b:
        return UNKNOWN
    difference = a[0].headline - b[0].headline
    (a_low, a_high), (b_low, b_high) = a[0].over_rows, b[0].over_rows
    below = math.hypot(a[0].headline - a_low, b_high - b[0].headline)
    above = math.hypot(a_high - a[0].headline, b[0].headline - b_low)
    return difference - below, difference + above


def of_rows(blocks: Sequence[Block]) -> tuple[float, float]:
    """Return the interval over rows of the first block."""
    return blocks[0].over_rows if blocks else UNKNOWN


def _kind(n: int, one_model: bool) -> str:
    if n == 1:
        return "rows"
    return "draws and rows" if one_model else "seeds"


def mean_of(values: Iterable[float]) -> float | None:
    """Return the mean; None without values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def finite(ends: Ends) -> Ends:
    """Return the ends of an interval with None for NaN."""
    low, high = (None if end is None or math.isnan(end) else end for end in ends)
    return low, high
