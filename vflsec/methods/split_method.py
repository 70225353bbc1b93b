"""Base class of methods that end in supervised split learning: FedSplitNN itself, and fine-tuning."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vflsec.base.errors import NotStackable, UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.cipher.noise import SealedPlan
from vflsec.cipher.roles.exposure import Exposure
from vflsec.core import hooks
from vflsec.core.federation import Federation
from vflsec.core.message import Kind
from vflsec.core.method import Method, Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary, LinearBoundary
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.methods.epochs import get_selection
from vflsec.methods.sealed_training import PRIVATE, PrivateModel, SealedTraining
from vflsec.methods.split_training import HeadTraining, SplitTraining
from vflsec.nn.encoders import build_encoder
from vflsec.nn.top import SharedTop, Top, build_top
from vflsec.protocols.plain import PlainBoundary
from vflsec.protocols.sealed_plain import SealedSums

BATCH_NORM = nn.BatchNorm1d | nn.BatchNorm2d

SPLIT = frozenset({Kind.EMBEDDING, Kind.GRADIENT})
"""The messages of split learning."""

RECEIVES = {"passive": frozenset({Kind.GRADIENT}), "active": frozenset({Kind.EMBEDDING})}
"""What each side receives in split learning."""


class SplitMethod(Method):
    """A method whose last phase is split learning on the aligned labeled rows.

    Class attributes:
        shares_head: whether a protocol may hold the passive parties' parts of a linear head.
        logistic: whether the head of two classes has one output.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
        boundary: the protocol at the cut layer.
    """

    receives = RECEIVES
    messages = {"train": SPLIT}  # noqa: RUF012  (declared ClassVar in the base class)
    shares_head: ClassVar[bool] = True
    logistic: ClassVar[bool] = False

    def __init__(self, train: TrainSpec, model: ModelSpec, *, boundary: type[Boundary] = PlainBoundary) -> None:
        super().__init__(train, model)
        self.boundary = boundary
        self._boundaries: dict[str, Boundary] = {}

    def build_party(self, party: Party, federation: Federation) -> None:
        """Give ``party`` what it has below the cut layer; layers draw from a stream of the party's own."""
        party.modules["bottom"] = build_encoder(party.layout, self.model_spec, federation.n_classes)

    def build(self, federation: Federation) -> None:
        """Draw each party's models, and the active party's top model, from streams of their own."""
        for party in federation.parties.values():
            with seed_weights(federation.seed, "model", party.name):
                self.build_party(party, federation)
        self._boundaries = self.connect(federation, self.train_spec, federation.n_rows("train"), "top")
        for party in federation.parties.values():
            party.modules.to(federation.device)

    def connect(self, federation: Federation, train: TrainSpec, rows: int, *stream: str) -> dict[str, Boundary]:
        """Draw the active party's top model from ``stream``, and return its boundary to each passive party by name.

        What a boundary itself learns follows ``train``, over so many ``rows``.
        """
        boundaries: dict[str, Boundary] = {}
        with seed_weights(federation.seed, "model", *stream):
            federation.active.modules["top"] = self.build_top(federation)
        protocol, options = self._get_protocol(federation)
        for party in federation.passive:
            boundaries[party.name] = protocol(party, federation.active, **options)
        if any(isinstance(boundary, LinearBoundary) for boundary in boundaries.values()):
            self._share_head(federation, boundaries, train, rows, *stream[1:])
        if any(isinstance(boundary, SealedSums) for boundary in boundaries.values()):
            width = sum(map(self.width, federation.passive), federation.active.n_features)
            with seed_weights(federation.seed, "model", "private", *stream):
                federation.active.modules[PRIVATE] = PrivateModel(width, federation.n_classes)
        for party in federation.passive:
            role = "_".join(["boundary", *stream[1:], party.name])
            for owner, module in boundaries[party.name].modules().items():  # stored with its owner's own models
                federation.parties[owner].modules[role] = module
        self._prepare(federation)
        return boundaries

    def build_top(self, federation: Federation) -> nn.Module:
        """Return the active party's top model."""
        widths = [self.width(party) for party in federation.parties.values()]
        return build_top(widths, federation.n_classes, self.model_spec, logistic=self.logistic)

    def _get_protocol(self, federation: Federation) -> tuple[type[Boundary], dict[str, Any]]:
        """The protocol with its options at the cut layer: a defense's own goes before the method's."""
        protocols = federation.active.defenses.protocols()
        if len(protocols) > 1 or (protocols and self.boundary is not PlainBoundary):
            raise UsageError("expected one protocol at the cut layer, got several: leave all but one out")
        return protocols[0] if protocols else (self.boundary, {})

    def _share_head(
        self, federation: Federation, boundaries: Mapping[str, Boundary], train: TrainSpec, rows: int, *stream: str
    ) -> None:
        """Give each linear boundary the part of the head that reads its party's embedding.

        The whole head was drawn first, so that training starts where it does at a plain boundary.
        """
        spec, top = self.model_spec, federation.active.modules["top"]
        if not self.shares_head or (spec.head, spec.aggregation) != ("linear", "concat"):
            way_out = "set model.head=linear and model.aggregation=concat" if self.shares_head else "take fedsplitnn"
            raise UsageError(
                f"expected a linear head over concatenated embeddings, got another in {self.name}: {way_out}"
            )
        changing = [d.name for party in federation.parties.values() for d in party.defenses.select(hooks.UPDATE)]
        if changing:
            raise UsageError(
                f"expected no defense of updates beside an encrypted head, got {changing[0]}: the head's weights learn "
                "inside the protocol, where it cannot act; drop one of them"
            )
        if train.local_steps > 1:
            raise UsageError(
                f"expected train.local_steps=1, got {train.local_steps}: the weights that a protocol holds learn in "
                "exchanges alone"
            )
        assert isinstance(top, Top)
        assert isinstance(top.head, nn.Linear)
        widths = [self.width(party) for party in federation.parties.values()]
        active_part, *parts = torch.split(top.head.weight.detach(), widths, dim=1)
        for party, part in zip(federation.passive, parts, strict=True):
            boundary = boundaries[party.name]
            assert isinstance(boundary, LinearBoundary), "all boundaries of a run are of one kind"
            with seed_weights(federation.seed, "model", party.name, "head", *stream):
                boundary.join(part.T.clone(), train, batches=train.count_batches(rows), epochs=train.count_epochs(rows))
        federation.active.modules["top"] = SharedTop(top, active_part.shape[1])

    def _prepare(self, federation: Federation) -> None:
        """Tell the active party's defenses what they will receive; each draws its first weights from its own stream."""
        shared = isinstance(federation.active.modules["top"], SharedTop)
        outputs = 1 if self.logistic and federation.n_classes == 2 else federation.n_classes
        widths = {party.name: outputs if shared else self.width(party) for party in federation.passive}
        for number, defense in enumerate(federation.active.defenses):
            stream = () if federation.active.name == "active" else (federation.active.name,)
            with seed_weights(federation.seed, "model", "defense", number, *stream):
                rng = make_rng(federation.seed, "defense", number, *stream, device=federation.device)
                defense.prepare(widths, n_classes=federation.n_classes, rng=rng)

    @property
    def sums_plan(self) -> SealedPlan | None:
        """The plan of sealed training; None for any other."""
        plans = (boundary.plan for boundary in self._boundaries.values() if isinstance(boundary, SealedSums))
        return next(plans, None)

    def width(self, party: Party) -> int:
        """Return the width of the embedding that ``party`` sends."""
        width = self.representation(party).width
        assert isinstance(width, int)
        return width

    def check(self, federation: Federation) -> None:
        """Raise UsageError if validation rows are needed, and there are none, or batches are too small."""
        get_selection(self.train_spec, federation)
        if self.sums_plan:
            training = self.split(federation)
            if isinstance(training, SealedTraining):
                training.check()
            elif not isinstance(training, HeadTraining):
                raise UsageError(
                    f"expected plain split learning for sealed, got {self.name}: choose --method fedsplitnn"
                )
        layers = (layer for party in federation.parties.values() for layer in party.modules.modules())
        if self.train_spec.batch < 2 and any(isinstance(layer, BATCH_NORM) for layer in layers):
            raise UsageError(f"expected train.batch >= 2, got {self.train_spec.batch}: one row tells BatchNorm nothing")

    def together(self, joined: Federation) -> SplitMethod:
        """Return this method with plain boundaries between the parties of all runs."""
        spec = self.train_spec
        if any(type(boundary) is not PlainBoundary for boundary in self._boundaries.values()):
            raise NotStackable("the boundary holds a state of its own")
        if spec.select != "last" or spec.patience or spec.target:
            raise NotStackable("train.select, train.patience and train.target measure each run after every epoch")
        if spec.clip:
            raise NotStackable("train.clip bounds the gradients of each run")
        method = copy.copy(self)
        method._boundaries = {party.name: self.boundary(party, joined.active) for party in joined.passive}
        return method

    def record(self, folder: Path) -> None:
        """Record every boundary, each in a folder named after its passive party."""
        for name, boundary in self._boundaries.items():
            boundary.record(folder / name)

    def close(self) -> None:
        """Close every boundary."""
        for boundary in self._boundaries.values():
            boundary.close()

    def notes(self, federation: Federation) -> list[str]:
        """Return whose embeddings the scores of an encrypted layer give away."""
        top = federation.active.modules["top"]
        scores = top.head.out_features if isinstance(top, SharedTop) else 0
        return [
            f"scores, {scores} a row and in clear at the active party, give the embedding of {party.name}, {width} "
            f"wide, up to a linear map: encryption does not hide it; set model.cut above {scores}"
            for party in federation.passive
            if (width := self.width(party)) <= scores
        ]

    def exposures(self, federation: Federation) -> list[tuple[str, float]]:
        """Return how much the scores of a masked linear layer will reveal of each passive party's features."""
        top = federation.active.modules["top"]
        if not isinstance(top, SharedTop):
            return []
        rows = federation.n_rows("train")
        exposures = []
        for party in federation.passive:
            exposure = Exposure(
                passes=self.train_spec.count_epochs(rows),
                outputs=top.head.out_features,
                width=self.width(party),
                rows=rows,
                frozen=self.is_frozen(party),
            )
            exposures.append((f"{self.name}, features of {party.name}: {exposure}", exposure.share))
        return exposures

    def is_frozen(self, party: Party) -> bool:
        """Return whether the embedding of ``party`` stays the same in the last phase."""
        return not any(parameter.requires_grad for parameter in self.representation(party).parameters())

    def cryptography(self, federation: Federation) -> float:
        """Return about how many CPU seconds the protocols at the cut layer take for the batches of the last phase."""
        if self.sums_plan:
            return sum(boundary.time_exchanges(values, sums) for boundary, values, sums in self._list_sums(federation))
        batches = self.train_spec.count_batches(federation.n_rows("train"))
        return sum(boundary.seconds(batches) for boundary in self._boundaries.values())

    def count_sums_bytes(self, federation: Federation) -> int:
        """Return the bytes of sealed training besides embeddings; 0 for any other."""
        return sum(boundary.count_bytes(values, sums) for boundary, values, sums in self._list_sums(federation))

    def _list_sums(self, federation: Federation) -> list[tuple[SealedSums, list[int], int]]:
        training = self.split(federation)
        return training.list_exchanges() if isinstance(training, SealedTraining) else []

    def max_releases(self, phase: str, federation: Federation) -> int | None:
        """Return the epochs of the last phase, in each of which every row is sent once; None for other phases."""
        if phase != self.phases[-1]:
            return None
        return self.sums_plan.epochs + 1 if self.sums_plan else self.train_spec.count_epochs(federation.n_rows("train"))

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run the last phase, split learning; ``pretrain`` runs the one before it."""
        if phase != self.phases[-1]:
            return self.pretrain(phase, federation, progress)
        return self.split(federation).fit(phase, progress)

    def pretrain(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run the phase before split learning, of a method that has one; return its loss by epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no phase {phase}")

    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return logits (n, C)."""
        return self.split(federation).predict(split)

    def public_options(self) -> dict[str, Any]:
        """Return the settings of the training if nothing but the sent gradients moves a bottom model."""
        spec = self.train_spec
        return {"train": spec} if spec.local_steps == 1 and not spec.clip and not spec.weight_decay else {}

    def representation(self, party: Party) -> nn.Module:
        """Return the bottom model."""
        return party.modules["bottom"]

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training across the cut layer, from the models as they are."""
        bottoms = {party.name: self.representation(party) for party in federation.parties.values()}
        training = SealedTraining if self.sums_plan else SplitTraining
        return training(federation, bottoms, federation.active.modules["top"], self._boundaries, self.train_spec)


class PretrainedMethod(SplitMethod):
    """Pre-training without labels by global iterations, then split learning.

    Attributes:
        iterations: all global iterations.
        until: after which pre-training stops.
        batch: rows per update.
        lr: learning rate.
        weight_decay: L2 factor.
    """

    phases = ("pretrain", "finetune")
    snapshots = True

    def plan_pretraining(self, *, epochs: int, batch: int, lr: float, weight_decay: float) -> None:
        """Set the numbers of pre-training: those of ``train.pretrain``, else these."""
        spec = self.train_spec.pretrain
        self.iterations = spec.epochs or epochs
        self.until = min(spec.until or self.iterations, self.iterations)
        self.batch, self.lr = spec.batch or batch, spec.lr or lr
        self.weight_decay = weight_decay if spec.weight_decay is None else spec.weight_decay
        if self.batch < 2:
            raise UsageError(
                f"expected train.pretrain.batch >= 2, got {self.batch}: one row has no other to learn from"
            )

    @property
    def pretraining(self) -> PretrainSpec:
        """Global iterations, batch, learning rate and weight decay."""
        return PretrainSpec(epochs=self.iterations, batch=self.batch, lr=self.lr, weight_decay=self.weight_decay)

    def count_updates(self, rows: int) -> int:
        """Return how many updates of pre-training ``rows`` make; a last batch of a single row is none of its own."""
        return self.iterations * max(1, math.ceil(rows / self.batch) - (rows % self.batch == 1))
