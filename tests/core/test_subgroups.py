"""Leaks of groups against scikit-learn, and p values that are uniform where groups do not differ."""

import numpy as np
import pytest
from scipy.stats import kstest
from sklearn.metrics import roc_auc_score

from vflsec.results import statistics
from vflsec.results.statistics import Scored, differ, find_leaks

PEOPLE, SEEDS = 240, 2


def binary(score):
    return np.stack([-score, score], axis=1)


def world(seed, *, lost=0.0):
    """Three groups with different shares of class 1; each seed scores two thirds of the people, with ties."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 3, PEOPLE)
    labels = (rng.random(PEOPLE) < np.array([0.3, 0.5, 0.7])[group]).astype(int)
    own = rng.normal(size=PEOPLE)  # what all seeds share of a person
    scored = []
    for _ in range(SEEDS):
        person = rng.permutation(PEOPLE)[: 2 * PEOPLE // 3]
        signal = np.where(group[person] == 2, 1.5 - lost, 1.5)
        score = own[person] + 0.5 * rng.normal(size=len(person)) + signal * labels[person]
        scored.append(Scored(person, binary(score.round(1)), labels[person]))
    return scored, group


def test_the_leak_of_a_group_is_the_auc_within_it():
    (scored, _), group = world(0)
    group[::7] = -1  # in no group
    within = [group[scored.person] == g for g in range(3)]
    expected = [roc_auc_score(scored.labels[own], scored.scores[own, 1]) for own in within]
    assert find_leaks(scored, group, 3) == pytest.approx(expected)


def test_the_leak_of_a_group_is_its_accuracy_for_more_classes():
    rng = np.random.default_rng(0)
    scored = Scored(np.arange(90), rng.normal(size=(90, 3)), rng.integers(0, 3, 90))
    group, hit = np.arange(90) % 2, scored.scores.argmax(axis=1) == scored.labels
    assert find_leaks(scored, group, 2) == pytest.approx([hit[::2].mean(), hit[1::2].mean()])
    assert np.isnan(find_leaks(scored, group, 3)[2]), "a group without rows"


@pytest.mark.long
def test_p_is_uniform_where_the_groups_leak_the_same(monkeypatch):
    """Also where their shares of classes differ, and where people are scored by several seeds alike."""
    monkeypatch.setattr(statistics, "DRAWS", 49)
    rng = np.random.default_rng(1)
    p = [differ(*world(seed), 3, rng) - rng.random() / 50 for seed in range(300)]  # steps of 1/50, filled in evenly
    assert kstest(p, "uniform").pvalue > 0.01


def test_a_group_without_a_leak_does_not_count(monkeypatch):
    monkeypatch.setattr(statistics, "DRAWS", 99)
    scored, group = world(3)
    group[group == 1] = -1
    again = [
        differ(scored, own, n, np.random.default_rng(0)) for own, n in ((group, 3), (np.where(group == 2, 1, group), 2))
    ]
    assert again[0] == again[1] < 1


@pytest.mark.long
def test_a_group_that_leaks_less_is_found():
    rng = np.random.default_rng(2)
    assert np.mean([differ(*world(seed, lost=1.3), 3, rng) < 0.05 for seed in range(10)]) > 0.7


def test_the_smallest_p_is_one_of_all_draws():
    label = np.arange(200) % 2
    group = np.arange(200) // 100
    score = np.where(group == 0, label, 1 - label).astype(float)
    assert differ([Scored(np.arange(200), binary(score), label)], group, 2, np.random.default_rng(0)) == 1 / 1000
