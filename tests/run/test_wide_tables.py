"""Trainings and attacks on a wide table give the same from sparse rows as from dense ones."""

import numpy as np
import pandas as pd
import pytest
import torch

import vflsec
from vflsec.base.sparse_rows import SparseRows, to_tensor
from vflsec.data import encode, frames
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.nn import wide
from vflsec.run import federation as federations
from vflsec.run import spec as specs
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import build_cell


@pytest.fixture(scope="module")
def name() -> str:
    rng, rows = np.random.default_rng(0), 500

    def table(party: str, categories: int) -> PartyTable:
        frame = pd.DataFrame({f"{party}{j}": rng.integers(0, categories, rows).astype(str) for j in range(5)})
        frame["amount"] = rng.normal(size=rows)
        frame.index = pd.Index([f"r{i}" for i in range(rows)])
        return PartyTable(party, frame, frozenset(frame.columns[:5]))

    active, passive = table("active", 4), table("passive_1", 600)
    score = active.frame["amount"] + passive.frame["amount"] + (passive.frame["passive_10"].astype(int) % 2)
    labels = (score > score.median()).astype(int)
    return frames.keep(VerticalDataset("wide", (active, passive), labels, ("no", "yes")))


def trained(name: str, method: str, encoder: str | None = None) -> tuple[list[float], torch.Tensor, bool]:
    federations._LAST.clear()
    settings = {"dataset": name, "methods": [method], "model": {"encoder": encoder}, "train": {"epochs": 3}}
    settings["train"] |= {"pretrain": {"epochs": 2}} if method.startswith(("fedhssl", "ss-vfl", "vflhlp")) else {}
    spec = specs.read_training({key: value for key, value in settings.items() if value != {"encoder": None}})
    cell = build_cell(spec, spec.methods[0], 0)
    federation, built = build_federation(cell, "cpu"), build_method(cell)
    sparse = isinstance(federation.parties["passive_1"].features["train"], SparseRows)
    found = built.fit(federation)
    return list(found.history[built.phases[-1]]), found.predict("test"), sparse


METHODS = [
    ("fedsplitnn", "mlp"),
    ("fedsplitnn", "tabular"),
    ("fedhssl-simsiam", "tabular"),
    ("fedcvt", "mlp"),
    ("ss-vfl-i", "tabular"),
    ("vflhlp", "tabular"),
    ("prada-no-da-fg-ir", None),
    ("vertical-lr", None),
    ("lr", None),
    ("lightgbm", None),
]


@pytest.fixture
def in_double_precision(monkeypatch):
    """Trains in float64: rounding, which a chaotic pre-training amplifies, stays far below any tolerance."""
    monkeypatch.setattr(
        "vflsec.run.federation.to_tensor", lambda rows, *device: to_tensor(rows.astype(np.float64), *device)
    )
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize(("method", "encoder"), METHODS)
def test_a_method_learns_the_same_from_sparse_rows(name, method, encoder, monkeypatch):
    losses, logits, sparse = trained(name, method, encoder)
    monkeypatch.setattr(encode, "WIDE", 10**9)
    expected, expected_logits, dense_was_sparse = trained(name, method, encoder)
    assert sparse
    assert not dense_was_sparse
    assert losses == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9)
    federations._LAST.clear()


@pytest.mark.parametrize("encoder", ["mlp", "tabular"])
def test_sparse_gradients_learn_as_well(name, encoder, monkeypatch):
    """They update fewer rows, and so differ from dense ones; both must come to fit the training rows."""
    dense, _, _ = trained(name, "fedsplitnn", encoder)
    monkeypatch.setattr(wide, "MANY", 1)
    losses, _, _ = trained(name, "fedsplitnn", encoder)
    assert losses != dense
    assert losses[-1] == pytest.approx(dense[-1], abs=0.05)


@pytest.mark.parametrize("settings", [{"clip": 1.0}, {"optimizer": "sgd"}, {"optimizer": "adagrad"}])
def test_training_that_needs_dense_gradients_has_them(name, settings, monkeypatch):
    monkeypatch.setattr(wide, "MANY", 1)
    found = vflsec.train(dataset=name, train={"epochs": 2, **settings})
    assert torch.isfinite(found.predict("test")).all()


def _noted(kinds: list[type], made: torch.Tensor) -> torch.Tensor:
    kinds.append(type(made))
    return made


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_attacks_leak_the_same_from_sparse_rows(name, monkeypatch, tmp_path):
    def leaks(folder: str) -> dict[str, float | None]:
        federations._LAST.clear()
        chosen = ["mc", "norm", "trees", "pseudo-labels", "self-training:iterations=2", "fusion"]
        settings = {"aux": {"folds": 0}, "train": {"epochs": 1}, "jobs": 1, "out": tmp_path / folder}
        settings["data"] = {"n_labeled": 200}
        report = vflsec.evaluate(attack=chosen, dataset=name, seeds=1, **settings)
        return {point.attack: point.leak.mean for point in report.points}

    kinds = []
    monkeypatch.setattr("vflsec.run.federation.to_tensor", lambda *given: _noted(kinds, to_tensor(*given)))
    sparse = leaks("sparse")
    assert SparseRows in kinds
    kinds.clear()
    monkeypatch.setattr(encode, "WIDE", 10**9)
    dense = leaks("dense")
    assert set(kinds) == {torch.Tensor}  # in this process: the setting reaches no other
    assert None not in sparse.values()
    assert sparse == pytest.approx(dense, abs=0.01)
    federations._LAST.clear()
