"""Base class of learning algorithms: phases that can be cached apart, in a world of parties and a wire."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vflsec.core import hooks
from vflsec.core.attack import Attack
from vflsec.core.checkpoint import Checkpoint
from vflsec.core.checks import finite, fraction, non_negative, positive
from vflsec.core.defense import Defense, touches
from vflsec.core.errors import Diverged, UsageError
from vflsec.core.hooks import Hook
from vflsec.core.message import Channel, Kind, Message
from vflsec.core.party import Party
from vflsec.core.view import Need

Progress = Callable[[str, int, int], None]


class PretrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How models are pre-trained; None leaves a number to the method, whose own are those of its paper.

    Attributes:
        epochs: global iterations.
        batch: rows per update.
        lr: learning rate.
    """

    epochs: int | None = None
    batch: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        """Check every number."""
        for name in ("epochs", "batch", "lr"):
            if getattr(self, name) is not None:
                positive(**{f"train.pretrain.{name}": getattr(self, name)})


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How models are fitted.

    Attributes:
        epochs: passes over the training rows; None for 20, or as many as 300 updates take if that is more:
            a model that stopped learning early would look like a private one.
        batch: rows per update.
        lr: learning rate.
        optimizer: ``adam``, ``sgd``, or ``adagrad`` (FedHSSL's for columns of clicks).
        momentum: of SGD.
        weight_decay: L2 factor.
        schedule: of the learning rate over epochs: ``constant``, ``cosine`` or ``inverse-sqrt``.
        select: which epoch's model is used: ``last``, ``best_on_val``, or ``paper_best_on_test``, which peeks at the
            test rows as some papers do and is never a default.
        patience: epochs without a better validation metric after which training stops, or None.
        clip: largest norm of each party's gradients in a step, or None.
        local_steps: updates that every party makes on what one exchange brought it (FedBCD, Liu et al. 2019).
        target: a utility on test rows; what had to be said to reach it is reported. It stops nothing.
        pretrain: of methods that pre-train.
    """

    epochs: int | None = None
    batch: int = 256
    lr: float = 1e-3
    optimizer: Literal["adam", "sgd", "adagrad"] = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "inverse-sqrt"] = "constant"
    select: Literal["last", "best_on_val", "paper_best_on_test"] = "last"
    patience: int | None = None
    clip: float | None = None
    local_steps: int = 1
    target: float | None = None
    pretrain: PretrainSpec = PretrainSpec()

    def __post_init__(self) -> None:
        """Check every number."""
        positive(**{"train.batch": self.batch, "train.lr": self.lr, "train.local_steps": self.local_steps})
        for name in ("epochs", "patience", "clip"):
            if getattr(self, name) is not None:
                positive(**{f"train.{name}": getattr(self, name)})
        if self.target is not None:
            fraction(**{"train.target": self.target})
        non_negative(**{"train.momentum": self.momentum, "train.weight_decay": self.weight_decay})
        finite(**{f"train.{name}": getattr(self, name) for name in ("lr", "momentum", "weight_decay")})

    def n_epochs(self, rows: int) -> int:
        """Return the number of passes over ``rows`` training rows."""
        return self.epochs or max(20, math.ceil(300 / math.ceil(rows / self.batch)))

    def n_batches(self, rows: int) -> int:
        """Return the number of batches in all passes."""
        return self.n_epochs(rows) * math.ceil(rows / self.batch)

    def optimize(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer of ``parameters``."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, self.lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        if self.optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, self.lr, weight_decay=self.weight_decay, fused=True)
        return torch.optim.Adam(parameters, self.lr, weight_decay=self.weight_decay, fused=True)

    def rate(self, epoch: int, epochs: int) -> float:
        """Return the learning rate in ``epoch`` (from 0)."""
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        return self.lr / math.sqrt(epoch + 1) if self.schedule == "inverse-sqrt" else self.lr


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the networks.

    Attributes:
        encoder: what turns a party's columns into its embedding: ``mlp``, ``tabular`` (categories embedded, two layers
            with BatchNorm), ``cnn``, ``resnet18``, or ``auto``: ``cnn`` for a party with images, else ``tabular``.
            None for ``mlp`` where every method that is compared learns from labels alone, else ``auto``, so that all of
            them have the same.
        bottom: widths of its hidden layers; None for the encoder's own, (64,) for ``mlp``.
        cut: width of the cut layer; None for the number of classes after an ``mlp``, as Fu et al. 2022 mostly have it,
            and for the last of ``bottom`` after the others.
        aggregation: how the active party joins embeddings: ``concat``, ``sum``, ``mean``, ``max``.
        head: what follows: ``linear``, ``mlp``, or ``none`` (the aggregate is the logits).
        head_hidden: width of the hidden layer of an ``mlp`` head.
    """

    encoder: Literal["mlp", "tabular", "cnn", "resnet18", "auto"] | None = None
    bottom: tuple[int, ...] | None = None
    cut: int | None = None
    aggregation: Literal["concat", "sum", "mean", "max"] = "concat"
    head: Literal["linear", "mlp", "none"] = "linear"
    head_hidden: int = 32

    def __post_init__(self) -> None:
        """Check widths, and that a missing head leaves logits."""
        for width in self.bottom or ():
            positive(**{"model.bottom": width})
        if self.cut is not None:
            positive(**{"model.cut": self.cut})
        positive(**{"model.head_hidden": self.head_hidden})
        if self.head == "none" and self.aggregation == "concat":
            raise UsageError(
                "expected model.aggregation sum, mean or max with model.head=none, got concat: "
                "without a head the aggregate itself is the logits"
            )
        if self.head == "none" and self.cut is not None:
            raise UsageError("expected no model.cut with model.head=none: the cut is as wide as the number of classes")


@dataclass
class World:
    """Everything a method may touch: parties, the wire, the task.

    Attributes:
        parties: by name, the active party first.
        channel: the wire.
        n_classes: C.
        metric: the headline metric, for selection on validation rows.
        seed: of this run.
        device: where models and features lie.
        malicious: the attack of each party that acts in training, by party.
        checkpoint: where a phase keeps what it needs to go on after a kill.
        reached: the epochs and bytes after which ``train.target`` was met, once it is.
        source: another active party with people and labels of its own, from which a model is adapted; or None. The
            adversary is never it, and what is inferred is about the people of the active party.
        places: by split, the positions (n_train,) of the training rows among its rows, for ``aligned``.
    """

    parties: Mapping[str, Party]
    channel: Channel
    n_classes: int
    metric: str
    seed: int
    device: torch.device
    malicious: Mapping[str, Attack] = field(default_factory=dict)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    reached: dict[str, float] = field(default_factory=dict)
    source: Party | None = None
    places: Mapping[str, Tensor] = field(default_factory=dict)

    def begin(self, *part: object) -> None:
        """Start every party's noise for one part of the run."""
        for party in self.everybody:
            party.begin(*part)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look at the models without a trace: nothing is said on the wire, and no party's noise moves on."""
        with ExitStack() as stack:
            stack.enter_context(self.channel.muted())
            for party in self.everybody:
                stack.enter_context(party.aside())
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Let defences watch the models of their parties while they are trained; a malicious party has none of that.

        Raises:
            UsageError: a defence cannot serve its party's models.
        """
        with ExitStack() as stack:
            for name, party in self.parties.items():
                if name not in self.malicious:
                    stack.enter_context(party.learning())
            yield

    @property
    def active(self) -> Party:
        """The party with the labels."""
        return next(iter(self.parties.values()))

    @property
    def passive(self) -> list[Party]:
        """All other parties, in order."""
        return [party for party in self.parties.values() if not party.active]

    @property
    def everybody(self) -> list[Party]:
        """All parties, and the source if there is one."""
        return [*self.parties.values(), *([self.source] if self.source else [])]

    def n_rows(self, split: str) -> int:
        """Return the number of aligned rows of ``split``."""
        return len(self.active.features[split])


class Method(ABC):
    """A VFL learning algorithm.

    Class attributes:
        name: registry name.
        phases: what training consists of, in order; each but the last is stored apart, and shared by all that follows.
        sends: the kinds of messages in each phase.
        shows: which needs of an attack the method's adversary meets, by side; of no side where there is no adversary.
        reference: paper and section.
        differs: in what training differs from that paper, and its authors' choices where the paper is silent, one
            sentence each; empty where nothing is known.
        version: raised whenever results change.
        keeps: roles of the parties' models that the phases before the last have trained.
        learns: the hooks of defenses that a phase runs, besides those of its messages; a phase that is not named here
            counts as one that runs all. A phase that runs no hook of labels reads none, and is shared by all label
            budgets.
        late: options that only the last phase reads.
        joint: options that make pre-training an affair of several parties.
        prior: the method whose pre-training, less ``joint``, any party could have done alone: what an adversary infers
            from that belongs to *alone*; or None.
        encoder: what ``model.encoder`` None stands for.
        elsewhere: phases that speak of no row of the active party, but of the source's: only an attack on these rows
            reads their messages.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
    """

    name: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = ("train",)
    reference: ClassVar[str]
    differs: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    shows: ClassVar[Mapping[str, frozenset[Need]]]
    sends: ClassVar[Mapping[str, frozenset[Kind]]]
    keeps: ClassVar[frozenset[str]] = frozenset()
    learns: ClassVar[Mapping[str, frozenset[Hook]]] = {}
    late: ClassVar[frozenset[str]] = frozenset()
    joint: ClassVar[frozenset[str]] = frozenset()
    prior: ClassVar[str | None] = None
    encoder: ClassVar[Literal["mlp", "auto"]] = "mlp"
    elsewhere: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, train: TrainSpec, model: ModelSpec) -> None:
        self.train_spec = train
        self.model_spec = model

    @classmethod
    def says(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:  # noqa: ARG003  (for subclasses)
        """Return the kinds of messages in ``phase``, with the method's ``options``; predicting is as the last one."""
        return cls.sends[phase if phase in cls.phases else cls.phases[-1]]

    @classmethod
    def runs(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Hook]:
        """Return the hooks of defenses that ``phase`` runs, with the method's ``options``."""
        said = cls.says(phase, options)
        of_messages = {hook for kind, hook in hooks.OF_KIND.items() if kind in said}
        learns = cls.learns.get(phase if phase in cls.phases else cls.phases[-1], hooks.SPLIT_LEARNING)
        return frozenset(of_messages) | learns | {hooks.WATCHING}  # every phase is watched, see ``run``

    @classmethod
    def nested_options(cls) -> Mapping[str, type]:
        """Return the options that are themselves options of something, by name, with the class that they go to."""
        return {}

    @abstractmethod
    def build(self, world: World) -> None:
        """Give every party its models, drawn from the world's seed."""

    @property
    def pretraining(self) -> PretrainSpec | None:
        """The numbers of pre-training that are used, the method's own where none are given; None without them."""
        return None

    def check(self, world: World) -> None:  # noqa: B027  (a hook: many methods need nothing more)
        """Raise UsageError if ``world``, already built, lacks what training needs; trains nothing."""

    @abstractmethod
    def train(self, phase: str, world: World, progress: Progress) -> list[float]:
        """Run one phase in place and return its loss by epoch.

        A phase draws all its randomness from the world's seed and its own name, so that a phase that starts from
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

    def notes(self, world: World) -> list[str]:
        """Return what a reader must know before believing a number of this method, already built on ``world``."""
        return []

    def cryptography(self, world: World) -> float:
        """Return about how many CPU seconds cryptography takes in training, measured on this machine; 0 for none."""
        return 0.0

    def exposures(self, world: World) -> list[tuple[str, float]]:
        """Return a line on each party whose features training will let others compute, and at most which share."""
        return []

    def planned(self, phase: str, world: World) -> int | None:
        """Return how often a row will be released to one party in ``phase``, at most; None where that is not known."""
        return None

    def updates(self, world: World) -> int:
        """Return how many updates of a party's models a row takes part in, at most.

        Raises:
            UsageError: this method updates them by more than a mean over rows of labelled batches.
        """
        raise UsageError(
            f"expected a method of which all training is split learning for a defense of updates, got {self.name}: "
            f"what it learns otherwise would not be protected; choose --method fedsplitnn"
        )

    @final
    def prepare(self, world: World) -> None:
        """Tell every party's defences how often a row will be released where they act."""
        for party in world.everybody:
            for defense in party.defenses:
                defense.expect(self.releases(defense, world))

    @final
    def releases(self, defense: Defense, world: World) -> int | None:
        """Return how often a row will be released to one party where ``defense`` acts; None where not known.

        For a defence of updates, in how many of them a row takes part.
        """
        if hooks.UPDATE in touches(defense):
            return self.updates(world)
        met = [p for p in self.phases if any(defense.acts(kind, p) for kind in self.sends.get(p, ()))]
        found = [self.planned(phase, world) for phase in met]
        return None if None in found else sum(n for n in found if n)

    @abstractmethod
    def predict(self, world: World, split: str) -> Tensor:
        """Return logits (n, C) for the rows of ``split``; embeddings cross the wire as in training."""

    @abstractmethod
    def representation(self, party: Party) -> nn.Module:
        """Return the map (B, features) -> (B, d) that ``party`` holds, which its attacker starts from."""

    def observers(self) -> tuple[str, ...]:
        """Return the names of those who receive messages without being a party: a server, a source."""
        return ()

    def shared(self, world: World) -> Mapping[str, Tensor]:
        """Return, by party, the parameters (P,) of its own that it last brought to an average; empty without one."""
        return {}

    def assembled(
        self,
        world: World,
        names: Collection[str],
        messages: Iterable[Message],
    ) -> Mapping[str, nn.Module]:
        """Return the models (B, features) -> (B, d) that parties can assemble from messages, by a readable name.

        Args:
            world: the trained parties.
            names: of the party, or of the colluding parties.
            messages: that they sent or received.
        """
        return {}

    @final
    def fit(self, world: World, progress: Progress = lambda phase, done, total: None) -> Trained:
        """Build the models, run all phases, return the trained world."""
        self.build(world)
        return Trained(self, world, {phase: self.run(phase, world, progress) for phase in self.phases})

    @final
    def run(self, phase: str, world: World, progress: Progress = lambda phase, done, total: None) -> list[float]:
        """Run one phase with noise of its own, and return its loss by epoch."""
        world.begin(phase)
        self.prepare(world)
        with world.learning():
            return self.train(phase, world, progress)


@dataclass
class Trained:
    """A trained federation.

    Attributes:
        method: what trained it.
        world: parties with their trained models, and the wire with its counts.
        history: loss by epoch of each phase.
    """

    method: Method
    world: World
    history: Mapping[str, Sequence[float | None]]

    def predict(self, split: str) -> Tensor:
        """Return finite logits (n, C).

        Raises:
            Diverged: a logit is not finite.
        """
        self.world.begin("predict", split)
        self.method.prepare(self.world)
        logits = self.method.predict(self.world, split)
        if not torch.isfinite(logits).all():
            raise Diverged(f"{self.method.name} predicts values that are not finite on {split} rows")
        return logits

    def save(self, folder: Path) -> None:
        """Write each party's models to ``folder/<party>.safetensors``; no pickle, nothing to execute."""
        save_states(self.world, folder)


def save_states(world: World, folder: Path, roles: Collection[str] | None = None) -> None:
    """Write each party's models, or those in the given roles, to ``folder/<party>.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    for party in world.everybody:
        kept = {role: module for role, module in party.modules.items() if roles is None or role in roles}
        state = {
            f"{role}.{key}": value.detach().cpu().contiguous().clone()
            for role, module in kept.items()
            for key, value in module.state_dict().items()
        }
        save_file(state, folder / f"{party.name}.safetensors", metadata={"format": "vflsec", "party": party.name})


def load_states(world: World, folder: Path) -> None:
    """Read into each party's models, already built, what ``save_states`` wrote; other roles stay as they are."""
    for party in world.everybody:
        stored = load_file(folder / f"{party.name}.safetensors")
        for role, module in party.modules.items():
            own = {key.removeprefix(f"{role}."): value for key, value in stored.items() if key.startswith(f"{role}.")}
            if own:
                module.load_state_dict(own)
