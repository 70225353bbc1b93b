"""The pool of opinions: weights from held-out rows, calibration, and trees whose held-out guesses are honest."""

import numpy as np
import pytest
import torch

from vflsec.inference.opinion_pool import Forest, Opinion, blend_opinions, pool_opinions

N, KNOWN = 2000, 60


def test_an_opinion_that_is_right_wins_over_one_that_says_nothing():
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(3, (N,), generator=rng)
    right = torch.nn.functional.one_hot(y, 3).double() + 0.3 * torch.randn(N, 3, generator=rng, dtype=torch.float64)
    noise = torch.randn(N, 3, generator=rng, dtype=torch.float64)
    found = pool_opinions([Opinion(noise, noise[:KNOWN]), Opinion(right, right[:KNOWN])], y[:KNOWN])
    assert (found.argmax(dim=1) == y).double().mean() >= (right.argmax(dim=1) == y).double().mean() - 0.01
    torch.testing.assert_close(found.sum(dim=1), torch.ones(N, dtype=torch.float64))


def test_opinions_about_different_rows_are_joined():
    """Either knows one half of the rows and is uncertain of the other: their mean knows all of them."""
    y = torch.arange(N) % 2
    sure = 4.0 * torch.nn.functional.one_hot(y, 2).double()
    half = torch.randperm(N, generator=torch.Generator().manual_seed(0)) % 2 == 0
    opinions = [Opinion(own, own[:KNOWN]) for own in (sure * half[:, None], sure * ~half[:, None])]
    assert (pool_opinions(opinions, y[:KNOWN]).argmax(dim=1) == y).all()


def test_equal_opinions_change_nothing():
    scores = torch.randn(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (scores[:, 1] > scores[:, 0]).long()
    opinion = Opinion(scores, scores[:KNOWN])
    torch.testing.assert_close(pool_opinions([opinion] * 3, y[:KNOWN]), pool_opinions([opinion], y[:KNOWN]))


def test_calibration_finds_the_factor_of_log_odds():
    rng = torch.Generator().manual_seed(0)
    log_odds = 3.0 * torch.randn(N, generator=rng, dtype=torch.float64)
    y = (torch.rand(N, generator=rng, dtype=torch.float64) < log_odds.sigmoid()).long()
    shrunk = torch.stack([torch.zeros(N, dtype=torch.float64), log_odds / 5], dim=1)
    found = Opinion(shrunk, shrunk).calibrate(y).scores[:, 1]
    assert (found - log_odds.sigmoid()).abs().mean() < 0.05


def test_held_out_guesses_of_trees_know_nothing_where_there_is_nothing_to_know():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 5, generator=rng), torch.randint(2, (400,), generator=rng)
    forest = Forest(x, y, 2, rng)
    assert (forest.vote(x).scores.argmax(dim=1) == y).double().mean() > 0.9, "of rows that it was fitted to"
    assert (forest.held_out.argmax(dim=1) == y).double().mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_known_rows_give_a_finite_guess(n):
    rng = torch.Generator().manual_seed(0)
    forest = Forest(torch.randn(n, 3), torch.ones(n, dtype=torch.long), 3, rng)
    assert np.isfinite(forest.vote(torch.randn(4, 3)).scores.numpy()).all()
    assert torch.isfinite(forest.held_out).all()


def test_numbers_are_blended_by_column():
    """Of two columns, each opinion knows another one; in a third both have errors of their own."""
    rng = torch.Generator().manual_seed(0)
    truth, errors = (torch.randn(2, N, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    scale = torch.tensor([[0.01, 3.0, 1.0], [3.0, 0.01, 1.0]])[:, None]
    predictions = [truth[0] + one for one in errors * scale]
    found = blend_opinions([Opinion(one, one[:KNOWN]) for one in predictions], truth[0, :KNOWN]).scores
    missed = (found - truth[0]).square().mean(dim=0)
    assert (missed[:2] < 0.001).all()
    assert 0.45 < missed[2] < 0.65, "the mean of both has half of the variance"


def test_the_weights_of_a_blend_are_the_posterior_mean():
    rng = np.random.default_rng(0)
    known, held_out = rng.normal(size=(7, 1)), rng.normal(size=(2, 7, 1))
    shares = np.arange(11) / 10
    likelihood = np.array([((w * held_out[0] + (1 - w) * held_out[1] - known) ** 2).mean() ** -3.5 for w in shares])
    weight = (shares * likelihood).sum() / likelihood.sum()
    opinions = [
        Opinion(torch.full((1, 1), k, dtype=torch.float64), torch.from_numpy(held_out[1 - int(k)])) for k in (1.0, 0.0)
    ]
    assert float(blend_opinions(opinions, torch.from_numpy(known)).scores) == pytest.approx(weight)


def test_equal_weights_for_all_columns_are_decided_by_all():
    """Ten known rows hardly tell a column which opinion is better; thirty columns together do."""
    rng = torch.Generator().manual_seed(0)
    truth, errors = torch.randn(N, 30, generator=rng), torch.randn(2, N, 30, generator=rng)
    predictions = [(truth + scale * part).double() for scale, part in zip((0.5, 1.0), errors, strict=True)]
    opinions = [Opinion(guess, guess[:10]) for guess in predictions]
    missed = [
        float((blend_opinions(opinions, truth[:10].double(), by_column=by_column).scores - truth).square().mean())
        for by_column in (False, True)
    ]
    assert missed[0] < 0.21 < missed[1], "the best weights are .8 and .2, and leave .2"
