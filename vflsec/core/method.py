"""Base class of learning algorithms: phases that can be cached apart, in a world of parties and a wire."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vflsec.core.checks import non_negative, positive
from vflsec.core.errors import Diverged, UsageError
from vflsec.core.message import Channel, Kind
from vflsec.core.party import Party
from vflsec.core.view import Need

Progress = Callable[[str, int, int], None]
OptimizerFactory = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer | None]


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How models are fitted.

    Attributes:
        epochs: passes over the training rows; None for 20, or as many as 1,000 updates take if that is more:
            a model that stopped learning early would look like a private one.
        batch: rows per update.
        lr: learning rate.
        optimizer: ``adam`` or ``sgd``.
        momentum: of SGD.
        weight_decay: L2 factor.
        schedule: of the learning rate over epochs: ``constant``, ``cosine`` or ``inverse-sqrt``.
        select: which epoch's model is used: ``last``, ``best_on_val``, or ``paper_best_on_test``, which peeks at the
            test rows as some papers do and is never a default.
        patience: epochs without a better validation metric after which training stops, or None.
    """

    epochs: int | None = None
    batch: int = 256
    lr: float = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "inverse-sqrt"] = "constant"
    select: Literal["last", "best_on_val", "paper_best_on_test"] = "last"
    patience: int | None = None

    def __post_init__(self) -> None:
        """Check every number."""
        positive(**{"train.batch": self.batch, "train.lr": self.lr})
        if self.epochs is not None:
            positive(**{"train.epochs": self.epochs})
        if self.patience is not None:
            positive(**{"train.patience": self.patience})
        non_negative(**{"train.momentum": self.momentum, "train.weight_decay": self.weight_decay})

    def n_epochs(self, rows: int) -> int:
        """Return the number of passes over ``rows`` training rows."""
        return self.epochs or max(20, math.ceil(1000 / math.ceil(rows / self.batch)))

    def rate(self, epoch: int, epochs: int) -> float:
        """Return the learning rate in ``epoch`` (from 0)."""
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        return self.lr / math.sqrt(epoch + 1) if self.schedule == "inverse-sqrt" else self.lr


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the networks.

    Attributes:
        bottom: widths of the hidden layers of each bottom model.
        cut: width of the cut layer; None for the number of classes, as Fu et al. 2022 mostly have it.
        aggregation: how the active party joins embeddings: ``concat``, ``sum``, ``mean``, ``max``.
        head: what follows: ``linear``, ``mlp``, or ``none`` (the aggregate is the logits).
        head_hidden: width of the hidden layer of an ``mlp`` head.
    """

    bottom: tuple[int, ...] = (64,)
    cut: int | None = None
    aggregation: Literal["concat", "sum", "mean", "max"] = "concat"
    head: Literal["linear", "mlp", "none"] = "linear"
    head_hidden: int = 32

    def __post_init__(self) -> None:
        """Check widths, and that a missing head leaves logits."""
        for width in self.bottom:
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
        optimizers: a malicious party's own optimizer, by party.
    """

    parties: Mapping[str, Party]
    channel: Channel
    n_classes: int
    metric: str
    seed: int
    device: torch.device
    optimizers: Mapping[str, OptimizerFactory] = field(default_factory=dict)

    @property
    def active(self) -> Party:
        """The party with the labels."""
        return next(iter(self.parties.values()))

    @property
    def passive(self) -> list[Party]:
        """All other parties, in order."""
        return [party for party in self.parties.values() if not party.active]

    def n_rows(self, split: str) -> int:
        """Return the number of aligned rows of ``split``."""
        return len(self.active.features[split])


class Method(ABC):
    """A VFL learning algorithm.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
    """

    name: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = ("train",)
    reference: ClassVar[str]
    version: ClassVar[int] = 1
    shows: ClassVar[Mapping[str, frozenset[Need]]]
    sends: ClassVar[frozenset[Kind]]

    def __init__(self, train: TrainSpec, model: ModelSpec) -> None:
        self.train_spec = train
        self.model_spec = model

    @abstractmethod
    def build(self, world: World) -> None:
        """Give every party its models, drawn from the world's seed."""

    def check(self, world: World) -> None:  # noqa: B027  (a hook: many methods need nothing more)
        """Raise UsageError if ``world``, already built, lacks what training needs; trains nothing."""

    @abstractmethod
    def train(self, phase: str, world: World, progress: Progress) -> list[float]:
        """Run one phase in place and return its loss by epoch.

        A phase draws all its randomness from the world's seed and its own name, so that a phase that starts from
        stored models equals one that follows in the same process.

        Raises:
            Diverged: the loss is not finite.
        """

    @abstractmethod
    def predict(self, world: World, split: str) -> Tensor:
        """Return logits (n, C) for the rows of ``split``; embeddings cross the wire as in training."""

    @abstractmethod
    def representation(self, party: Party) -> nn.Module:
        """Return the map (B, features) -> (B, d) that ``party`` holds, which its attacker starts from."""

    @final
    def fit(self, world: World, progress: Progress = lambda phase, done, total: None) -> Trained:
        """Build the models, run all phases, return the trained world."""
        self.build(world)
        history = {phase: self.train(phase, world, progress) for phase in self.phases}
        return Trained(self, world, history)


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
    history: Mapping[str, list[float]]

    def predict(self, split: str) -> Tensor:
        """Return finite logits (n, C).

        Raises:
            Diverged: a logit is not finite.
        """
        logits = self.method.predict(self.world, split)
        if not torch.isfinite(logits).all():
            raise Diverged(f"{self.method.name} predicts values that are not finite on {split} rows")
        return logits

    def save(self, folder: Path) -> None:
        """Write each party's models to ``folder/<party>.safetensors``; no pickle, nothing to execute."""
        save_states(self.world, folder)


def save_states(world: World, folder: Path) -> None:
    """Write each party's models to ``folder/<party>.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    for party in world.parties.values():
        state = {key: value.detach().cpu().contiguous().clone() for key, value in party.modules.state_dict().items()}
        save_file(state, folder / f"{party.name}.safetensors", metadata={"format": "vflsec", "party": party.name})


def load_states(world: World, folder: Path) -> None:
    """Read into each party's models, already built, what ``save_states`` wrote."""
    for party in world.parties.values():
        party.modules.load_state_dict(load_file(folder / f"{party.name}.safetensors"))
