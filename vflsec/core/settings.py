"""Settings of training and of the networks."""

import math
from typing import Literal

import msgspec

from vflsec.base.checks import check_finite, check_fraction, check_non_negative, check_positive, check_positive_or_none
from vflsec.base.errors import UsageError


class PretrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of pre-training; None is the method's own default.

    Attributes:
        epochs: global iterations.
        batch: rows per update.
        lr: learning rate.
        weight_decay: L2 factor.
        paper: take the numbers of the method's paper and its authors' code where its defaults differ, which fit fewer
            updates.
        until: global iterations after which pre-training stops, at the learning rates of all ``epochs``; None for all
            of them. In one results folder a longer pre-training goes on from a shorter one.
    """

    epochs: int | None = None
    batch: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    paper: bool = False
    until: int | None = None

    def __post_init__(self) -> None:
        """Check every number."""
        if self.weight_decay is not None:
            check_non_negative(**{"train.pretrain.weight_decay": self.weight_decay})
        check_positive_or_none(
            **{f"train.pretrain.{name}": getattr(self, name) for name in ("epochs", "batch", "lr", "until")}
        )


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of training.

    Attributes:
        epochs: passes over the training rows; None for 20, or for 300 updates if that is more: a model that stopped
            learning early would look like a private one.
        batch: rows per update.
        lr: learning rate.
        optimizer: ``adam``, ``sgd``, or ``adagrad`` (FedHSSL's for columns of clicks).
        momentum: of SGD.
        weight_decay: L2 factor.
        schedule: of the learning rate over epochs: ``constant``, ``cosine`` or ``inverse-sqrt``.
        select: the epoch whose model is used: ``last``, ``best_on_val``, or ``paper_best_on_test``, which selects on
            test rows as some papers do and is never a default.
        patience: epochs without a better validation metric after which training stops, or None.
        clip: largest norm of each party's gradients in a step, or None.
        local_steps: updates of every party for each exchange (FedBCD, Liu et al. 2019).
        target: a utility on test rows; the traffic until it is reached is reported. It does not stop training.
        pretrain: settings of pre-training, for methods that have it.
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
        check_positive(**{"train.batch": self.batch, "train.lr": self.lr, "train.local_steps": self.local_steps})
        check_positive_or_none(**{f"train.{name}": getattr(self, name) for name in ("epochs", "patience", "clip")})
        if self.target is not None:
            check_fraction(**{"train.target": self.target})
        check_non_negative(**{"train.momentum": self.momentum, "train.weight_decay": self.weight_decay})
        check_finite(**{f"train.{name}": getattr(self, name) for name in ("lr", "momentum", "weight_decay")})

    def count_epochs(self, rows: int) -> int:
        """Return the number of passes over ``rows`` training rows."""
        return self.epochs or max(20, math.ceil(300 / math.ceil(rows / self.batch)))

    def count_batches(self, rows: int) -> int:
        """Return the number of batches in all passes."""
        return self.count_epochs(rows) * math.ceil(rows / self.batch)

    def rate(self, epoch: int, epochs: int) -> float:
        """Return the learning rate in ``epoch`` (from 0)."""
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        return self.lr / math.sqrt(epoch + 1) if self.schedule == "inverse-sqrt" else self.lr


MAX_UNITS = 65_536
"""The most units of a layer."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the networks.

    Attributes:
        encoder: of a party's columns: ``mlp``, ``tabular`` (categories embedded, two layers with BatchNorm), ``cnn``,
            ``resnet18``, or ``auto``: ``cnn`` for a party with images, else ``tabular``. None for ``mlp`` if every
            method that is compared learns from labels alone, else ``auto``; all of them have the same encoder.
        bottom: widths of its hidden layers; None for the encoder's own, (64,) for ``mlp``.
        cut: width of the cut layer; None for the number of classes after an ``mlp``, as mostly in Fu et al. 2022, and
            for the last of ``bottom`` after the others.
        aggregation: how the active party joins embeddings: ``concat``, ``sum``, ``mean``, ``max``.
        head: of the top model: ``linear``, ``mlp``, or ``none`` (the aggregate is the logits).
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
            check_positive(**{"model.bottom": width})
        check_positive_or_none(**{"model.cut": self.cut, "model.head_hidden": self.head_hidden})
        widest = max(*(self.bottom or (0,)), self.cut or 0, self.head_hidden)
        if widest > MAX_UNITS:
            raise UsageError(f"expected layers of at most {MAX_UNITS} units, got {widest} in model")
        if self.head == "none" and self.aggregation == "concat":
            raise UsageError(
                "expected model.aggregation sum, mean or max with model.head=none, got concat: "
                "without a head the aggregate itself is the logits"
            )
        if self.head == "none" and self.cut is not None:
            raise UsageError("expected no model.cut with model.head=none: the cut is as wide as the number of classes")
