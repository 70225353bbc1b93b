"""The passport layer is the formula, its passports are drawn as it says, and predictions use their centers."""

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from vflsec.base.seeds import make_rng, seed_weights
from vflsec.defenses.fedpass import Passports


def prepared(strength=2.0, *, senders=("passive_1",), width=4, seed=0):
    made = Passports(strength)
    with seed_weights(seed, "weights"):
        made.prepare(dict.fromkeys(senders, width), n_classes=2, rng=make_rng(seed, "fedpass"))
    return made


def layer(made, sender="passive_1"):
    (layers,) = made.modules()
    return layers[sender]


def naive(made, h, passports):
    """The output entry by entry, from the formula."""
    found, own = torch.zeros_like(h), layer(made)

    def affine(x):
        return own.linear.weight @ x + own.linear.bias

    scale, shift = (
        torch.tanh(own.decode.weight @ F.leaky_relu(own.encode.weight @ affine(passport))) for passport in passports
    )
    for i, row in enumerate(h):
        found[i] = scale * affine(row) + shift
    return found


@pytest.mark.parametrize("width", [2, 9])
def test_predictions_are_the_formula_with_the_centers(width):
    made = prepared(width=width)
    layer(made).eval()
    h = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    found = made.on_received(h, "passive_1")
    assert torch.allclose(found, naive(made, h, layer(made).centers), atol=1e-6)
    assert torch.equal(made.on_received(h, "passive_1"), found)


def test_training_draws_a_passport_for_each_update(monkeypatch):
    made, h, drawn = prepared(3.0, width=50), torch.ones(2, 50), []
    module = type(layer(made))
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda own, x, p: drawn.append(p) or forward(own, x, p))
    outputs = [made.on_received(h, "passive_1") for _ in range(60)]
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.allclose(outputs[0], naive(made, h, drawn[0]), atol=1e-5)
    off = (torch.stack(drawn) - layer(made).centers).flatten().numpy()
    assert stats.kstest(off, stats.uniform(-1.5, 3).cdf).pvalue > 0.01
    for wrong in (2.7, 3.3):
        assert stats.kstest(off, stats.uniform(-wrong / 2, wrong).cdf).pvalue < 0.01
    centers = layer(prepared(1.0, width=5000)).centers.flatten().detach().numpy()
    assert stats.kstest(centers, stats.norm(-1, 1).cdf).pvalue > 0.01


def test_without_a_range_passports_stay():
    made, h = prepared(1e-9), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.on_received(h, "passive_1"), made.on_received(h, "passive_1"))


def test_each_sender_has_a_layer_of_its_own_and_equal_seeds_are_equal():
    made, h = prepared(senders=("passive_1", "passive_2")), torch.ones(3, 4)
    assert not torch.equal(made.on_received(h, "passive_1"), made.on_received(h, "passive_2"))
    one, same, other = (prepared(seed=seed).on_received(h, "passive_1") for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("rows", [0, 1])
def test_small_batches(rows):
    assert prepared().on_received(torch.ones(rows, 4), "passive_1").shape == (rows, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("attack", ["direction", "averaging", "spectral"])
def test_passports_that_vary_more_leak_no_more(leak, attack):
    found = [leak(attack, "fedpass", strength) for strength in (0.0, 1.0, 30.0)]
    assert found[1] <= found[0] + 0.02
    assert found[2] <= found[1] + 0.02


def test_what_the_bottom_model_has_learned_is_not_hidden(leak):
    assert leak("mc", "fedpass", 30.0) > 0.95
