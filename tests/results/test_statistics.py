"""Intervals with known answers, and their coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vflsec.results.metrics import METRICS, f1
from vflsec.results.statistics import (
    GROUPS,
    bound_interval,
    bound_over_rows,
    bound_over_seeds,
    combine_errors,
    draw_groups,
    jackknife,
    leave_out_groups,
)


def test_over_seeds_is_the_t_interval():
    values = [0.71, 0.74, 0.69, 0.72, 0.70]
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert bound_over_seeds(values)[1:3] == pytest.approx(expected)


def test_one_seed_has_no_interval():
    interval = bound_over_seeds([0.7])
    assert interval.mean == 0.7
    assert math.isnan(interval.low)
    assert interval.n == 1


@pytest.mark.parametrize("metric", ["auc", "accuracy"])
def test_row_interval_covers_the_truth_and_is_not_wasteful(metric):
    rng = np.random.default_rng(0)
    truth = stats.norm.cdf(1 / math.sqrt(2)) if metric == "auc" else stats.norm.cdf(0.5)
    covered, widths = 0, []
    for _ in range(120):
        labels = np.arange(400) % 2
        score = rng.normal(size=400) + labels - 0.5
        low, high = bound_over_rows(metric, np.stack([-score, score], axis=1), labels, rng)
        covered += low <= truth <= high
        widths.append(high - low)
    assert covered >= stats.binom.ppf(0.001, 120, 0.95)
    assert np.mean(widths) < 0.12


@pytest.mark.long
def test_bootstrap_of_f1_equals_a_naive_one():
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(int)
    score = labels + rng.normal(size=300)
    scores = np.stack([0.8 - score, score - 0.8], axis=1)
    found = bound_over_rows("f1", scores, labels, np.random.default_rng(1))
    guessed = scores.argmax(axis=1)

    def resampled(rows):
        return 2 * (guessed[rows] & labels[rows]).sum() / (guessed[rows].sum() + labels[rows].sum())

    assert resampled(slice(None)) == pytest.approx(f1(scores, labels))
    naive = np.quantile([resampled(rng.integers(300, size=300)) for _ in range(2000)], [0.025, 0.975])
    assert found == pytest.approx(tuple(naive), abs=0.015)
    low, high = bound_over_rows("f1", scores, np.zeros(300, dtype=int), rng)  # nothing to find
    wrong, z = (scores.argmax(axis=1) == 1).sum(), stats.norm.ppf(0.975) ** 2
    assert (low, high) == pytest.approx((0, z / (wrong + z)))


@pytest.mark.parametrize(("hits", "n"), [(12, 12), (0, 12), (29, 30)])
def test_the_interval_of_accuracy_is_wilsons(hits, n):
    scores, labels = np.eye(2)[np.ones(n, dtype=int)], (np.arange(n) < hits).astype(int)
    expected = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert bound_over_rows("accuracy", scores, labels, np.random.default_rng(0)) == pytest.approx(tuple(expected))


def test_a_single_positive_row_shows_no_variance_and_so_has_the_largest():
    score = np.r_[np.linspace(0, 1, 99), 0.7]
    low, high = bound_over_rows(
        "auc", np.stack([-score, score], axis=1), np.arange(100) // 99, np.random.default_rng(0)
    )
    assert low < 0.2
    assert high > 0.9


def test_intervals_end_within_their_bounds_and_around_the_mean():
    for mean in (1 - 1e-13, 1.0, 1e-13, 0.5):
        low, high = bound_interval(mean, 1e-7, (0.0, 1.0), 100)
        assert 0 <= low <= mean <= high <= 1


def test_the_variance_of_auc_is_delong_s_also_on_ties():
    """By its definition, over all pairs of a positive and a negative row."""
    rng = np.random.default_rng(0)
    labels, score = (rng.random(200) < 0.3).astype(int), rng.integers(0, 8, 200).astype(float)
    pairs = np.array([[(a > b) + (a == b) / 2 for b in score[labels == 0]] for a in score[labels == 1]])
    variance = sum(side.var(ddof=1) / len(side) for side in (pairs.mean(axis=1), pairs.mean(axis=0)))
    expected = bound_interval(pairs.mean(), stats.norm.ppf(0.975) * math.sqrt(variance), (0.0, 1.0))
    assert bound_over_rows("auc", np.stack([-score, score], axis=1), labels, rng) == pytest.approx(expected)


def test_a_perfect_auc_has_the_interval_of_a_share_of_the_rarer_class():
    """Wilson's score interval where no pair was wrong."""
    labels = np.r_[np.zeros(90, dtype=int), np.ones(10, dtype=int)]
    low, high = bound_over_rows("auc", np.stack([-labels, labels], axis=1), labels, np.random.default_rng(0))
    z = stats.norm.ppf(0.975) ** 2
    assert (low, high) == (pytest.approx(10 / (10 + z)), 1.0)


@given(st.floats(0.01, 0.99), st.floats(0.001, 0.5))
def test_within_a_share_is_wilsons_interval(share, margin):
    """With the deviation of n rows it is the score interval; near a bound it keeps away from it."""
    z, n = 2.0, 4.0 / margin**2 * share * (1 - share)
    center = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = bound_interval(share, margin, (0, 1))
    assert (low, high) == pytest.approx((center - half, center + half), abs=1e-9)
    assert -1e-9 <= low <= share <= high <= 1 + 1e-9


def test_within_no_bounds_is_symmetric_and_one_bound_is_kept():
    assert bound_interval(0.3, 0.1, (None, None)) == pytest.approx((0.2, 0.4))
    low, high = bound_interval(0.9, 0.5, (None, 1.0))
    assert high < 1
    assert (1 - low) * (1 - high) == pytest.approx((1 - 0.9) ** 2), "a factor less or more"


def test_a_mean_at_a_bound_has_an_interval_by_its_rows():
    z = stats.norm.ppf(0.975)
    assert bound_interval(1.0, 0.0, (0, 1), n=100) == pytest.approx((100 / (100 + z**2), 1.0))
    assert bound_interval(0.0, 0.0, (-1, 1), n=100) == (0.0, 0.0), "no bound"


@pytest.mark.parametrize("metric", ["auc", "accuracy", "f1"])
def test_without_groups_is_the_metric_of_the_other_rows(metric):
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.4).astype(int)
    score = np.round(labels + rng.normal(size=300), 1)
    scores, groups = np.stack([0.5 - score, score - 0.5], axis=1), draw_groups(300)
    found = leave_out_groups(metric, scores, labels, groups)
    naive = [METRICS[metric](scores[groups != k], labels[groups != k]) for k in range(GROUPS)]
    assert found == pytest.approx(naive)
    assert leave_out_groups(metric, scores, np.arange(300) // 299, groups) is None, "the only positive is in one group"


def test_groups_are_even_and_always_the_same():
    assert np.bincount(draw_groups(1000)).tolist() == [1000 // GROUPS] * GROUPS
    assert (draw_groups(77) == draw_groups(77)).all()


def test_the_jackknife_of_a_mean_is_the_variance_of_the_means_of_groups():
    hits = np.random.default_rng(0).random((GROUPS, 20)) < 0.7
    without = [np.delete(hits, k, axis=0).mean() for k in range(GROUPS)]
    assert jackknife(without) == pytest.approx(hits.mean(axis=1).var(ddof=1) / GROUPS)


def test_seeds_that_share_all_rows_have_the_error_of_these_rows_in_common():
    without = np.random.default_rng(0).normal(0.7, 0.001, GROUPS)
    same = combine_errors([0.7] * 3, [without] * 3)
    assert same.size == pytest.approx(jackknife(without) ** 0.5)


def test_seeds_without_common_rows_have_the_t_interval():
    values = [0.71, 0.74, 0.69, 0.72, 0.70]
    apart = np.zeros((5, GROUPS))
    for seed in range(5):
        apart[seed, 10 * seed : 10 * seed + 5], apart[seed, 10 * seed + 5 : 10 * seed + 10] = 1e-3, -1e-3
    error = combine_errors(values, apart)
    assert error.size == pytest.approx(stats.sem(values))
    simple = combine_errors(values, np.zeros((5, GROUPS)))
    assert (simple.size, simple.freedom) == (pytest.approx(stats.sem(values)), pytest.approx(4))
    assert simple.margin == pytest.approx(bound_over_seeds(values).high - np.mean(values))


def test_equal_values_of_different_rows_have_the_error_of_rows():
    """Few positive rows allow for few values, and two seeds may have the same one."""
    apart = np.full((2, GROUPS), 0.997)
    apart[0, :5], apart[1, 5:10] = 0.995, 0.995
    within = jackknife(apart[0])
    tied, near = combine_errors([0.997] * 2, apart), combine_errors([0.997, 0.997 - (2 * within) ** 0.5], apart)
    assert tied.size == pytest.approx(near.size)
    assert tied.size == pytest.approx((within / 2) ** 0.5, rel=0.1)


def test_common_draws_of_known_rows_widen_the_interval():
    values = [0.71, 0.74, 0.69, 0.72, 0.70]
    flat = np.zeros((5, GROUPS))
    error = combine_errors(values, flat, known=0.2)
    assert error.size**2 == pytest.approx(np.var(values, ddof=1) * (0.2 + 0.2))
