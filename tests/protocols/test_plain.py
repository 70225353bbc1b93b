"""Plain split learning carries both ways what the parties' defenses let through."""

import pytest
import torch

from vflsec.core.message import Kind, Route, Step
from vflsec.defenses.iso import IsotropicNoise
from vflsec.protocols.plain import PlainBoundary

ROWS = torch.tensor([4, 2, 7])


@pytest.fixture
def heard(federation):
    messages = []
    federation.channel.taps.append(messages.append)
    return messages


@pytest.fixture
def boundary(federation, heard):
    return PlainBoundary(federation.passive[0], federation.active)


def test_undefended_it_carries_the_values_as_they_are(boundary, federation, heard):
    h, g = torch.rand(3, 2, requires_grad=True), torch.rand(3, 2)
    step = Step(5, "train", ROWS, torch.tensor([0, 1, 0]))
    arrived, returned = boundary.forward(h, step), boundary.backward(g, step)
    assert torch.equal(arrived, h)
    assert torch.equal(returned, g)
    assert not arrived.requires_grad
    assert [(m.kind, m.sender, m.receiver, m.step, m.phase) for m in heard] == [
        (Kind.EMBEDDING, "passive_1", "active", 5, "train"),
        (Kind.GRADIENT, "active", "passive_1", 5, "train"),
    ]
    assert all(torch.equal(message.rows, ROWS) for message in heard)
    assert federation.channel.traffic == {
        Route("train", "passive_1", "active", Kind.EMBEDDING): 24,
        Route("train", "active", "passive_1", Kind.GRADIENT): 24,
    }


@pytest.mark.parametrize("point", ["embedding", "gradient"])
def test_the_sender_defends_what_it_sends(boundary, federation, point):
    for party in federation.parties.values():
        party.defenses = [IsotropicNoise(1.0, at=[point])]
    h, g = torch.rand(3, 2), torch.rand(3, 2)
    step = Step(0, "train", ROWS, torch.tensor([0, 1, 0]))
    assert torch.equal(boundary.forward(h, step), h) == (point != "embedding")
    assert torch.equal(boundary.backward(g, step), g) == (point != "gradient")


def test_at_prediction_nobody_has_labels(boundary):
    assert boundary.forward(torch.ones(3, 2), Step(0, "predict", ROWS)).shape == (3, 2)
