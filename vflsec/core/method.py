"""Base class of learning algorithms: phases that are stored separately, run by the parties of a federation."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from vflsec.base.errors import Diverged, NotStackable, UsageError
from vflsec.base.seeds import Seeds, seed_weights
from vflsec.core import hooks
from vflsec.core.defense import Defense, list_hooks
from vflsec.core.federation import Federation
from vflsec.core.hooks import Hook
from vflsec.core.message import Kind, Message
from vflsec.core.options import list_options
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec

Progress = Callable[[str, int, int], None]

RATES = dict.fromkeys(("train.weight_decay", "train.pretrain.weight_decay"), (1e-5, 1e-2)) | {"train.lr": (1e-4, 1e-2)}
"""What any method is tuned over that learns by gradients."""


class Method(ABC):
    """A VFL learning algorithm.

    Class attributes:
        name: registry name.
        phases: of training, in order; each but the last is stored separately and shared by all cells that start alike.
        messages: the kinds of messages in each phase.
        receives: the kinds of messages that each side receives and could read; empty if there is no adversary.
        reference: paper and section.
        differs: how training differs from that paper, and the authors' choices if the paper is silent, one sentence
            each; empty if nothing is known.
        version: raised whenever results change.
        stored_modules: roles of the parties' models that the phases before the last have trained.
        learns: the hooks of defenses that a phase runs, besides those of its messages; a phase that is not named here
            runs all. A phase that runs no hook of labels reads no label, and is shared by all label budgets.
        last_phase_options: options that only the last phase reads.
        joint: options by which several parties pre-train together.
        prior: the method whose pre-training, without ``joint``, any party could have done alone, as a baseline; or
            None.
        encoder: the encoder if ``model.encoder`` is None.
        embeds: whether a party's representation is one that training could have collapsed.
        snapshots: whether pre-training can stop before its last iteration, see ``train.pretrain.until``.
        source_phases: phases whose messages are about the source's rows alone: only an attack on these rows reads them.
        search: the ends between which ``--tune`` draws settings, by path, and options, by name, on a log scale.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
    """

    name: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = ("train",)
    reference: ClassVar[str]
    differs: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    receives: ClassVar[Mapping[str, frozenset[Kind]]]
    messages: ClassVar[Mapping[str, frozenset[Kind]]]
    stored_modules: ClassVar[frozenset[str]] = frozenset()
    learns: ClassVar[Mapping[str, frozenset[Hook]]] = {}
    last_phase_options: ClassVar[frozenset[str]] = frozenset()
    joint: ClassVar[frozenset[str]] = frozenset()
    prior: ClassVar[str | None] = None
    encoder: ClassVar[Literal["mlp", "auto"]] = "mlp"
    source_phases: ClassVar[frozenset[str]] = frozenset()
    embeds: ClassVar[bool] = True
    snapshots: ClassVar[bool] = False
    search: ClassVar[Mapping[str, tuple[float, float]]] = RATES

    def __init__(self, train: TrainSpec, model: ModelSpec) -> None:
        if train.pretrain.until is not None and "pretrain" in self.phases and not self.snapshots:
            raise UsageError(f"expected no train.pretrain.until with {self.name}, whose pre-training runs as a whole")
        self.train_spec = train
        self.model_spec = model

    @classmethod
    def derive(cls, **facts: Any) -> None:
        """Set class attributes that follow from others, but for those that the class itself sets."""
        for name, fact in facts.items():
            if name not in vars(cls):
                setattr(cls, name, fact)

    @classmethod
    def leave_out(cls, unused: Collection[str], **defaults: Any) -> None:
        """Leave ``unused`` options out of the class's signature, which is what users may set; change ``defaults``.

        For presets, in which some options of their class have no effect.
        """
        offered = [p for p in inspect.signature(cls.__init__).parameters.values() if p.name not in {"self", *unused}]
        parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in offered]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    @classmethod
    def list_ranges(cls) -> dict[str, tuple[float, float]]:
        """Return what of ``search`` this method has: a preset may lack options, and a method pre-training."""
        known = {*list_options(cls), "train", *(["train.pretrain"] if "pretrain" in cls.phases else [])}
        return {path: ends for path, ends in cls.search.items() if known & {path, path.rpartition(".")[0]}}

    @classmethod
    def messages_in(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:  # noqa: ARG003  (for subclasses)
        """Return the kinds of messages in ``phase``, with the method's ``options``; prediction is as the last."""
        return cls.messages[phase if phase in cls.phases else cls.phases[-1]]

    @classmethod
    def runs(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Hook]:
        """Return the hooks of defenses that ``phase`` runs, with the method's ``options``."""
        sent = cls.messages_in(phase, options)
        of_messages = {hook for kind, hook in hooks.OF_KIND.items() if kind in sent}
        learns = cls.learns.get(phase if phase in cls.phases else cls.phases[-1], hooks.SPLIT_LEARNING)
        return frozenset(of_messages) | learns | {hooks.TRAINING}  # ``run`` runs this hook in every phase

    @classmethod
    def option_tables(cls) -> Mapping[str, type]:
        """Return the names of options that are tables of options, with the class that each configures."""
        return {}

    @abstractmethod
    def build(self, federation: Federation) -> None:
        """Give every party its models, drawn from the federation's seed."""

    @property
    def pretraining(self) -> PretrainSpec | None:
        """The settings of pre-training that are used, by default the method's own; None without pre-training."""
        return None

    def check(self, federation: Federation) -> None:  # noqa: B027  (a hook: many methods need nothing more)
        """Raise UsageError if training is impossible on ``federation``, which is already built; trains nothing."""

    @abstractmethod
    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run one phase in place and return its loss by epoch.

        A phase draws all its randomness from the federation's seed and its own name, so that it gives the same result
        from stored models as in one process with the phases before it. ``run`` calls it.

        Raises:
            Diverged: the loss is not finite.
        """

    def record(self, folder: Path) -> None:
        """Record in ``folder`` what both roles of each encrypted boundary, already built, see from now on.

        Raises:
            UsageError: nothing is encrypted.
        """
        raise UsageError(f"expected a method with an encrypted boundary to record, got {self.name}: add --defense phe")

    def close(self) -> None:  # noqa: B027  (a hook: many methods hold nothing open)
        """End helper processes and recordings; the method can still predict."""

    def together(self, joined: Federation) -> Method:
        """Return this method, built on one of several runs, for the last phase of all of them at once.

        ``MethodConformance`` tests that each run becomes what it becomes by itself.

        Raises:
            NotStackable: its settings do not allow it, with the reason.
        """
        raise NotStackable(f"{self.name} trains its runs one after the other")

    def notes(self, federation: Federation) -> list[str]:
        """Return the caveats of numbers of this method, which is already built on ``federation``."""
        return []

    def cryptography(self, federation: Federation) -> float:
        """Return an estimate of the CPU seconds of cryptography in training on this machine; 0 without any."""
        return 0.0

    def count_sums_bytes(self, federation: Federation) -> int:
        """Return the bytes that sums in place of gradients take in training, known before it; 0 without any."""
        return 0

    def public_options(self) -> dict[str, Any]:
        """Return the options that every party knows and an attack may use, by name."""
        return {}

    def remedy(self, federation: Federation) -> str:
        """Return what to change, and why, if the trained model predicts the same for all rows; empty if unknown."""
        return ""

    def exposures(self, federation: Federation) -> list[tuple[str, float]]:
        """Return, for each party whose features others can compute, a sentence and an upper bound of their share."""
        return []

    def max_releases(self, phase: str, federation: Federation) -> int | None:
        """Return the largest number of releases of a row to one party in ``phase``; None if it is unknown."""
        return None

    def updates(self, federation: Federation) -> int:
        """Return the largest number of updates of a party's models in which one row takes part.

        Raises:
            UsageError: not all updates are by a mean over the rows of a labeled batch.
        """
        raise UsageError(
            f"expected a method in which all training is split learning for a defense of updates, got {self.name}: "
            f"its other updates would not be protected; choose --method fedsplitnn"
        )

    @final
    def prepare(self, federation: Federation) -> None:
        """Pass to each party's defenses the number of releases of a row on which they act."""
        for party in federation.all_parties:
            for defense in party.defenses:
                defense.plan_releases(self.releases(defense, federation))

    @final
    def releases(self, defense: Defense, federation: Federation) -> int | None:
        """Return the largest number of releases of a row to one party on which ``defense`` acts; None if unknown.

        For a defense of updates it is the number of updates in which a row takes part.
        """
        if hooks.UPDATE in list_hooks(defense):
            return self.updates(federation)
        phases = [p for p in self.phases if any(defense.acts(kind, p) for kind in self.messages.get(p, ()))]
        planned = [self.max_releases(phase, federation) for phase in phases]
        return None if None in planned else sum(n for n in planned if n)

    @abstractmethod
    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return logits (n, C) for the rows of ``split``; embeddings are sent through the channel as in training."""

    @abstractmethod
    def representation(self, party: Party) -> nn.Module:
        """Return the model (B, features) -> (B, d) that ``party`` holds, from which its attacker starts."""

    def embed_defended(self, federation: Federation, parties: Sequence[Party]) -> Mapping[str, Tensor]:
        """Return by split the embeddings (n, d) of text as defenses of ``parties`` changed it; empty if none did."""
        return {}

    def observers(self) -> tuple[str, ...]:
        """Return the names of receivers of messages that are no party: a server, a source."""
        return ()

    def local_parameters(self, federation: Federation) -> Mapping[str, Tensor]:
        """Return, by party, the own parameters (P,) that were last averaged; empty if none are averaged."""
        return {}

    def assemble_models(
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
        """Run one phase with noise and dropout of its own, and return its loss by epoch."""
        federation.begin(phase)
        self.prepare(federation)
        stacked = isinstance(federation.seed, Seeds)  # without dropout
        with nullcontext() if stacked else seed_weights(federation.seed, "dropout", phase), federation.run_hooks():
            return self.train(phase, federation, progress)


@dataclass
class Trained:
    """A trained federation.

    Attributes:
        method: what trained it.
        federation: parties with their trained models, and the channel with its counts.
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
