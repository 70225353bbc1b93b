"""Rows of all parties are blended alike, with the weights that the formula says, and alpha 0 blends nothing."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from vflsec.base.seeds import make_rng
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.defenses.mixup import Mixup
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.testing.federations import make_toy_federation


def prepared(alpha, *, classes=2, seed=0):
    made = Mixup(alpha)
    made.prepare({"passive_1": 2}, n_classes=classes, rng=make_rng(seed, "mixup"))
    return made


def blends(alpha, rows, seed=0):
    """Weights and partners, read off a batch whose label is the row itself."""
    _, targets = prepared(alpha, classes=rows, seed=seed).on_batch([torch.eye(rows).double()], torch.arange(rows))
    weight = targets.diagonal()
    rest = targets - torch.diag(weight)
    return weight, torch.where(rest.sum(dim=1) > 0, rest.argmax(dim=1), torch.arange(rows)), targets


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_weights_are_the_larger_part_of_a_beta(alpha):
    weight, partner, _ = blends(alpha, 3000)
    weight = weight[partner != torch.arange(3000)].numpy()

    def law(a):
        return lambda w: np.where(w < 0.5, 0, 1 - 2 * stats.beta(a, a).sf(w))

    assert stats.kstest(weight, law(alpha)).pvalue > 0.01
    assert stats.kstest(weight, law(1.3 * alpha)).pvalue < 0.01, "another alpha is told apart"


def test_partners_are_a_permutation():
    _, partner, targets = blends(1.0, 500)
    assert sorted(partner.tolist()) == list(range(500))
    assert torch.allclose(targets.sum(dim=0), targets.sum(dim=0).round(), atol=1)  # each is a partner once
    assert torch.allclose(targets.sum(dim=1), torch.ones(500, dtype=torch.float64))


def test_all_parties_and_labels_are_blended_alike():
    rng = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(20, width, generator=rng).double() for width in (3, 1, 5)]
    y = torch.arange(20) % 4
    how = blends(0.7, 20)[2]  # the same seed draws the same, whatever is blended
    mixed, targets = prepared(0.7, classes=4).on_batch(embeddings, y)
    for h, found in zip(embeddings, mixed, strict=True):
        assert torch.allclose(found, how @ h)
    assert torch.allclose(targets, how @ F.one_hot(y, 4).double())
    soft = torch.softmax(torch.randn(20, 4, generator=rng), dim=1).double()
    assert torch.allclose(prepared(0.7, classes=4).on_batch(embeddings, soft)[1], how @ soft)


@pytest.mark.parametrize("alpha", [1e-9, 1e-300])
def test_as_alpha_goes_to_zero_nothing_is_blended(alpha):
    h = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    (mixed,), targets = prepared(alpha).on_batch([h], torch.arange(50) % 2)
    assert torch.equal(mixed, h)
    assert torch.equal(targets, F.one_hot(torch.arange(50) % 2, 2).float())


def test_as_alpha_grows_both_rows_weigh_the_same():
    weight, partner, _ = blends(1e9, 200)
    assert torch.allclose(weight[partner != torch.arange(200)], torch.tensor(0.5).double(), atol=1e-3)


def test_a_row_alone_is_itself_and_blends_are_fresh():
    made = prepared(1.0)
    (h,), targets = made.on_batch([torch.ones(1, 2)], torch.tensor([1]))
    assert torch.equal(h, torch.ones(1, 2))
    assert torch.equal(targets, torch.tensor([[0.0, 1.0]]))
    x = torch.randn(30, 2)
    (first,), (second,) = (made.on_batch([x], torch.arange(30) % 2)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_a_gradient_is_of_a_rows_own_blend_and_of_its_partners():
    """Each row's gradient has w of its own blend's, and 1 - w of the blend that it was put into."""
    h = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    y, how = torch.arange(12) % 3, blends(2.0, 12)[2]
    (mixed,), targets = prepared(2.0, classes=3).on_batch([h], y)
    F.cross_entropy(mixed, targets, reduction="sum").backward()
    residual = torch.softmax(how @ h.detach(), dim=1) - how @ F.one_hot(y, 3).double()
    assert torch.allclose(h.grad, how.T @ residual)


def fitted(alpha):
    federation = make_toy_federation()
    was = federation.active
    own = {"noise": was._noise, "labels": was.labels, "defenses": [Mixup(alpha)] if alpha else []}
    federation.parties = {**federation.parties, "active": Party("active", was.features, federation.channel, **own)}
    return FedSplitNN(TrainSpec(epochs=2, batch=64), ModelSpec(bottom=(8,))).fit(federation)


def test_training_without_weight_is_training_without_it():
    plain, tiny, mixed, again = (fitted(alpha).predict("test") for alpha in (0, 1e-9, 1.0, 1.0))
    assert torch.allclose(tiny, plain, atol=1e-5)
    assert not torch.allclose(mixed, plain, atol=1e-3)
    assert torch.equal(mixed, again)


@pytest.mark.long
@pytest.mark.parametrize("attack", ["norm", "direction", "averaging"])
def test_more_mixing_never_leaks_more(leak, attack):
    found = [leak(attack, "mixup", strength) for strength in (0.0, 0.3, 10.0)]
    assert found[1] <= found[0] + 0.02
    assert found[2] <= found[1] + 0.02


def test_over_epochs_partners_average_out(leak):
    assert leak("direction", "mixup", 10.0) > 0.9
