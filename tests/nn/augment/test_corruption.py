"""What corrupted values are: uniform numbers and masks, or values of other rows."""

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.seeds import make_rng
from vflsec.nn.augmentation import ScarfCorruption, UniformCorruption

LAYOUT = Layout(
    (
        EncodedColumn("age", "numeric", 0, 1),
        EncodedColumn("town", "categorical", 1, 4),
        EncodedColumn("income", "numeric", 5, 1),
        EncodedColumn("constant", "numeric", 6, 1),
        EncodedColumn("color", "categorical", 7, 3),
    )
)
TOWN, COLOR, NUMBERS = slice(1, 5), slice(7, 10), [0, 5, 6]
BOTH = pytest.mark.parametrize("corruption", [UniformCorruption, ScarfCorruption])


def rows(count, numbers):
    """Rows with these numbers (count, 3), and categories other than the first slot, which stands for unknown ones."""
    rng = make_rng(1, "categories")
    x = torch.empty(count, 10)
    x[:, NUMBERS] = numbers
    x[:, TOWN] = F.one_hot(torch.randint(1, 4, (count,), generator=rng), 4).float()
    x[:, COLOR] = F.one_hot(torch.randint(1, 3, (count,), generator=rng), 3).float()
    return x


def reference(count=500):
    """Training rows: age in [-1, 3], income in [10, 20], and a constant 7."""
    share = torch.linspace(0, 1, count)
    return rows(count, torch.stack([4 * share - 1, 20 - 10 * share, torch.full((count,), 7.0)], dim=1))


def clean(count=4000):
    """Rows with numbers that no reference row has."""
    return rows(count, torch.full((count, 3), 100.0))


def replaced(x, view):
    """Which numbers were replaced, (B, 3)."""
    return view[:, NUMBERS] != x[:, NUMBERS]


@BOTH
class TestBoth:
    def test_none_at_rate_zero(self, corruption):
        x = clean()
        view = corruption(LAYOUT, reference(), 0)(x, make_rng(0))
        assert torch.equal(view, x)
        assert view.data_ptr() != x.data_ptr()

    def test_all_at_rate_one(self, corruption):
        x = clean()
        assert replaced(x, corruption(LAYOUT, reference(), 1)(x, make_rng(0))).all()

    def test_what_is_not_replaced_stays(self, corruption):
        x = clean()
        numbers = corruption(LAYOUT, reference(), 0.4)(x, make_rng(0))[:, NUMBERS]
        assert ((numbers == 100) | (numbers <= 20)).all()
        share = (numbers != 100).float().mean()  # each of the five columns equally often
        assert float(share) == pytest.approx(0.4, abs=0.02)

    def test_categories_stay_one_hot(self, corruption):
        view = corruption(LAYOUT, reference(), 0.6)(clean(), make_rng(0))
        for block in (view[:, TOWN], view[:, COLOR]):
            assert ((block == 0) | (block == 1)).all()
            assert (block.sum(dim=1) == 1).all()

    def test_seeds_decide_and_nothing_else_is_touched(self, corruption):
        x, known = clean(50), reference()
        before, before_known, state = x.clone(), known.clone(), torch.get_rng_state()
        corrupt = corruption(LAYOUT, known)
        view, again, other = (corrupt(x, make_rng(seed)) for seed in (0, 0, 1))
        assert torch.equal(view, again)
        assert not torch.equal(view, other)
        assert torch.equal(x, before)
        assert torch.equal(known, before_known)
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_generator_goes_on(self, corruption):
        corrupt, rng, x = corruption(LAYOUT, reference()), make_rng(0), clean(50)
        assert not torch.equal(corrupt(x, rng), corrupt(x, rng))

    @pytest.mark.parametrize("count", [0, 1])
    def test_few_rows(self, corruption, count):
        x = clean(2)[:count]
        assert corruption(LAYOUT, reference(1))(x, make_rng(0)).shape == (count, 10)

    def test_double_precision(self, corruption):
        x = clean(5).double()
        assert corruption(LAYOUT, reference().double())(x, make_rng(0)).dtype == torch.float64


class TestUniform:
    def test_the_default_rate_is_that_of_the_paper(self):
        x = torch.full((50, 10), 100.0)
        view = UniformCorruption(Layout.numeric(10), torch.rand(9, 10, generator=make_rng(0)))(x, make_rng(0))
        assert ((view != x).sum(dim=1) == 3).all()

    def test_numbers_are_uniform_between_the_least_and_the_largest(self):
        view = UniformCorruption(LAYOUT, reference(), 1)(clean(), make_rng(0))
        for column, low, width in ((0, -1, 4), (5, 10, 10)):
            values = view[:, column].numpy()
            assert low <= values.min()
            assert values.max() <= low + width
            assert stats.kstest(values, "uniform", (low, width)).pvalue > 0.01
            assert stats.kstest(values, "uniform", (low, 1.1 * width)).pvalue < 1e-6  # a range 10 % off is rejected
        assert (view[:, 6] == 7).all()

    def test_numbers_of_a_row_are_drawn_apart(self):
        view = UniformCorruption(LAYOUT, reference(), 1)(clean(), make_rng(0))
        assert abs(stats.pearsonr(view[:, 0], view[:, 5]).statistic) < 0.05

    def test_categories_become_the_first_slot(self):
        view = UniformCorruption(LAYOUT, reference(), 1)(clean(), make_rng(0))
        assert (view[:, TOWN].argmax(dim=1) == 0).all()
        assert (view[:, COLOR].argmax(dim=1) == 0).all()

    def test_as_many_categories_are_masked_as_the_rate_says(self):
        x = clean()
        view = UniformCorruption(LAYOUT, reference(), 0.6)(x, make_rng(0))
        masked = view[:, [TOWN.start, COLOR.start]] == 1
        assert (masked.sum(dim=1) + replaced(x, view).sum(dim=1) == 3).all()


class TestScarf:
    def test_the_default_rate_is_that_of_the_paper(self):
        x = torch.full((50, 10), 100.0)
        view = ScarfCorruption(Layout.numeric(10), torch.rand(9, 10, generator=make_rng(0)))(x, make_rng(0))
        assert ((view != x).sum(dim=1) == 6).all()

    def test_values_are_those_of_reference_rows(self):
        known = reference()
        view = ScarfCorruption(LAYOUT, known, 1)(clean(), make_rng(0))
        for column in LAYOUT.columns:
            block = slice(column.start, column.start + column.width)
            values = {tuple(row) for row in known[:, block].tolist()}
            assert {tuple(row) for row in view[:, block].tolist()} <= values, column.name

    def test_every_reference_row_is_equally_likely(self):
        known = torch.arange(8.0).view(8, 1).expand(8, 2)
        view = ScarfCorruption(Layout.numeric(2), known, 1)(torch.zeros(4000, 2), make_rng(0))
        for column in view.T:
            seen = torch.bincount(column.long(), minlength=8).numpy()
            assert stats.chisquare(seen).pvalue > 0.01

    def test_columns_of_a_row_come_from_different_rows(self):
        """Together they come from one row no more often than chance has it: the marginals, not the joint."""
        known = torch.arange(50.0).view(50, 1).expand(50, 2)
        view = ScarfCorruption(Layout.numeric(2), known, 1)(torch.zeros(5000, 2), make_rng(0))
        same = int((view[:, 0] == view[:, 1]).sum())
        assert stats.binomtest(same, 5000, 1 / 50).pvalue > 0.01

    def test_a_category_keeps_its_frequency(self):
        known = reference()
        view = ScarfCorruption(LAYOUT, known, 1)(clean(), make_rng(0))
        shares = known[:, TOWN].mean(dim=0)
        expected = 4000 * shares[1:].double()
        statistic = (view[:, TOWN].sum(dim=0)[1:].double() - expected) ** 2 / expected
        assert statistic.sum() < stats.chi2(len(expected) - 1).ppf(0.99)
        assert view[:, TOWN.start].sum() == 0
