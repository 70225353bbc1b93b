"""Base class of learning algorithms: phases that can be cached apart, run by the parties of a federation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from vflsec.core import hooks
from vflsec.core.defense import Defense, touches
from vflsec.core.errors import Diverged, UsageError
from vflsec.core.federation import Federation, save_states
from vflsec.core.hooks import Hook
from vflsec.core.message import Kind, Message
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.core.view import Need

Progress = Callable[[str, int, int], None]


class Method(ABC):
    """A VFL learning algorithm.

    Class attributes:
        name: registry name.
        phases: what training consists of, in order; each but the last is stored apart, and shared by all that follows.
        messages: the kinds of messages in each phase.
        visible_to: which needs of an attack are met, by the side of the adversary; empty where there is no adversary.
        reference: paper and section.
        differs: in what training differs from that paper, and its authors' choices where the paper is silent, one
            sentence each; empty where nothing is known.
        version: raised whenever results change.
        stored_modules: roles of the parties' models that the phases before the last have trained.
        learns: the hooks of defenses that a phase runs, besides those of its messages; a phase that is not named here
            counts as one that runs all. A phase that runs no hook of labels reads none, and is shared by all label
            budgets.
        last_phase_options: options that only the last phase reads.
        joint: options that make pre-training an affair of several parties.
        prior: the method whose pre-training, less ``joint``, any party could have done alone: what an adversary infers
            from that belongs to *alone*; or None.
        encoder: what ``model.encoder`` None stands for.
        source_phases: phases whose messages are about the source's rows and none of the active party: only an attack
            on the source's rows reads them.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
    """

    name: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = ("train",)
    reference: ClassVar[str]
    differs: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    visible_to: ClassVar[Mapping[str, frozenset[Need]]]
    messages: ClassVar[Mapping[str, frozenset[Kind]]]
    stored_modules: ClassVar[frozenset[str]] = frozenset()
    learns: ClassVar[Mapping[str, frozenset[Hook]]] = {}
    last_phase_options: ClassVar[frozenset[str]] = frozenset()
    joint: ClassVar[frozenset[str]] = frozenset()
    prior: ClassVar[str | None] = None
    encoder: ClassVar[Literal["mlp", "auto"]] = "mlp"
    source_phases: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, train: TrainSpec, model: ModelSpec) -> None:
        self.train_spec = train
        self.model_spec = model

    @classmethod
    def messages_in(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:  # noqa: ARG003  (for subclasses)
        """Return the kinds of messages in ``phase``, with the method's ``options``; predicting is as the last one."""
        return cls.messages[phase if phase in cls.phases else cls.phases[-1]]

    @classmethod
    def runs(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Hook]:
        """Return the hooks of defenses that ``phase`` runs, with the method's ``options``."""
        said = cls.messages_in(phase, options)
        of_messages = {hook for kind, hook in hooks.OF_KIND.items() if kind in said}
        learns = cls.learns.get(phase if phase in cls.phases else cls.phases[-1], hooks.SPLIT_LEARNING)
        return frozenset(of_messages) | learns | {hooks.TRAINING}  # every phase is watched, see ``run``

    @classmethod
    def nested_options(cls) -> Mapping[str, type]:
        """Return the options that are themselves options of something, by name, with the class that they go to."""
        return {}

    @abstractmethod
    def build(self, federation: Federation) -> None:
        """Give every party its models, drawn from the federation's seed."""

    @property
    def pretraining(self) -> PretrainSpec | None:
        """The numbers of pre-training that are used, the method's own where none are given; None without them."""
        return None

    def check(self, federation: Federation) -> None:  # noqa: B027  (a hook: many methods need nothing more)
        """Raise UsageError if ``federation``, already built, lacks what training needs; trains nothing."""

    @abstractmethod
    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run one phase in place and return its loss by epoch.

        A phase draws all its randomness from the federation's seed and its own name, so that a phase that starts from
        stored models equals one that follows in the same process. ``run`` calls it.

        Raises:
            Diverged: the loss is not finite.
        """

    def record(self, folder: Path) -> None:
        """Write down in ``folder`` what both roles of each encrypted boundary, already built, see from now on.

        Raises:
            UsageError: nothing is encrypted.
        """
        raise UsageError(f"expected a method with an encrypted boundary to record, got {self.name}")

    def close(self) -> None:  # noqa: B027  (a hook: many methods hold nothing open)
        """End what runs beside the method, and recordings; it can still predict."""

    def notes(self, federation: Federation) -> list[str]:
        """Return what a reader must know before believing a number of this method, already built on ``federation``."""
        return []

    def cryptography(self, federation: Federation) -> float:
        """Return about how many CPU seconds cryptography takes in training, measured on this machine; 0 for none."""
        return 0.0

    def exposures(self, federation: Federation) -> list[tuple[str, float]]:
        """Return a line on each party whose features training will let others compute, and at most which share."""
        return []

    def planned(self, phase: str, federation: Federation) -> int | None:
        """Return how often a row will be released to one party in ``phase``, at most; None where that is not known."""
        return None

    def updates(self, federation: Federation) -> int:
        """Return how many updates of a party's models a row takes part in, at most.

        Raises:
            UsageError: this method updates them by more than a mean over rows of labeled batches.
        """
        raise UsageError(
            f"expected a method of which all training is split learning for a defense of updates, got {self.name}: "
            f"what it learns otherwise would not be protected; choose --method fedsplitnn"
        )

    @final
    def prepare(self, federation: Federation) -> None:
        """Tell every party's defenses how often a row will be released where they act."""
        for party in federation.everybody:
            for defense in party.defenses:
                defense.plan_releases(self.releases(defense, federation))

    @final
    def releases(self, defense: Defense, federation: Federation) -> int | None:
        """Return how often a row will be released to one party where ``defense`` acts; None where not known.

        For a defense of updates, in how many of them a row takes part.
        """
        if hooks.UPDATE in touches(defense):
            return self.updates(federation)
        met = [p for p in self.phases if any(defense.acts(kind, p) for kind in self.messages.get(p, ()))]
        found = [self.planned(phase, federation) for phase in met]
        return None if None in found else sum(n for n in found if n)

    @abstractmethod
    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return logits (n, C) for the rows of ``split``; embeddings cross the wire as in training."""

    @abstractmethod
    def representation(self, party: Party) -> nn.Module:
        """Return the map (B, features) -> (B, d) that ``party`` holds, which its attacker starts from."""

    def observers(self) -> tuple[str, ...]:
        """Return the names of those who receive messages without being a party: a server, a source."""
        return ()

    def shared(self, federation: Federation) -> Mapping[str, Tensor]:
        """Return, by party, the parameters (P,) of its own that it last brought to an average; empty without one."""
        return {}

    def assembled(
        self,
        federation: Federation,
        names: Collection[str],
        messages: Iterable[Message],
    ) -> Mapping[str, nn.Module]:
        """Return the models (B, features) -> (B, d) that parties can assemble from messages, by a readable name.

        Args:
            federation: the trained parties.
            names: of the party, or of the colluding parties.
            messages: that they sent or received.
        """
        return {}

    @final
    def fit(self, federation: Federation, progress: Progress = lambda phase, done, total: None) -> Trained:
        """Build the models, run all phases, return the trained federation."""
        self.build(federation)
        return Trained(self, federation, {phase: self.run(phase, federation, progress) for phase in self.phases})

    @final
    def run(
        self, phase: str, federation: Federation, progress: Progress = lambda phase, done, total: None
    ) -> list[float]:
        """Run one phase with noise of its own, and return its loss by epoch."""
        federation.begin(phase)
        self.prepare(federation)
        with federation.learning():
            return self.train(phase, federation, progress)


@dataclass
class Trained:
    """A trained federation.

    Attributes:
        method: what trained it.
        federation: parties with their trained models, and the wire with its counts.
        history: loss by epoch of each phase.
    """

    method: Method
    federation: Federation
    history: Mapping[str, Sequence[float | None]]

    def predict(self, split: str) -> Tensor:
        """Return finite logits (n, C).

        Raises:
            Diverged: a logit is not finite.
        """
        self.federation.begin("predict", split)
        self.method.prepare(self.federation)
        logits = self.method.predict(self.federation, split)
        if not torch.isfinite(logits).all():
            raise Diverged(f"{self.method.name} predicts values that are not finite on {split} rows")
        return logits

    def save(self, folder: Path) -> None:
        """Write each party's models to ``folder/<party>.safetensors``; no pickle, nothing to execute."""
        save_states(self.federation, folder)
