"""Scales that a few wild values cannot move."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vflsec.core.message import Kind, Message
from vflsec.core.scaling import FAR, Bounds, clip_outliers, clip_softly, shorten, tame
from vflsec.core.view import View
from vflsec.inference.regression import standardize
from vflsec.results.metrics import mse, r2

WILD = (1e6, 1e12, 1e30)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_scale_of_a_normal_sample_is_its_deviation():
    middle, scale = Bounds.from_columns(3 + 2 * normal(10_000, 2))
    assert middle.tolist() == pytest.approx([3, 3], abs=0.1)
    assert scale.tolist() == pytest.approx([2, 2], abs=0.1)


@pytest.mark.parametrize("value", WILD)
@pytest.mark.parametrize("n", [20, 100, 1000])
def test_five_percent_of_the_rows_do_not_double_a_scale(n, value):
    x = normal(n, 3)
    spoiled = x.clone()
    spoiled[: n // 20] = value
    before, after = Bounds.from_columns(x), Bounds.from_columns(spoiled)
    assert (after.middle - before.middle).abs().max() < 0.3
    assert (after.scale / before.scale).log2().abs().max() < 1


def test_far_values_come_near_in_their_order_and_others_keep_every_bit():
    z = torch.tensor([-1e30, -7.0, -FAR, -0.1, 0.0, 3.3, FAR, 6.0, 1e3, 1e6])
    found = clip_softly(z)
    assert torch.equal(found[2:7], z[2:7])
    assert (found.diff() > 0).all()
    assert found.abs().max() <= 2 * FAR
    x = normal(200, 4)
    assert clip_outliers(x, far=10.0) is x
    assert torch.isfinite(clip_softly(torch.tensor([torch.inf, -torch.inf]))).all()


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_column_of_a_rare_category_keeps_its_information(share):
    """Beside a wild value, and although most rows are 0."""
    x = (torch.arange(500) < 500 * share).double()[:, None]
    x[-1] = 1e12
    found = standardize(x)[:, 0]
    assert found[0] > found[400] + 1  # in deviations
    assert found[-1] > found[0]


def test_values_of_a_relu_keep_their_order():
    x = (normal(1000, 1) - 1.9).clamp_min(0)  # 97 % zeros
    found = clip_outliers(x)[:, 0]
    assert torch.equal(found.argsort(stable=True), x[:, 0].argsort(stable=True))


def test_standardized_columns_have_mean_0_and_deviation_1_and_constants_are_0():
    x = torch.cat([5 + 3 * normal(400, 2), torch.full((400, 1), 0.1)], dim=1)
    found = standardize(x)
    expected = (x[:, :2].double() - x[:, :2].double().mean(0)) / x[:, :2].double().std(0, correction=0)
    assert torch.allclose(found[:, :2], expected, atol=1e-9)
    assert not found[:, 2].any()
    assert not standardize(torch.full((3, 3), 1e30), x)[:, 2].any()


def test_a_long_row_is_shortened_with_its_direction_and_lengths_keep_their_order():
    x = normal(300, 5)
    x[:3] *= torch.tensor([1e3, 1e6, 1e20])[:, None]
    found = shorten(x)
    assert torch.equal(found[3:], x[3:])
    cosine = torch.nn.functional.cosine_similarity(found[:3].double(), x[:3].double())
    assert cosine.min() > 1 - 1e-6
    lengths = found.double().norm(dim=1)
    assert lengths[3:].max() < lengths[0] < lengths[1] <= lengths[2] < 20


def test_gradients_that_shrink_during_training_are_not_shortened():
    x = normal(5000, 3) * torch.logspace(0, -9, 5000)[:, None]
    usual = shorten(x).norm(dim=1) / x.norm(dim=1)
    assert (usual < 1).float().mean() < 0.02
    assert usual.min() > 0.5


def view_of(x, **changes):
    known = torch.arange(40)
    found = View("passive_1", "passive", 2, {"train": x, "test": x[:50]}, None, known, known % 2)
    return replace(found, **changes)


def test_a_view_without_wild_values_is_as_it_was():
    message = Message(Kind.EMBEDDING, "active", "passive_1", 0, "train", {"value": normal(200, 3)}, torch.arange(200))
    view = view_of(normal(200, 2), messages=(message,), predictions={"train": normal(200, 2, seed=1)})
    found = tame(view)
    assert found.features["train"] is view.features["train"]
    assert found.predictions["train"] is view.predictions["train"]
    assert found.messages[0] is message
    assert torch.equal(found.aux_rows, view.aux_rows)


@pytest.mark.parametrize("value", WILD)
def test_few_auxiliary_rows_that_are_wild_are_left_out(value):
    x = normal(200, 2)
    x[7, 1] = value
    found = tame(view_of(x))
    assert found.aux_rows.tolist() == [k for k in range(40) if k != 7]
    assert found.features["train"].abs().max() < 500
    x[:20] = value  # half of them are no exception
    assert len(tame(view_of(x)).aux_rows) == 40


def test_a_class_whose_rows_are_all_wild_is_kept():
    x = normal(200, 2)
    x[5] = 1e6
    labels = (torch.arange(40) == 5).long()
    assert len(tame(view_of(x, aux_labels=labels)).aux_rows) == 40


@pytest.mark.parametrize("value", WILD)
def test_a_wild_truth_or_guess_does_not_decide_how_much_of_columns_is_recovered(value):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(200, 3))
    guess = truth + 0.5 * rng.normal(size=truth.shape)
    before = r2(guess, truth), mse(guess, truth)
    spoiled = truth.copy()
    spoiled[0, 0] = value
    assert r2(guess, spoiled) == pytest.approx(before[0], abs=0.02)
    assert mse(guess, spoiled) == pytest.approx(before[1], abs=0.02)
    guess[3, 1] = -value
    assert r2(guess, truth) == pytest.approx(before[0], abs=0.03)


def test_a_column_that_is_nearly_constant_does_not_decide_how_much_is_recovered():
    rng = np.random.default_rng(0)
    truth = np.stack([rng.normal(size=300), np.zeros(300)], axis=1)
    guess = truth + rng.normal(size=truth.shape) * [0.1, 1e4]
    assert r2(guess, truth) > 0.95
