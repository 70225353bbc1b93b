"""The active party alone: which rows it learns from, that it asks nobody, and that its loop is the federation's."""

import math

import pytest
import torch
from torch.nn import functional as F

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.methods.epochs import EarlyStopping
from vflsec.methods.local import Local, LocalTraining, select_labeled_rows
from vflsec.methods.split_training import SplitTraining
from vflsec.testing.federations import make_toy_federation

VALIDATION = DataSpec(validation=0.25)
QUICK = {"epochs": 3, "batch": 32}


def make_federation(data=None, *, parties=2, rows=150, **options):
    return make_toy_federation(data=data, parties=parties, rows=rows, columns=4, **options)


def method(*, model=None, **train):
    return Local(TrainSpec(**{**QUICK, **train}), ModelSpec(**{"bottom": (6,), **(model or {})}))


def weights(federation):
    return torch.cat([p.detach().flatten() for p in federation.active.modules.parameters()])


def test_it_learns_from_every_labeled_row_aligned_or_not():
    """The same aligned rows, and the unaligned ones of a smaller overlap on top."""
    federation = make_federation(DataSpec(overlap=0.4))
    own = federation.active
    rows, labels = select_labeled_rows(federation)
    assert len(own.labels["local"]) == len(own.features["local"]) > 0
    assert torch.equal(rows, torch.cat([own.features["train"], own.features["local"]]))
    assert torch.equal(labels, torch.cat([own.labels["train"], own.labels["local"]]))


@pytest.mark.parametrize("split", ["train", "local"])
def test_every_label_it_knows_changes_the_result(split):
    federations = [make_federation(DataSpec(overlap=0.4)) for _ in range(2)]
    federations[1].active.labels[split][0] = 1 - federations[1].active.labels[split][0]
    for federation in federations:
        method().fit(federation)
    assert not torch.equal(*map(weights, federations))


def test_where_labels_are_scarce_it_learns_from_the_aligned_ones_alone():
    """As if it had no unaligned rows at all."""
    federations = [make_federation(DataSpec(overlap=0.5, n_labeled=40)) for _ in range(2)]
    assert len(federations[0].active.features["local"]) > 0
    for split in ("local", "unlabeled", "val"):
        federations[1].active.features[split].fill_(float("nan"))
    for federation in federations:
        assert len(select_labeled_rows(federation)[0]) == 40
        method().fit(federation)
    assert torch.equal(*map(weights, federations))


@pytest.mark.parametrize("select", ["last", "best_on_val"])
def test_it_reads_no_other_party_and_says_nothing(select):
    data = DataSpec(overlap=0.5, validation=0.2)
    federations = [make_federation(data, parties=3) for _ in range(2)]
    for party in federations[1].passive:
        for features in party.features.values():
            features.fill_(float("nan"))
    heard, trained = [], []
    for federation in federations:
        federation.channel.taps.append(heard.append)
        trained.append(method(select=select).fit(federation))
    assert torch.equal(*(one.predict("test") for one in trained))
    assert not heard
    assert not any(federation.channel.traffic for federation in federations)


@pytest.mark.sampled
@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(
    "options", [{"schedule": "cosine"}, {"select": "best_on_val", "weight_decay": 0.01}, {"patience": 1, "clip": 0.1}]
)
def test_it_is_split_learning_of_one_party(head, optimizer, options, monkeypatch):
    """The federation's own loop, given a federation with the active party alone, makes the same model bit for bit."""
    made = method(model={"head": head}, optimizer=optimizer, epochs=6, lr=0.05, **options)
    local, single = make_federation(VALIDATION), make_federation(VALIDATION)
    history = made.fit(local).history["train"]
    made.build(single)
    single.parties = {"active": single.active}
    model = single.active.modules["local"]

    def drawn(count, size, order, device):
        number = next(epochs)
        return batches(count, size, make_rng(single.seed, "batches", "local", number), device)

    epochs, batches = iter(range(6)), SplitTraining.fit.__globals__["draw_batches"]
    monkeypatch.setitem(SplitTraining.fit.__globals__, "draw_batches", drawn)
    split = SplitTraining(single, {"active": model.encoder}, _First(model.head), {}, made.train_spec)
    assert split.fit("train", lambda *_: None) == pytest.approx(history, rel=1e-6)
    assert torch.equal(weights(local), weights(single))


class _First(torch.nn.Module):
    """A top model of one embedding."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, embeddings):
        (own,) = embeddings
        return self.head(own)


def test_without_a_head_the_embedding_is_the_logits():
    federation = make_federation(classes=3)
    made = method(model={"head": "none", "aggregation": "sum"})
    logits = made.fit(federation).predict("test")
    embedding = made.representation(federation.active)(federation.active.features["test"])
    assert torch.equal(logits, embedding)
    assert logits.shape == (federation.n_rows("test"), 3)


def test_a_passive_party_has_its_columns_and_no_model():
    federation, made = make_federation(), method()
    made.fit(federation)
    own = federation.passive[0].features["test"]
    assert torch.equal(made.representation(federation.passive[0])(own), own)
    assert not list(federation.passive[0].modules.parameters())


def test_the_loss_falls_to_that_of_a_planted_signal():
    history = method(epochs=40, lr=0.02).fit(make_federation()).history["train"]
    assert history[-1] < 0.1 < math.log(2) * 0.8 < history[0] * 1.5


@pytest.mark.parametrize("settings", [{"patience": 1}, {"select": "best_on_val"}])
def test_selection_needs_validation_rows(settings):
    federation, made = make_federation(), method(**settings)
    made.build(federation)
    with pytest.raises(UsageError, match="need validation rows"):
        made.check(federation)


@pytest.mark.parametrize(
    ("train", "match"),
    [
        ({"lr": 1e30, "epochs": 30}, "local model is .*after epoch"),
        ({"lr": 1e38, "epochs": 1, "batch": 1000, "select": "best_on_val"}, "not finite on val rows"),
    ],
)
def test_divergence_is_a_status(train, match):
    with pytest.raises(Diverged, match=match + r".*lower train\.lr"):
        method(optimizer="sgd", **train).fit(make_federation(VALIDATION))


def test_a_nan_of_its_own_is_a_divergence():
    federation = make_federation()
    federation.active.features["train"][0, 0] = float("nan")
    with pytest.raises(Diverged, match="nan"):
        method().fit(federation)


@pytest.mark.parametrize("select", ["last", "best_on_val"])
def test_a_prediction_depends_on_its_own_row_alone_and_leaves_no_trace(select):
    """With BatchNorm, whose statistics are those of the rows that were learned from."""
    federation = make_federation(VALIDATION)
    made = method(model={"encoder": "tabular"}, select=select)
    before = made.fit(federation).predict("test")
    statistics = {key: value.clone() for key, value in federation.active.modules.state_dict().items()}
    made.predict(federation, "val")
    federation.active.features["test"][1:] += 5
    assert torch.allclose(made.predict(federation, "test")[0], before[0], atol=1e-6)
    assert all(torch.equal(value, statistics[key]) for key, value in federation.active.modules.state_dict().items())
    kept = federation.active.modules["local"].state_dict()
    steps = [value for key, value in kept.items() if key.endswith("num_batches_tracked")]
    per_epoch = math.ceil(federation.n_rows("train") / QUICK["batch"])
    assert all(value % per_epoch == 0 and 0 < value <= QUICK["epochs"] * per_epoch for value in steps)


def test_progress_counts_epochs():
    seen = []
    method().fit(make_federation(), lambda *progress: seen.append(progress))
    assert seen == [("train", n, 3) for n in (1, 2, 3)]


def test_training_goes_on_from_a_state_that_was_kept():
    """State and optimizer after two epochs are all that the third one needs."""
    spec = TrainSpec(**{**QUICK, "epochs": 4, "select": "best_on_val", "patience": 2, "schedule": "cosine"})

    def training(federation):
        made = Local(spec, ModelSpec(bottom=(6,)))
        made.build(federation)
        return LocalTraining(federation, federation.active.modules["local"], *select_labeled_rows(federation), spec)

    whole, first, second = (training(make_federation(VALIDATION)) for _ in range(3))
    losses = [whole.epoch() for _ in range(4)]
    assert [first.epoch(), first.epoch()] == losses[:2]
    second.state.load_state_dict(first.state.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert [second.epoch(), second.epoch()] == losses[2:]
    for one in (whole, second):
        one.finish()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("scores", "patience", "epochs", "best"),
    [
        ([0.5, 0.9, 0.7, 0.9, 0.8, 0.95], None, 6, 5),
        ([0.5, 0.9, 0.7, 0.9, 0.8, 0.95], 3, 5, 1),  # an equal score is no better one
        ([0.5, 0.5, 0.6], 1, 2, 0),
        ([-0.1, -0.2, -0.3, -0.05], 3, 4, 3),
    ],
)
def test_early_stopping(scores, patience, epochs, best):
    model = torch.nn.Linear(1, 1)
    state = EarlyStopping(model, epochs=6, patience=patience)
    done = 0
    while not state.is_done and done < len(scores):
        torch.nn.init.constant_(model.weight, done)
        state.count(scores[done])
        done += 1
    assert done == epochs
    state.take_best()
    assert model.weight.item() == best


def test_scores_that_differ_beyond_single_precision_are_told_apart():
    state = EarlyStopping(torch.nn.Linear(1, 1), epochs=3, patience=None)
    for score in (0.9, 0.9 + 1e-12, 0.9):
        state.count(score)
    assert int(state.best_epoch) == 1


def test_predictions_are_those_of_encoder_and_head():
    federation = make_federation(classes=3)
    trained = method().fit(federation)
    model, x = federation.active.modules["local"], federation.active.features["test"]
    assert torch.equal(trained.predict("test"), model.head(model.encoder(x)))
    assert F.cross_entropy(trained.predict("test"), federation.active.labels["test"]) > 0
