"""Self-training: the Bayes rule of Gaussian data, from few labels and many rows; trees against the library."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from vflsec.attacks.fusion import Fusion
from vflsec.attacks.self_training import (
    N_FOLDS,
    PENALTY,
    ForestTraining,
    SelfTraining,
    _log_density,
    _Regressions,
    _whiten_tables,
)  # fmt: skip
from vflsec.attacks.trees import Trees
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.fused import fuse_classes
from vflsec.inference.regression import standardize
from vflsec.inference.sources import list_sources
from vflsec.results import metrics

N, KNOWN = 3000, 20


def federation(own, gradient, seed=0):
    """A class that shifts one of ten own columns by ``own`` and the gradient by ``gradient``, in deviations."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (N,), generator=rng)
    x = {split: torch.randn(N, 10, generator=rng) for split in ("train", "test")}
    for columns in x.values():
        columns[:, 0] += own * y
    g = torch.randn(N, 2, generator=rng)
    g[:, 0] += gradient * y
    rows = torch.arange(N)
    message = Message(Kind.GRADIENT, "active", "passive_1", 0, "train", {"value": g}, rows)
    return View("passive_1", "passive", 2, x, None, rows[:KNOWN], y[:KNOWN], (message,)), y


def auc(guess, y, split):
    return metrics.auc(guess.scores[split][KNOWN:].numpy(), y[KNOWN:].numpy())


@pytest.mark.statistical
@pytest.mark.usefixtures("few_trees")
def test_with_few_labels_it_comes_near_the_bayes_rule_of_both_splits():
    own, gradient = 1.5, 4.0
    view, y = federation(own, gradient)
    guess = SelfTraining()(view, seed=0)
    assert auc(guess, y, "train") == pytest.approx(norm.cdf((own**2 + gradient**2) ** 0.5 / 2**0.5), abs=0.01)
    assert auc(guess, y, "test") == pytest.approx(norm.cdf(own / 2**0.5), abs=0.02)


@pytest.mark.statistical
@pytest.mark.usefixtures("few_trees")
def test_rows_without_a_label_teach_what_few_labels_cannot():
    """Gradients give training rows away; test rows have nothing but columns, of which fusion sees twenty labels."""
    view, y = federation(1.5, 4.0)
    assert auc(SelfTraining()(view, seed=0), y, "test") > auc(Fusion()(view, seed=0), y, "test") + 0.05


@pytest.mark.statistical
@pytest.mark.usefixtures("few_trees")
def test_without_messages_it_reads_own_columns():
    view, y = federation(3.0, 4.0)
    assert auc(SelfTraining()(replace(view, messages=()), seed=0), y, "test") > 0.85


@pytest.mark.statistical
def test_where_columns_are_many_forest_training_does_not_lose_what_it_starts_from():
    """Ten noisy copies of each of 30 columns, four classes, twelve labels a class."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(4, (N,), generator=rng)
    centers = 1.2 * torch.randn(4, 30, generator=rng)
    x = (centers[y] + torch.randn(N, 30, generator=rng)).repeat(1, 10) + 0.5 * torch.randn(N, 300, generator=rng)
    g = F.one_hot(y, 4) + 2.0 * torch.randn(N, 4, generator=rng)
    rows = torch.arange(N)
    message = Message(Kind.GRADIENT, "active", "passive_1", 0, "train", {"value": g}, rows)
    view = View("passive_1", "passive", 4, {"train": x}, None, rows[:48], y[:48], (message,))
    reached = {
        attack.name: (attack(view, seed=0).scores["train"].argmax(dim=1) == y)[48:].float().mean()
        for attack in (Fusion(), ForestTraining())
    }
    assert reached["forest-training"] > reached["fusion"]


@pytest.mark.statistical
def test_forest_training_reads_gradients_whose_meaning_changes_during_training():
    """What a class adds in the first third of training it takes away in the last: the mean of all says nothing."""
    own, gradient = 1.5, 1.5
    view, y = federation(own, 0.0)
    reached = []
    for draw in range(1, 4):
        rng = torch.Generator().manual_seed(draw)
        messages = []
        for step, sign in enumerate((1, 0, -1)):
            g = torch.randn(N, 2, generator=rng)
            g[:, 0] += sign * gradient * y
            messages.append(Message(Kind.GRADIENT, "active", "passive_1", step, "train", {"value": g}, torch.arange(N)))
        reached.append(auc(ForestTraining()(replace(view, messages=tuple(messages)), seed=0), y, "train"))
    assert fmean(reached) == pytest.approx(norm.cdf((own**2 + 2 * gradient**2) ** 0.5 / 2**0.5), abs=0.02)
    assert min(reached) > norm.cdf(own / 2**0.5) + 0.05


@pytest.mark.parametrize("releases", [1, 2])
def test_of_few_releases_the_finest_reading_is_told_from_the_others(releases):
    view, _ = federation(1.0, 1.0)
    rng = torch.Generator().manual_seed(1)
    rows = torch.arange(N)
    messages = [
        Message(Kind.GRADIENT, "active", "passive_1", step, "train", {"value": torch.randn(N, 2, generator=rng)}, rows)
        for step in range(releases)
    ]
    found = [
        name for name, source in list_sources(replace(view, messages=tuple(messages))).items() if not source.derived
    ]
    assert found == ["columns", f"gradient from active in train: {'mean' if releases == 1 else 'thirds'}"]


def test_a_row_is_held_against_means_of_the_other_rows():
    rng = torch.Generator().manual_seed(0)
    z = 12**0.5 * torch.linalg.qr(torch.randn(12, 3, generator=rng, dtype=torch.float64)).Q
    guessed = torch.rand(12, 2, generator=rng, dtype=torch.float64)
    found = _log_density(z, guessed)
    means = guessed.T @ z / guessed.sum(dim=0)[:, None]
    within = (z.T @ z - (means.T * guessed.sum(dim=0)) @ means) / 12 + 1e-6 * torch.eye(3, dtype=torch.float64)
    inverse = torch.linalg.inv(within)
    for i in range(12):
        others = torch.arange(12) != i
        mean = guessed[others].T @ z[others] / guessed[others].sum(dim=0)[:, None]
        expected = mean @ inverse @ z[i] - ((mean @ inverse) * mean).sum(dim=1) / 2
        torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("columns", [5, 500])
def test_regressions_are_those_of_the_library(columns):
    """Of a fold, fitted to the weighted guesses of all other folds, with its penalty; also where columns are many."""
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(5, columns, generator=rng, dtype=torch.float64) * (5 / columns) ** 0.5
    x = torch.randn(400, 5, generator=rng, dtype=torch.float64) @ mixed
    guessed = torch.softmax(2 * torch.randn(400, 2, generator=rng, dtype=torch.float64) + x[:, :2], dim=1)
    weight = 1 + 2 * (torch.arange(400) < 20).double()
    regressions = _Regressions({"train": x, "test": 2 * x}, guessed.shape, rng, "train")
    found = regressions.fit(guessed, weight, "train", torch.arange(20), last=True)
    expected, elsewhere = torch.zeros(400, 2), torch.zeros(N_FOLDS, 400, 2)
    for k in range(N_FOLDS):
        inside = (regressions.fold != k).numpy()
        share = weight[inside, None] * guessed[inside]
        library = LogisticRegression(C=1 / PENALTY, tol=1e-8, max_iter=1000)
        both = np.concatenate([x[inside].numpy()] * 2)
        library.fit(both, np.repeat([0, 1], inside.sum()), (share / share.sum()).T.flatten().numpy())
        expected[~inside] = torch.from_numpy(library.predict_log_proba(x[~inside].numpy())).float()
        elsewhere[k] = torch.from_numpy(library.predict_log_proba(2 * x.numpy()))
    torch.testing.assert_close(found["train"].float(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(found["test"].float(), elsewhere.mean(dim=0), atol=4e-4, rtol=0)


def test_components_of_more_columns_than_rows_are_those_of_their_decomposition():
    z = torch.randn(6, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = _whiten_tables([z], 6), torch.linalg.svd(standardize(z)).U[:, :5] * 6**0.5
    torch.testing.assert_close(found @ found.T, expected @ expected.T)  # up to a rotation


@pytest.mark.long
@pytest.mark.parametrize("attack", [SelfTraining(iterations=2), ForestTraining(iterations=2)], ids=lambda a: a.name)
def test_results_do_not_depend_on_how_libraries_round(monkeypatch, attack):
    """Trees would make large differences of small ones."""
    view, _ = federation(1.0, 1.0)
    before = attack(view, seed=0).scores["train"]

    def rounded_elsewhere(view, rng):
        guess = fuse_classes(view, rng)
        return replace(guess, scores={split: p * (1 + 1e-12) for split, p in guess.scores.items()})

    monkeypatch.setattr("vflsec.attacks.self_training.fuse_classes", rounded_elsewhere)
    torch.testing.assert_close(attack(view, seed=0).scores["train"], before, atol=1e-9, rtol=0)


def test_trees_are_those_of_the_library():
    view, _ = federation(1.0, 0.0)
    found = Trees()(view, seed=3).scores["test"].numpy()
    rng = torch.Generator().manual_seed(3)
    model = ExtraTreesClassifier(200, min_samples_leaf=2, random_state=int(torch.randint(2**31, (), generator=rng)))
    model.fit(view.features["train"][:KNOWN].numpy(), view.aux_labels.numpy())
    np.testing.assert_array_equal(found, model.predict_proba(view.features["test"].numpy()))


def test_a_class_without_a_known_row_is_never_guessed_by_trees():
    view, _ = federation(1.0, 0.0)
    scores = Trees()(replace(view, n_classes=3), seed=0).scores["train"]
    assert (scores[:, 2] == 0).all()
