"""Statistics of paired differences over seeds: tests, Holm's correction, and the power of a test.

Nothing here knows of claims or of federations. A comparison has two limits, ``floor`` and ``margin``, and two one-sided
t tests: that the mean difference exceeds the floor, and that it falls short of the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

from vflsec.results.statistics import LEVEL, over_seeds

ALPHA = 1 - LEVEL
POWER = 0.8
FEWEST = 3
"""Seeds below which no test is made: two differences that are alike by chance would decide."""

NORMAL = 1e6
"""Degrees of freedom from which a t distribution is normal."""

EQUAL = 1e-9
"""Values that differ by less are equal: the rest is rounding."""


class Paired(NamedTuple):
    """The paired differences of two arms.

    Attributes:
        mean: of the differences.
        low: of the 95 % t interval of the mean, whose other end is ``high``; NaN with one seed.
        n: number of seeds.
        deviation: standard deviation of the differences; NaN with one seed.
        p_above: of the test that the mean exceeds the floor; 1 if there are too few seeds.
        p_below: of the test that it falls short of the margin.
    """

    mean: float
    low: float
    high: float
    n: int
    deviation: float
    p_above: float
    p_below: float


def paired(differences: Sequence[float], *, floor: float = 0.0, margin: float = 0.0) -> Paired:
    """Return mean, interval and both tests; differences without any deviation are taken as exact.

    >>> round(paired([0.01, 0.02, 0.03], margin=0.1).p_above, 4)
    0.0371
    """
    if not differences:
        return Paired(float("nan"), float("nan"), float("nan"), 0, float("nan"), 1.0, 1.0)
    mean, low, high, n = over_seeds(differences)
    deviation = float(np.std(differences, ddof=1)) if n > 1 else float("nan")
    if n < FEWEST:
        return Paired(mean, low, high, n, deviation, 1.0, 1.0)
    if deviation <= EQUAL * max(1.0, abs(mean)):
        above, below = float(not mean > floor + EQUAL), float(not mean < margin - EQUAL)
        return Paired(mean, low, high, n, 0.0, above, below)
    error = deviation / n**0.5
    above = float(stats.t.sf((mean - floor) / error, n - 1))
    below = float(stats.t.cdf((mean - margin) / error, n - 1))
    return Paired(mean, low, high, n, deviation, above, below)


def holm(p: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction, in their order.

    Rejecting those below 0.05 rejects any true hypothesis with a probability of at most 0.05, whatever depends on what.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def detectable(deviation: float, n: int, *, level: float = ALPHA, power: float = POWER) -> float:
    """Return the smallest true difference that a one-sided paired t test finds with a probability of ``power``.

    Args:
        deviation: of single differences.
        n: number of seeds.
        level: of the test.
        power: the probability.
    """
    return deviation * standardized(n - 1, level, power) / n**0.5 if n >= FEWEST else float("inf")


@lru_cache
def standardized(freedom: float, level: float, power: float = POWER) -> float:
    """Return the true mean, in standard errors, that a one-sided t test finds with this power: its noncentrality."""
    freedom = min(freedom, NORMAL)
    critical = float(stats.t.isf(level, freedom))

    def lacking(noncentrality: float) -> float:
        return float(1 - special.nctdtr(freedom, noncentrality, critical) - power)

    return float(optimize.brentq(lacking, 0.0, 10 * critical + 10))
