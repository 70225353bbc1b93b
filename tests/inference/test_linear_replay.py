"""A linear bottom model whose training is replayed: rows come back exactly, and noise costs nothing."""

from dataclasses import replace

import pytest
import torch

from vflsec.core.message import Kind, Message
from vflsec.core.settings import TrainSpec
from vflsec.core.view import View
from vflsec.inference.linear_replay import LastModel, find_nearest, read_training, refine_by_replay
from vflsec.inference.opinion_pool import Opinion
from vflsec.nn.wide import create_optimizer
from vflsec.results import metrics

N, KNOWN, CUT, RATE = 400, 60, 3, 1e-3


def train(*, noise=0.0, continuous=False, hidden=False, epochs=12, seed=0, **optimizer):
    """The view of an active party that sent gradients to a linear model of three columns of 0 and 1 and three more."""
    rng = torch.Generator().manual_seed(seed)
    x = {split: (torch.rand(N, 6, generator=rng) < 0.4).float() for split in ("train", "test")}
    for rows in x.values():
        rows[:, 3:] = (
            torch.randn(N, 3, generator=rng) if continuous else torch.randint(4, (N, 3), generator=rng).float()
        )
    layer = torch.nn.Linear(6, CUT)
    layer.weight.data, layer.bias.data = torch.randn(CUT, 6, generator=rng) / 3, torch.randn(CUT, generator=rng)
    spec, messages, step = TrainSpec(**{"epochs": epochs, "batch": 100, "lr": RATE, **optimizer}), [], 0
    optimizer = create_optimizer(layer.parameters(), spec)

    def embed(rows):
        return layer(rows).tanh() if hidden else layer(rows)

    def send(kind, value, rows, phase="train", split="train"):
        parties = ("passive_1", "active") if kind is Kind.EMBEDDING else ("active", "passive_1")
        messages.append(Message(kind, *parties, step, phase, {"value": value.detach()}, rows, split))

    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = spec.rate(epoch, epochs)
        for rows in torch.randperm(N, generator=rng).split(100):
            h = embed(x["train"][rows])
            gradient = (h.detach() - h.detach().roll(1, 1) + 0.3 * torch.randn(h.shape, generator=rng)) / len(rows)
            send(Kind.EMBEDDING, h + noise * torch.randn(h.shape, generator=rng), rows)
            send(Kind.GRADIENT, gradient, rows)
            optimizer.zero_grad()
            h.backward(gradient)
            optimizer.step()
            step += 1
    e = embed(x["test"])
    send(Kind.EMBEDDING, e + noise * torch.randn(e.shape, generator=rng), torch.arange(N), "predict", "test")
    features = {split: torch.randn(N, 1, generator=rng) for split in x}
    view = View("active", "active", 6, features, None, torch.arange(KNOWN), x["train"][:KNOWN], tuple(messages),
                victim="passive_1", parties=("active", "passive_1"), agreed={"train": spec})  # fmt: skip
    return view, {split: rows.double() for split, rows in x.items()}


def regress(view):
    """What a ridge regression on the last embedding says of each split, and of known rows by leave-one-out."""
    opinions, y = {}, view.aux_labels.double()
    sent = {split: torch.zeros(N, CUT) for split in ("train", "test")}
    for m in view.messages:
        if m.kind is Kind.EMBEDDING:
            sent[m.split][m.rows] = m.payload["value"]
    h = {split: torch.cat([rows.double(), torch.ones(N, 1)], dim=1) for split, rows in sent.items()}
    a = h["train"][:KNOWN]
    inverse = torch.linalg.inv(a.T @ a + 0.1 * torch.eye(CUT + 1))
    leverage = ((a @ inverse) * a).sum(dim=1)[:, None]
    held_out = y - (y - a @ inverse @ (a.T @ y)) / (1 - leverage)
    for split, rows in h.items():
        opinions[split] = Opinion(rows @ inverse @ (a.T @ y), held_out)
    return opinions


def score(opinions, truth):
    return {s: metrics.r2(o.scores[KNOWN:].numpy(), truth[s][KNOWN:].numpy()) for s, o in opinions.items()}


@pytest.mark.parametrize(
    "optimizer",
    [{}, {"schedule": "cosine"}, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}, {"optimizer": "sgd", "lr": 0.01},
     {"optimizer": "adagrad"}],
    ids=["adam", "cosine", "sgd", "momentum", "adagrad"],
)  # fmt: skip
def test_rows_on_grids_come_back_exactly_although_they_have_more_columns_than_numbers(optimizer):
    view, truth = train(**optimizer)
    before = regress(view)
    after = refine_by_replay(view, before, view.aux_labels.double())
    assert max(score(before, truth).values()) < 0.8
    assert (after["train"].scores - truth["train"]).abs().max() < 1e-3
    assert (after["test"].scores - truth["test"]).abs().max() < 1e-3


@pytest.mark.parametrize("setting", [{"noise": 0.3}, {"noise": 0.01}, {"continuous": True}, {"hidden": True}])
def test_where_nothing_is_exact_nothing_is_lost(setting):
    view, truth = train(**setting)
    before = regress(view)
    after = score(refine_by_replay(view, before, view.aux_labels.double()), truth)
    assert all(after[split] >= r2 - 0.003 for split, r2 in score(before, truth).items())


def test_a_training_that_cannot_be_replayed_is_not_read():
    view, _ = train(epochs=2)
    assert read_training(view) is not None
    assert read_training(replace(view, agreed={})) is None
    assert read_training(replace(view, messages=())) is None
    embeddings = tuple(m for m in view.messages if m.kind is Kind.EMBEDDING)
    assert read_training(replace(view, messages=embeddings)) is None


def test_the_replay_makes_the_steps_of_the_training():
    view, truth = train(epochs=3)
    x = torch.cat([truth["train"], torch.ones(N, 1)], dim=1)
    training = read_training(view)
    sent = training.embed_last(x, training.replay(x))
    model = LastModel.fit(x, sent)
    assert (sent - x @ model.weights).abs().max() < 1e-5


def test_points_of_a_lattice_are_found_near_themselves():
    rng = torch.Generator().manual_seed(0)
    basis = torch.cat([1e5 * torch.randn(5, 2, generator=rng), torch.eye(5)], dim=1).double()
    whole = torch.randint(-3, 4, (50, 5), generator=rng).double()
    near = whole @ basis + 0.1 * torch.randn(50, 7, generator=rng)
    assert torch.equal(find_nearest(basis, near), whole)
