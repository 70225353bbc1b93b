"""Batch label inference: as good as exploit while sums hide nothing, and what is left beyond."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.attacks.batch_label import BatchLabel, find_last_layers, sum_gradients
from vflsec.attacks.exploit import ExPLoit
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.inference.releases import read_releases
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.nn.encoders import MLPBottom
from vflsec.nn.wrappers import SideBySide
from vflsec.run.adversary import draw_auxiliary, observe
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation

ROWS, COLUMNS, HIDDEN = 1024, 8, 31


def exchanged(classes, width, *, batch, turns=1, aux=60, signal=True, seed=0):
    """A view with gradients (p - onehot(y)) W / B of a random linear head, and a bottom model with 31 hidden units."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        bottom = MLPBottom(COLUMNS, (HIDDEN,), width)
        nn.init.normal_(bottom[0].weight, std=1.0)
        nn.init.normal_(bottom[0].bias)
    x = torch.randn(ROWS, COLUMNS, generator=rng)
    y = torch.arange(ROWS) % classes
    head = torch.randn(classes, width, generator=rng)
    p = (torch.randn(ROWS, classes, generator=rng) + 1.5 * F.one_hot(y, classes)).softmax(dim=1)
    clean = (p - F.one_hot(y, classes)) @ head if signal else torch.randn(ROWS, width, generator=rng)
    messages = []
    for turn in range(turns):
        for step, rows in enumerate(torch.randperm(ROWS, generator=rng).split(batch)):
            payload = {"value": clean[rows] / len(rows)}
            messages.append(
                Message(Kind.GRADIENT, "active", "passive_1", 10_000 * turn + step, "train", payload, rows, "train")
            )
    known = draw_auxiliary(y, classes, AuxSpec(n=aux), seed)
    return View("passive_1", "passive", classes, {"train": x}, bottom, known, y[known], tuple(messages)), y


def right(attack, view, y):
    keep = torch.ones(ROWS, dtype=torch.bool)
    keep[view.aux_rows] = False
    return (attack(view, seed=0).scores["train"].argmax(dim=1) == y)[keep].double().mean().item()


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [1, 8, 24])
@pytest.mark.parametrize(("classes", "width"), [(2, 1), (2, 4), (3, 2), (5, 8)])
def test_small_batches_hide_nothing(batch, classes, width):
    """Of 32 units of rank, some are dead in a batch."""
    assert right(BatchLabel(), *exchanged(classes, width, batch=batch)) > 0.95


def test_larger_batches_hide_more_and_further_epochs_show_more():
    small, large, often = (
        right(BatchLabel(releases=None), *exchanged(3, 4, batch=batch, turns=turns))
        for batch, turns in ((16, 1), (256, 1), (256, 20))
    )
    assert small > 0.98
    assert large < 0.75
    assert often > large + 0.1


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [8, 256])
@pytest.mark.parametrize("classes", [2, 4])
def test_gradients_without_a_label_in_them_leave_chance(batch, classes):
    found = right(BatchLabel(), *exchanged(classes, 4, batch=batch, turns=3, signal=False))
    assert abs(found - 1 / classes) < 4 * (0.25 / ROWS) ** 0.5


def test_shuffled_labels_leave_chance():
    view, y = exchanged(3, 4, batch=8)
    found = right(BatchLabel(), view, y[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))])
    assert abs(found - 1 / 3) < 4 * (2 / 9 / ROWS) ** 0.5


@pytest.mark.parametrize("batch", [8, 64])
def test_nothing_but_the_sums_is_read(batch):
    """Gradients that have the same sums over every batch, and are others, give the same guess."""
    view, _ = exchanged(2, 3, batch=batch)
    inputs, messages = find_last_layers(view)[0].inputs.double(), []
    for m in view.messages:
        a, g = inputs[m.rows], m.payload["value"].double()
        other = torch.randn(g.shape, generator=torch.Generator().manual_seed(m.step)).double()
        other = g + other - a @ torch.linalg.pinv(a) @ other
        assert torch.allclose(a.T @ other, a.T @ g, atol=1e-8)
        messages.append(Message(m.kind, m.sender, m.receiver, m.step, m.phase, {"value": other}, m.rows))
    plain = tuple(
        Message(m.kind, m.sender, m.receiver, m.step, m.phase, {"value": m.payload["value"].double()}, m.rows)
        for m in view.messages
    )
    rngs = [torch.Generator().manual_seed(0) for _ in range(2)]
    views = [replace(view, messages=tuple(ms)) for ms in (plain, messages)]  # whose long gradients are not shortened
    scores = [BatchLabel().run(own, rng=rng).scores for own, rng in zip(views, rngs, strict=True)]
    assert torch.allclose(scores[0]["train"], scores[1]["train"], atol=1e-3)


@pytest.mark.parametrize("batch", [5, 100])
def test_the_nearest_gradients_have_the_sums_that_were_seen(batch):
    view, _ = exchanged(2, 3, batch=batch)
    sums = sum_gradients(read_releases(view, Kind.GRADIENT), find_last_layers(view))
    residuals, weights = torch.randn(ROWS, 2), torch.randn(2, 3)
    nearest = sums.find_smallest(ROWS) + sums.find_hidden(residuals, weights)
    assert torch.allclose(sums.basis[0].mT @ nearest[sums.rows], sums.values[0], atol=1e-4)
    g = residuals @ weights
    for rows, basis, values in zip(sums.rows, sums.basis[0], sums.values[0], strict=True):  # each row is in one batch
        change = basis @ (values - basis.T @ g[rows])
        used = basis.any(dim=1)
        assert torch.allclose(nearest[rows[used]], (g[rows] + change)[used], atol=1e-4)


def test_the_last_layer_reads_what_it_reads():
    torch.manual_seed(0)
    x = torch.randn(6, COLUMNS)
    bottom = MLPBottom(COLUMNS, (5,), 3)
    one = torch.ones(6, 1)
    models = {
        "hidden units": (bottom, torch.cat([bottom[0](x).relu(), one], dim=1)),
        "columns": (nn.Linear(COLUMNS, 2), torch.cat([x, one], dim=1)),
        "embeddings after a ReLU": (nn.Sequential(bottom, nn.ReLU()), torch.cat([bottom(x).relu(), one], dim=1)),
        "embeddings without a layer": (nn.Identity(), torch.cat([x, one], dim=1)),
    }
    for name, (model, expected) in models.items():
        view = View("passive_1", "passive", 2, {"train": x}, model, torch.arange(0), torch.arange(0))
        # The model runs once more here, and another order of a sum moves its last bit.
        torch.testing.assert_close(find_last_layers(view)[0].inputs, expected, msg=name)
        assert not any(layer._forward_hooks for layer in model.modules()), name


def test_of_colluding_parties_each_has_a_layer_of_its_own():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    both = SideBySide([nn.Linear(3, 2), MLPBottom(5, (4,), 3)], [3, 5])
    view = View("passive_1+passive_2", "passive", 2, {"train": x}, both, torch.arange(0), torch.arange(0))
    found = find_last_layers(view)
    assert [layer.width for layer in found] == [2, 3]
    assert torch.equal(found[0].inputs[:, :3], x[:, :3])
    assert torch.equal(found[1].inputs[:, :4], both.models[1][0](x[:, 3:]).relu())


def test_colluding_parties_infer_no_less_than_one_of_them():
    federation = make_toy_federation(classes=3, rows=800, parties=3)
    names = ["passive_1", "passive_2"]
    transcript = Transcript(frozenset(names), frozenset(Kind))
    federation.channel.taps.append(transcript)
    trained = FedSplitNN(TrainSpec(epochs=2, batch=128, lr=5e-3), ModelSpec(bottom=(16,))).fit(federation)
    labels = federation.active.labels["train"]
    rows = draw_auxiliary(labels, 3, AuxSpec(n=30), 0)
    found = {}
    for who in (["passive_1"], ["passive_2"], names, names[::-1]):
        view = observe(trained, [federation.parties[name] for name in who], rows, tuple(transcript.messages))
        guess = BatchLabel()(view, seed=0).scores["train"].argmax(dim=1)
        found["+".join(who)] = (guess == labels).double().mean().item()
    assert found["passive_1+passive_2"] > max(found["passive_1"], found["passive_2"]) - 0.02, found
    assert found["passive_2+passive_1"] == pytest.approx(found["passive_1+passive_2"], abs=0.02)


def test_gradients_of_which_nobody_knows_whose_they_are_are_refused():
    view, _ = exchanged(2, 3, batch=64)
    both = SideBySide([nn.Linear(3, 2), nn.Linear(5, 2)], [3, 5])
    with pytest.raises(InsufficientView, match="colluding.*4 numbers"):
        BatchLabel()(replace(view, model=both), seed=0)


@pytest.mark.parametrize(("batch", "least"), [(16, 0.95), (64, 0.7)])
def test_on_a_federation(batch, least):
    federation = make_toy_federation(classes=3, rows=800)
    transcript = Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    trained = FedSplitNN(TrainSpec(epochs=5, batch=batch, lr=5e-3), ModelSpec(bottom=(32,))).fit(federation)
    labels = federation.active.labels["train"]
    rows = draw_auxiliary(labels, 3, AuxSpec(n=30), 0)
    view = observe(trained, [federation.parties["passive_1"]], rows, tuple(transcript.messages))
    found, most = (
        (attack(view, seed=0).scores["train"].argmax(dim=1) == labels).double().mean()
        for attack in (BatchLabel(), ExPLoit())
    )
    assert most >= found > least


def test_rows_never_spoken_of_have_a_guess():
    view, _ = exchanged(3, 4, batch=8)
    guess = BatchLabel()(replace(view, messages=view.messages[:20]), seed=0)
    assert torch.isfinite(guess.scores["train"]).all()
    assert guess.budget == {"rounds": 60, "batches": 20}


def test_gradients_that_are_all_zero_are_no_error():
    view, _ = exchanged(3, 4, batch=8)
    for message in view.messages:
        message.payload["value"].zero_()
    assert torch.isfinite(BatchLabel()(view, seed=0).scores["train"]).all()


def test_says_whether_labels_still_move():
    view, _ = exchanged(5, 8, batch=64)
    assert BatchLabel(rounds=1)(view, seed=0).converged is False


def test_wrong_numbers_are_refused():
    with pytest.raises(UsageError, match="rounds > 0, got 0"):
        BatchLabel(rounds=0)
