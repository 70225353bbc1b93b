"""Each row loses exactly as many raw columns as the rate says, whichever they are, and a category as a whole."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vflsec.base.errors import UsageError
from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.seeds import make_rng
from vflsec.nn.augmentation import ColumnChoice, ScarfCorruption, UniformCorruption

CPU = torch.device("cpu")


def layout(*widths):
    """Columns of these widths: a number for each 1, a category for each other."""
    starts = [sum(widths[:j]) for j in range(len(widths))]
    kinds = ["numeric" if width == 1 else "categorical" for width in widths]
    return Layout(
        tuple(EncodedColumn(f"x{j}", *rest) for j, rest in enumerate(zip(kinds, starts, widths, strict=True)))
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 6))
def test_exactly_the_rate_and_whole_blocks(widths, rate, rows):
    chosen = ColumnChoice(layout(*widths), rate, CPU)(rows, make_rng(0))
    assert chosen.shape == (rows, sum(widths))
    blocks = chosen.split(widths, dim=1)
    assert all(torch.equal(block.all(dim=1), block.any(dim=1)) for block in blocks)
    count = sum(block[:, 0].int() for block in blocks)
    assert count.tolist() == [round(rate * len(widths))] * rows


def test_every_set_of_columns_is_equally_likely():
    chosen = ColumnChoice(layout(1, 3, 1, 2), 0.5, CPU)(6000, make_rng(0))[:, [0, 1, 4, 5]].tolist()
    sets = [[j in pair for j in range(4)] for pair in combinations(range(4), 2)]
    seen = [chosen.count(one) for one in sets]
    assert sum(seen) == 6000
    assert stats.chisquare(seen).pvalue > 0.01
    uneven = [n + 60 * (-1) ** j for j, n in enumerate(seen)]  # 6 % off would be noticed
    assert stats.chisquare(uneven).pvalue < 0.01


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
@pytest.mark.parametrize("corruption", [UniformCorruption, ScarfCorruption])
def test_a_rate_is_a_share(corruption, rate):
    with pytest.raises(UsageError, match=rf"expected 0 <= rate <= 1, got {rate}"):
        corruption(layout(1, 1), torch.zeros(3, 2), rate)


@pytest.mark.parametrize("corruption", [UniformCorruption, ScarfCorruption])
@pytest.mark.parametrize("shape", [(3, 3), (2,)])
def test_the_reference_lies_as_the_rows_do(corruption, shape):
    with pytest.raises(AssertionError, match="another width than its layout"):
        corruption(layout(1, 1), torch.zeros(shape))
