"""Attribute inference: the classifier that it says, on what was received; nothing from what says nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Classifier
from sklearn.model_selection import StratifiedKFold

from vflsec.attacks.attribute import AttributeInference
from vflsec.base.errors import UsageError
from vflsec.core.message import Kind, Message
from vflsec.core.view import Need, View
from vflsec.inference.regression import PENALTIES, search_penalty
from vflsec.results import metrics
from vflsec.testing.conformance import AttackConformance

N = 3000


@pytest.mark.long
class TestReceived(AttackConformance):
    side = "active"

    def make(self):
        return AttributeInference(reads="received")


@pytest.mark.long
class TestOwn(AttackConformance):
    side = "active"

    def make(self):
        return AttributeInference(reads="own")


def make_view(received, own, y, *, aux=80, n_classes=2):
    """What is received of rows whose attribute is ``y``, all of them training rows."""
    rows = torch.arange(len(y))
    message = Message(Kind.EMBEDDING, "passive_1", "active", 0, "train", {"value": received}, rows)
    known = rows[:aux]
    features = {"train": own}
    return View("active", "active", n_classes, features, None, known, y[known], (message,), victim="passive_1")


def planted(shift, seed=0):
    """An attribute, a shifted embedding beside a column of noise, and an own column of noise."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (N,), generator=rng)
    h = torch.randn(N, 2, generator=rng)
    h[:, 0] += shift * y
    return h, torch.randn(N, 1, generator=rng), y


def auc(guess, y):
    return metrics.auc(guess.scores["train"].numpy(), y.numpy())


@pytest.mark.parametrize("shift", [1.0, 2.0])
def test_it_reaches_the_auc_of_two_gaussians(shift):
    """AUC = Phi(shift / sqrt(2))."""
    h, own, y = planted(shift)
    expected = 0.5 * (1 + torch.erf(torch.tensor(shift / 2))).item()
    assert auc(AttributeInference()(make_view(h, own, y, aux=400), seed=0), y) == pytest.approx(expected, abs=0.02)


def test_it_reads_what_is_the_better_source():
    h, own, y = planted(2.0)
    received, both, chosen = (AttributeInference(reads=reads)(make_view(own, h, y), seed=0) for reads in
                              ("received", "both", None))  # fmt: skip
    assert torch.equal(chosen.scores["train"], both.scores["train"])
    assert auc(both, y) > auc(received, y) + 0.2


@pytest.mark.parametrize("reads", ["received", "both"])
def test_embeddings_that_say_nothing_tell_nothing(reads):
    _, own, y = planted(2.0)
    guess = AttributeInference(reads=reads)(make_view(torch.zeros(N, 2), own, y), seed=0)
    assert auc(guess, y) == pytest.approx(0.5, abs=4 * 0.011)


@pytest.mark.long
def test_training_rows_are_read_as_often_as_serves_best_and_test_rows_once():
    """Noise of deviation 3 over ten releases is one of .95."""
    rng = torch.Generator().manual_seed(0)
    _, own, y = planted(2.0)
    rows = torch.arange(N)

    def say(split):
        h = 2.0 * y[:, None] + 3 * torch.randn(N, 1, generator=rng)
        return Message(Kind.EMBEDDING, "passive_1", "active", 0, "train", {"value": h}, rows, split)

    messages = (*(say("train") for _ in range(12)), say("test"))
    features = {"train": own, "test": own}
    view = replace(make_view(torch.zeros(N, 1), own, y, aux=200), messages=messages, features=features)
    one, many, chosen, once = (
        AttributeInference(releases=turns)(replace(view, adaptive=adaptive), seed=0)
        for turns, adaptive in ((1, True), (10, True), (None, True), (None, False))
    )
    for guess in (many, chosen, once):
        shift = (guess.scores["test"] - one.scores["test"]).diff(dim=1)  # thresholds depend on training rows
        torch.testing.assert_close(shift, shift[:1].expand_as(shift))
    told = [0.5 * (1 + torch.erf(torch.tensor(2 / noise / 2))).item() for noise in (3, 3 / 10**0.5)]
    assert auc(once, y) == pytest.approx(told[0], abs=0.03)
    assert auc(one, y) == pytest.approx(told[0], abs=0.03)
    for guess in (many, chosen):
        assert auc(guess, y) == pytest.approx(told[1], abs=0.03)
    assert metrics.auc(chosen.scores["test"].numpy(), y.numpy()) == pytest.approx(told[0], abs=0.03)


def test_a_column_that_is_the_same_everywhere_tells_nothing():
    h, own, y = planted(2.0)
    guess = AttributeInference()(make_view(h, own, 0 * y, n_classes=1), seed=0)
    assert guess.scores["train"].shape == (N, 1)
    assert not guess.scores["train"].any()


def test_its_name_in_tables_is_its_options_alone():
    expected = "attribute(column=None, folds=5, reads='own', releases=None, victim=None)"
    assert repr(AttributeInference(reads="both").alone()) == expected
    assert repr(AttributeInference().alone()) == "attribute-fusion(column=None, victim=None)"


def test_alone_reads_own_columns_and_no_message():
    attack = AttributeInference(victim="passive_2", column="SEX", folds=3, reads="both")
    alone = attack.alone()
    assert alone.needs == {Need.FEATURES, Need.AUX_LABELS}
    assert (alone.victim, alone.column, alone.folds, alone.reads) == ("passive_2", "SEX", 3, "own")
    assert Need.EMBEDDINGS in attack.needs
    h, own, y = planted(2.0)
    view = make_view(own, h, y)
    with_messages = alone(view, seed=0)
    assert torch.equal(alone(view.drop_federation(None), seed=0).scores["train"], with_messages.scores["train"])


def test_the_penalty_is_that_of_the_common_search():
    h, _, y = planted(1.0)
    x, labels = h[:80].double().numpy(), y[:80].numpy()
    folds = StratifiedKFold(5, shuffle=True, random_state=7)
    found = search_penalty(x, labels, 5, 7)
    values = []
    for penalty in PENALTIES:
        value = 0.0
        for fit, out in folds.split(x, labels):
            p = Classifier(C=penalty, max_iter=5000, tol=1e-8).fit(x[fit], labels[fit]).predict_proba(x[out])
            value += np.log(p[np.arange(len(out)), labels[out]]).sum()
        values.append(value)
    assert PENALTIES[np.argmax(values)] == found.model.C
    assert found.value == pytest.approx(max(values), rel=1e-3)


@pytest.mark.parametrize("rare", [0, 1, 2])
def test_a_category_that_is_too_rare_is_the_least_likely(rare):
    h, own, y = planted(3.0)
    y[80:200] = 2
    y[:rare] = 2
    scores = AttributeInference()(make_view(h, own, y, n_classes=3), seed=0).scores["train"]
    assert (scores.argmin(dim=1) == 2).all()
    assert metrics.auc(scores[200:, :2].numpy(), y[200:].numpy()) > 0.95


def test_a_row_without_an_answer_is_not_learned_from():
    h, own, y = planted(2.0)
    y[:5] = -1
    assert auc(AttributeInference()(make_view(h, own, y), seed=0), y.clamp_min(0)) > 0.85


def test_of_a_single_category_there_is_nothing_to_tell():
    h, own, y = planted(2.0)
    y[:80] = 1
    scores = AttributeInference()(make_view(h, own, y), seed=0).scores["train"]
    assert (scores.argmax(dim=1) == 1).all()


def test_with_one_sample_of_either_the_penalty_is_not_searched():
    h, own, y = planted(4.0)
    y = y.clone()
    order = torch.cat([(y == 0).nonzero()[:1, 0], (y == 1).nonzero()[:1, 0]])
    order = torch.cat([order, torch.tensor([i for i in range(N) if i not in set(order.tolist())])])
    assert auc(AttributeInference()(make_view(h[order], own[order], y[order], aux=2), seed=0), y[order]) > 0.6


def test_no_fold_is_refused():
    with pytest.raises(UsageError, match="folds > 0, got 0"):
        AttributeInference(folds=0)
