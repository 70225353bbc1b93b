"""Gaussian noise for integers that protects real data: no bit of it depends on how a computer rounds."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import gmpy2
import numpy as np

from vflsec.base.errors import UsageError

BITS = 256
"""Of each of the two uniform numbers that a pair of normal ones is computed from."""

MAX_SCALE = 2.0**42


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
