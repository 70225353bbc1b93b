"""Rounded normal noise: its probabilities are the exact ones, and tests that hold for it fail for what is nearly it."""

import random

import mpmath
import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

from vflsec.base.errors import UsageError
from vflsec.cipher.noise import BITS, draw_rounded_normal


def draw(scale, size=50_000, seed=0):
    return draw_rounded_normal(scale, size, random.Random(seed).getrandbits)  # noqa: S311


def compare(drawn, scale):
    """Return the p-value of large numbers under a normal distribution."""
    spread = np.sum((drawn / scale) ** 2)  # chi-squared with as many degrees of freedom
    deviation = abs(spread / len(drawn) - 1) / np.sqrt(2 / len(drawn))
    return min(kstest(drawn / scale, "norm").pvalue, 2 * norm.sf(deviation))


def test_large_noise_is_normal_and_tests_tell_it_from_other_noise():
    scale, rng = 1e9, np.random.default_rng(0)
    drawn = draw(scale)
    assert compare(drawn, scale) > 1e-3
    assert compare(drawn, 1.02 * scale) < 1e-4
    assert compare(drawn, scale / 1.02) < 1e-4
    for other in (rng.laplace(size=50_000) / np.sqrt(2), rng.logistic(size=50_000) * np.sqrt(3) / np.pi):
        assert compare(other * scale, scale) < 1e-6
    assert abs(np.corrcoef(drawn[::2], drawn[1::2])[0, 1]) < 4 / np.sqrt(25_000)  # the two of a pair


@pytest.mark.parametrize("scale", [0.4, 1.3])
def test_small_noise_has_the_exact_probabilities(scale):
    drawn, edges = draw(scale), np.arange(-3, 3) + 0.5
    counts = np.bincount(np.digitize(drawn, edges), minlength=7)
    exact = np.diff(norm.cdf(edges / scale), prepend=0, append=1)
    assert chisquare(counts, exact * len(drawn)).pvalue > 1e-3
    wrong = np.diff(norm.cdf(edges / scale / 1.05), prepend=0, append=1)
    assert chisquare(counts, wrong * len(drawn)).pvalue < 1e-3


@pytest.mark.parametrize("case", range(5))
def test_all_bits_of_the_uniform_numbers_count(case):
    bits = [random.Random(case).getrandbits(BITS) for _ in range(2)]  # noqa: S311
    bits[0] = [bits[0], 0, (1 << BITS) - 1, 1 << 20, bits[0]][case]
    waiting = iter(bits)
    cosine, sine = draw_rounded_normal(2.0**42, 2, lambda _: next(waiting))[::-1]
    with mpmath.workprec(600):
        u, v = (mpmath.mpf(2 * x + 1) / 2 ** (BITS + 1) for x in bits)
        radius = 2**42 * mpmath.sqrt(-2 * mpmath.log(u))
        assert cosine == int(mpmath.nint(radius * mpmath.cos(2 * mpmath.pi * v)))
        assert sine == int(mpmath.nint(radius * mpmath.sin(2 * mpmath.pi * v)))


def test_its_size_is_as_asked_and_its_source_the_operating_system():
    assert draw_rounded_normal(5.0, 7).shape == (7,)
    assert not draw_rounded_normal(0.0, 3).any()
    assert (draw_rounded_normal(1e9, 9) != draw_rounded_normal(1e9, 9)).any()
    for scale in (-1.0, float("nan"), float("inf"), 1e13):
        with pytest.raises(UsageError, match="lower bits or raise epsilon"):
            draw_rounded_normal(scale, 1)
