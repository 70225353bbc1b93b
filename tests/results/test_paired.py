"""Paired tests: known answers, error rates and power by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from vflsec.results.statistics import ALPHA, POWER, compare_pairs, correct_holm, find_detectable


def test_tests_and_interval_are_those_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.8, 0.02, 8), rng.normal(0.79, 0.02, 8)
    found = compare_pairs(list(a - b), floor=0.0, margin=0.03)
    assert found.p_above == pytest.approx(stats.ttest_rel(a, b, alternative="greater").pvalue)
    assert found.p_below == pytest.approx(stats.ttest_rel(a - 0.03, b, alternative="less").pvalue)
    whole = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((whole.low, whole.high))
    assert found.deviation == pytest.approx(np.std(a - b, ddof=1))
    assert found.n == 8


def test_a_floor_below_zero_tests_that_nothing_is_lost():
    differences = [-0.01, 0.0, 0.01, -0.005, 0.005]
    assert compare_pairs(differences, floor=-0.05, margin=-0.05).p_above < 0.001
    assert compare_pairs(differences, floor=0.0, margin=0.05).p_above == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("differences", "above", "below"),
    [
        ([0.1] * 5, 0.0, 1.0),  # all alike, above the margin
        ([0.02] * 5, 0.0, 0.0),  # above the floor and below the margin
        ([0.0] * 5, 1.0, 0.0),
        ([0.1 + 1e-16, 0.1, 0.1], 0.0, 1.0),
        ([-0.1] * 3, 1.0, 0.0),
    ],
)
def test_differences_without_deviation_are_exact(differences, above, below):
    found = compare_pairs(differences, margin=0.05)
    assert (found.deviation, found.p_above, found.p_below) == (0.0, above, below)


@pytest.mark.parametrize("differences", [[], [0.5], [0.5, 0.5]])
def test_fewer_than_three_seeds_decide_nothing(differences):
    found = compare_pairs(differences, margin=0.05)
    assert (found.p_above, found.p_below, found.n) == (1.0, 1.0, len(differences))
    assert find_detectable(0.01, len(differences)) == math.inf


def test_holm_by_hand():
    """0.005 * 4 = 0.02; 0.01 * 3 = 0.03; 0.03 * 2 = 0.06; 0.04 * 1 = 0.04, which may not fall below 0.06."""
    assert correct_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert correct_holm([0.9, 0.8]) == [1.0, 1.0]
    assert correct_holm([]) == []
    assert correct_holm([0.2]) == [0.2]


def _p_values(mean, n, draws, margin, deviation=1.0):
    x = np.random.default_rng(1).normal(mean, deviation, (draws, n))
    return [compare_pairs(list(row), margin=margin) for row in x]


@pytest.mark.statistical
@pytest.mark.parametrize("n", [3, 6])
def test_a_true_hypothesis_is_rejected_as_often_as_stated(n):
    """The error of a share of 0.05 in 2,000 draws is 0.005; four of these are allowed."""
    above = np.mean([one.p_above < ALPHA for one in _p_values(0.0, n, 2000, 1.0)])
    below = np.mean([one.p_below < ALPHA for one in _p_values(1.0, n, 2000, 1.0)])
    assert above == pytest.approx(ALPHA, abs=0.02)
    assert below == pytest.approx(ALPHA, abs=0.02)


@pytest.mark.statistical
def test_intervals_cover_the_mean_as_often_as_stated():
    covered = np.mean([one.low <= 0.3 <= one.high for one in _p_values(0.3, 5, 2000, 1.0)])
    assert covered == pytest.approx(0.95, abs=0.02)


@pytest.mark.statistical
@pytest.mark.parametrize(("n", "level"), [(5, 0.05), (6, 0.001)])
def test_the_stated_difference_is_found_with_the_stated_power(n, level):
    def found(scale):
        difference = scale * find_detectable(2.0, n, level=level)
        return np.mean([one.p_above < level for one in _p_values(difference, n, 2000, 9.0, deviation=2.0)])

    assert found(1.0) == pytest.approx(POWER, abs=0.036)
    assert found(n**0.5) > POWER + 0.036  # a difference of single seeds instead of their mean would fail this
    assert found(n**-0.5) < POWER - 0.036


@pytest.mark.statistical
def test_holm_keeps_the_error_of_a_whole_page():
    rng = np.random.default_rng(2)
    pages = [[compare_pairs(list(row), margin=1.0).p_above for row in rng.normal(0, 1, (20, 5))] for _ in range(300)]
    assert np.mean([min(correct_holm(page)) < ALPHA for page in pages]) <= ALPHA + 0.04
    assert np.mean([min(page) < ALPHA for page in pages]) > 0.4  # without it


@pytest.mark.parametrize("n", [3, 5, 10, 20, 50, 1000])
@pytest.mark.parametrize("tests", [1, 6, 40, 90, 200, 10_000])
def test_what_is_detectable_has_the_power_that_is_asked_for(n, tests):
    """For any number of seeds and of corrected tests, of which 90 of 20 seeds had no answer."""
    level = 0.05 / tests
    mean = find_detectable(2.0, n, level=level) / 2.0 * n**0.5
    assert stats.nct.sf(stats.t.isf(level, n - 1), n - 1, mean) == pytest.approx(0.8, abs=1e-9)
