"""Fusion: what independent sources say adds up, what says nothing costs nothing, and each split has its own sources."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import norm
from torch import nn

from vflsec.attacks.fusion import AttributeFusion, ColumnFusion, Fusion
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.sources import list_sources
from vflsec.results import metrics

N, KNOWN = 4000, 200


def federation(own=0.0, gradient=0.0, *, noise_columns=3, epochs=4, seed=0, n_classes=2):
    """A class that shifts one own column by ``own`` and the mean gradient by ``gradient``, in deviations; the truth."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(n_classes, (N,), generator=rng)
    columns = torch.randn(N, 1 + noise_columns, generator=rng)
    columns[:, 0] += own * y
    rows = torch.arange(N)
    messages = []
    for step in range(epochs):
        g = torch.randn(N, 2, generator=rng) * epochs**0.5
        g[:, 0] += gradient * y
        messages.append(Message(Kind.GRADIENT, "active", "passive_1", step, "train", {"value": g}, rows))
    features = {"train": columns, "test": columns.clone()}
    return View("passive_1", "passive", n_classes, features, None, rows[:KNOWN], y[:KNOWN], tuple(messages)), y


def auc(view, y, split="train", attack=None):
    scores = (attack or Fusion())(view, seed=0).scores[split]
    return metrics.auc(scores[KNOWN:].numpy(), y[KNOWN:].numpy())


def phi(*shifts):
    """AUC of the best score from independent Gaussian columns whose means the class shifts."""
    return norm.cdf(sum(shift**2 for shift in shifts) ** 0.5 / 2**0.5)


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
@pytest.mark.parametrize(("own", "gradient"), [(0.7, 1.2), (1.5, 0.0)])
def test_it_reaches_the_best_auc_of_independent_gaussian_sources(own, gradient):
    view, y = federation(own, gradient)
    assert auc(view, y) == pytest.approx(phi(own, gradient), abs=0.02)


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
def test_test_rows_are_guessed_from_what_is_known_of_them():
    view, y = federation(1.0, 2.0)
    assert auc(view, y, "test") == pytest.approx(phi(1.0), abs=0.02)
    assert auc(view, y, "train") == pytest.approx(phi(1.0, 2.0), abs=0.02)


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
def test_alone_it_reads_own_columns_and_nothing_else():
    view, y = federation(1.0, 2.0)
    alone = view.drop_federation(nn.Identity())
    assert set(list_sources(alone)) == {"columns"}
    assert auc(alone, y, attack=Fusion().alone()) == pytest.approx(phi(1.0), abs=0.02)


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
def test_sources_that_say_nothing_cost_next_to_nothing():
    """A column tells the class; gradients and a model tell nothing. The mean over seeds."""
    lost = []
    for seed in range(10):
        view, y = federation(1.5, 0.0, noise_columns=0, seed=seed)
        view = replace(view, features={"train": view.features["train"]})
        view = replace(view, aux_rows=view.aux_rows[:80], aux_labels=view.aux_labels[:80])
        rng = torch.Generator().manual_seed(seed)
        with_noise = replace(view, model=_Lookup(view.features["train"], torch.randn(N, 16, generator=rng)))
        lost.append(auc(replace(view, messages=()), y) - auc(with_noise, y))
    assert sum(lost) / len(lost) < 0.01


class _Lookup(nn.Module):
    """A model whose embeddings of known rows are given."""

    def __init__(self, rows, embeddings):
        super().__init__()
        self.rows, self.embeddings = rows, embeddings

    def forward(self, x):
        assert torch.equal(x, self.rows)
        return self.embeddings


def test_a_class_that_no_linear_score_finds_is_found_in_own_columns():
    view, _ = federation()
    ring = view.features["train"][:, :2]
    y = (ring.square().sum(dim=1) > 1.4).long()
    view = replace(view, features={"train": ring}, aux_labels=y[:KNOWN], messages=())
    assert auc(view, y) > 0.95


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
def test_several_classes_are_told_apart():
    view, y = federation(4.0, 3.0, n_classes=3)
    found = Fusion()(view, seed=0).scores["train"].argmax(dim=1)
    assert (found == y)[KNOWN:].float().mean() > 0.95


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
def test_a_joint_attack_beats_each_source_where_neither_is_enough():
    """Residuals p - y: p is in the columns, p - y in the gradients, and y in neither alone."""
    rng = torch.Generator().manual_seed(0)
    p = torch.randn(N, 1, generator=rng)
    y = torch.randint(2, (N,), generator=rng)
    rows = torch.arange(N)
    residual = torch.cat([p - y[:, None], torch.randn(N, 1, generator=rng)], dim=1)
    message = Message(Kind.GRADIENT, "active", "passive_1", 0, "train", {"value": residual}, rows)
    view = View("passive_1", "passive", 2, {"train": p}, None, rows[:KNOWN], y[:KNOWN], (message,))
    assert auc(replace(view, messages=()), y) == pytest.approx(0.5, abs=0.03)
    assert auc(view, y) > 0.99


def received(seed=0):
    """Columns of a victim, noisy embeddings of them in three epochs and at prediction, and an own column of noise."""
    rng = torch.Generator().manual_seed(seed)
    theirs = {split: torch.randn(N, 3, generator=rng) for split in ("train", "test")}
    mix = torch.randn(3, 5, generator=rng)
    rows, messages = torch.arange(N), []
    for step, (phase, split) in enumerate([("train", "train")] * 3 + [("predict", "test")]):
        h = theirs[split] @ mix + 0.5 * torch.randn(N, 5, generator=rng)
        messages.append(Message(Kind.EMBEDDING, "passive_1", "active", step, phase, {"value": h}, rows, split))
    features = {split: torch.randn(N, 2, generator=rng) for split in theirs}
    view = View("active", "active", 3, features, None, rows[:KNOWN], theirs["train"][:KNOWN], tuple(messages),
                victim="passive_1", parties=("active", "passive_1"))  # fmt: skip
    return view, theirs


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
def test_columns_are_recovered_as_well_as_ridge_regression_recovers_them():
    view, theirs = received()
    found = ColumnFusion()(view, seed=0).scores
    reached = {split: metrics.r2(found[split][KNOWN:].numpy(), theirs[split][KNOWN:].numpy()) for split in found}
    for split, turns in (("train", 3), ("test", 1)):
        h = torch.stack([m.payload["value"] for m in view.messages if m.split == split])[-turns:].mean(dim=0)
        x = torch.cat([h, torch.ones(N, 1)], dim=1)
        best = torch.linalg.lstsq(x, theirs[split]).solution  # with all the truth
        assert reached[split] > metrics.r2((x @ best).numpy(), theirs[split].numpy()) - 0.03
    assert reached["train"] > reached["test"] + 0.02, "noise averages out over releases of training rows"


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
def test_an_attribute_is_inferred_from_what_its_owner_sends():
    view, theirs = received()
    y = {split: (x[:, 0] > 0).long() for split, x in theirs.items()}
    view = replace(view, n_classes=2, aux_labels=y["train"][:KNOWN])
    found = AttributeFusion()(view, seed=0).scores
    assert metrics.auc(found["test"].numpy(), y["test"].numpy()) > 0.9


def test_a_party_with_labels_reads_them():
    view, _ = received()
    labels = torch.arange(N) % 2
    assert "own labels" in list_sources(replace(view, labels={"train": labels}))


def test_equal_tables_are_read_once_and_constant_ones_not_at_all():
    view, _ = federation()
    own = replace(view, model=nn.Identity(), messages=())
    assert set(list_sources(own)) == {"columns"}
    constant = replace(own, features={"train": torch.ones(N, 2)}, model=None)
    assert set(list_sources(constant)) == set()


@pytest.mark.sampled
@pytest.mark.usefixtures("small_forests")
@pytest.mark.parametrize("n_aux", [1, 5])
def test_few_labels_of_one_class_give_a_finite_guess(n_aux):
    view, _ = federation(1.0, 1.0)
    known = view.aux_rows[view.aux_labels == 1][:n_aux]
    view = replace(view, aux_rows=known, aux_labels=torch.ones(n_aux, dtype=torch.long))
    assert Fusion()(view, seed=0).scores["train"].argmax(dim=1).eq(1).all()


def test_columns_that_are_the_same_for_everybody_give_the_base_rate():
    view, y = federation()
    view = replace(view, features={"train": torch.ones(N, 2)}, messages=())
    scores = Fusion()(view, seed=0).scores["train"]
    torch.testing.assert_close(scores, torch.tensor([[1 - r, r] for r in [y[:KNOWN].double().mean()]]).expand(N, 2))
