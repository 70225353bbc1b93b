"""Settings of training and networks, the federation, and models on disk."""

import math

import pytest
import torch
from torch import nn

from vflsec.base.errors import Diverged, UsageError
from vflsec.core.method import Method, Trained
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.checkpoint import load_states, save_states


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch": 0}, "expected train.batch > 0, got 0"),
        ({"lr": 0.0}, "expected train.lr > 0, got 0.0"),
        ({"lr": float("nan")}, "expected train.lr > 0, got nan"),
        ({"epochs": 0}, "expected train.epochs > 0, got 0"),
        ({"patience": -1}, "expected train.patience > 0, got -1"),
        ({"momentum": -0.1}, "expected train.momentum >= 0, got -0.1"),
        ({"weight_decay": -1}, "expected train.weight_decay >= 0, got -1"),
    ],
)
def test_impossible_training_is_refused(settings, match):
    with pytest.raises(UsageError, match=f"^{match}$"):
        TrainSpec(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bottom": (8, 0)}, "expected model.bottom > 0, got 0"),
        ({"cut": 0}, "expected model.cut > 0, got 0"),
        ({"head_hidden": 0}, "expected model.head_hidden > 0, got 0"),
        ({"head": "none"}, r".*model\.head=none, got concat"),
        ({"head": "none", "aggregation": "sum", "cut": 3}, "expected no model.cut with model.head=none"),
    ],
)
def test_impossible_networks_are_refused(settings, match):
    with pytest.raises(UsageError, match=f"^{match}"):
        ModelSpec(**settings)


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "expected"),
    [
        (7, 10, 256, 7),
        (None, 256_000, 256, 20),  # 1,000 updates a pass: twenty passes
        (None, 256, 256, 300),  # one update a pass: three hundred passes
        (None, 257, 256, 150),
        (None, 7 * 256, 256, 43),  # the last pass may exceed 300
    ],
)
def test_number_of_passes(epochs, rows, batch, expected):
    assert TrainSpec(epochs=epochs, batch=batch).count_epochs(rows) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.1] * 4),
        ("cosine", [0.1, 0.05 * (1 + math.sqrt(0.5)), 0.05, 0.05 * (1 - math.sqrt(0.5))]),
        ("inverse-sqrt", [0.1, 0.1 / math.sqrt(2), 0.1 / math.sqrt(3), 0.05]),
    ],
)
def test_learning_rates(schedule, expected):
    spec = TrainSpec(lr=0.1, schedule=schedule)
    assert [spec.rate(epoch, 4) for epoch in range(4)] == pytest.approx(expected)


class Constant(Method):
    name = "constant"
    reference = "made for a test"
    phases = ("first", "second")

    def build(self, federation):
        for party in federation.parties.values():
            party.modules["bottom"] = nn.Linear(party.n_features, 2)

    def train(self, phase, federation, progress):
        progress(phase, 1, 1)
        return [float(len(phase))]

    def predict(self, federation, split):
        return torch.full((federation.n_rows(split), 2), self.value)

    def representation(self, party):
        return party.modules["bottom"]


@pytest.fixture
def method():
    made = Constant(TrainSpec(), ModelSpec())
    made.value = 1.0
    return made


def test_fit_runs_every_phase_in_order(method, federation):
    seen = []
    trained = method.fit(federation, lambda *progress: seen.append(progress))
    assert trained.history == {"first": [5.0], "second": [6.0]}
    assert seen == [("first", 1, 1), ("second", 1, 1)]
    assert trained.predict("test").shape == (8, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prediction_that_is_not_finite_is_a_divergence(method, federation, value):
    method.value = value
    with pytest.raises(Diverged, match="constant predicts values.*test rows"):
        Trained(method, federation, {}).predict("test")


def test_models_survive_the_disk(method, federation, tmp_path):
    save_states(method.fit(federation).federation, tmp_path / "new" / "folder")
    kept = {name: party.modules["bottom"].weight.clone() for name, party in federation.parties.items()}
    method.build(federation)
    load_states(federation, tmp_path / "new" / "folder")
    for name, party in federation.parties.items():
        assert torch.equal(party.modules["bottom"].weight, kept[name])
    save_states(federation, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["active.safetensors", "passive_1.safetensors"]


def test_the_federation_knows_who_is_who(federation):
    assert federation.active.name == "active"
    assert [party.name for party in federation.passive] == ["passive_1"]
    assert federation.n_rows("val") == 8
