"""The best split is the one that a search through all of them finds."""

import itertools
import math

import numpy as np
import pytest

from vflsec.trees.histograms import FRACTION_BITS, Rule, find_splits, sum_bins

UNIT = 2**FRACTION_BITS
EVERY = Rule(l2=1.0, least_rows=1, least_hessian=0.0, least_gain=0.0)


def columns(rng, rows):
    """Codes (rows, 4) of a number, a category, a constant and a number, and column and ordered of their 14 bins."""
    widths = [6, 4, 1, 3]
    codes = np.stack([rng.integers(width, size=rows) for width in widths], axis=1)
    column = np.repeat(np.arange(4), widths)
    start = np.cumsum([0, *widths[:-1]])
    return (codes + start).astype(np.int32), column, column != 1


def search(codes, g, h, column, ordered, rule):
    """The gain of every split of one node, row by row, in exact integers as long as possible."""
    found = {}
    for b, (own, is_ordered) in enumerate(zip(column, ordered, strict=True)):
        left, right = [0, 0, 0], [0, 0, 0]
        for row, code in enumerate(codes[:, own]):
            side = left if (code <= b if is_ordered else code != b) else right
            for k, value in enumerate((g[row], h[row], 1)):
                side[k] += int(value)
        if min(left[2], right[2]) < rule.least_rows:
            continue
        if min(left[1], right[1]) / UNIT < rule.least_hessian:
            continue
        whole = [a + c for a, c in zip(left, right, strict=True)]
        terms = [(G / UNIT) ** 2 / (H / UNIT + rule.l2) for G, H, _ in (left, right, whole)]
        gain = terms[0] + terms[1] - terms[2]
        if gain > rule.least_gain:
            found[b] = gain
    return found


RULES = [
    EVERY,
    Rule(l2=0.1, least_rows=1, least_hessian=0.0, least_gain=0.0),
    Rule(l2=10.0, least_rows=5, least_hessian=0.0, least_gain=0.0),
    Rule(l2=1.0, least_rows=1, least_hessian=3.0, least_gain=0.0),
    Rule(l2=1.0, least_rows=2, least_hessian=0.5, least_gain=2.0),
]


@pytest.mark.parametrize(("seed", "rule"), list(itertools.product(range(4), RULES)))
def test_the_best_split_is_that_of_a_search_through_all(seed, rule):
    rng = np.random.default_rng(seed)
    rows, n_nodes = 60, 4
    codes, column, ordered = columns(rng, rows)
    g, h = (rng.normal(size=rows) * UNIT).astype(np.int64), (rng.uniform(0.01, 0.3, size=rows) * UNIT).astype(np.int64)
    nodes = rng.integers(-1, n_nodes, size=rows)
    sums = sum_bins(codes, nodes, np.stack([g, h], axis=1), n_nodes, len(column))
    best = find_splits(sums, column, ordered, rule)
    for node in range(n_nodes):
        inside = nodes == node
        found = search(codes[inside], g[inside], h[inside], column, ordered, rule)
        if not found:
            assert best.gain[node] == -np.inf
            continue
        expected = max(found, key=found.get)
        assert best.gain[node] == pytest.approx(found[expected], rel=1e-9)
        assert best.bin[node] == expected
    assert np.isfinite(best.gain).any() or rule.least_hessian > 1, "or it tests nothing"


def test_of_equal_splits_the_first_bin_is_taken():
    sums = np.array([[[-UNIT, UNIT, 4], [UNIT, UNIT, 4]] * 3])
    column, ordered = np.repeat(np.arange(3), 2), np.ones(6, dtype=bool)
    assert find_splits(sums, column, ordered, EVERY).bin.tolist() == [0]
    assert find_splits(sums[:, 2:], column[2:], ordered[2:], EVERY).bin.tolist() == [0]


@pytest.mark.parametrize(
    "sums",
    [
        [[3 * UNIT, UNIT, 9]],  # one bin
        [[3 * UNIT, UNIT, 9], [0, 0, 0]],  # all rows in one bin
        [[UNIT, UNIT, 5], [UNIT, UNIT, 5]],  # nothing to gain
        [[0, 0, 0], [0, 0, 0]],  # no rows
    ],
)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("l2", [0.0, 1.0])
def test_a_node_without_a_split_has_no_gain(sums, ordered, l2):
    found = find_splits(
        np.array([sums]), np.zeros(len(sums), dtype=int), np.full(len(sums), ordered), EVERY._replace(l2=l2)
    )
    assert found.gain.tolist() == [-math.inf]


def test_without_columns_or_nodes_there_is_no_split():
    none = find_splits(np.zeros((3, 0, 3), dtype=np.int64), np.zeros(0, int), np.zeros(0, bool), EVERY)
    assert none.gain.tolist() == [-math.inf] * 3
    assert find_splits(np.zeros((0, 2, 3), dtype=np.int64), np.zeros(2, int), np.ones(2, bool), EVERY).gain.shape == (
        0,
    )


@pytest.mark.parametrize("drawn", [(0, 1), (1, 3), (3,), (1,)])
def test_columns_that_were_not_drawn_do_not_change_those_that_were(drawn):
    """Their bins have no rows, those of the first column included."""
    rng = np.random.default_rng(1)
    codes, column, ordered = columns(rng, 80)
    weights = np.stack([rng.normal(size=80), rng.uniform(0.1, 0.3, size=80)], axis=1)
    weights = (weights * UNIT).astype(np.int64)
    nodes = rng.integers(2, size=80)
    best = find_splits(sum_bins(codes[:, drawn], nodes, weights, 2, len(column)), column, ordered, EVERY)
    for node in range(2):
        inside = nodes == node
        found = search(codes[inside], *weights[inside].T, column, ordered, EVERY)
        found = {b: gain for b, gain in found.items() if column[b] in drawn}
        assert best.bin[node] == max(found, key=found.get)
        assert best.gain[node] == pytest.approx(max(found.values()))
