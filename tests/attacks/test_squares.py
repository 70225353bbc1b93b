"""Squares: a rule that is linear in squares of the columns, and nothing lost where it is linear in the columns."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from vflsec.attacks.logistic import LogisticRegression, Squares
from vflsec.core.view import View

N, KNOWN, WIDTH, RATIO = 4000, 80, 3, 3.0


def view_of(x, y):
    return View("passive_1", "passive", 2, {"train": x, "test": x.flip(0)}, None, torch.arange(KNOWN), y[:KNOWN])


def spread(seed=0):
    """Two classes with the same mean; columns of class 1 are ``RATIO`` times as wide."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (N,), generator=rng)
    return torch.randn(N, WIDTH, generator=rng) * (1 + (RATIO - 1) * y)[:, None], y


def accuracy(guess, y):
    return float((guess.scores["train"].argmax(dim=1) == y)[KNOWN:].double().mean())


def bayes():
    """Accuracy of the best rule, which cuts the squared length where both densities are equal."""
    cut = WIDTH * 2 * torch.tensor(RATIO).log().item() / (1 - RATIO**-2)
    return (chi2.cdf(cut, WIDTH) + chi2.sf(cut / RATIO**2, WIDTH)) / 2


@pytest.mark.parametrize("seed", range(3))
def test_where_classes_differ_in_spread_it_comes_near_the_bayes_rule(seed):
    x, y = spread(seed)
    assert accuracy(Squares()(view_of(x, y), seed=0), y) == pytest.approx(bayes(), abs=0.03)
    assert accuracy(LogisticRegression()(view_of(x, y), seed=0), y) < bayes() - 0.15


def test_scale_and_origin_of_a_column_change_nothing():
    x, y = spread()
    found = Squares()(view_of(x, y), seed=0).scores["test"]
    moved = Squares()(view_of(1000 * x + 500, y), seed=0).scores["test"]
    torch.testing.assert_close(moved, found, atol=1e-2, rtol=1e-2)


def test_a_column_that_is_the_same_for_all_rows_changes_nothing():
    x, y = spread()
    view = view_of(x, y)
    constant = {split: torch.cat([own, torch.full((len(own), 1), 7.0)], dim=1) for split, own in view.features.items()}
    wider = Squares()(replace(view, features=constant), seed=0).scores["test"]
    torch.testing.assert_close(wider, Squares()(view, seed=0).scores["test"], atol=1e-3, rtol=1e-3)
