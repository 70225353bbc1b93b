"""VFLHLP: every party pre-trains alone, the active party with its labels; then split learning from both."""

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec
import torch
from torch import Tensor, nn

from vflsec.base.checks import check_fraction, check_non_negative, check_positive
from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core import hooks
from vflsec.core.federation import Federation
from vflsec.core.hooks import Hook
from vflsec.core.method import RATES, Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.methods.epochs import EarlyStopping
from vflsec.methods.local import Learner, LocalTraining, build_local, get_rows, learn, select_labeled_rows
from vflsec.methods.split_method import SPLIT, SplitMethod
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.augmentation import ScarfCorruption
from vflsec.nn.losses import scarf_loss
from vflsec.nn.stacked import draw_batches
from vflsec.protocols.plain import PlainBoundary

HELD_OUT, PATIENCE = 0.1, 3
PRETRAINED = ("epochs", "batch", "lr", "weight_decay")
MIN_ROWS = 4
"""Two to learn from and two to validate on: a loss needs a second row to compare with."""


class ScarfSSL(Learner):
    """Step 2 of VFLHLP: the encoder learns to match each corrupted row of a batch with its clean row.

    Rows are those of the party itself, aligned or not; nothing is sent. A tenth of them is held out, always corrupted
    in the same way: training stops when their loss has not fallen for three epochs, and the best state is taken.

    Source: Bahri et al. 2022 (Scarf), arXiv 2106.15147, algorithm 1, whose settings VFLHLP (Li et al. 2024, arXiv
    2405.11884, section 4.2.2) leaves as they are: Adam, early stopping with patience 3.

    Args:
        party: whose rows; only its own are read.
        model: encoder and projection head, (B, d) -> (B, width).
        seed: of the run; streams are named by party and epoch.
        epochs: at most.
        batch: rows per update, N in the loss.
        lr: learning rate.
        weight_decay: L2 factor.
        rate: share of a row's raw columns that is corrupted.
        temperature: tau.
    """

    def __init__(
        self,
        party: Party,
        model: nn.Module,
        *,
        seed: int,
        epochs: int,
        batch: int,
        lr: float,
        weight_decay: float = 0.0,
        rate: float,
        temperature: float,
    ) -> None:
        rows = get_rows(party)
        order = torch.randperm(len(rows), generator=make_rng(seed, "held out", party.name)).to(rows.device)
        held_out, rest = order.tensor_split([max(2, round(HELD_OUT * len(rows)))])
        self.rows, self.held_out = rows[rest], rows[held_out]
        self.model = model
        self.batch = batch
        self.temperature = temperature
        self.corrupt = ScarfCorruption(party.layout, self.rows, rate)
        self.state = EarlyStopping(model, epochs=epochs, patience=PATIENCE)
        self.optimizer = torch.optim.Adam(model.parameters(), lr, weight_decay=weight_decay, fused=True)
        self._streams = (seed, party.name)

    def epoch(self) -> float:
        """Make one pass; the loss of the rows held out chooses the epoch."""
        number, (seed, name) = self.state.epoch, self._streams
        order = make_rng(seed, "batches", "scarf", name, number)
        noise = make_rng(seed, "corruption", name, number, device=self.rows.device)
        parts = draw_batches(len(self.rows), self.batch, order, self.rows.device)
        mean = self._make_pass(parts, lambda rows: self._compute_loss(self.rows[rows], noise), None)
        held_out = self.compute_validation_loss()
        if not math.isfinite(mean + held_out):
            raise Diverged(
                f"the loss of Scarf at {name} is {mean}, {held_out} on rows held out, after epoch {number + 1}: "
                "lower train.pretrain.lr"
            )
        self.state.count(-held_out)
        return mean

    def finish(self) -> None:
        """Put the model into its best state."""
        self.state.take_best()

    @torch.no_grad()
    def compute_validation_loss(self) -> float:
        """Return the mean loss of the rows held out, in evaluation mode."""
        seed, name = self._streams
        noise = make_rng(seed, "corruption", name, "held out", device=self.rows.device)
        self.model.eval()
        losses = [self._compute_loss(rows, noise) * len(rows) for rows in torch.split(self.held_out, self.batch)]
        return float(torch.stack(losses).sum()) / len(self.held_out)

    def _compute_loss(self, rows: Tensor, noise: torch.Generator) -> Tensor:
        return scarf_loss(self.model(rows), self.model(self.corrupt(rows, noise)), self.temperature)


SHARED_DIFFERS = (
    "The paper states no training settings. Split learning and step 1 follow train, and encoders follow model: "
    "by default two blocks of width 128 with BatchNorm, Adam at 0.001. The paper has 64-64-16 and "
    "256-128-64-16.",
    "Labels that a defense changes are changed before pre-training.",
)
CONSTRAINT_DIFFERS = (
    "L_cons sums squared differences over parameters, the bias of the head included; BatchNorm's running "
    "statistics are left out. Eq. 8 prints squares of vectors.",
    "The active party computes beta L_cons itself; in algorithm 1 the server computes the whole loss. beta is "
    "0.01 by default; the paper names no value.",
)
SCARF_DIFFERS = (
    "Scarf: the second norm of eq. 5 is that of the corrupted row's projection, where eq. 5 prints the clean one's.",
    "Scarf: rate 0.6, temperature 1, batches of 128, Adam at 0.001, early stopping with patience 3 on a tenth "
    "of the rows and at most 100 epochs; the paper names none of these.",
    "Scarf: the projection head has two layers as wide as the embedding; the original has 256.",
    "Scarf corrupts categories before they are embedded.",
)


class VFLHLP(SplitMethod):
    """The whole of VFLHLP: supervised pre-training constrains the active party, Scarf initializes the passive ones.

    1. The active party fits an encoder Theta^1 and a linear head Theta^0 of its own to all its labeled rows, aligned
       or not: the model of the method ``local``.
    2. Each passive party fits its encoder Theta^k by Scarf to all its rows; the projection head is dropped.
    3. Split learning on the aligned labeled rows. Passive encoders start from Theta^k. The active party's encoder
       theta^1 and the head theta^0 are drawn at random, and it adds beta · L_cons to its own loss (eq. 7 and 8),
       L_cons = 1/2 (||theta^1 - Theta^1||^2 + ||theta^0_s - Theta^0||^2), where theta^0_s is the bias and those columns
       of the head that read its embedding. Squares are summed over parameters; running statistics are left out.

    Steps 1 and 2 send nothing: what a passive party infers from its pre-training, it could infer alone.

    The paper states no training settings. Step 1 follows ``train``; step 2 follows Scarf: Adam, 10^-3, batches of 128,
    rate 0.6, tau 1, early stopping, and at most 100 epochs. Numbers in ``train.pretrain`` override both. A global
    iteration is an epoch of each party that is still learning. Labels that a defense changes are changed before step 1,
    once for all steps.

    Source: VFLHLP (Li et al. 2024, arXiv 2405.11884), section 4.2 and algorithm 1; section 5.4 for VFLHLP-A and -P.

    Class attributes:
        constrains: whether the active party pre-trains (step 1) and is constrained by the result.
        initializes: whether passive parties pre-train (step 2) and start from the result.

    Args:
        boundary: the protocol at the cut layer in fine-tuning.
        beta: weight of L_cons; 0 is split learning from the same start, bit for bit.
        rate: share of a row's raw columns that Scarf corrupts.
        temperature: tau of Scarf's loss.
    """

    name = "vflhlp"
    reference = "Li et al. 2024 (VFLHLP), arXiv 2405.11884, section 4.2 and algorithm 1"
    differs: ClassVar[tuple[str, ...]] = (*SHARED_DIFFERS, *CONSTRAINT_DIFFERS, *SCARF_DIFFERS)
    phases = ("pretrain", "finetune")
    messages = {"pretrain": frozenset(), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar in the base class)
    learns: ClassVar[Mapping[str, frozenset[Hook]]] = {"pretrain": hooks.ON_LABELS}
    stored_modules = frozenset({"bottom", "pretrained"})
    last_phase_options = frozenset({"boundary", "beta"})
    prior = "vflhlp"
    encoder = "auto"
    search = {**RATES, "train.pretrain.lr": (1e-4, 1e-2), "beta": (1e-3, 0.1)}  # noqa: RUF012
    constrains: ClassVar[bool] = True
    initializes: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Set what follows from the steps that are taken."""
        super().__init_subclass__()
        constraint, scarf = cls.constrains, cls.initializes
        cls.derive(
            differs=SHARED_DIFFERS + CONSTRAINT_DIFFERS * constraint + SCARF_DIFFERS * scarf,
            learns={"pretrain": hooks.ON_LABELS if constraint else frozenset()},
            stored_modules=frozenset({"bottom"} if scarf else ()) | frozenset({"pretrained"} if constraint else ()),
            last_phase_options=frozenset({"boundary", "beta"} if constraint else {"boundary"}),
            prior=cls.name if scarf else None,
        )
        cls.leave_out((() if constraint else ("beta",)) + (() if scarf else ("rate", "temperature")))

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        beta: float = 1e-2,
        rate: float = 0.6,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(train, model, boundary=boundary)
        check_non_negative(beta=beta)
        check_fraction(rate=rate)
        check_positive(temperature=temperature)
        self.beta = beta
        self.rate = rate
        self.temperature = temperature
        self._projections: dict[str, nn.Module] = {}

    @property
    def pretraining(self) -> PretrainSpec:
        """What is given, and for Scarf its own numbers where nothing is; step 1 has those of ``train`` instead."""
        given = self.train_spec.pretrain
        if not self.initializes:
            return given
        epochs, batch, lr = given.epochs or 100, given.batch or 128, given.lr or 1e-3
        return PretrainSpec(epochs=epochs, batch=batch, lr=lr, weight_decay=given.weight_decay or 0.0)

    def build(self, federation: Federation) -> None:
        """Draw what split learning has, the active party's model of its own, and Scarf's projection heads."""
        super().build(federation)
        if self.constrains:
            federation.active.modules["pretrained"] = build_local(federation, self.model_spec)
        for party in federation.passive if self.initializes else ():
            width = self.width(party)
            with seed_weights(federation.seed, "model", party.name, "projection"):
                head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            self._projections[party.name] = head.to(federation.device)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if the head has no slice for the active party, or rows are lacking."""
        super().check(federation)
        spec = self.model_spec
        if self.constrains and (spec.head, spec.aggregation) != ("linear", "concat"):
            raise UsageError(
                f"{self.name} expects model.head=linear and model.aggregation=concat, got {spec.head} and "
                f"{spec.aggregation}: only there is a part of the head the active party's own"
            )
        for party in federation.passive if self.initializes else ():
            count = len(get_rows(party))
            if count < MIN_ROWS:
                raise UsageError(
                    f"{self.name} expects {MIN_ROWS} rows at each passive party, got {count} at {party.name}: "
                    "raise data.aligned or data.overlap"
                )

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training across the cut layer, with the active party's constraint."""
        training = super().split(federation)
        if self.constrains and self.beta:
            training.constraint = lambda: self.beta * self.measure_distance(federation)
        return training

    def measure_distance(self, federation: Federation) -> Tensor:
        """Return L_cons of eq. 8; the pre-trained model is held fixed."""
        return 0.5 * torch.stack([(now - then.detach()).square().sum() for now, then in self._pair(federation)]).sum()

    def _pair(self, federation: Federation) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that is constrained, and what it was in the active party's own model."""
        modules = federation.active.modules
        encoder = modules["pretrained"].get_submodule("encoder")
        local_head = modules["pretrained"].get_submodule("head")
        yield from zip(modules["bottom"].parameters(), encoder.parameters(), strict=True)
        head = modules["top"].get_submodule("head")
        assert isinstance(head, nn.Linear)
        assert isinstance(local_head, nn.Linear)
        yield head.weight[:, : local_head.in_features], local_head.weight  # the active party's embedding comes first
        yield head.bias, local_head.bias

    def pretrain(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run steps 1 and 2; return the mean loss of the parties that still learn, by global iteration."""
        return learn(federation, phase, progress, dict(self._make_learners(federation)))

    def _make_learners(self, federation: Federation) -> Iterator[tuple[str, Learner]]:
        given = self.train_spec.pretrain
        if self.constrains:
            numbers = {key: value for key in PRETRAINED if (value := getattr(given, key)) is not None}
            spec = msgspec.structs.replace(self.train_spec, **numbers)
            labels = torch.cat([self._labels(federation, "train"), self._labels(federation, "local")])
            active, rows = federation.active, select_labeled_rows(federation)[0]
            model = active.modules["pretrained"]
            yield active.name, LocalTraining(federation, model, rows, labels, spec, defenses=active.defenses)
        settings = {key: getattr(self.pretraining, key) for key in PRETRAINED}
        for party in federation.passive if self.initializes else ():
            model = nn.Sequential(party.modules["bottom"], self._projections[party.name])
            numbers = {"rate": self.rate, "temperature": self.temperature, **settings}
            yield party.name, ScarfSSL(party, model, seed=federation.seed, **numbers)

    def _labels(self, federation: Federation, split: str) -> Tensor:
        """The active party's labels as fine-tuning sees them, (n,) class numbers or (n, C) probabilities.

        A defense that changes labels changes each one once: two draws could be averaged, and true labels would reach
        the gradients by way of the constraint.
        """
        active = federation.active
        labels = active.labels[split]
        stream = [self.phases[-1], *([] if split == "train" else [split])]
        rng = federation.get_label_stream(*stream)
        features = active.features[split][: len(labels)]
        return active.defenses.training_targets(labels, features, n_classes=federation.n_classes, rng=rng)[1]
