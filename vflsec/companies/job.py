"""What both parties agree on before they start: one TOML file, the same on both sides.

    name = "loans"
    seed = 0                    # of the split and of the order of batches, which both must draw alike
    test = 0.3                  # share of the rows that is held out; ignored where the dataset has a test set
    dataset = "credit-default"  # only to try it out: each process keeps its own party's columns alone

    [model]
    outputs = 1                 # 1: logistic regression on two classes; else the number of classes
    encoder = "mlp"             # at the passive party: mlp, tabular, or identity (its columns themselves: SecureLR)
    hidden = [64]
    width = 10                  # of the embedding; identity has the width of the columns

    [train]
    epochs = 5
    batch = 128
    lr = 0.1
    momentum = 0.0
    weight_decay = 0.0
    schedule = "constant"       # or cosine, inverse-sqrt

    [paillier]                  # the fields of vflsec.cipher.arithmetic.layout.CipherSpec, all of them optional
    bits = 2048
    feature_bits = 4            # |feature| <= 2^4

In place of [paillier], sealed training; [train] then describes the last fit, of the active party alone:

    [sealed]                    # all of them optional
    epsilon = 1.0               # of every label, at this delta, in everything that the passive party learns
    delta = 1e-5
    epochs = 10                 # passes in which both parties learn from noised sums
    batch = 2048                # rows of a sum, about
    lr = 0.02                   # of Adam
    bits = 14                   # of the fraction of both factors of a sum
    parameters = 4096           # the most that the passive party's model may have: a sum is answered for each

What is a party's own affair stands in no job: its file, its columns, and the seed of its first weights, which nobody
else may know.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from vflsec.base import files
from vflsec.base.checks import check_inside, check_positive
from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.layout import CipherSpec
from vflsec.cipher.noise import SealedPlan, find_mu
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.sealed_training import plan_batches

MAX_COUNT = 1_000_000
"""Of rows in a batch, and epochs."""
MAX_UNITS = 65_536
"""Of any layer."""
MAX_WEIGHTS = 1 << 28
"""Between the layers of the passive party's encoder: 1 GiB as float32."""
PLAN = SealedPlan()
"""The defaults of sealed training."""
LONGEST_SETTING = 1_000
"""Characters that one setting may have when the parties compare theirs."""


class JobModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The networks: the passive party's encoder, and a linear layer over its embedding and the active party's columns.

    Attributes:
        outputs: 1 for logistic regression, else the number of classes C >= 2.
        encoder: of the passive party's columns.
        hidden: widths of its hidden layers.
        width: g, of the passive party's embedding; None with ``identity`` alone.
        share: whether the passive party adds a random part to the first weights over its embedding, so that the active
            party never knows them. An honest active party that knew them could read a feature of the first batch off
            its scores.
    """

    outputs: int = 1
    encoder: Literal["identity", "mlp", "tabular"] = "identity"
    hidden: tuple[int, ...] = (64,)
    width: int | None = None
    share: bool = True

    def __post_init__(self) -> None:
        """Check the number of outputs."""
        check_positive(**{"model.outputs": self.outputs})

    def check_width(self) -> None:
        """Raise UsageError unless an encoder has its width."""
        if self.encoder == "identity" and self.width is not None:
            raise UsageError(f"expected no model.width with model.encoder=identity, got {self.width}: leave it out")
        if self.encoder != "identity" and self.width is None:
            raise UsageError(f"expected model.width with model.encoder={self.encoder}, got none: say width = 10")

    def check_additive(self) -> None:
        """Raise UsageError unless both parties' models give scores that are added."""
        if self.encoder != "mlp":
            raise UsageError(f"expected model.encoder = 'mlp' with [sealed], got {self.encoder!r}: change it")
        if self.width is not None:
            raise UsageError(f"expected no model.width with [sealed], got {self.width}: leave it out")

    @property
    def spec(self) -> ModelSpec:
        """The encoder's settings where it is a network."""
        assert self.encoder != "identity", "there is nothing to build"
        return ModelSpec(encoder=self.encoder, bottom=self.hidden, cut=self.width)


class JobTraining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How everything is fitted: by SGD, for the weights that are shared between two parties admit nothing non-linear.

    Attributes:
        epochs: passes over the training rows.
        batch: rows per update.
        lr: learning rate.
        momentum: of SGD.
        weight_decay: L2 factor.
        schedule: of the learning rate over epochs.
    """

    epochs: int = 5
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "inverse-sqrt"] = "constant"

    @property
    def spec(self) -> TrainSpec:
        """The same in the words of every method.

        Raises:
            UsageError: a number is out of its range.
        """
        return TrainSpec(optimizer="sgd", **msgspec.structs.asdict(self))


class JobSealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sealed training: noised sums over a batch in place of a gradient for each row.

    Attributes:
        epsilon: of every label, in everything that the passive party learns if both follow the protocol.
        delta: at which epsilon is meant.
        epochs: passes in which both parties learn from noised sums.
        batch: rows of a sum, about.
        lr: learning rate of Adam in these passes.
        bits: of the fraction of both factors of a sum.
        parameters: the most that the passive party's model may have. The active party answers as many sums for each
            batch, and a passive party that deviates can read the label of as many rows.
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    epochs: int = PLAN.epochs
    batch: int = PLAN.batch
    lr: float = PLAN.lr
    bits: int = PLAN.bits
    parameters: int = 4096

    def __post_init__(self) -> None:
        """Check every number as the defense does."""
        check_positive(**{"sealed.epsilon": self.epsilon, "sealed.parameters": self.parameters})
        _ = self.plan

    @property
    def plan(self) -> SealedPlan:
        """The same in the words of the boundary.

        Raises:
            UsageError: a number is out of its range.
        """
        return SealedPlan(find_mu(self.epsilon, self.delta), self.epochs, self.batch, self.lr, self.bits)


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole agreement.

    Attributes:
        name: for people.
        seed: of what both must draw alike: the split, and the order of batches.
        test: share of the rows that is held out.
        dataset: a registered one, of which each process keeps its own party's columns; None: each brings a file.
        options: of that dataset.
        model: the shape of the networks.
        train: how everything is fitted.
        paillier: how the boundary is encrypted.
        sealed: sealed training in place of it, or None.
    """

    name: str
    seed: int = 0
    test: float = 0.3
    dataset: str | None = None
    options: dict[str, Any] = {}
    model: JobModel = JobModel()
    train: JobTraining = JobTraining()
    paillier: CipherSpec = CipherSpec()
    sealed: JobSealed | None = None

    def __post_init__(self) -> None:
        """Check what the types do not."""
        check_inside(test=self.test)
        if self.seed < 0:
            raise UsageError(f"expected seed >= 0, got {self.seed}")
        if self.options and self.dataset is None:
            raise UsageError(f"expected options with a dataset alone, got {', '.join(self.options)}: drop them")
        _ = self.train.spec
        model, width = self.model, self.model.width or 1
        for name, value, most in (
            ("train.batch", self.train.batch, MAX_COUNT),
            ("train.epochs", self.train.epochs, MAX_COUNT),
            ("model.hidden", max(model.hidden, default=1), MAX_UNITS),
            ("model.width", width, MAX_UNITS),
            ("model.outputs", model.outputs, MAX_UNITS),
            *((f"sealed.{key}", getattr(self.sealed, key, 1), MAX_COUNT) for key in ("epochs", "batch", "parameters")),
        ):
            if value > most:
                raise UsageError(f"expected {name} <= {most}, got {value}")
        weights = sum(before * after for before, after in pairwise((*model.hidden, width)))
        if weights > MAX_WEIGHTS:
            raise UsageError(f"expected model.hidden with at most {MAX_WEIGHTS} weights, got {weights}: choose less")
        for name, text in self.settings.items():
            if len(text) > LONGEST_SETTING:
                raise UsageError(f"expected {name} of at most {LONGEST_SETTING} characters, got {len(text)}")
        if self.sealed is None:
            self.model.check_width()
            self.paillier.allow(self.train.epochs)
            return
        self.model.check_additive()
        if self.paillier != CipherSpec():
            raise UsageError("expected [sealed] or [paillier], got both: leave one out")

    def get_training(self, rows: int) -> TrainSpec:
        """Return how both parties learn together from ``rows`` training rows."""
        return plan_batches(self.sealed.plan, rows, self.train.spec) if self.sealed else self.train.spec

    @property
    def settings(self) -> dict[str, str]:
        """Every setting by its dotted name, as text that two parties can compare."""
        return {key: json.dumps(value, sort_keys=True) for key, value in _flatten(msgspec.to_builtins(self))}


def read(path: Path) -> JobFile:
    """Return the job in the TOML file ``path``.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    try:
        return msgspec.convert(files.parse_toml(files.read(path).decode()), JobFile)
    except OSError as error:
        raise UsageError(f"expected a job in {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise UsageError(f"{path.name}: {error}; vflsec party --help shows the form") from None
    except ValueError as error:
        raise UsageError(f"{path.name}: expected TOML in utf-8: {error}") from None


def _flatten(tree: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{stem}{key}.")
        else:
            yield f"{stem}{key}", value
