"""The base class: settings refused in words, hooks that do nothing, a repr that shows every option."""

import pytest
import torch

from vflsec.core.defense import Defense, describe
from vflsec.core.errors import UsageError
from vflsec.core.message import Kind


class Plain(Defense):
    name = "plain"
    reference = "made for a test"
    guarantee = "none"
    points = (Kind.GRADIENT, Kind.EMBEDDING)


class Keyed(Plain):
    def __init__(self, strength, *, bound=2, at=None):
        super().__init__(strength, at=at)
        self.bound = bound
        self._cache = None


class AtHome(Plain):
    points = ()


@pytest.mark.parametrize(
    ("strength", "match"),
    [(-0.1, "expected strength >= 0, got -0.1"), (float("nan"), "expected strength >= 0"), (float("inf"), "finite")],
)
def test_an_impossible_strength_is_refused(strength, match):
    with pytest.raises(UsageError, match=match):
        Plain(strength)


@pytest.mark.parametrize(
    ("point", "match"), [("gradeint", "Did you mean gradient"), ("parameters", "Known: embedding, gradient")]
)
def test_a_point_where_it_cannot_act_is_refused(point, match):
    with pytest.raises(UsageError, match=match):
        Plain(1.0, at=[point])


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (Plain(5), "plain:strength=5@gradient"),
        (Plain(0.5, at=["gradient", "embedding"]), "plain:strength=0.5@embedding+gradient"),
        (Keyed(1.0), "plain:strength=1,bound=2@gradient"),
        (AtHome(1.0), "plain:strength=1"),
    ],
)
def test_repr_shows_every_option(made, shown):
    assert repr(made) == shown


def test_every_hook_is_the_identity():
    defense, x = Plain(1.0), torch.ones(2, 3)
    for hook in (defense.on_embedding, defense.on_gradient, defense.on_parameters):
        assert hook(x, None) is x
    assert defense.on_labels(x, features=x, n_classes=2, rng=None) is x
    assert defense.on_predictions(x) is x
    assert defense.on_received(x, "passive_1") is x
    assert defense.penalty(x, x, "passive_1") is None
    assert tuple(defense.modules()) == ()
    assert defense.prepare({"passive_1": 3}, n_classes=2, rng=None) is None
    assert defense.expect(None) is None
    assert defense.spent(1) is None
    defense.suit(10)


def test_the_card_is_data():
    assert describe(Plain) == {
        "name": "plain",
        "acts at": "gradient, embedding",
        "strength": "strength",
        "reference": "made for a test",
        "guarantee": "none",
    }
