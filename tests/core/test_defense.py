"""The base class: settings refused in words, hooks that do nothing, a repr that shows every option."""

from itertools import permutations

import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.cli.show_ import describe
from vflsec.core import hooks
from vflsec.core.defense import Defense, DefenseStack, list_hooks
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
    assert defense.on_batch([x], x) == ([x], x)
    assert defense.on_received(x, "passive_1") is x
    assert defense.penalty(x, x, "passive_1") is None
    assert tuple(defense.modules()) == ()
    assert defense.prepare({"passive_1": 3}, n_classes=2, rng=None) is None
    assert defense.plan_releases(None) is None
    assert defense.privacy_spent(1) is None
    defense.check_task(10)


class Turning(AtHome):
    """Of three classes each becomes the next."""

    def on_labels(self, y, *, features, n_classes, rng):
        assert y.dim() == 1
        return (y + int(self.strength)) % n_classes


class Softening(AtHome):
    softens = True

    def on_labels(self, y, *, features, n_classes, rng):
        hard = torch.nn.functional.one_hot(y, n_classes).float() if y.dim() == 1 else y
        return hard * (1 - self.strength) + self.strength * features


class Coding(Softening):
    """Shifts classes, and back."""

    def on_labels(self, y, **rest):
        return super().on_labels(y, **rest).roll(1, dims=1)

    def on_predictions(self, logits):
        return logits.roll(-1, dims=1)


class Mixing(AtHome):
    def on_batch(self, embeddings, targets):
        return [2 * h for h in embeddings], targets


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_class_numbers_come_first_and_codes_last_in_whatever_order(order):
    y, x = torch.tensor([0, 1, 2]), torch.eye(3)[[0, 0, 0]]
    three = [Turning(1.0), Softening(0.5), Coding(0.25)]
    labels, targets = DefenseStack(three[k] for k in order).training_targets(y, x, n_classes=3, rng=None)
    assert labels.tolist() == [1, 2, 0]
    softened = 0.5 * torch.eye(3)[labels] + 0.5 * x
    assert torch.allclose(targets, (0.75 * softened + 0.25 * x).roll(1, dims=1))


def test_without_softening_both_are_the_same_numbers_and_strength_zero_is_nobody():
    y = torch.tensor([0, 1, 2])
    labels, targets = DefenseStack([Turning(1.0), Turning(1.0), Softening(0.0)]).training_targets(
        y, y, n_classes=3, rng=None
    )
    assert labels is targets
    assert labels.tolist() == [2, 0, 1]
    labels, targets = DefenseStack().training_targets(y, y, n_classes=3, rng=None)
    assert labels is targets is y


def test_what_was_done_last_is_undone_first():
    z = torch.tensor([[1.0, 2.0, 3.0]])
    assert DefenseStack([Coding(0.5), Coding(0.5)]).decode_logits(z).tolist() == [[3.0, 1.0, 2.0]]
    assert DefenseStack([Coding(0.0)]).decode_logits(z) is z


def test_a_defense_of_updates_acts_at_labels_and_says_so():
    assert DefenseStack([Mixing(1.0)]).select(hooks.BATCH)
    assert not DefenseStack([Mixing(0.0), Coding(1.0)]).select(hooks.BATCH)
    assert Mixing(1.0, at=["labels"]).kinds == frozenset()
    assert describe("defense", Mixing)["acts at"] == describe("defense", Coding)["acts at"] == "labels"
    with pytest.raises(UsageError, match="plain without a point.*@labels"):
        AtHome(1.0, at=["labels"])


class Inherited(AtHome):
    """Has hooks of messages, and no point at which they could act."""

    on_embedding = on_gradient = lambda self, value, release: value

    def on_update(self, modules, rows, rng):
        pass


def test_a_defense_touches_the_hooks_that_it_overrides_and_can_run():
    assert list_hooks(Plain) == list_hooks(Plain(1.0)) == frozenset()
    assert list_hooks(Coding) == list_hooks(Coding(0.0)) == {hooks.LABELS, hooks.PREDICTIONS}
    assert list_hooks(Inherited) == {hooks.UPDATE}
    assert not Coding(0.0).runs(hooks.LABELS, "train")
    assert Coding(1.0).runs(hooks.LABELS, "train")
    assert not Coding(1.0).runs(hooks.BATCH, "train")


def test_every_hook_of_a_defense_is_declared_or_changes_nothing():
    """A new hook that is not declared would be missed by stage keys."""
    own = {name for name, value in vars(Defense).items() if callable(value) and not name.startswith("_")}
    asked = {"acts", "runs", "check_task", "modules", "prepare", "plan_releases", "privacy_spent"}
    assert own - asked == {hook.name for hook in hooks.HOOKS}


def test_the_card_says_who_runs_it_when_and_whether_training_changes():
    card = describe("defense", Coding)
    assert card["runs at"] == "the active party: learning from labels, prediction"
    assert card["changes training"] == "yes"
    assert describe("defense", Inherited)["acts at"] == "the updates of its party's own models"


def test_the_card_is_data():
    assert describe("defense", Plain) == {
        "name": "plain",
        "acts at": "gradient, embedding",
        "runs at": "",
        "changes training": "no",
        "strength": "strength",
        "usual strengths": "1, 5, 25",
        "reference": "made for a test",
        "guarantee": "none",
    }
