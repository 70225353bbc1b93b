"""Completion of rows by steps: equal to a naive loop, exact where each message has a model of its own."""

import numpy as np
import pytest
import torch

from vflsec.core.scaling import standardized
from vflsec.inference import completion
from vflsec.inference.completion import RIDGE, completed
from vflsec.inference.releases import Releases

N, D = 300, 6


def sent(*, epochs=12, batch=60, cut=1, seed=0):
    """Releases by a linear model that is drawn anew for each message, and the columns (n, D)."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=rng, dtype=torch.float64)
    batches = [part for _ in range(epochs) for part in torch.randperm(N, generator=rng).split(batch)]
    values = [x[rows] @ torch.randn(D, cut, generator=rng, dtype=torch.float64) for rows in batches]
    message = torch.arange(len(batches)).repeat_interleave(torch.tensor([len(rows) for rows in batches]))
    return Releases(torch.cat(values), torch.cat(batches), message // (N // batch), message, N), x


def near_truth(x, noise):
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)


def explained(x, z):
    """The share of the variance of ``x`` (n, D) that is linear in ``z``."""
    z = torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], dim=1)
    return float(1 - (x - z @ torch.linalg.lstsq(z, x).solution).square().sum() / (x - x.mean(dim=0)).square().sum())


def naive(releases, u, usual):
    """One sweep over messages and rows."""
    z, n, k = standardized(releases.values), *u.shape

    def white(x):
        values, axes = np.linalg.eigh(np.cov(x[usual].T.numpy(), bias=True))
        return (x - x[usual].mean(dim=0)) @ torch.tensor(axes / np.sqrt(values) @ axes.T)

    u = white(u)
    squares, products = torch.zeros(n, k, k, dtype=torch.float64), torch.zeros(n, k, dtype=torch.float64)
    for number in range(int(releases.message.max()) + 1):
        at = releases.message == number
        rows = releases.rows[at]
        fits, x = usual[rows], torch.cat([u[rows], torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        gram = x[fits].T @ x[fits] + RIDGE * int(fits.sum()) * torch.eye(k + 1, dtype=torch.float64)
        slope = torch.linalg.solve(gram, x[fits].T @ z[at][fits])
        for row, h in zip(rows.tolist(), z[at], strict=True):
            squares[row] += slope[:k] @ slope[:k].T
            products[row] += slope[:k] @ (h - slope[k])
    prior = RIDGE * sum(float(torch.trace(own)) for own in squares) / n / k
    return white(torch.stack([
        torch.linalg.solve(squares[row] + prior * torch.eye(k, dtype=torch.float64), products[row] + prior * u[row])
        for row in range(n)
    ]))  # fmt: skip


@pytest.mark.parametrize("cut", [1, 3])
def test_a_sweep_equals_a_loop_over_messages_and_rows(cut, monkeypatch):
    monkeypatch.setattr(completion, "SWEEPS", 1)
    releases, x = sent(cut=cut, epochs=3)
    seen = releases.rows >= 5  # some rows have no release
    releases, begin = releases.where(seen), near_truth(x, 0.5)[:, :4]
    usual = torch.arange(N) % 10 > 0
    torch.testing.assert_close(completed([releases], begin, usual), naive(releases, begin, usual), rtol=1e-8, atol=1e-8)


def test_coordinates_that_explain_each_message_tell_the_columns():
    """No two messages are of the same model, and each value is a single number."""
    releases, x = sent()
    begin, usual = near_truth(x, 1.0), torch.ones(N, dtype=torch.bool)
    assert explained(x, begin) < 0.6
    assert explained(x, completed([releases], begin, usual)) > 0.95


def test_two_routes_together_tell_what_neither_does():
    """Three releases by each of two senders, of six columns."""
    (first, x), (second, _) = sent(epochs=3, cut=1), sent(epochs=3, cut=1)
    rng = torch.Generator().manual_seed(5)
    models = torch.randn(int(second.message.max()) + 1, D, 2, generator=rng, dtype=torch.float64)
    second = second._replace(values=torch.einsum("rd,rdc->rc", x[second.rows], models[second.message]))
    begin, usual = near_truth(x, 1.0), torch.ones(N, dtype=torch.bool)
    alone = [explained(x, completed([own], begin, usual)) for own in (first, second)]
    assert explained(x, completed([first, second], begin, usual)) > max(alone) + 0.05


def test_unusual_rows_move_no_other_row():
    releases, x = sent()
    usual = torch.arange(N) >= 3
    begin = near_truth(x, 0.3)
    other = begin.clone()
    other[:3] *= 50
    found, moved = (completed([releases], z, usual)[3:] for z in (begin, other))
    torch.testing.assert_close(found, moved)


def test_constant_releases_leave_finite_coordinates():
    releases, x = sent(epochs=2)
    found = completed([releases._replace(values=torch.ones_like(releases.values))], x, torch.ones(N, dtype=torch.bool))
    assert found.isfinite().all()
