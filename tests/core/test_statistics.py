"""Intervals with known answers, and their coverage."""

import math

import numpy as np
import pytest
from scipy import stats

from vflsec.core.metrics import f1
from vflsec.core.statistics import over_rows, over_seeds


def test_over_seeds_is_the_t_interval():
    values = [0.71, 0.74, 0.69, 0.72, 0.70]
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert over_seeds(values)[1:3] == pytest.approx(expected)


def test_one_seed_has_no_interval():
    interval = over_seeds([0.7])
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
        low, high = over_rows(metric, np.stack([-score, score], axis=1), labels, rng)
        covered += low <= truth <= high
        widths.append(high - low)
    assert covered >= stats.binom.ppf(0.001, 120, 0.95)
    assert np.mean(widths) < 0.12


def test_bootstrap_of_f1_equals_a_naive_one():
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(int)
    score = labels + rng.normal(size=300)
    scores = np.stack([0.8 - score, score - 0.8], axis=1)
    found = over_rows("f1", scores, labels, np.random.default_rng(1))
    rows = (rng.integers(300, size=300) for _ in range(2000))
    naive = np.quantile([f1(scores[some], labels[some]) for some in rows], [0.025, 0.975])
    assert found == pytest.approx(tuple(naive), abs=0.015)
    assert over_rows("f1", scores, np.zeros(300, dtype=int), rng) == (0, 0)  # nothing to find


def test_bootstrap_of_auc_equals_a_naive_one_on_ties():
    labels = np.array([0, 0, 1, 1, 1, 0])
    score = np.array([0.0, 1.0, 1.0, 2.0, 0.0, 0.0])
    scores = np.stack([-score, score], axis=1)
    low, high = over_rows("auc", scores, labels, np.random.default_rng(1))
    rng, values = np.random.default_rng(1), []
    for _ in range(400):
        rows = rng.integers(6, size=6)
        pairs = [(a > b) + (a == b) / 2 for a in score[rows][labels[rows] == 1] for b in score[rows][labels[rows] == 0]]
        values.append(np.mean(pairs) if pairs else 0.5)
    assert (low, high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
