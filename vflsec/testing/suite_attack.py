"""Conformance of attacks; see ``vflsec.testing.conformance`` for how to use it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.errors import InsufficientView
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.method import ModelSpec, Trained, TrainSpec
from vflsec.core.seeds import generator
from vflsec.core.view import Guess, Need, Secret, View
from vflsec.evaluation.adversary import draw_auxiliary, secret_of, view_of
from vflsec.evaluation.score import score
from vflsec.evaluation.spec import AuxSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.testing.suite import SIGMAS, Suite, auc_error, refused, same, stated
from vflsec.testing.worlds import toy_world

SEEDS = (0, 1, 2)
ADVERSARY = {"passive": "passive_1", "active": "active"}
WITHOUT_MESSAGES = frozenset({Need.OWN_FEATURES, Need.OWN_MODEL, Need.AUX_LABELS})


class AttackConformance(Suite):
    """Checks of one attack, against a small split network in toy worlds of two parties and two classes.

    Class attributes:
        method_options: of FedSplitNN's ``ModelSpec``, for an attack that works at some boundaries only.
        aux: how many labels the adversary knows.
    """

    method_options: ClassVar[Mapping[str, Any]] = {}
    aux: ClassVar[int] = 40

    def make(self) -> Attack:
        """Return the attack, with a budget small enough for tests."""
        raise NotImplementedError

    def test_states_what_it_is(self) -> None:
        """The card is complete, and an earlier version cannot be zero."""
        attack = self.make()
        stated(attack, ("name", "side", "target", "needs", "reference", "verified", "version"))
        assert attack.side in ADVERSARY
        assert attack.needs <= frozenset(Need), f"unknown needs {attack.needs - frozenset(Need)}"
        assert attack.name in repr(attack)

    def test_refuses_a_poor_view(self) -> None:
        """Each missing need is named, and so is the wrong side."""
        attack, scene = self.make(), self._scene("planted", 0)
        for need in attack.needs:
            with refused(InsufficientView, naming=need.value):
                attack(without(scene.view, need), seed=0)
        other = "active" if attack.side == "passive" else "passive"
        with refused(InsufficientView, naming=other):
            attack(replace(scene.view, side=other), seed=0)

    def test_guesses_for_the_rows_it_was_given(self) -> None:
        """Finite scores (n, C), detached, for splits of the view."""
        view = self._scene("planted", 0).view
        for split, scores in self.make()(view, seed=0).scores.items():
            assert tuple(scores.shape) == (len(view.features[split]), view.n_classes)
            assert torch.isfinite(scores).all()
            assert not scores.requires_grad

    def test_equal_seeds_give_equal_guesses(self) -> None:
        """Bit for bit, from one instance used twice: no state stays in it, no randomness comes from elsewhere."""
        attack, view = self.make(), self._scene("planted", 0).view
        assert equal(attack(view, seed=3), attack(view, seed=3)), f"{attack!r} is not reproducible"

    def test_leaves_no_trace(self) -> None:
        """The view, its model and its messages stay as they were, and so do all global generators."""
        view = self._scene("planted", 0).view.private_copy()  # an attack that fails here must not taint the scene
        before = footprint(view)
        self.make()(view, seed=0)
        after = footprint(view)
        changed = [name for name, value in before.items() if not _equal(value, after[name])]
        assert not changed, f"the attack changed {', '.join(changed)}"

    def test_guess_does_not_depend_on_the_truth(self) -> None:
        """Labels flipped after the view was built change nothing: nothing in the view reaches them."""
        attack, scene = self.make(), self._scene("planted", 0)
        honest = attack(scene.view, seed=0)
        labels = scene.trained.world.active.labels
        try:
            for y in labels.values():
                y.neg_().add_(1)
            assert equal(honest, attack(scene.view, seed=0)), "the guess follows labels that the adversary cannot see"
        finally:
            for y in labels.values():
                y.neg_().add_(1)

    def test_beats_chance_on_a_planted_leak(self) -> None:
        """AUC on rows whose label it did not know, where every party's columns give the class away."""
        leak = self._leak("planted")
        assert leak.mean > 0.5 + SIGMAS * leak.error, f"AUC {leak}: not above chance where the leak is planted"

    def test_is_at_chance_against_shuffled_labels(self) -> None:
        """The scorer's null: a guess cannot know an order that was drawn after it."""
        leak = self._leak("planted", shuffled=True)
        assert abs(leak.mean - 0.5) < SIGMAS * leak.error, f"AUC {leak} against shuffled labels"

    def test_is_at_chance_without_a_signal(self) -> None:
        """Where no column has to do with the class, features and models tell nothing of rows not trained on.

        Gradients do tell: they carry the label whatever the features say, so attacks on messages are left out.
        """
        if not self.make().needs <= WITHOUT_MESSAGES:
            raise SkipTest("reads messages, which carry labels even where features do not")
        leak = self._leak("none", splits=("test",))
        assert abs(leak.mean - 0.5) < SIGMAS * leak.error, f"AUC {leak} where there is nothing to learn"

    def _scene(self, signal: str, seed: int) -> Scene:
        attack = self.make()
        settings = (attack.side, signal, seed, self.aux, tuple(sorted(self.method_options.items())))
        return _trained(*settings, attack) if attack.acts_in_training else _scene(*settings)

    def _leak(self, signal: str, *, shuffled: bool = False, splits: tuple[str, ...] = ("train", "test")) -> Leak:
        """Return the AUC, mean over seeds, on the first of ``splits`` that the attack guesses."""
        if self.make().target != "labels":
            raise SkipTest("recovers something else than labels")
        values, errors = [], []
        for seed in SEEDS:
            scene = self._scene(signal, seed)
            guess = self.make()(scene.view, seed=seed)
            split = next((split for split in splits if split in guess.scores), None)
            if split is None:
                raise SkipTest(f"guesses no labels of {splits[0]} rows")
            secret = scene.secret.shuffled(generator(seed, "shuffle")) if shuffled else scene.secret
            found = score(guess, secret, headline="auc", exclude=scene.view.aux_rows, seed=0)
            values.append(found[split]["metrics"]["auc"])
            errors.append(auc_error(secret.labels[split], len(SEEDS)))
        return Leak(float(np.mean(values)), max(errors))


class Leak(NamedTuple):
    """A mean AUC, and the standard error it would have if the guess knew nothing."""

    mean: float
    error: float

    def __str__(self) -> str:
        """Return both numbers."""
        return f"{self.mean:.3f} (standard error {self.error:.3f})"


class Scene(NamedTuple):
    """A trained toy federation, its adversary's view and the truth."""

    trained: Trained
    view: View
    secret: Secret


@lru_cache(maxsize=16)
def _scene(side: str, signal: str, seed: int, aux: int, model: tuple[tuple[str, Any], ...]) -> Scene:
    return _trained(side, signal, seed, aux, model, None)


def _trained(
    side: str,
    signal: str,
    seed: int,
    aux: int,
    model: tuple[tuple[str, Any], ...],
    attack: Attack | None,
) -> Scene:
    world, name = toy_world(seed=seed, signal=signal), ADVERSARY[side]
    if attack:
        world.malicious = {name: attack}
    transcript = Transcript(frozenset({name}), frozenset(Kind))
    world.channel.taps.append(transcript)
    spec = ModelSpec(**{"bottom": (16,), **dict(model)})
    trained = FedSplitNN(TrainSpec(epochs=15, batch=64, lr=5e-3), spec).fit(world)
    rows = draw_auxiliary(world.active.labels["train"], world.n_classes, AuxSpec(n=aux), seed)
    view = view_of(trained, [world.parties[name]], rows, tuple(transcript.messages))
    return Scene(trained, view, secret_of(world))


def without(view: View, need: Need) -> View:
    """Return ``view`` without what ``need`` names."""
    kinds = {Need.GRADIENTS: Kind.GRADIENT, Need.EMBEDDINGS: Kind.EMBEDDING}
    if need in kinds:
        return replace(view, messages=tuple(m for m in view.messages if m.kind != kinds[need]))
    poor: dict[Need, dict[str, Any]] = {
        Need.OWN_FEATURES: {"features": {}},
        Need.OWN_MODEL: {"model": None},
        Need.AUX_LABELS: {"aux_rows": view.aux_rows[:0], "aux_labels": view.aux_labels[:0]},
    }
    return replace(view, **poor[need])


def equal(a: Guess, b: Guess) -> bool:
    """Whether two guesses are equal bit for bit."""
    return a.scores.keys() == b.scores.keys() and all(same(a.scores[split], b.scores[split]) for split in a.scores)


def footprint(view: View) -> dict[str, Any]:
    """Return copies of everything that an attack might change, by what it is called."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002  (the global one, to see that it stays)
    found: dict[str, Any] = {
        "torch's global generator": torch.get_rng_state(),
        "numpy's global generator": repr(numpy_state),
        "Python's global generator": random.getstate(),
        "the auxiliary rows": view.aux_rows.clone(),
        "the auxiliary labels": view.aux_labels.clone(),
    }
    found |= {f"the {split} features": x.clone() for split, x in view.features.items()}
    if view.model is not None:
        found |= {f"the model's {key}": value.clone() for key, value in view.model.state_dict().items()}
        found["the model's mode"] = [module.training for module in view.model.modules()]
        found["what the model trains"] = [parameter.requires_grad for parameter in view.model.parameters()]
    for number, message in enumerate(view.messages):
        found |= {f"message {number}'s {key}": value for key, value in _tensors(message)}
    return found


def _tensors(message: Message) -> Iterator[tuple[str, Tensor]]:
    for key, value in message.payload.items():
        if isinstance(value, Tensor):
            yield key, value.clone()


def _equal(a: Any, b: Any) -> bool:
    return same(a, b) if isinstance(a, Tensor) else bool(a == b)
