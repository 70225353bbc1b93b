"""Truth and knowledge travel apart."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vflsec.base.errors import BadGuess
from vflsec.base.seeds import make_rng
from vflsec.core.knowledge import Knowledge
from vflsec.core.message import Kind, Message
from vflsec.core.view import GroundTruth, Guess, Need, View


def said(kind, sender, receiver):
    return Message(kind, sender, receiver, 0, "train", {"value": torch.ones(1, 1)})


@pytest.fixture
def view():
    features = {"train": torch.zeros(3, 2), "test": torch.zeros(2, 2)}
    return View("passive_1", "passive", 2, features, nn.Linear(2, 1), torch.tensor([0, 2]), torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {Need.FEATURES, Need.MODEL, Need.AUX_LABELS}),
        ({"features": {}}, {Need.MODEL, Need.AUX_LABELS}),
        ({"model": None}, {Need.FEATURES, Need.AUX_LABELS}),
        ({"aux_rows": torch.tensor([])}, {Need.FEATURES, Need.MODEL}),
        (
            {"messages": (said(Kind.GRADIENT, "active", "passive_1"),)},
            {Need.FEATURES, Need.MODEL, Need.AUX_LABELS, Need.GRADIENTS},
        ),
        (  # what it sent itself, and what went to others, it did not receive
            {"messages": (said(Kind.EMBEDDING, "passive_1", "active"), said(Kind.GRADIENT, "active", "passive_2"))},
            {Need.FEATURES, Need.MODEL, Need.AUX_LABELS},
        ),
        (
            {"party": "passive_1+active", "messages": (said(Kind.EMBEDDING, "passive_2", "active"),)},
            {Need.FEATURES, Need.MODEL, Need.AUX_LABELS, Need.EMBEDDINGS},
        ),
    ],
)
def test_a_view_has_what_it_holds(view, changes, expected):
    assert {need for need in replace(view, **changes).has() if not need.sent} == expected


def test_knowledge_without_a_place_is_in_no_view(view):
    assert Knowledge("a secret", "none") not in view.has([Knowledge("a secret", "none")])


def test_knowing_fewer_labels(view):
    fewer = view.restrict(torch.tensor([1]))
    assert (fewer.aux_rows.tolist(), fewer.aux_labels.tolist()) == ([2], [0])


def test_without_the_federation_there_is_neither_training_nor_talk(view):
    fresh = nn.Linear(2, 1)
    alone = replace(view, messages=(said(Kind.GRADIENT, "active", "passive_1"),)).drop_federation(fresh)
    assert alone.model is fresh
    assert alone.messages == ()


def test_a_secret_does_not_print_itself():
    assert repr(GroundTruth({"train": torch.tensor([1, 0])})) == "GroundTruth()"


def test_a_shuffled_secret_keeps_the_classes():
    labels = {"train": torch.arange(50), "test": torch.arange(9)}
    shuffled = GroundTruth(labels).shuffle_labels(make_rng(0, "x"))
    for split, y in labels.items():
        assert torch.equal(shuffled.labels[split].sort().values, y)
        assert not torch.equal(shuffled.labels[split], y)


@pytest.mark.parametrize(
    ("scores", "match"),
    [
        ({}, "least one split, got none"),
        ({"val": torch.zeros(3, 2)}, r"\['test', 'train'\], got .*'val'"),
        ({"train": torch.zeros(3)}, r"\(3, 2\), got \(3,\)"),
        ({"train": torch.zeros(3, 3)}, r"got \(3, 3\)"),
        ({"test": torch.tensor([[0, float("nan")], [float("inf"), 0]])}, "finite test scores, got 2"),
    ],
)
def test_a_guess_that_does_not_fit_is_refused(view, scores, match):
    with pytest.raises(BadGuess, match=match):
        Guess(scores).check(view)


def test_a_checked_guess_is_detached_and_keeps_its_facts(view):
    guess = Guess({"train": torch.zeros(3, 2, requires_grad=True)}, converged=False, budget={"steps": 3}).check(view)
    assert not guess.scores["train"].requires_grad
    assert (guess.converged, guess.budget) == (False, {"steps": 3})
