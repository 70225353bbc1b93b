"""Bits per row against closed forms, and that no row is calibrated by its own answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.results.metrics import calibrate, score_knowledge


def halves(n, seed=0):
    return np.random.default_rng(seed).permutation(n) % 2 == 0


def told(scores, labels):
    first = halves(len(labels))
    return score_knowledge(calibrate(scores, labels, first), labels, first)


def binary(score):
    return np.stack([-score, score], axis=1)


def entropy(share):
    return -share * np.log2(share) - (1 - share) * np.log2(1 - share)


def test_scores_that_tell_nothing_cost_the_entropy_of_the_labels():
    rng = np.random.default_rng(0)
    labels = (rng.random(20_000) < 0.2).astype(int)
    found = told(binary(rng.normal(size=20_000)), labels)
    assert found["cross_entropy"] == pytest.approx(entropy(labels.mean()), abs=0.004)
    assert found["known@0.99"] == 0.0
    assert "right@0.99" not in found


def test_the_wrong_way_round_tells_nothing():
    labels = np.arange(4000) % 2
    assert told(binary(1.0 - labels), labels)["cross_entropy"] == pytest.approx(1.0, abs=0.01)


def test_the_cross_entropy_of_two_normal_distributions_is_that_of_their_posterior():
    rng = np.random.default_rng(1)
    labels = (rng.random(40_000) < 0.3).astype(int)
    score = rng.normal(size=40_000) + 1.5 * labels
    odds = 1.5 * score - 1.5**2 / 2 + np.log(0.3 / 0.7)
    posterior = np.log2(1 + np.exp(np.where(labels == 1, -odds, odds))).mean()
    assert told(binary(np.expm1(score)), labels)["cross_entropy"] == pytest.approx(posterior, abs=0.006)


def test_the_cross_entropy_of_many_classes_seen_through_noise():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 5, 20_000)
    seen = np.where(rng.random(20_000) < 0.75, labels, rng.integers(0, 5, 20_000))  # right with .8, else .05 each
    expected = -0.8 * np.log2(0.8) - 4 * 0.05 * np.log2(0.05)
    shifted = np.eye(5)[seen] + rng.normal(scale=50, size=(20_000, 1))  # logits have no common origin
    assert told(shifted, labels)["cross_entropy"] == pytest.approx(expected, abs=0.02)


def test_few_rows_known_for_certain_are_seen():
    rng = np.random.default_rng(3)
    labels = np.arange(10_000) % 2
    certain = rng.random(10_000) < 0.1
    found = told(binary(np.where(certain, 10.0 * (2 * labels - 1), rng.normal(size=10_000))), labels)
    assert found["known@0.99"] == pytest.approx(certain.mean(), abs=0.005)
    assert found["right@0.99"] > 0.99
    assert found["cross_entropy"] == pytest.approx(1 - certain.mean(), abs=0.01)


def test_naming_a_very_common_class_is_no_knowledge():
    """Of 2 % positives a guess without information is right in 98 of 100 rows; a perfect one knows every positive."""
    rng = np.random.default_rng(7)
    labels = (np.arange(20_000) % 50 == 0).astype(int)
    blind, weak = told(binary(rng.normal(size=20_000)), labels), told(binary(rng.normal(size=20_000) + labels), labels)
    assert blind["known_of_class@0.99"] == weak["known_of_class@0.99"] == 0.0
    assert weak["known@0.99"] > 0.3, "most rows are surely negative"
    assert "right_of_class@0.99" not in weak
    perfect = told(binary(labels + rng.uniform(0, 0.5, 20_000)), labels)
    assert perfect["known_of_class@0.99"] > 0.99
    assert perfect["right_of_class@0.99"] == 1.0


def test_each_class_counts_alike_for_what_is_known():
    """A tenth of class 0 and half of class 1 are known: .3, whatever the sizes of the classes."""
    labels = (np.arange(20_000) % 4 == 0).astype(int)
    certain = np.random.default_rng(8).random(20_000) < np.where(labels == 1, 0.5, 0.1)
    found = told(binary(np.where(certain, 10.0 * (2 * labels - 1), 0.0)), labels)
    assert found["known_of_class@0.99"] == pytest.approx(0.3, abs=0.01)


def test_an_attack_that_is_sure_and_often_wrong_is_not_taken_at_its_word():
    rng = np.random.default_rng(4)
    labels = np.arange(10_000) % 2
    guessed = np.where(rng.random(10_000) < 0.9, labels, 1 - labels)
    found = told(binary(1e9 * (2 * guessed - 1.0)), labels)
    assert found["known@0.99"] == 0.0
    assert found["cross_entropy"] == pytest.approx(entropy(0.9), abs=0.02)


def test_of_rows_known_with_confidence_almost_all_are_right():
    shares = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        labels = np.arange(4000) % 2
        found = told(binary(rng.normal(size=4000) + 3.0 * labels), labels)
        shares.append(found["right@0.99"])
    assert np.mean(shares) > 0.985


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_only_the_order_counts(seed):
    rng = np.random.default_rng(seed)
    labels, score = rng.integers(0, 2, 200), rng.normal(size=200).round(1)
    first = halves(200, seed)
    assert calibrate(binary(score), labels, first) == pytest.approx(calibrate(binary(score**3), labels, first))


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 299))
def test_no_row_is_calibrated_by_its_own_answer(seed, row):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 3, 300), rng.normal(size=(300, 3))
    first = halves(300, seed)
    before = calibrate(scores, labels, first)
    labels[row] = (labels[row] + 1) % 3
    after = calibrate(scores, labels, first)
    assert (after[row] == before[row]).all()
    assert (after[first == first[row]] == before[first == first[row]]).all()
    assert after.sum(axis=1) == pytest.approx(1.0)
    assert (after > 0).all()


def test_few_rows_are_no_certainty_and_no_zero():
    labels = np.arange(60) % 2
    assert told(binary(labels.astype(float)), labels).keys() == {"cross_entropy"}, "each half has 15 rows of a class"


@pytest.mark.parametrize("rows", [98, 100])
def test_known_rows_of_a_class_are_seen_from_100_on(rows):
    labels = (np.arange(10_000) < 900).astype(int)
    certain, first = binary((np.arange(10_000) < rows).astype(float)), np.arange(10_000) % 2 == 0
    found = score_knowledge(calibrate(certain, labels, first), labels, first)
    assert found["known_of_class@0.99"] == (pytest.approx(1 / 9) if rows == 100 else 0.0)


@pytest.mark.parametrize("rows", [98, 100])
def test_what_is_known_of_a_rare_class_is_measured_from_100_rows_on(rows):
    """A step of m rows is (m + 1/2) / (m + 1), which exceeds .99 from m = 50 on."""
    labels = (np.arange(10_000) < rows).astype(int)
    perfect, first = binary(labels.astype(float)), np.arange(10_000) % 2 == 0
    found = score_knowledge(calibrate(perfect, labels, first), labels, first)
    assert found.get("known_of_class@0.99") == found.get("right_of_class@0.99") == (1.0 if rows == 100 else None)
    assert found["known@0.99"] == pytest.approx(1.0 if rows == 100 else 1 - rows / 10_000)
    blind = np.random.default_rng(0).normal(size=10_000)
    found = score_knowledge(calibrate(binary(blind), labels, first), labels, first)
    assert found.get("known_of_class@0.99") == (0.0 if rows == 100 else None), "nothing is known of enough rows"
