"""Completion of rows by steps: equal to a naive loop, and fit for small batches where models change slowly."""

import numpy as np
import pytest
import torch

from vflsec.inference import trajectories
from vflsec.inference.regression import standardize
from vflsec.inference.releases import Releases
from vflsec.inference.trajectories import complete_coordinates, smooth_models

N, D = 300, 6


def walk(models):
    return torch.cat([models[:1], 0.1 * models[1:]]).cumsum(dim=0)


def line(models):
    return torch.linspace(0, 1, len(models), dtype=torch.float64)[:, None, None] * models[0] + models[1]


def sent(*, epochs=12, batch=60, cut=1, seed=0, change=lambda models: models):
    """Releases by linear models, drawn anew for each message unless they ``change`` slowly, and the columns (n, D)."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=rng, dtype=torch.float64)
    batches = [part for _ in range(epochs) for part in torch.randperm(N, generator=rng).split(batch)]
    models = change(torch.randn(len(batches), D, cut, generator=rng, dtype=torch.float64))
    values = [x[rows] @ model for rows, model in zip(batches, models, strict=True)]
    message = torch.arange(len(batches)).repeat_interleave(torch.tensor([len(rows) for rows in batches]))
    return Releases(torch.cat(values), torch.cat(batches), message // (N // batch), message, N), x


def near_truth(x, noise):
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)


def explained(x, z):
    """The share of the variance of ``x`` (n, D) that is linear in ``z``."""
    z = torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], dim=1)
    return float(1 - (x - z @ torch.linalg.lstsq(z, x).solution).square().sum() / (x - x.mean(dim=0)).square().sum())


def solve_densely(squares, products, order, rate):
    n, k, d = products.shape
    changes = np.kron(np.diff(np.eye(n), order, axis=0), np.eye(k))
    matrix = torch.block_diag(*squares).numpy() + rate * changes.T @ changes
    return torch.tensor(np.linalg.solve(matrix, products.reshape(-1, d).numpy()).reshape(n, k, d))


@pytest.mark.parametrize("order", [1, 2])
def test_smooth_models_equal_a_dense_solution(order):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, 4, generator=rng, dtype=torch.float64)  # two rows do not determine a model of four numbers
    y = torch.randn(9, 2, 3, generator=rng, dtype=torch.float64)
    parts = x.mT @ x, x.mT @ y, order, 0.3
    torch.testing.assert_close(smooth_models(*parts), solve_densely(*parts), rtol=1e-5, atol=1e-6)


def test_models_of_fewer_messages_than_the_order_are_separate():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 3, generator=rng, dtype=torch.float64)
    y = torch.randn(2, 9, 1, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(smooth_models(x.mT @ x, x.mT @ y, 2, 0.3), torch.linalg.lstsq(x, y).solution)


def naive(releases, u, usual, order):
    """One sweep over messages and rows."""
    z, (n, k) = standardize(releases.values), u.shape

    def white(x):
        values, axes = np.linalg.eigh(np.cov(x[usual].T.numpy(), bias=True))
        return (x - x[usual].mean(dim=0)) @ torch.tensor(axes / np.sqrt(values) @ axes.T)

    u = white(u)
    n_messages = int(releases.message.max()) + 1
    parts = []
    for number in range(n_messages):
        at = (releases.message == number) & usual[releases.rows]
        x = torch.cat([u[releases.rows[at]], torch.ones(int(at.sum()), 1, dtype=torch.float64)], dim=1)
        parts.append((x.T @ x, x.T @ z[at]))
    models = solve_densely(*map(torch.stack, zip(*parts, strict=True)), order, len(z) / n_messages)
    errors = [h - torch.cat([u[row], torch.ones(1, dtype=torch.float64)]) @ models[message]
              for row, message, h in zip(releases.rows.tolist(), releases.message.tolist(), z, strict=True)
              if usual[row]]  # fmt: skip
    noise = torch.stack(errors).square().mean()
    squares, products = torch.zeros(n, k, k, dtype=torch.float64), torch.zeros(n, k, dtype=torch.float64)
    for row, message, h in zip(releases.rows.tolist(), releases.message.tolist(), z, strict=True):
        slope = models[message]
        squares[row] += slope[:k] @ slope[:k].T
        products[row] += slope[:k] @ (h - slope[k])
    return white(torch.linalg.solve(squares + noise * torch.eye(k, dtype=torch.float64), products))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_sweep_equals_a_loop_over_messages_and_rows(cut, order, monkeypatch):
    monkeypatch.setattr(trajectories, "SWEEPS", 1)
    releases, x = sent(cut=cut, epochs=3)
    seen = releases.rows >= 5  # some rows have no release
    releases, begin = releases.select(seen), near_truth(x, 0.5)[:, :4]
    usual = torch.arange(N) % 10 > 0
    result = complete_coordinates([releases], begin, usual, order=order)
    torch.testing.assert_close(result, naive(releases, begin, usual, order), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [1, 2])
def test_batches_smaller_than_the_number_of_columns_suffice_where_models_change_slowly(order):
    """Six rows do not tell a constant and six slopes, but the models before and after them do."""
    releases, x = sent(batch=6, cut=3, change={1: walk, 2: line}[order])
    begin, usual = near_truth(x, 1.0), torch.ones(N, dtype=torch.bool)
    assert explained(x, begin) < 0.6
    assert explained(x, complete_coordinates([releases], begin, usual, order=order)) > 0.8


def test_coordinates_that_explain_each_message_tell_the_columns():
    """No two messages are of the same model, and each value is a single number."""
    releases, x = sent()
    begin, usual = near_truth(x, 1.0), torch.ones(N, dtype=torch.bool)
    assert explained(x, begin) < 0.6
    assert explained(x, complete_coordinates([releases], begin, usual)) > 0.95


def test_two_routes_together_tell_what_neither_does():
    """Three releases by each of two senders, of six columns."""
    (first, x), (second, _) = sent(epochs=3, cut=1), sent(epochs=3, cut=1)
    rng = torch.Generator().manual_seed(5)
    models = torch.randn(int(second.message.max()) + 1, D, 2, generator=rng, dtype=torch.float64)
    second = second._replace(values=torch.einsum("rd,rdc->rc", x[second.rows], models[second.message]))
    begin, usual = near_truth(x, 1.0), torch.ones(N, dtype=torch.bool)
    alone = [explained(x, complete_coordinates([own], begin, usual)) for own in (first, second)]
    assert explained(x, complete_coordinates([first, second], begin, usual)) > max(alone) + 0.05


def test_unusual_rows_move_no_other_row():
    releases, x = sent()
    usual = torch.arange(N) >= 3
    begin = near_truth(x, 0.3)
    other = begin.clone()
    other[:3] *= 50
    found, moved = (complete_coordinates([releases], z, usual)[3:] for z in (begin, other))
    torch.testing.assert_close(found, moved)


def test_constant_releases_leave_finite_coordinates():
    releases, x = sent(epochs=2)
    found = complete_coordinates(
        [releases._replace(values=torch.ones_like(releases.values))], x, torch.ones(N, dtype=torch.bool)
    )
    assert found.isfinite().all()
