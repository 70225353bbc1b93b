"""Attacks on integrity: what a malicious passive party does in training and prediction in place of what was agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from vflsec.core.attack import Attack, Target
from vflsec.core.errors import UsageError
from vflsec.core.message import Step
from vflsec.core.seeds import generator
from vflsec.core.view import Guess, Need, View

When = Literal["train", "predict", "both"]
"""The part of a run in which an attack acts."""


def integrity_attacks(malicious: Mapping[str, Attack]) -> dict[str, IntegrityAttack]:
    """Return those of the attacks that parties mount in training, by party, that are on integrity."""
    return {name: attack for name, attack in malicious.items() if isinstance(attack, IntegrityAttack)}


class IntegrityAttack(Attack):
    """A malicious passive party. It infers nothing: it spoils the joint model, or plants a backdoor in it.

    It acts wherever embeddings cross the cut layer for a supervised loss or for a prediction, and in no pre-training.
    Each hook is the honest behavior unless overridden. Its own defenses still act on whatever it sends. The ``step``
    that a hook is given has no labels. A party that colludes has an instance of its own.

    Attributes:
        aim: the class that a trigger is to lead to; None for an attack without a trigger.
    """

    side: ClassVar[Literal["passive", "active", "either"]] = "passive"
    target: ClassVar[Target] = "integrity"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OWN_FEATURES})
    aim: int | None = None
    _seed: int = 0
    _party: str = ""

    @final
    def join(self, view: View, *, seed: int) -> None:
        """Begin: learn what the party has before training.

        Args:
            view: without models and messages.
            seed: of all parties that collude.

        Raises:
            UsageError: the party knows too little for this attack.
        """
        self._seed, self._party = seed, view.party
        self.prepare(view.private_copy())

    def prepare(self, view: View) -> None:
        """Choose rows, measure columns: whatever is done before training."""

    def on_features(self, x: Tensor, step: Step) -> Tensor:
        """Return what the party's bottom model is fed in place of its columns ``x`` (B, p)."""
        return x

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Return what is sent in place of the embedding ``h`` (B, d)."""
        return h

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Return what the party's bottom model learns from in place of the gradient ``g`` (B, d) that it received."""
        return g

    def trigger(self, x: Tensor) -> Tensor:
        """Return the columns ``x`` (B, p) with the trigger, for an attack with an ``aim``."""
        return x

    @final
    def noise(self, step: Step, device: torch.device) -> torch.Generator:
        """Return this party's own randomness in ``step``; asked again, it is the same."""
        return generator(self._seed, self._party, step.phase, step.split, step.number, device=device)

    @final
    def agreed(self, step: Step, device: torch.device) -> torch.Generator:
        """Return the randomness in ``step`` of all parties that collude; asked again, it is the same."""
        return generator(self._seed, step.phase, step.split, step.number, device=device)

    @final
    def some(self, rate: float, step: Step) -> Tensor:
        """Return the rows of ``step`` that all parties that collude choose, (B,) bool, each with this probability."""
        device = step.rows.device
        return torch.rand(len(step.rows), generator=self.agreed(step, device), device=device) < rate

    @final
    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Refuse: there is nothing to guess."""
        raise UsageError(f"attack {self.name!r} is on integrity and guesses nothing: measure it with vflsec eval")

    @property
    def acts_in_training(self) -> bool:
        """True: each cell under attack is a training of its own."""
        return True
