"""Sums by node and bin are exact, and no sum that may not be is given."""

import numpy as np
import pytest

from vflsec.base.errors import UsageError
from vflsec.trees.histograms import sum_bins


def case(rows=100, seed=0, columns=3, n_nodes=4, largest=2**30, weights=2):
    rng = np.random.default_rng(seed)
    bins = (rng.integers(5, size=(rows, columns)) + 5 * np.arange(columns)).astype(np.int32)
    return bins, rng.integers(-1, n_nodes, size=rows), rng.integers(-largest, largest, size=(rows, weights))


def in_loops(bins, nodes, weights, n_nodes, n_bins):
    found = [[[0] * (weights.shape[1] + 1) for _ in range(n_bins)] for _ in range(n_nodes)]
    for row, node in enumerate(nodes):
        for b in bins[row] if node >= 0 else ():
            for k, weight in enumerate([*weights[row], 1]):
                found[node][b][k] += int(weight)
    return found


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("weights", [0, 1, 2])
def test_sums_are_those_of_a_loop(order, weights):
    bins, nodes, w = case(weights=weights)
    found = sum_bins(np.asarray(bins, order=order), nodes, w, 4, 15)
    assert found.dtype == np.int64
    assert found.tolist() == in_loops(bins, nodes, w, 4, 15)


def test_integers_that_no_single_precision_holds_are_summed_exactly():
    bins, nodes, w = case(rows=8, largest=2**49)
    assert sum_bins(bins, nodes, w, 4, 15).tolist() == in_loops(bins, nodes, w, 4, 15)


def test_a_parent_is_the_sum_of_its_children():
    bins, nodes, w = case(n_nodes=2)
    children = sum_bins(bins, nodes, w, 2, 15)
    assert (sum_bins(bins, np.minimum(nodes, 0), w, 1, 15)[0] - children[0] == children[1]).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (20, 0), (0, 0)])
def test_without_rows_or_columns_all_sums_are_zero(rows, columns):
    bins, nodes, w = case(rows=rows, columns=columns)
    assert sum_bins(bins, nodes, w, 4, 15).shape == (4, 15, 3)
    assert not sum_bins(bins, nodes, w, 4, 15).any()


def test_no_row_is_in_no_node():
    bins, nodes, w = case()
    assert not sum_bins(bins, np.full_like(nodes, -1), w, 4, 15).any()


def test_sums_that_may_not_be_exact_are_refused():
    bins, nodes, w = case(rows=4)
    with pytest.raises(UsageError, match="below 2251799813685248 .*got 2251799813685248"):
        sum_bins(bins, nodes, np.full_like(w, 2**51), 4, 15)
    sum_bins(bins, nodes, np.full_like(w, 2**51 - 1), 4, 15)
