"""Measures against closed forms and naive loops, ties included."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score, roc_curve

from vflsec.results import metrics
from vflsec.results.statistics import leave_out_groups

RNG = np.random.default_rng(0)


def binary(score):
    """Two columns whose difference is ``score``."""
    score = np.asarray(score, dtype=float)
    return np.stack([-score / 2, score / 2], axis=1)


def naive_auc(score, positive):
    pairs = [(a > b) + (a == b) / 2 for a in score[positive] for b in score[~positive]]
    return np.mean(pairs)


@pytest.mark.parametrize(
    ("score", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
    ],
)
def test_auc_closed_forms(score, labels, expected):
    assert metrics.auc(binary(score), np.array(labels)) == pytest.approx(expected)


labeled = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30).filter(
    lambda rows: len({label for _, label in rows}) == 2
)


@settings(max_examples=50)
@given(labeled)
def test_auc_and_ks_equal_naive_loops(rows):
    score, labels = np.array([s for s, _ in rows], dtype=float), np.array([int(y) for _, y in rows])
    assert metrics.auc(binary(score), labels) == pytest.approx(naive_auc(score, labels == 1))
    gaps = [abs((score[labels == 1] <= t).mean() - (score[labels == 0] <= t).mean()) for t in score]
    assert metrics.ks(binary(score), labels) == pytest.approx(max(gaps))


def test_auc_of_many_classes_is_the_mean_of_one_against_the_rest():
    scores, labels = RNG.normal(size=(60, 4)).round(1), np.arange(60) % 4
    expected = np.mean([naive_auc(scores[:, c], labels == c) for c in range(4)])
    assert metrics.auc(scores, labels) == pytest.approx(expected)


def test_auc_leaves_out_a_class_that_is_not_there():
    scores, labels = RNG.normal(size=(30, 3)), np.arange(30) % 2
    assert metrics.auc(scores, labels) == pytest.approx(np.mean([naive_auc(scores[:, c], labels == c) for c in (0, 1)]))


def test_accuracy_and_top5_equal_naive_loops():
    scores, labels = RNG.normal(size=(50, 8)), RNG.integers(8, size=50)
    first = [max(range(8), key=lambda c: row[c]) == y for row, y in zip(scores, labels, strict=True)]
    five = [y in sorted(range(8), key=lambda c: -row[c])[:5] for row, y in zip(scores, labels, strict=True)]
    assert metrics.accuracy(scores, labels) == pytest.approx(np.mean(first))
    assert metrics.top5(scores, labels) == pytest.approx(np.mean(five))


def test_top5_of_a_constant_takes_the_first_classes():
    assert metrics.top5(np.zeros((8, 8)), np.arange(8)) == 5 / 8


@pytest.mark.parametrize(
    ("predicted", "labels", "expected"),
    [
        ([1, 1, 0, 0], [1, 0, 1, 0], 0.5),  # one hit, one false alarm, one miss
        ([0, 0, 0, 0], [1, 0, 1, 0], 0.0),
        ([1, 0, 1, 0], [1, 0, 1, 0], 1.0),
    ],
)
def test_f1_closed_forms(predicted, labels, expected):
    assert metrics.f1(binary(2 * np.array(predicted) - 1), np.array(labels)) == pytest.approx(expected)


def test_f1_of_many_classes_is_the_mean_over_classes():
    predicted, labels = np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])
    assert metrics.f1(np.eye(3)[predicted], labels) == pytest.approx(np.mean([1, 2 / 3, 2 / 3]))


@pytest.mark.parametrize(
    ("classes", "names"),
    [(2, ("auc", "accuracy", "f1", "ks")), (5, ("accuracy", "auc", "f1")), (6, ("accuracy", "auc", "f1", "top5"))],
)
def test_what_applies(classes, names):
    assert metrics.list_metrics(classes) == names
    assert set(names) <= set(metrics.METRICS)


def test_chance_is_a_guesser_without_information():
    labels = np.array([0, 0, 0, 1])
    assert metrics.score_chance("auc", labels) == 0.5
    assert metrics.score_chance("accuracy", labels) == 0.75
    assert metrics.accuracy(binary(-np.ones(4)), labels) == 0.75
    assert metrics.score_chance("f1", labels) == metrics.f1(binary(np.ones(4)), labels) == 0.4


def test_r2_is_the_share_of_all_variance_and_zero_for_the_mean():
    truth = np.random.default_rng(0).normal(size=(200, 3)) * [1.0, 2.0, 0.0]
    assert metrics.r2(truth, truth) == 1
    assert metrics.r2(np.broadcast_to(truth.mean(axis=0), truth.shape), truth) == pytest.approx(0)
    half = truth.copy()
    half[:, 1] = truth[:, 1].mean()
    parts = truth.var(axis=0)
    assert metrics.r2(half, truth) == pytest.approx(parts[0] / parts.sum())


def test_psnr_of_a_known_error():
    truth = np.linspace(0, 255, 256)[:, None]
    assert metrics.psnr(truth + 1, truth) == pytest.approx(20 * np.log10(255))
    assert metrics.psnr(truth, truth) == 100


def test_tpr_counts_only_what_is_found_below_the_false_positives_allowed():
    score = np.r_[np.arange(100.0), 99.5, 98.5, np.full(98, -1.0)]  # of class 0 the hundred, of class 1 the rest
    labels = np.r_[np.zeros(100, int), np.ones(100, int)]
    scores = np.stack([-score, score], axis=1)
    assert metrics.tpr_at(scores, labels, fpr=0.01) == 0.02
    many = np.tile(labels, 10), np.tile(scores, (10, 1))
    assert metrics.tpr_at(many[1], many[0], fpr=0.001) == 0.01
    assert np.isnan(metrics.tpr_at(scores, labels, fpr=0.001)), "a hundred rows do not tell 0.1 % from 0"


def test_tpr_of_many_classes_is_the_mean_of_each_against_the_rest():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 4, 2000), rng.normal(size=(2000, 4))
    scores[np.arange(2000), labels] += 2.0
    rates = []
    for c in range(4):
        margin = scores[:, c] - np.delete(scores, c, axis=1).max(axis=1)
        threshold = np.sort(margin[labels != c])[::-1][int(0.01 * (labels != c).sum())]
        rates.append((margin[labels == c] > threshold).mean())
    assert metrics.tpr_at(scores, labels, fpr=0.01) == pytest.approx(np.mean(rates))
    assert metrics.tpr_at(scores + rng.normal(size=(2000, 1)), labels, fpr=0.01) == pytest.approx(np.mean(rates))


def test_margins_are_to_the_largest_of_the_others():
    assert metrics.compute_margins(np.array([[1.0, 4.0, 2.0], [3.0, 3.0, 0.0]])).tolist() == [[-3, 2, -2], [0, 0, -3]]


def test_an_auc_is_at_most_one():
    """Of these scores scikit-learn's sum of trapezoids is 1 + 2e-16, which no record may hold."""
    rng = np.random.default_rng(9195)
    n = int(rng.integers(50, 3000))
    labels = (rng.random(n) < rng.uniform(0.05, 0.95)).astype(int)
    score = labels * 10 + np.round(rng.normal(size=n), int(rng.integers(0, 2)))
    assert roc_auc_score(labels, score) > 1
    assert metrics.auc(binary(score), labels) == 1


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("step", [0.0, 0.25])  # without ties, and with many
def test_metrics_from_one_sort_are_those_of_scikit_learn(classes, step):
    rng = np.random.default_rng(classes)
    labels = rng.permutation(np.arange(800) % classes)
    scores = rng.normal(size=(800, classes)) + np.eye(classes)[labels]
    scores = np.round(scores / step) * step if step else scores
    columns = {1: scores[:, 1] - scores[:, 0]} if classes == 2 else dict(enumerate(scores.T))
    expected = np.mean([roc_auc_score(labels == c, score) for c, score in columns.items()])
    assert metrics.auc(scores, labels) == pytest.approx(expected, abs=1e-12)
    average = "binary" if classes == 2 else "macro"
    assert metrics.f1(scores, labels) == pytest.approx(
        f1_score(labels, scores.argmax(axis=1), average=average), abs=1e-12
    )
    margin = metrics.compute_margins(scores)
    curves = [roc_curve(labels == c, margin[:, c]) for c in columns]
    expected = np.mean([true[false <= 0.05].max() for false, true, _ in curves])
    assert metrics.tpr_at(scores, labels, fpr=0.05) == pytest.approx(expected, abs=1e-12)
    if classes == 2:
        groups = rng.integers(50, size=800)
        without = [metrics.auc(scores[groups != k], labels[groups != k]) for k in range(50)]
        assert leave_out_groups("auc", scores, labels, groups) == pytest.approx(without, abs=1e-12)
