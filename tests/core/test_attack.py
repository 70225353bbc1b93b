"""The base class: refuses, seeds, copies and checks, whatever the plug-in does."""

import pytest
import torch
from torch import nn

from vflsec.base.errors import BadGuess, InsufficientView
from vflsec.cli.show_ import describe
from vflsec.core.attack import Attack
from vflsec.core.knowledge import KNOWLEDGE
from vflsec.core.message import Kind, Message
from vflsec.core.view import Guess, Need, View


class Draw(Attack):
    """Guesses from its own stream and from torch's global one."""

    name = "draw"
    needs = frozenset({Need.FEATURES, Need.GRADIENTS})
    reference = "made for a test"
    verified = "unverified"

    def __init__(self, *, size=3, at="end"):
        self.size, self.at, self._cache = size, at, []

    def run(self, view, *, rng):
        return Guess({"train": torch.rand(4, 2, generator=rng) + torch.rand(4, 2)})


@pytest.fixture
def view():
    heard = Message(Kind.GRADIENT, "active", "passive_1", 0, "train", {"value": torch.ones(4, 2)}, torch.arange(4))
    model = nn.Linear(3, 2)
    return View(
        "passive_1", "passive", 2, {"train": torch.ones(4, 3)}, model, torch.tensor([1]), torch.tensor([0]), (heard,)
    )


def test_what_is_missing_is_named():
    with pytest.raises(InsufficientView, match="'draw' needs own features.*own model"):
        Draw().check("passive", [Need.MODEL])


def test_what_is_missing_comes_with_a_way_out():
    with pytest.raises(InsufficientView, match="--adversary passive_1; .*exchange=plain$"):
        Draw().check("passive", [Need.MODEL])
    assert all(need.way_out for need in KNOWLEDGE)


def test_the_wrong_side_is_named():
    with pytest.raises(InsufficientView, match="passive side, .*active side"):
        Draw().check("active", frozenset(KNOWLEDGE))


def test_the_seed_decides_both_streams(view):
    first, again, other = (Draw()(view, seed=seed).scores["train"] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_generator_stays(view):
    before = torch.get_rng_state()
    Draw()(view, seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_an_attack_may_spoil_its_copy_without_a_trace(view):
    class Vandal(Draw):
        def run(self, view, *, rng):
            with torch.no_grad():
                for tensor in (
                    *view.features.values(),
                    *view.model.parameters(),
                    view.aux_rows,
                    view.aux_labels,
                    view.messages[0].payload["value"],
                    view.messages[0].rows,
                ):
                    tensor.fill_(7)
            view.model.eval()
            return Guess({"train": torch.ones(4, 2)})

    weight = view.model.weight.clone()
    Vandal()(view, seed=0)
    assert (view.features["train"] == 1).all()
    assert torch.equal(view.model.weight, weight)
    assert view.model.training
    assert (view.aux_rows.item(), view.aux_labels.item()) == (1, 0)
    assert (view.messages[0].payload["value"] == 1).all()
    assert view.messages[0].rows.tolist() == [0, 1, 2, 3]


def test_gradients_are_on_and_the_guess_comes_detached(view):
    class Careless(Draw):
        def run(self, view, *, rng):
            return Guess({"train": view.model(view.features["train"])})

    with torch.no_grad():
        assert not Careless()(view, seed=0).scores["train"].requires_grad


def test_the_guess_is_checked(view):
    class Wrong(Draw):
        def run(self, view, *, rng):
            return Guess({"train": torch.zeros(3, 2)})

    with pytest.raises(BadGuess, match=r"\(4, 2\), got \(3, 2\)"):
        Wrong()(view, seed=0)


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        (None, "expected attack 'draw' to return a Guess, got NoneType"),
        (Guess({"train": torch.zeros(4, 2, dtype=torch.complex64)}), "scores of real numbers"),
        (Guess({"train": torch.zeros(4, 2)}, budget={"updates": "many"}), "number for budget 'updates'"),
    ],
)
def test_what_is_no_guess_is_refused(view, proposed, message):
    class Wrong(Draw):
        def run(self, view, *, rng):
            return proposed

    with pytest.raises(BadGuess, match=message):
        Wrong()(view, seed=0)


def test_acting_in_training_is_bringing_an_optimizer():
    class Active(Draw):
        def optimizer(self, parameters, lr):
            return torch.optim.SGD(parameters, lr)

    assert Active().acts_in_training
    assert not Draw().acts_in_training
    assert Draw().optimizer([], 0.1) is None
    assert Draw().alone() is None


def test_repr_and_card():
    assert repr(Draw(size=4)) == "draw(at='end', size=4)"
    assert describe("attack", Draw) == {
        "name": "draw",
        "recovers": "labels",
        "adversary": "passive",
        "behavior": "honest-but-curious",
        "needs": "own features, received gradients",
        "classes": "any number",
        "head": "any",
        "reference": "made for a test",
        "verified": "unverified",
        "version": 1,
    }
