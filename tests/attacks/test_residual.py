"""Residue reconstruction: exact while a batch has no more rows than columns, and what is left beyond."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vflsec.attacks.residual import Residual, solve_gradients
from vflsec.base.errors import InsufficientView
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.releases import find_span, read_releases
from vflsec.results import metrics

ROWS, COLUMNS = 2048, 16


def regression(*, batch, turns=1, head=(1.0,), aux=0, signal=True, rare=0.5, seed=0):
    """Vertical logistic regression: what comes back for a row is (p - y) times the head, over the batch."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=rng)
    y = (torch.rand(ROWS, generator=rng) < rare).long()
    residual = torch.rand(ROWS, generator=rng) * 0.9 + 0.05 - y  # p is anything
    if not signal:
        residual = torch.randn(ROWS, generator=rng)
    messages = []
    for turn in range(turns):
        for step, rows in enumerate(torch.randperm(ROWS, generator=rng).split(batch)):
            value = residual[rows, None] * torch.tensor([head]) / batch
            number = 10_000 * turn + step
            messages.append(
                Message(Kind.GRADIENT, "active", "passive_1", number, "train", {"value": value}, rows, "train")
            )
    known = torch.arange(aux)
    return View("passive_1", "passive", 2, {"train": x}, None, known, y[known], tuple(messages)), y, residual


def auc(view, y, **options):
    n_aux = len(view.aux_rows)
    return metrics.auc(Residual(**options)(view, seed=0).scores["train"][n_aux:].numpy(), y[n_aux:].numpy())


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [1, 4, COLUMNS])
def test_residuals_are_exact_while_a_batch_has_no_more_rows_than_columns(batch):
    view, y, residual = regression(batch=batch)
    releases = read_releases(view, Kind.GRADIENT)
    assert torch.allclose(solve_gradients(releases, view.features["train"]), releases.values, atol=1e-3 / batch)
    guess = Residual()(view, seed=0).scores["train"].argmax(dim=1)
    clear = residual.abs() > 0.01
    assert torch.equal(guess[clear], y[clear])


@pytest.mark.parametrize("batch", [8, 64])
def test_the_solution_is_the_pseudo_inverse_of_the_sum(batch):
    """It depends on the sum alone: numpy gets nothing else."""
    view, _, _ = regression(batch=batch)
    releases = read_releases(view, Kind.GRADIENT)
    found = solve_gradients(releases, view.features["train"])
    for lines in releases.group_by_message()[:5]:
        x = view.features["train"][releases.rows[lines]].double().numpy()
        total = x.T @ releases.values[lines].double().numpy()
        assert np.allclose(found[lines], np.linalg.pinv(x.T) @ total, atol=1e-5)


def test_a_share_of_the_residuals_is_left_in_larger_batches():
    """The projection keeps COLUMNS of every batch's dimensions."""
    view, _, _ = regression(batch=128)
    releases = read_releases(view, Kind.GRADIENT)
    kept = solve_gradients(releases, view.features["train"]).pow(2).sum() / releases.values.pow(2).sum()
    assert kept.item() == pytest.approx(COLUMNS / 128, rel=0.15)


def test_larger_batches_hide_more_and_further_epochs_show_more():
    small, large, often = (
        auc(*regression(batch=batch, turns=turns)[:2]) for batch, turns in ((32, 1), (256, 1), (256, 40))
    )
    assert small > large + 0.1
    assert often > large + 0.1
    view, y, _ = regression(batch=256, turns=40)
    assert auc(view, y, releases=1) < often


@pytest.mark.parametrize("head", [(1.0, -1.0), (-0.2, 0.5, 3.0)])
@pytest.mark.parametrize(("aux", "rare"), [(20, 0.5), (0, 0.1)])
def test_a_wider_cut_is_read_along_its_axis(head, aux, rare):
    view, y, _ = regression(batch=COLUMNS, head=head, aux=aux, rare=rare)
    assert auc(view, y) > 0.99


def test_auxiliary_labels_turn_the_sign_round():
    assert auc(*regression(batch=8, head=(-1.0,))[:2]) < 0.01
    assert auc(*regression(batch=8, head=(-1.0,), aux=20)[:2]) > 0.99


@pytest.mark.parametrize("batch", [8, 64])
def test_gradients_without_a_label_in_them_leave_chance(batch):
    view, y, _ = regression(batch=batch, signal=False)
    assert abs(auc(view, y) - 0.5) < 4 * (1 / 12 / (ROWS / 4)) ** 0.5


def test_shuffled_labels_leave_chance():
    view, y, _ = regression(batch=8)
    assert abs(auc(view, y[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))]) - 0.5) < 0.05


def test_rows_with_the_same_columns_share_what_is_found():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    basis = find_span(x)
    assert torch.allclose(basis @ basis.T, torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]), atol=1e-6)
    assert find_span(torch.zeros(3, 2)).shape == (3, 0)
    wide = torch.cat([x, x, torch.ones(3, 3)], dim=1)  # more columns than rows
    assert torch.allclose(find_span(wide) @ find_span(wide).T, wide @ torch.linalg.pinv(wide), atol=1e-6)


def test_columns_without_a_number_are_no_error():
    view, y, _ = regression(batch=8)
    view.features["train"].zero_()
    assert auc(view, y) == 0.5


def test_more_classes_are_refused():
    view, _, _ = regression(batch=8)
    with pytest.raises(InsufficientView, match="is for 2 classes, got 3"):
        Residual()(replace(view, n_classes=3), seed=0)
