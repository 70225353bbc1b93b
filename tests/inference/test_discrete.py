"""Columns of few values: their expectation given a guess equals the closed form, and others stay as they are."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.inference.discrete import DistinctValues, _expect, expect_values, extend_grid, find_discrete
from vflsec.inference.opinion_pool import Opinion
from vflsec.results import metrics

KNOWN, N = 400, 4000


def noisy(x, scale, seed=0):
    """A guess of each row, shrunk and with an error; known rows come first."""
    rng = torch.Generator().manual_seed(seed)
    guess = 0.5 + 0.8 * x + scale * torch.randn(x.shape, generator=rng, dtype=torch.float64)
    return Opinion(guess, guess[:KNOWN])


def test_the_posterior_mean_of_two_values_is_that_of_bayes():
    rng = torch.Generator().manual_seed(1)
    x = (torch.rand(4000, 1, generator=rng) < 0.3).double()
    q = noisy(x, 0.4).scores
    block = DistinctValues([0], torch.tensor([[0.0], [1.0]]).double(), torch.tensor([2800.0, 1200.0]).double())
    guess = torch.linspace(-1, 2, 50, dtype=torch.float64)
    densities = [norm.pdf(guess.numpy(), loc, 0.4) for loc in (0.5, 1.3)]
    expected = 0.3 * densities[1] / (0.7 * densities[0] + 0.3 * densities[1])
    found = _expect(guess[:, None], q, x, block)[:, 0]
    np.testing.assert_allclose(found.numpy(), expected, atol=0.03)


def test_a_binary_column_gains_and_a_continuous_column_stays():
    rng = torch.Generator().manual_seed(2)
    x = torch.stack([(torch.rand(N, generator=rng) < 0.4).double(), torch.randn(N, generator=rng).double()], dim=1)
    opinion = noisy(x, 0.2)
    before, after = (
        [metrics.r2(guess[KNOWN:, [j]].numpy(), x[KNOWN:, [j]].numpy()) for j in range(2)]
        for guess in (opinion.scores, expect_values(opinion, x[:KNOWN], None).scores)
    )
    assert after[0] > before[0] + 0.3
    assert after[1] == pytest.approx(before[1], abs=1e-9)


def test_categories_are_taken_together_and_sum_to_their_share():
    rng = torch.Generator().manual_seed(3)
    x = torch.nn.functional.one_hot(torch.randint(3, (N,), generator=rng) + 1, 4).double()
    layout = Layout((EncodedColumn("plan", "categorical", 0, 4),))
    opinion = noisy(x, 0.4)
    found = expect_values(opinion, x[:KNOWN], layout)
    alone = expect_values(opinion, x[:KNOWN], None)
    missed = [(each.scores - x)[KNOWN:].square().mean() for each in (found, alone, opinion)]
    assert missed[0] < 0.9 * missed[1] < 0.9 * missed[2]
    assert found.held_out[:, 0].abs().max() < 0.05


def test_a_guess_that_says_nothing_costs_nothing():
    rng = torch.Generator().manual_seed(4)
    x = torch.randint(3, (N, 4), generator=rng).double()
    opinion = Opinion(torch.full_like(x, 1.0), torch.full_like(x[:KNOWN], 1.0))
    found = expect_values(opinion, x[:KNOWN], None).scores
    assert metrics.r2(found[KNOWN:].numpy(), x[KNOWN:].numpy()) > -0.003


def test_values_lie_on_a_grid_that_is_filled_and_extended():
    values = torch.tensor([0.0, 1, 2, 4, 5]).double() * 0.25 - 3
    torch.testing.assert_close(extend_grid(values), torch.arange(-1, 7).double() * 0.25 - 3)
    assert extend_grid(torch.tensor([0.0, 1.0, 2.5, 3.1]).double()) is None
    column = values[torch.arange(40) % 5]
    (block,) = find_discrete(torch.stack([column, torch.arange(40).double()], dim=1), None)
    assert block.columns == [0]
    assert block.counts.tolist() == pytest.approx([0.3, 8, 8, 8, 0.3, 8, 8, 0.3])


@pytest.mark.parametrize("n_known", [1, 2, 9, 12])
def test_few_known_rows_give_a_finite_guess(n_known):
    x = (torch.arange(N) % 7 == 0).double()[:, None]
    opinion = Opinion(x + 0.1, x[:n_known] + 0.1)
    assert expect_values(opinion, x[:n_known], None).scores.isfinite().all()
