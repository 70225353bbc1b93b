"""Replay: exact under a linear head, at chance where gradients say nothing, and its least squares against scipy's."""

from dataclasses import replace

import pytest
import torch
from scipy.optimize import nnls
from torch.nn import functional as F

from vflsec.attacks.replay import Replay
from vflsec.core import metrics
from vflsec.core.errors import UsageError
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.experiment.adversary import draw_auxiliary, view_of
from vflsec.experiment.spec import AuxSpec
from vflsec.inference import surrogate_head
from vflsec.inference.surrogate_head import Head, explained
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.testing.conformance import AttackConformance
from vflsec.testing.federations import toy_federation

ROWS = 2000


class TestReplay(AttackConformance):
    def make(self):
        return Replay()


def replayed(classes, width, *, aux=80, turns=1, noise=0.0, labels=None, signal=True, seed=0):
    """A view with gradients (p - onehot(y)) W / 256 of a random linear head that knows something about each row."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(ROWS) % classes if labels is None else labels
    head = torch.randn(classes, width, generator=rng)
    p = (torch.randn(ROWS, classes, generator=rng) + 1.5 * F.one_hot(y, classes)).softmax(dim=1)
    clean = (p - F.one_hot(y, classes)) @ head / 256
    if not signal:
        clean = torch.randn(ROWS, width, generator=rng)
    messages = []
    for turn in range(turns):
        order = torch.randperm(ROWS, generator=rng)
        sent = clean + noise * clean.norm(dim=1).max() / width**0.5 * torch.randn(clean.shape, generator=rng)
        payload = {"value": sent[order] * 0.5**turn}
        messages.append(Message(Kind.GRADIENT, "active", "passive_1", turn, "train", payload, order, "train"))
    known = draw_auxiliary(y, classes, AuxSpec(n=aux), seed)
    features = {"train": torch.zeros(ROWS, 1)}
    return View("passive_1", "passive", classes, features, None, known, y[known], tuple(messages)), y


def unknown(view):
    keep = torch.ones(ROWS, dtype=torch.bool)
    keep[view.aux_rows] = False
    return keep


def right(attack, view, y):
    keep = unknown(view)
    guess = attack(view, seed=0).scores["train"].argmax(dim=1)
    return (guess == y)[keep].double().mean().item()


@pytest.mark.parametrize(("classes", "width"), [(2, 1), (2, 2), (2, 32), (3, 2), (3, 8), (5, 16), (10, 10), (10, 32)])
def test_recovers_labels_under_a_linear_head(classes, width):
    assert right(Replay(), *replayed(classes, width)) > 0.95


def test_a_cut_narrower_than_the_logits_has_cones_that_overlap():
    """In a plane no three directions of ten are independent."""
    wide, narrow, plane = (right(Replay(), *replayed(10, width, aux=100)) for width in (10, 4, 2))
    assert wide > narrow > plane + 0.05
    assert plane > 0.2


def test_rows_beyond_the_fitted_ones_are_labeled_too(monkeypatch):
    monkeypatch.setattr(surrogate_head, "CHUNK", 300)
    view, y = replayed(3, 4)
    attack = Replay(rows=500)
    assert right(attack, view, y) > 0.99
    assert attack(view, seed=0).budget == {"rounds": 40, "rows": 500}


def test_the_scale_of_gradients_changes_nothing():
    view, _ = replayed(3, 4)
    (m,) = view.messages
    payload = {"value": m.payload["value"] * 1024}
    louder = Message(m.kind, m.sender, m.receiver, m.step, m.phase, payload, m.rows)
    scores = [Replay()(v, seed=0).scores["train"] for v in (view, replace(view, messages=(louder,)))]
    assert torch.allclose(*scores, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 5])
def test_gradients_without_a_label_in_them_leave_chance(classes):
    found = right(Replay(), *replayed(classes, 6, signal=False))
    assert abs(found - 1 / classes) < 4 * (0.25 / ROWS) ** 0.5


def test_is_at_chance_against_shuffled_labels():
    view, y = replayed(3, 4)
    found = right(Replay(), view, y[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))])
    assert abs(found - 1 / 3) < 4 * (2 / 9 / ROWS) ** 0.5


def test_noise_costs_and_repeated_releases_pay():
    once, often = (right(Replay(), *replayed(4, 8, noise=1.0, turns=turns)) for turns in (1, 20))
    assert 0.3 < once < 0.8
    assert often > once + 0.15


def test_rare_classes_are_found():
    rare = (torch.arange(ROWS) % 20 == 0).long()
    view, y = replayed(2, 3, labels=rare, aux=20)
    keep = unknown(view)
    assert metrics.auc(Replay()(view, seed=0).scores["train"][keep].numpy(), y[keep].numpy()) > 0.99


def test_errors_are_those_of_non_negative_least_squares():
    """The ridge is a row of the system: sqrt(ridge) a = sqrt(ridge) / C."""
    rng = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(4, 3, generator=rng).double(), torch.randn(5, 3, generator=rng).double()
    head = Head(weights, 0.01)
    found = explained(head, gradients, steps=2000)
    ridge = max(0.01 * weights.pow(2).mean(), torch.tensor(0.01 * 16)).sqrt().double()
    for c in range(4):
        system = torch.cat([(weights - weights[c]).T, ridge * torch.eye(4)])
        for i, g in enumerate(gradients):
            errors, residual = nnls(system.numpy(), torch.cat([g, ridge.expand(4) / 4]).numpy())
            assert torch.allclose(found.errors[c, i], torch.from_numpy(errors), atol=1e-6)
            assert found.cost[i, c].item() == pytest.approx(residual**2, abs=1e-8)


def test_says_whether_labels_still_move():
    view, _ = replayed(10, 9)
    assert Replay(rounds=1)(view, seed=0).converged is False
    assert Replay(rounds=80)(view, seed=0).converged is True


@pytest.mark.parametrize(("classes", "head", "least"), [(2, "linear", 0.999), (4, "linear", 0.95), (4, "mlp", 0.8)])
def test_on_a_federation(classes, head, least):
    """The head moves while it sends; under an mlp it differs from row to row."""
    federation = toy_federation(classes=classes, rows=800)
    transcript = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    trained = FedSplitNN(TrainSpec(epochs=5, batch=64, lr=5e-3), ModelSpec(bottom=(16,), head=head)).fit(federation)
    labels = federation.active.labels["train"]
    rows = draw_auxiliary(labels, classes, AuxSpec(n=20), 0)
    view = view_of(trained, [federation.parties["passive_1"]], rows, tuple(transcript.messages))
    guess = Replay()(view, seed=0).scores["train"].argmax(dim=1)
    assert (guess == labels).double().mean() > least


def test_a_class_without_a_known_label_is_no_error():
    view, _ = replayed(3, 4)
    view = view.knowing((view.aux_labels != 2).nonzero()[:, 0])
    assert torch.isfinite(Replay()(view, seed=0).scores["train"]).all()


def test_gradients_that_are_all_zero_are_no_error():
    view, _ = replayed(3, 4)
    view.messages[0].payload["value"].zero_()
    assert torch.isfinite(Replay()(view, seed=0).scores["train"]).all()


@pytest.mark.parametrize(("options", "match"), [({"rounds": 0}, "rounds > 0, got 0"), ({"rows": 0}, "rows > 0, got 0")])
def test_wrong_numbers_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        Replay(**options)
