"""Base class of the SS-VFL methods: a linear projection per party, and the pre-training of each party alone."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from torch import nn

from vflsec.base.checks import one_of, positive
from vflsec.base.errors import UsageError
from vflsec.base.seeds import drawing
from vflsec.core import hooks
from vflsec.core.federation import Federation
from vflsec.core.method import Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.methods.epochs import Epochs, set_rate
from vflsec.methods.local_contrastive import LocalCL, LocalMoCo
from vflsec.methods.local_training import own_rows
from vflsec.methods.split_method import SplitMethod
from vflsec.nn.bottoms import Encoder
from vflsec.nn.encoders import build_encoder
from vflsec.protocols.plain import PlainBoundary

LEARNERS = {"moco": LocalMoCo, "inbatch": LocalCL}
WIDTH = 128


class SSVFL(SplitMethod):
    """Contrastive learning of each party by itself, then learning from labels on top of it.

    A party's model is its encoder with a linear projection at its end, to the cut layer. Pre-training sends nothing:
    each party uses its aligned and its local rows, and could do so without a federation. What an adversary infers from
    that belongs to *alone*.

    As in the released code, the projection starts again at random after pre-training, unless ``keep_projection``.

    Source: SS-VFL (Castiglia et al. 2022), section 3.

    Args:
        train: how models are fitted. ``pretrain`` defaults to batches of 128 and the learning rate 0.03, divided by ten
            after 60 % and after 80 % of the epochs, as released; and to 40 epochs, as in FedHSSL, where the paper has
            200.
        model: the shape of the networks.
        boundary: the protocol at the cut layer.
        localcl: what a party learns from its rows: ``moco``, as released, or ``inbatch``, as printed.
        projection: width of the projection; None for ``model.cut``, or the paper's 128 if there is none.
        keep_projection: whether what pre-training made of the projection is kept.
    """

    differs: ClassVar[tuple[str, ...]] = (
        "LocalCL is MoCo v1 by default (localcl=moco), as in the released code; the paper prints an in-batch loss "
        "(localcl=inbatch), and that in one direction where both are taken here.",
        "The queue of MoCo holds 65,536 keys, or one for each row where these are fewer.",
        "Temperature 0.2, SGD at 0.03 with momentum 0.9 and weight decay 1e-4, and two steps of the rate are the "
        "released code's.",
        "Pre-training takes 40 epochs by default, with the rate divided by ten after 60 % and 80 % of them; the "
        "paper takes 200.",
        "The projection to the cut layer starts again at random after pre-training, as in the released code; the "
        "paper does not say so (keep_projection=true).",
        "Tables: view 1 is the row itself and view 2 a corruption of it; the paper has images alone. Jitter of "
        "images is relative to their own mean and deviation.",
        "Encoders are those of model, and fine-tuning follows train: by default Adam at 0.001 in batches of 256. "
        "The paper has ResNet-18 and ResNet-50 and 500 epochs, its code SGD with rates for each dataset.",
    )
    phases = ("pretrain", "finetune")
    snapshots = True
    stored_modules = frozenset({"bottom"})
    learns = {"pretrain": frozenset(), "finetune": hooks.SPLIT_LEARNING}  # noqa: RUF012  (declared ClassVar in the base)
    last_phase_options = frozenset({"boundary", "keep_projection"})
    encoder = "auto"

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        localcl: Literal["moco", "inbatch"] = "moco",
        projection: int | None = None,
        keep_projection: bool = False,
    ) -> None:
        super().__init__(train, model, boundary=boundary)
        one_of(LEARNERS, localcl=localcl)
        if projection is not None:
            positive(projection=projection)
            if model.head == "none":
                raise UsageError(
                    "expected no projection with model.head=none, got one: the cut is as wide as the number of classes"
                )
        self.localcl = localcl
        self.projection = projection or model.cut or WIDTH
        self.keep_projection = keep_projection
        spec = train.pretrain
        self.iterations = spec.epochs or 40
        self.until = min(spec.until or self.iterations, self.iterations)
        self.batch = spec.batch or 128
        self.lr = spec.lr or 0.03
        if self.batch < 2:
            raise UsageError(f"expected train.pretrain.batch >= 2, got {self.batch}: a row is told from the others")

    @property
    def pretraining(self) -> PretrainSpec:
        """Global iterations, batch and learning rate."""
        return PretrainSpec(epochs=self.iterations, batch=self.batch, lr=self.lr)

    def build_party(self, party: Party, federation: Federation) -> None:
        """Draw the encoder and, at its end, the projection."""
        spec = self.model_spec
        if spec.head != "none":  # without one, embeddings are logits
            spec = msgspec.structs.replace(spec, cut=self.projection)
        party.modules["bottom"] = build_encoder(party.layout, spec, federation.n_classes)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if a party has fewer than two rows to learn from."""
        super().check(federation)
        for party in federation.parties.values():
            if len(own_rows(party)) < 2:
                raise UsageError(
                    f"{self.name} expects two training rows at each party, got {len(own_rows(party))} at {party.name}: "
                    "raise data.aligned or lower data.overlap"
                )

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Pre-train, or learn from labels."""
        if phase != "pretrain" and not self.keep_projection:
            for party in federation.parties.values():
                self._draw_projection(party, federation.seed)
        return super().train(phase, federation, progress)

    def rate(self, iteration: int) -> float:
        """Return the learning rate of pre-training in ``iteration`` (from 0)."""
        return self.lr * 0.1 ** sum(10 * iteration >= tenths * self.iterations for tenths in (6, 8))

    def pretrain(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run LocalCL at every party; return the mean loss of each global iteration."""
        learners = {party.name: self._learner(party, federation.seed) for party in federation.parties.values()}
        optimizers = [learner.optimizer for learner in learners.values()]
        epochs = Epochs(federation, phase, progress, self.until, kept=learners, optimizers=optimizers)
        for iteration in epochs:
            set_rate(optimizers, self.rate(iteration))
            passes = [learner.steps(federation.seed, phase, name, iteration) for name, learner in learners.items()]
            losses = [float(loss) for steps in passes for loss in steps]
            epochs.end(sum(losses) / len(losses))
        return epochs.losses

    def _learner(self, party: Party, seed: int) -> LocalCL:
        with drawing(seed, "queue", party.name):
            return LEARNERS[self.localcl](_bottom(party), own_rows(party), party.layout, batch=self.batch, lr=self.lr)

    def _draw_projection(self, party: Party, seed: int) -> None:
        """Draw the last layer anew, on the CPU, so that every device gets the same."""
        *_, projection = _bottom(party).top.modules()
        assert isinstance(projection, nn.Linear), "with a cut, a plain Linear ends the encoder"
        with drawing(seed, "projection", party.name):
            fresh = nn.Linear(projection.in_features, projection.out_features)
        projection.load_state_dict(fresh.state_dict())


def _bottom(party: Party) -> Encoder:
    found = party.modules["bottom"]
    assert isinstance(found, Encoder)
    return found
