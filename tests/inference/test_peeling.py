"""Rows are found in bins from exact sums alone; what is not unique stays unknown."""

import numpy as np
import pytest

from vflsec.inference.trees.histograms import Equation, PossibleBins, encode_pairs, peel_bins

BINS = 6


def world(n=60, columns=3, *, seed=0, equal=False):
    rng = np.random.default_rng(seed)
    bins = rng.integers(0, BINS, (n, columns)) + BINS * np.arange(columns)
    pairs = np.tile([[7, 3]], (n, 1)) if equal else rng.integers(-(2**24), 2**24, (n, 2))
    return bins, pairs


def equation(rows, bins, pairs):
    rows = np.asarray(rows)
    inside = bins[rows][:, :, None] == np.arange(BINS * bins.shape[1])  # (m, columns, V)
    counts = inside.sum(axis=(0, 1))
    sums = np.einsum("mcv,mk->vk", inside.astype(np.int64), pairs[rows])
    return Equation(rows, encode_pairs(pairs[rows]), encode_pairs(sums), counts)


class Allowed(PossibleBins):
    """Rows can be in the bins of ``allowed`` (n, V)."""

    def __init__(self, allowed):
        self.allowed = allowed

    def find_rows(self, rows, b):
        return self.allowed[rows, b]

    def numbers(self, rows, start, stop):
        return self.allowed[rows, start:stop].sum(axis=0)


everywhere = Allowed(np.ones((200, 3 * BINS), dtype=bool))


def column(columns=3):
    return np.repeat(np.arange(columns), BINS)


def test_keys_add_up_as_pairs_do():
    pairs = np.random.default_rng(0).integers(-(2**40), 2**40, (50, 2))
    with np.errstate(over="ignore"):
        assert encode_pairs(pairs).sum() == encode_pairs(pairs.sum(axis=0))


def test_bins_with_one_or_two_rows_are_found():
    bins, pairs = world(8)
    found = peel_bins([equation(range(8), bins, pairs)], column(), 8, everywhere)
    counts = np.bincount(bins.ravel(), minlength=3 * BINS)
    few = counts[bins] <= 2
    assert (found[few] == bins[few]).all()
    assert few.any()


def test_rows_that_are_found_are_taken_out_of_other_nodes():
    bins, pairs = world(60)
    nodes = [range(start, start + 5) for start in range(0, 60, 5)]
    apart = [equation(rows, bins, pairs) for rows in nodes]
    assert (peel_bins(apart, column(), 60, everywhere) == bins).all(), "five rows of six bins"
    whole = [equation(range(60), bins, pairs)]
    assert (peel_bins(whole, column(), 60, everywhere) == -1).mean() > 0.9, "ten rows in each bin"
    but_one = [one for rows, one in zip(nodes, apart, strict=True) if 7 not in rows]
    assert (peel_bins([*whole, *but_one], column(), 60, everywhere) == bins).all(), "the rest follows from the whole"


@pytest.mark.parametrize("seed", range(5))
def test_nothing_false_is_found(seed):
    bins, pairs = world(200, seed=seed)
    rng = np.random.default_rng(seed)
    equations = [equation(rng.choice(200, 30, replace=False), bins, pairs) for _ in range(20)]
    found = peel_bins(equations, column(), 200, everywhere)
    assert (found[found >= 0] == bins[found >= 0]).all()


def test_rows_with_equal_derivatives_are_not_told_apart():
    bins, pairs = world(20, equal=True)
    found = peel_bins([equation(range(20), bins, pairs)], column(), 20, everywhere)
    assert (found == -1).all()


def test_sums_of_other_numbers_find_nothing():
    bins, pairs = world(10)
    one = equation(range(10), bins, pairs)
    found = peel_bins([one._replace(sums=one.sums + 1)], column(), 10, everywhere)
    assert (found == -1).all()


def test_rows_that_cannot_be_in_a_bin_are_left_out():
    bins, pairs = world(12, equal=True)
    within = (bins[:, :, None] == np.arange(3 * BINS)).any(axis=1)
    found = peel_bins([equation(range(12), bins, pairs)], column(), 12, Allowed(within))
    assert (found == bins).all(), "every row has one bin left"
