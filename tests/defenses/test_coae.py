"""Codes have high entropy and are read back without error, whatever else is done to labels."""

import math
from functools import lru_cache
from itertools import permutations

import pytest
import torch
from torch.nn import functional as F

from vflsec.base.errors import Diverged
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core.defense import DefenseStack
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.defenses.coae import ConfusionalAutoencoder
from vflsec.defenses.label_dp import LabelDP
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results.metrics import accuracy
from vflsec.testing.federations import make_toy_federation


@lru_cache
def prepared(strength=1.0, *, classes=2, seed=0):
    """A defense with its layers drawn; fitted at most once in this file."""
    made = ConfusionalAutoencoder(strength)
    with seed_weights(seed, "weights"):
        made.prepare({"passive_1": 2}, n_classes=classes, rng=make_rng(seed, "coae"))
    return made


def coded(made, y, classes=2):
    return made.on_labels(y, features=y.float(), n_classes=classes, rng=make_rng(0, "labels"))


def entropy(codes):
    return float(-(codes * codes.log()).sum(dim=1).mean())


@pytest.mark.long
@pytest.mark.parametrize(("classes", "strengths"), [(2, (0.01, 0.1, 1.0, 10.0)), (5, (0.01, 1.0))])
def test_codes_come_near_the_bound_of_entropy_and_are_read_without_error(classes, strengths):
    y = torch.arange(classes)
    found = []
    for strength in strengths:
        made = prepared(strength, classes=classes)
        codes = coded(made, y, classes)
        assert torch.equal(made.on_predictions(codes.log()).argmax(dim=1), y), "at convergence decoding is perfect"
        found.append(entropy(codes) / math.log(classes))
    assert found == sorted(found)
    assert found[0] < 0.5
    assert 0.95 < found[-1] < 1


def test_decoding_gives_log_probabilities_that_are_sure():
    made = prepared(classes=3)
    z = made.on_predictions(coded(made, torch.arange(3), 3).log() + 4.0)  # logits are known up to a constant
    assert torch.allclose(z.exp().sum(dim=1), torch.ones(3), atol=1e-5)
    assert float(z.exp().diagonal().min()) > 0.9


@pytest.mark.long
def test_codes_are_named_by_their_largest_entries():
    """No other way to name them puts more weight on the classes themselves, and two classes are never turned round."""
    codes = coded(prepared(classes=5), torch.arange(5), 5)
    best = max(sum(float(codes[c, p[c]]) for c in range(5)) for p in permutations(range(5)))
    assert float(codes.diagonal().sum()) == pytest.approx(best, rel=1e-6)
    for seed in (0, 1):
        two = coded(prepared(seed=seed), torch.arange(2))
        assert two[0, 0] > two[1, 0]
        assert two[1, 1] > two[0, 1]


def test_a_soft_label_is_coded_as_the_mean_of_its_classes():
    made = prepared(classes=3)
    codes = coded(made, torch.arange(3), 3)
    mixed = coded(made, torch.tensor([[0.5, 0.25, 0.25]]), 3)
    assert torch.allclose(mixed[0], 0.5 * codes[0] + 0.25 * codes[1] + 0.25 * codes[2])
    assert torch.equal(coded(made, torch.eye(3), 3), codes)


def test_every_set_of_rows_has_the_same_codes_and_every_seed_its_own():
    made, y = prepared(), torch.tensor([0, 1, 1])
    first = coded(made, y)
    assert torch.equal(coded(made, y.flip(0)), first.flip(0))
    assert coded(made, y[:0]).shape == (0, 2)
    again = prepared.__wrapped__()
    assert torch.equal(coded(again, y), first)
    assert not torch.equal(coded(prepared(seed=1), y), first)


def test_codes_that_cannot_be_told_apart_are_refused():
    with pytest.raises(Diverged, match="2 classes .*lambda=300: lower"):
        coded(prepared(300.0), torch.arange(2))


@pytest.mark.parametrize("turned", [False, True])
def test_random_answers_come_before_codes_in_whatever_order(turned):
    """Randomized response draws from class numbers: the codes are those of its answers, and nothing knows the truth."""
    y, made, private = torch.arange(400) % 2, prepared(), LabelDP(0.5)
    rest = {"n_classes": 2, "rng": make_rng(0, "labels")}
    answers = private.on_labels(y, features=y.float(), n_classes=2, rng=make_rng(0, "labels"))
    labels, targets = DefenseStack([private, made] if turned else [made, private]).training_targets(
        y, y.float(), **rest
    )
    assert torch.equal(labels, answers)
    assert not torch.equal(labels, y)
    assert torch.equal(targets, coded(made, answers))


def test_two_codes_are_undone_in_turn():
    made, again = prepared(classes=3), prepared(classes=3, seed=1)
    both = DefenseStack([made, again])
    _, targets = both.training_targets(torch.arange(3), torch.zeros(3, 1), n_classes=3, rng=make_rng(0, "labels"))
    assert torch.equal(both.decode_logits(targets.log()).argmax(dim=1), torch.arange(3))


def federation(*defenses, **data):
    federation = make_toy_federation(classes=3, **data)
    was = federation.active
    active = Party("active", was.features, federation.channel, noise=was._noise, labels=was.labels, defenses=defenses)
    federation.parties = {**federation.parties, "active": active}
    return federation


class Watched(ConfusionalAutoencoder):
    """Remembers what it was before the federation was trained."""

    _before = None

    def on_labels(self, y, **rest):
        coded = super().on_labels(y, **rest)
        self._before = {name: value.clone() for name, value in next(iter(self.modules())).state_dict().items()}
        return coded


def test_a_federation_learns_codes_and_predicts_classes(tmp_path):
    """Nothing of the code is trained with it, and what reads codes is stored with the models."""
    method = FedSplitNN(TrainSpec(epochs=12, batch=32, lr=0.02, weight_decay=1e-4), ModelSpec(bottom=(16,)))
    made = Watched(1.0)
    trained = method.fit(federation(made))
    (after,) = made.modules()
    assert all(torch.equal(value, made._before[name]) for name, value in after.state_dict().items())
    truth = trained.federation.active.labels["test"].numpy()
    predicted = trained.predict("test")
    assert accuracy(predicted.numpy(), truth) > 0.9
    save_states(trained.federation, tmp_path)
    later, again = FedSplitNN(method.train_spec, method.model_spec), federation(ConfusionalAutoencoder(1.0))
    later.build(again)
    load_states(again, tmp_path)
    assert torch.equal(later.predict(again, "test"), predicted)


@pytest.mark.long
def test_the_sign_of_gradients_tells_less_of_a_code(leak):
    """And the head that an adversary fits to its own embeddings reads on as before."""
    direction = [leak("direction", "coae", strength) for strength in (0.0, 10.0)]
    assert direction[1] < direction[0] - 0.1
    assert leak("mc", "coae", 10.0) > 0.95


@pytest.mark.long
def test_what_the_loss_asks_of_an_early_gradient_is_the_code():
    """Before anything is learned, a gradient is even probabilities less the code: the shorter, the nearer to even."""
    y = torch.arange(2)
    lengths = []
    for strength in (0.1, 1.0, 10.0):
        z = torch.zeros(2, 2, requires_grad=True)
        F.cross_entropy(z, coded(prepared(strength), y), reduction="sum").backward()
        assert torch.allclose(z.grad, 0.5 - coded(prepared(strength), y), atol=1e-6)
        lengths.append(float(z.grad.norm(dim=1).mean()))
    assert lengths == sorted(lengths, reverse=True)
