"""Attacks on integrity: a malicious passive party deviates from the protocol in training and prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.base.seeds import generator
from vflsec.core.attack import Attack, Target
from vflsec.core.message import Step
from vflsec.core.view import Guess, Need, View

When = Literal["train", "predict", "both"]
"""The part of a run in which an attack acts."""


def integrity_attacks(malicious: Mapping[str, Attack]) -> dict[str, IntegrityAttack]:
    """Return the attacks on integrity among those that parties mount in training, by party."""
    return {name: attack for name, attack in malicious.items() if isinstance(attack, IntegrityAttack)}


class IntegrityAttack(Attack):
    """A malicious passive party that degrades the joint model, or plants a backdoor in it; it infers nothing.

    It acts whenever it sends embeddings for a supervised loss or a prediction, and never in pre-training. Each hook is
    honest unless overridden. The party's own defenses still act on its messages. The ``step`` that a hook receives has
    no labels. Each colluding party has an instance of its own.

    Attributes:
        aim: the class that a trigger causes; None for an attack without a trigger.
    """

    side: ClassVar[Literal["passive", "active", "either"]] = "passive"
    target: ClassVar[Target] = "integrity"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OWN_FEATURES})
    aim: int | None = None
    _seed: int = 0
    _party: str = ""

    @final
    def join(self, view: View, *, seed: int) -> None:
        """Start with the view of the party before training.

        Args:
            view: without models and messages.
            seed: shared by colluding parties.

        Raises:
            UsageError: the party knows too little for this attack.
        """
        self._seed, self._party = seed, view.party
        self.prepare(view.private_copy())

    def prepare(self, view: View) -> None:
        """Prepare the attack before training, for example choose rows."""

    def on_features(self, x: Tensor, step: Step) -> Tensor:
        """Return the input of the party's bottom model in place of its columns ``x`` (B, p)."""
        return x

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Return the embedding that is sent in place of ``h`` (B, d)."""
        return h

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Return the gradient that the bottom model learns from in place of the received ``g`` (B, d)."""
        return g

    def trigger(self, x: Tensor) -> Tensor:
        """Return the columns ``x`` (B, p) with the trigger, for an attack with an ``aim``."""
        return x

    @final
    def noise(self, step: Step, device: torch.device) -> torch.Generator:
        """Return a generator of this party in ``step``; every call returns the same stream."""
        return generator(self._seed, self._party, step.phase, step.split, step.number, device=device)

    @final
    def agreed(self, step: Step, device: torch.device) -> torch.Generator:
        """Return a generator that colluding parties share in ``step``; every call returns the same stream."""
        return generator(self._seed, step.phase, step.split, step.number, device=device)

    @final
    def some(self, rate: float, step: Step) -> Tensor:
        """Return the rows of ``step`` that colluding parties choose, (B,) bool, each with probability ``rate``."""
        device = step.rows.device
        return torch.rand(len(step.rows), generator=self.agreed(step, device), device=device) < rate

    @final
    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Raise UsageError, since there is nothing to guess."""
        raise UsageError(f"attack {self.name!r} is on integrity and guesses nothing: measure it with vflsec eval")

    @property
    def acts_in_training(self) -> bool:
        """True, since each cell under attack is a training of its own."""
        return True
