"""Gaussian noise of sealed training: how much an epsilon takes, and integers of it that protect real data."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import gmpy2
import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from vflsec.base.checks import check_finite, check_inside, check_positive
from vflsec.base.errors import UsageError

MIN_MU, MAX_MU = 1e-9, 50.0
"""The least and largest mu; beyond the latter, a label is as good as public."""

BITS = 256
"""Of each of the two uniform numbers that a pair of normal ones is computed from."""

MAX_SCALE = 2.0**42


@dataclass(frozen=True, slots=True)
class SealedPlan:
    """What both parties agree on before sealed training.

    Attributes:
        mu: the Gaussian privacy of one label in all releases of the training together (Dong et al. 2019); infinite
            without noise.
        epochs: passes over the training rows.
        batch: rows of an update, about.
        lr: learning rate of Adam.
        bits: of the fraction of each factor.

    Raises:
        UsageError: a number out of range.
    """

    mu: float = math.inf
    epochs: int = 10
    batch: int = 2048
    lr: float = 0.02
    bits: int = 14

    def __post_init__(self) -> None:
        """Check every number."""
        check_positive(epochs=self.epochs, batch=self.batch, lr=self.lr)
        check_finite(lr=self.lr)
        if not 8 <= self.bits <= 16:
            raise UsageError(f"expected 8 to 16 bits, got {self.bits}")

    def scale(self, change: float) -> float:
        """Return the noise's deviation, where a label that is replaced changes the sums of a batch by ``change``."""
        return change * math.sqrt(self.epochs) / self.mu


def compute_delta(mu: float, epsilon: float) -> float:
    """Return the delta at ``epsilon`` of mu-Gaussian differential privacy (Dong et al. 2019, corollary 2.13)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)))


@lru_cache(maxsize=256)
def compute_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon with which mu-Gaussian differential privacy has this ``delta``."""
    if compute_delta(mu, 0.0) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: compute_delta(mu, epsilon) - delta, 0.0, mu**2 + 40 * mu, xtol=1e-12))


@lru_cache(maxsize=256)
def find_mu(epsilon: float, delta: float) -> float:
    """Return the mu of Gaussian differential privacy with this ``epsilon`` at ``delta``.

    Raises:
        UsageError: a delta out of range, or an epsilon so large that nothing is hidden.
    """
    check_inside(delta=delta)
    if compute_epsilon(MAX_MU, delta) <= epsilon:
        raise UsageError(f"expected epsilon below {compute_epsilon(MAX_MU, delta):.0f} for sealed, got {epsilon:g}")
    if epsilon < (least := compute_epsilon(MIN_MU, delta)):
        raise UsageError(f"expected epsilon >= {least:.2g} at delta {delta:g} for sealed, got {epsilon:g}")
    return float(brentq(lambda mu: compute_epsilon(mu, delta) - epsilon, MIN_MU, MAX_MU, xtol=1e-12))


def draw_rounded_normal(scale: float, size: int, randbits: Callable[[int], int] = secrets.randbits) -> np.ndarray:
    """Return ``size`` integers, each a normal number of deviation ``scale``, rounded.

    For an integer x and a normal number y, x + round(y) = round(x + y): adding them is the Gaussian mechanism, rounded
    afterwards, and its guarantee holds. Noise in floating point has gaps that tell what it was added to (Mironov 2012).

    Pairs are computed by Box and Muller's method from middles of cells of 2^-256, with 320 bits. If a uniform number in
    the cell stood in place of its middle, the result would be another with a probability below 2^-100: but for a
    probability of 2^-111, the first uniform number is 2^-112 away from 0 and 1, where the radius has a slope of 2^112
    at most. So the normal number moves by less than 2^-144, scaled by less than 2^-102, and a rounded one changes only
    if it is as close to a half. 2^36 integers together have a total variation distance below 2^-64 from exact ones.

    Args:
        scale: up to 2^42.
        size: how many.
        randbits: returns a uniform integer of so many bits; another than that of ``secrets`` protects nothing.

    Raises:
        UsageError: a scale out of range.
    """
    if not 0 <= scale <= MAX_SCALE:
        raise UsageError(
            f"expected noise of a deviation from 0 to 2^42 units, got {scale:g}: lower bits or raise epsilon"
        )
    drawn: list[int] = []
    with gmpy2.context(precision=BITS + 64):
        while len(drawn) < size:
            first, second = (gmpy2.mpfr(2 * randbits(BITS) + 1) / 2 ** (BITS + 1) for _ in range(2))
            radius = gmpy2.mpfr(scale) * gmpy2.sqrt(-2 * gmpy2.log(first))
            angle = 2 * gmpy2.const_pi() * second
            drawn += [int(gmpy2.rint(radius * part)) for part in gmpy2.sin_cos(angle)]
    return np.array(drawn[:size], dtype=np.int64)
