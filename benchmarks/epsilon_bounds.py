"""Lower bounds of epsilon from the errors of attacks in many independent trials.

A test that tells two neighbors apart has a false positive rate a and a true positive rate of at most g(a), where g is
fixed by the mechanism: 1 minus its trade-off function (Dong, Roth and Su 2022, Gaussian differential privacy, section
2). Counted rates therefore refute every parameter for which they are too good, and the bound is the least parameter
that is left. A tighter g gives a larger bound, but holds for its own mechanism alone:

* ``approximate``: every mechanism with (epsilon, delta)-differential privacy. It is exact for randomized response.
* ``gaussian``: Gaussian noise, also composed and adaptive. The parameter is mu; ``gaussian_epsilon`` converts it (Nasr
  et al. 2023, Tight auditing of differentially private machine learning, section 4).
* ``laplace``: Laplace noise, composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from vflsec.results.canaries import CONFIDENCE, QUANTILES, Floats, Tradeoff, bound_rate, count_above, divide

Least = Callable[[Floats, Floats], Floats]
"""From false and true positive rates (k,) to the least parameters (k,) that allow them."""

CELLS = 500
"""Of a grid of privacy losses, for epsilon of one release."""


def epsilon_at_least(
    absent: ArrayLike,
    present: ArrayLike,
    delta: float,
    *,
    tradeoff: Tradeoff | None = None,
    releases: int = 1,
    confidence: float = CONFIDENCE,
) -> float:
    """Return a lower confidence bound of epsilon at ``delta``, from scores of independent trials.

    Args:
        absent: (n,) scores of trials with one neighbor.
        present: (m,) scores of trials with the other, which are to be higher.
        delta: of the epsilon; ``laplace`` has its bound at 0, which holds for any.
        tradeoff: of the mechanism (``Defense.tradeoff``), or None for a bound that holds for all.
        releases: of the same noise, for ``laplace``.
        confidence: of the bound.
    """
    if tradeoff == "gaussian":
        return gaussian_epsilon(at_least(absent, present, gaussian, confidence=confidence), delta)
    least, choose = (laplace(releases), gaussian) if tradeoff == "laplace" else (approximate(delta), None)
    return at_least(absent, present, least, choose=choose, confidence=confidence)


def at_least(
    absent: ArrayLike, present: ArrayLike, least: Least, *, choose: Least | None = None, confidence: float = CONFIDENCE
) -> float:
    """Return a lower confidence bound of a mechanism's parameter, from scores of independent trials.

    A quarter of the trials chooses the threshold, and which of two bounds is used; the others are counted. One is the
    Clopper-Pearson bounds of both rates, each at half of the error. The other is that of the share of right answers, p,
    over equally many trials of both neighbors, at all of the error. By Hoeffding 1956 (On the distribution of the
    number of successes in independent trials, theorem 5), this number has no heavier tail than a binomial one of the
    same mean. The mean is largest where both kinds of errors are as frequent, if g is symmetric. So p is refuted where
    (1 - p, p) is.

    Args:
        absent: (n,) scores of trials with one neighbor.
        present: (m,) scores of trials with the other, which are to be higher.
        least: of a mechanism whose trade-off function is symmetric.
        choose: by what the threshold is chosen, if not by ``least``; the bound is valid for any.
        confidence: of the bound.
    """
    (out, counted_out), (found, counted_found) = (divide(np.asarray(x, dtype=float)) for x in (absent, present))
    if min(len(out), len(found)) == 0:
        return 0.0
    thresholds = np.unique(np.quantile(np.concatenate([out, found]), QUANTILES))
    points = _points(out, found, thresholds, 1 - confidence)
    by_bound = [(choose or least)(*point) for point in points]
    used = int(np.argmax([values.max() for values in by_bound]))
    threshold = thresholds[[by_bound[used].argmax()]]
    point = _points(counted_out, counted_found, threshold, 1 - confidence)[used]
    return max(0.0, float(least(*point)[0]))


def _points(absent: Floats, present: Floats, thresholds: Floats, error: float) -> list[tuple[Floats, Floats]]:
    """Return two points of bounds (false, true positive rate) for each threshold, each wrong at most with ``error``."""
    n, m, equal = len(absent), len(present), min(len(absent), len(present))
    fpr, tpr = (
        1 - bound_rate(n - count_above(absent, thresholds), n, error / 2),
        bound_rate(count_above(present, thresholds), m, error / 2),
    )
    right = bound_rate(
        equal - count_above(absent[:equal], thresholds) + count_above(present[:equal], thresholds), 2 * equal, error
    )
    return [(fpr, tpr), (1 - right, right)]


def approximate(delta: float) -> Least:
    """Return the least epsilon of (epsilon, ``delta``)-differential privacy (Kairouz et al. 2015, theorem 2.1)."""

    def least(fpr: Floats, tpr: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [(tpr - delta) / fpr, (1 - delta - fpr) / (1 - tpr)]
            return np.asarray(np.log(np.maximum(np.nanmax(ratios, axis=0), 1e-300)))

    return least


def gaussian(fpr: Floats, tpr: Floats) -> Floats:
    """Return the least mu of mu-Gaussian differential privacy (Dong, Roth and Su 2022, definition 2.6)."""
    return np.asarray(stats.norm.ppf(tpr) - stats.norm.ppf(fpr))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon at ``delta`` of mu-Gaussian differential privacy.

    Dong, Roth and Su 2022, corollary 2.13; Balle and Wang 2018 (arXiv 1805.06530), theorem 8.
    """
    if mu <= 0:
        return 0.0

    def excess(eps: float) -> float:
        return float(stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps + stats.norm.logcdf(-mu / 2 - eps / mu)) - delta)

    return float(optimize.brentq(excess, 0, 1e4, xtol=1e-10)) if excess(0.0) > 0 else 0.0


def laplace(releases: int) -> Least:
    """Return the least epsilon of ``releases`` Laplace mechanisms together, each of epsilon / ``releases``.

    A row may differ in several entries: of all differences with one L1 norm, that in a single entry is the easiest to
    tell. (Shifting weight from a smaller difference b to a larger one a adds P(a + L_b > t) - P(b + L_a > t) >= 0 to
    the power of the best test, where L is the privacy loss of one entry.)
    """

    def one(fpr: float, tpr: float) -> float:
        def missing(epsilon: float) -> float:
            return laplace_power(fpr, epsilon, releases) - tpr

        if tpr <= fpr:
            return 0.0
        largest = 1.0
        while missing(largest) < 0:
            largest *= 2
        return float(optimize.brentq(missing, 0.0, largest, xtol=1e-6))

    return lambda fpr, tpr: np.array([one(a, b) for a, b in zip(fpr, tpr, strict=True)])


def laplace_power(fpr: float, epsilon: float, releases: int) -> float:
    """Return the largest true positive rate at ``fpr`` under Laplace noise, or up to epsilon / 1,000 more.

    The privacy losses of the releases add up; their distribution is convolved on a grid, rounded up (Koskela et al.
    2020, arXiv 1906.03049). One release has a closed form (Dong, Roth and Su 2022, proposition A.6).
    """
    own = epsilon / releases
    losses = np.linspace(-own, own, 2 * CELLS + 1)
    mass = np.diff(0.5 * np.exp((losses - own) / 2), prepend=0.0)  # the lowest is an atom, and the highest
    mass[-1] += 0.5
    size = 2 * CELLS * releases + 1
    composed = np.maximum(np.fft.irfft(np.fft.rfft(mass, size) ** releases, size), 0.0)[::-1]
    weights = composed * np.exp(-np.linspace(epsilon, -epsilon, size))
    return float(np.interp(fpr, np.append(0.0, weights.cumsum()), np.append(0.0, composed.cumsum())))
