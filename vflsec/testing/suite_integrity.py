"""Conformance of attacks on integrity; see ``vflsec.testing.conformance`` for how to use it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vflsec.core.attack import IntegrityAttack
from vflsec.core.message import Step
from vflsec.core.method import Trained
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.run.adversary import observe_before
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation
from vflsec.testing.suite import Suite, are_same, check_stated, get_generators, list_changed

NAME = "passive_1"


class IntegrityConformance(Suite):
    """Checks of one attack on integrity, in a toy federation of two parties and two classes.

    Class attributes:
        aux: how many labels the adversary knows.
    """

    aux: ClassVar[int] = 40

    def make(self) -> IntegrityAttack:
        """Return the attack."""
        raise NotImplementedError

    def test_states_what_it_is(self) -> None:
        """The card is complete, and an earlier version cannot be zero."""
        attack = self.make()
        check_stated(attack, ("name", "side", "target", "needs", "reference", "verified", "version"))
        assert (attack.side, attack.target) == ("passive", "integrity")
        assert attack.name in repr(attack)

    def test_keeps_shape_and_dtype(self) -> None:
        """Whatever it feeds, sends and learns from is of the kind that it stands for, and finite."""
        attack, party = self._join()
        for step in _run_steps():
            for hook, value in _list_hooks(attack, party, step):
                result = hook(value.clone(), step)
                assert result.shape == value.shape, f"{hook.__name__} made {tuple(value.shape)} {tuple(result.shape)}"
                assert result.dtype == value.dtype
                assert torch.isfinite(result).all()

    def test_leaves_its_input_untouched(self) -> None:
        """What a hook is given stays as it was: it may be the party's own columns."""
        attack, party = self._join()
        for step in _run_steps():
            for hook, value in _list_hooks(attack, party, step):
                given = value.clone()
                hook(given, step)
                assert are_same(given, value), f"{hook.__name__} changed what it was given"

    def test_equal_seeds_give_equal_models(self) -> None:
        """Bit for bit, and the same predictions when asked twice."""
        first, again = (self._train(self.make()) for _ in range(2))
        assert all(are_same(a, b) for a, b in zip(_collect(first), _collect(again), strict=True)), "not reproducible"
        assert are_same(first.predict("test"), again.predict("test"))
        assert are_same(first.predict("test"), first.predict("test")), "a prediction depends on those before it"

    def test_leaves_no_trace(self) -> None:
        """The party's columns stay as they were, and so do all global generators."""
        attack, party = self._join()
        before = _copy_all(party)
        for step in _run_steps():
            for hook, value in _list_hooks(attack, party, step):
                hook(value.clone(), step)
        traces = list_changed(before, _copy_all(party))
        assert not traces, f"the attack changed {', '.join(traces)}"

    def test_makes_a_difference(self) -> None:
        """With its defaults, predictions on test rows are others than those of an honest federation."""
        honest, attacked = self._train(None), self._train(self.make())
        assert not are_same(honest.predict("test"), attacked.predict("test")), "the attack changes nothing"

    def test_a_trigger_has_an_aim(self) -> None:
        """An attack with an aim has a trigger that can be seen on every row, and one without has none."""
        attack, party = self._join()
        x = party.features["test"]
        changed = (attack.trigger(x.clone()) != x).any(dim=1)
        assert bool(changed.float().mean() > 0.5) is (attack.aim is not None)

    def _join(self) -> tuple[IntegrityAttack, Party]:
        federation, attack = make_toy_federation(seed=0), self.make()
        party = federation.parties[NAME]
        attack.join(observe_before(federation, party, AuxSpec(n=self.aux)), seed=7)
        return attack, party

    def _train(self, attack: IntegrityAttack | None) -> Trained:
        federation = make_toy_federation(seed=0)
        if attack:
            attack.join(observe_before(federation, federation.parties[NAME], AuxSpec(n=self.aux)), seed=7)
            federation.malicious = {NAME: attack}
        return FedSplitNN(TrainSpec(epochs=2, batch=64, lr=5e-3), ModelSpec(bottom=(8,))).fit(federation)


def _run_steps() -> list[Step]:
    """Two updates and a prediction, of the first rows."""
    rows = torch.arange(100)
    return [Step(0, "train", rows), Step(1, "train", rows), Step(0, "predict", rows, split="test")]


def _list_hooks(attack: IntegrityAttack, party: Party, step: Step) -> list[tuple[Any, Tensor]]:
    """Return each hook with what it would be given in ``step``."""
    h = torch.randn(len(step.rows), 3, generator=torch.Generator().manual_seed(step.number))
    hooks = [(attack.on_features, party.features[step.split][step.rows]), (attack.on_embedding, h)]
    return [*hooks, (attack.on_gradient, h)] if step.learns else hooks


def _collect(trained: Trained) -> list[Tensor]:
    return [p.detach() for party in trained.federation.parties.values() for p in party.modules.parameters()]


def _copy_all(party: Party) -> dict[str, Any]:
    """Return copies of everything that an attack might change, by what it is called."""
    return get_generators() | {f"the {split} columns": x.clone() for split, x in party.features.items()}
