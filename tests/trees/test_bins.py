"""A row's bin says on which side of each threshold it is, and bins have about as many rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.sparse_rows import SparseRows
from vflsec.trees.bins import Bins

ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)
FEW = st.sampled_from([0.0, -0.0, 1.0, 1.5, np.finfo(np.float32).max, np.finfo(np.float32).tiny])
LARGEST = float(np.finfo(np.float32).max)


def bins_of(values, most=32):
    x = torch.tensor(np.array(values, dtype=np.float32))[:, None]
    return Bins(Layout.numeric(1), x, most), x


def mixed(rows=200, seed=0):
    """A number, a category of four values of which one does not occur, and another number."""
    rng = np.random.default_rng(seed)
    category = rng.choice([0, 2, 3], size=rows)
    x = np.zeros((rows, 6), dtype=np.float32)
    x[:, 0], x[:, 5] = rng.normal(size=rows), rng.integers(3, size=rows)
    x[np.arange(rows), 1 + category] = 1
    columns = (
        EncodedColumn("a", "numeric", 0, 1),
        EncodedColumn("b", "categorical", 1, 4),
        EncodedColumn("c", "numeric", 5, 1),
    )
    return Layout(columns), torch.tensor(x), category


@given(
    values=arrays(np.float32, st.integers(1, 60), elements=st.one_of(ANY, FEW)),
    others=arrays(np.float32, st.integers(1, 20), elements=st.one_of(ANY, FEW)),
    most=st.integers(2, 12),
)
def test_a_row_is_in_a_bin_up_to_b_exactly_if_it_does_not_exceed_the_threshold_of_b(values, others, most):
    bins, x = bins_of(values, most)
    assert 1 <= len(bins) <= most
    assert np.isinf(bins.threshold[-1])
    assert (np.diff(bins.threshold) > 0).all()
    for rows in (x, torch.tensor(others)[:, None]):
        codes = bins.assign(rows)[:, 0]
        for b in range(len(bins)):
            assert ((codes <= b) == (rows[:, 0].numpy() <= bins.threshold[b])).all()
    assert set(bins.assign(x)[:, 0]) == set(range(len(bins))), "no bin is empty"


@given(values=arrays(np.float32, st.integers(1, 30), elements=st.one_of(ANY, FEW)))
def test_fewer_values_than_bins_have_a_bin_each(values):
    bins, x = bins_of(values)
    assert len(bins) == len(np.unique(values))
    assert (np.unique(values, return_inverse=True)[1] == bins.assign(x)[:, 0]).all()


@pytest.mark.parametrize(
    "pair",
    [
        (1.0, float(np.nextafter(np.float32(1), np.float32(2)))),
        (float(np.nextafter(np.float32(1), np.float32(0))), 1.0),
        (-LARGEST, LARGEST),
        (LARGEST / 2, LARGEST),
        (0.0, 1e-45),
        (-1e-45, 0.0),
    ],
)
def test_neighboring_and_extreme_numbers_are_told_apart(pair):
    bins, x = bins_of(pair)
    assert bins.assign(x)[:, 0].tolist() == [0, 1]
    assert pair[0] <= bins.threshold[0] < pair[1]


def test_a_threshold_is_halfway_between_two_values():
    bins, _ = bins_of([3, 1, 1, 4])
    assert bins.threshold.tolist() == [2.0, 3.5, np.inf]


def test_a_constant_column_has_one_bin():
    bins, x = bins_of([2.5] * 9)
    assert (len(bins), set(bins.assign(x)[:, 0])) == (1, {0})


@pytest.mark.parametrize("most", [2, 5, 32])
def test_many_values_have_bins_of_about_as_many_rows(most):
    bins, x = bins_of(np.random.default_rng(0).lognormal(size=1000), most)
    counts = np.bincount(bins.assign(x)[:, 0])
    assert len(counts) == most
    assert counts.max() - counts.min() <= 1


def test_a_value_of_many_rows_has_a_bin_of_its_own():
    values = np.concatenate([np.zeros(700), np.random.default_rng(0).uniform(1, 2, 300)])
    bins, x = bins_of(values, 10)
    counts = np.bincount(bins.assign(x)[:, 0])
    assert len(counts) == 10
    assert counts[0] == 700
    assert counts[1:].max() - counts[1:].min() <= 1, "the others share those that are left"


def test_values_of_many_rows_leave_no_bin_of_few_between_them():
    values = np.repeat([0.0, 0.1, 1.0, 1.1, 2.0, 3.0, 4.0, 5.0], [300, 2, 300, 60, 300, 13, 13, 12])
    bins, _ = bins_of(values, 6)
    assert bins.threshold == pytest.approx([0.05, 1.05, 1.55, 2.5, np.inf])


def test_rows_beyond_those_of_training_are_in_the_outer_bins():
    bins, _ = bins_of([0, 1, 2])
    assert bins.assign(torch.tensor([[-9.0], [9.0], [np.inf]]))[:, 0].tolist() == [0, 2, 2]


def test_bins_of_all_columns_stand_one_after_the_other():
    layout, x, category = mixed()
    bins, codes = Bins(layout, x, 8), Bins(layout, x, 8).assign(x)
    assert bins.column.tolist() == [0] * 8 + [1] * 4 + [2] * 3
    assert bins.ordered.tolist() == [True] * 8 + [False] * 4 + [True] * 3
    assert bins.start.tolist() == [0, 8, 12]
    assert len(bins) == 15
    assert (codes[:, 1] == 8 + category).all()
    assert codes.dtype == np.int32
    for code in range(len(bins)):  # what is beyond a bin is told by one encoded column
        beyond = x[:, bins.place[code]].numpy() > bins.threshold[code]
        own = codes[:, bins.column[code]]
        assert (beyond == (own > code if bins.ordered[code] else own == code)).all()


def test_sparse_rows_are_as_dense_ones():
    layout, x, category = mixed()
    places = torch.tensor(np.stack([np.zeros(len(x), dtype=int), 1 + category, np.full(len(x), 5)], axis=1))
    sparse = SparseRows(x.gather(1, places), places, 6)
    assert torch.equal(sparse.dense(), x)
    one, other = Bins(layout, x, 8), Bins(layout, sparse, 8)
    assert (one.threshold == other.threshold).all()
    assert (one.assign(x) == other.assign(sparse)).all()


def test_a_party_without_columns_has_no_bins():
    bins = Bins(Layout(()), torch.zeros(5, 0), 8)
    assert len(bins) == 0
    assert bins.assign(torch.zeros(5, 0)).shape == (5, 0)
