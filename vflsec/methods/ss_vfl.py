"""SS-VFL: contrastive learning of each party alone, then learning from labels on top of it."""

import copy
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from vflsec.base.checks import check_positive, expect_known
from vflsec.base.errors import UsageError
from vflsec.base.layout import Layout
from vflsec.base.seeds import seed_weights
from vflsec.core.federation import Federation
from vflsec.core.message import Kind
from vflsec.core.method import RATES, Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.epochs import Epochs, set_rate
from vflsec.methods.local import get_rows
from vflsec.methods.split_method import RECEIVES, SPLIT, PretrainedMethod
from vflsec.methods.split_training import Alter, HeadTraining, SplitTraining
from vflsec.methods.ssl_steps import draw_two_views
from vflsec.nn.augmentation import ImageAugmentation, TwoViews, UniformCorruption, make_two_views
from vflsec.nn.encoders import Encoder, build_encoder
from vflsec.nn.losses import info_nce, nt_xent
from vflsec.nn.siamese import Queue, fit_momentum, update_average
from vflsec.protocols.plain import PlainBoundary

MOMENTUM, WEIGHT_DECAY, TEMPERATURE = 0.9, 1e-4, 0.2
AVERAGE, QUEUE = 0.999, 65_536


class LocalCL(nn.Module):
    """The model learns to distinguish the two views of a row from all other views in the batch.

    The loss is NT-Xent, both ways, with 2B - 2 negatives, straight on the model's output: there is no projector behind
    it. The optimizer is SGD with momentum 0.9 and weight decay 1e-4.

    Source: SS-VFL (Castiglia et al. 2022), algorithm 4 and equation 2, which prints one way; temperature and optimizer
    are those of the released code.

    Args:
        model: (B, d) -> (B, width), what learns.
        rows: (n, d) of the party, n >= 2.
        layout: of its columns.
        batch: rows per update.
        lr: first learning rate.
        weight_decay: L2 factor.
        updates: in all, by which a moving average is to forget its start; None for the momentum of the released code.

    Attributes:
        optimizer: of the model.
    """

    def __init__(
        self,
        model: Encoder,
        rows: Tensor,
        layout: Layout,
        *,
        batch: int,
        lr: float,
        weight_decay: float = WEIGHT_DECAY,
        updates: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.rows = rows
        self.views = make_views(layout, rows)
        self.batch = batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM, weight_decay=weight_decay, fused=True)

    def steps(self, *stream: object) -> Iterator[Tensor]:
        """Yield the loss of each update of one pass over the rows; ``stream`` names its randomness, seed first."""
        self.train()
        for first, second in draw_two_views(self.views, self.rows, self.batch, *stream):
            loss = self.loss(first, second)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()  # after it, so that no gradient is left for a later phase to find
            self.update_state()
            yield loss.detach()

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of two views (B, d) of the same rows."""
        return nt_xent(self.model(first), self.model(second), TEMPERATURE)

    def update_state(self) -> None:
        """Update what follows the model."""


class LocalMoCo(LocalCL):
    """View 1 of a row is to find its key, view 2, among keys of other rows, which a queue remembers: MoCo v1.

    Keys are made by a slow average of the model. It and the queue are not used after training. The
    queue starts with random directions, drawn from torch's global stream.

    Source: He et al. 2020 (MoCo), arXiv 1911.05722, algorithm 1, with temperature 0.2, as the released code of SS-VFL
    has it in the place of equation 2.

    Args: those of ``LocalCL``.
    """

    def __init__(
        self, model: Encoder, rows: Tensor, layout: Layout, *, batch: int, updates: int | None = None, **rates: Any
    ) -> None:
        super().__init__(model, rows, layout, batch=batch, **rates)
        self.momentum = fit_momentum(AVERAGE, updates) if updates else AVERAGE
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.queue = Queue(size_queue(len(rows), batch), model.width).to(rows.device)
        self._keys = torch.empty(0)  # of the last step

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Return InfoNCE of view 1 (B, d) against the key of view 2, with the whole queue as negatives."""
        with torch.no_grad():
            self._keys = self.average(second)  # (B, width)
        return info_nce(self.model(first), self._keys, self.queue.keys, TEMPERATURE)

    def update_state(self) -> None:
        """Move the average towards the model; remember the last keys."""
        update_average(self.average, self.model, self.momentum)
        self.queue.enqueue(self._keys)


def size_queue(rows: int, batch: int) -> int:
    """Return how many keys are remembered: 65,536, or one for each row if these are fewer, in whole batches."""
    most = min(QUEUE, rows)
    return most - most % min(batch, most)


def make_views(layout: Layout, rows: Tensor) -> TwoViews:
    """Return what makes two views: of images MoCo v1's alterations, of a table those of all other methods."""
    if layout.image is None:
        return make_two_views(layout, rows)
    alter = ImageAugmentation(
        layout.image, scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), jitter_p=1.0, grey_p=0.2, blur_p=0.0
    )
    return lambda x, noise: (alter(x, noise), alter(x, noise))


LEARNERS = {"moco": LocalMoCo, "inbatch": LocalCL}
WIDTH = 128


class SSVFL(PretrainedMethod):
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
        boundary: the protocol at the cut layer.
        localcl: what a party learns from its rows: ``inbatch``, as printed, or ``moco``, as released.
        projection: width of the projection; None for ``model.cut``, or the paper's 128 if there is none.
        keep_projection: whether what pre-training made of the projection is kept.
    """

    differs: ClassVar[tuple[str, ...]] = (
        "LocalCL has the in-batch loss of equation 2, in both directions where the paper prints one; the released code "
        "has MoCo v1 (localcl=moco).",
        "The queue of MoCo holds 65,536 keys, or one for each row where these are fewer; its moving average has the "
        "momentum 0.999, or less where few updates would leave much of its random start (not with "
        "train.pretrain.paper=true).",
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
    version = 2
    stored_modules = frozenset({"bottom"})
    learns = {"pretrain": frozenset()}  # noqa: RUF012  (declared ClassVar in the base)
    last_phase_options = frozenset({"boundary", "keep_projection"})
    encoder = "auto"
    search = {**RATES, "train.pretrain.lr": (3e-3, 0.3)}  # noqa: RUF012

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        localcl: Literal["inbatch", "moco"] = "inbatch",
        projection: int | None = None,
        keep_projection: bool = False,
    ) -> None:
        super().__init__(train, model, boundary=boundary)
        expect_known(LEARNERS, localcl=localcl)
        if projection is not None:
            check_positive(projection=projection)
            if model.head == "none":
                raise UsageError(
                    "expected no projection with model.head=none, got one: the cut is as wide as the number of classes"
                )
        self.localcl = localcl
        self.projection = projection or model.cut or WIDTH
        self.keep_projection = keep_projection
        self.plan_pretraining(epochs=40, batch=128, lr=0.03, weight_decay=WEIGHT_DECAY)

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
            if (rows := len(get_rows(party))) < 2:
                raise UsageError(
                    f"{self.name} expects two training rows at each party, got {rows} at {party.name}: "
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
        learners = {party.name: self._make_learner(party, federation.seed) for party in federation.parties.values()}
        optimizers = [learner.optimizer for learner in learners.values()]
        epochs = Epochs(federation, phase, progress, self.until, kept=learners, optimizers=optimizers)
        for iteration in epochs:
            set_rate(optimizers, self.rate(iteration))
            passes = [learner.steps(federation.seed, phase, name, iteration) for name, learner in learners.items()]
            losses = [float(loss) for steps in passes for loss in steps]
            epochs.end(sum(losses) / len(losses))
        return epochs.losses

    def _make_learner(self, party: Party, seed: int) -> LocalCL:
        rows, model = get_rows(party), party.module("bottom", Encoder)
        rates = {"lr": self.lr, "weight_decay": self.weight_decay}
        updates = None if self.train_spec.pretrain.paper else self.count_updates(len(rows))
        with seed_weights(seed, "queue", party.name):
            return LEARNERS[self.localcl](model, rows, party.layout, batch=self.batch, updates=updates, **rates)

    def _draw_projection(self, party: Party, seed: int) -> None:
        """Draw the last layer anew, on the CPU, so that every device gets the same."""
        *_, projection = party.module("bottom", Encoder).top.modules()
        assert isinstance(projection, nn.Linear), "with a cut, a plain Linear ends the encoder"
        with seed_weights(seed, "projection", party.name):
            fresh = nn.Linear(projection.in_features, projection.out_features)
        projection.load_state_dict(fresh.state_dict())


class SSVFLCoupled(SSVFL):
    """Contrastive pre-training of each party alone, then split learning of all of it.

    An epoch sends and reveals as much as one of split learning from scratch.

    Source: SS-VFL (Castiglia et al. 2022), algorithm 2.

    Args: those of ``SSVFL``.
    """

    name = "ss-vfl-c"
    reference = "Castiglia et al. 2022 (SS-VFL), FL-NeurIPS workshop, algorithm 2"
    differs = (
        *SSVFL.differs,
        "Algorithm 2's chain rule is read as the transposed Jacobian times the gradient; it prints the "
        "representation itself.",
    )
    messages = {"pretrain": frozenset[Kind](), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar in the base class)
    prior = "ss-vfl-c"


class SSVFLIndependent(SSVFL):
    """Contrastive pre-training of each party alone; bottom models stay as they are, and the head alone is trained.

    Each passive party sends its embedding of every labeled row once and receives no gradient: the labels leave the
    active party in no form. An epoch of the head costs no byte, so all of training costs what one epoch of split
    learning sends up. Validation rows, where an epoch is chosen by them, are sent with the others.

    The head follows ``train``, as every method that it is compared with does. For the small scale of frozen features
    the released code has ``train.optimizer`` ``sgd`` and ``server_lr`` 100. A boundary's own weights stay as drawn.

    Source: SS-VFL (Castiglia et al. 2022), algorithm 1.

    Args, besides those of ``SSVFL``:
        server_lr: learning rate of the head; None for ``train.lr``.
        recompute_augmented: whether embeddings of altered rows (crops and flips of images, else corrupted columns) are
            sent in every epoch, as released; all are counted.
    """

    name = "ss-vfl-i"
    reference = "Castiglia et al. 2022 (SS-VFL), FL-NeurIPS workshop, algorithm 1"
    differs = (
        *SSVFL.differs,
        "Embeddings of rows as they are cross once, as printed; the released code sends those of newly altered "
        "rows in every epoch (recompute_augmented=true).",
        "The server learns at train.lr; the released code has 100 (server_lr).",
        "Validation rows, where an epoch is chosen by them, are sent too.",
    )
    messages = {"pretrain": frozenset[Kind](), "finetune": frozenset({Kind.EMBEDDING})}  # noqa: RUF012
    receives = {**RECEIVES, "passive": frozenset[Kind]()}  # noqa: RUF012
    last_phase_options = SSVFL.last_phase_options | {"server_lr", "recompute_augmented"}
    prior = "ss-vfl-i"
    shares_head = False

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        localcl: Literal["inbatch", "moco"] = "inbatch",
        projection: int | None = None,
        keep_projection: bool = False,
        server_lr: float | None = None,
        recompute_augmented: bool = False,
    ) -> None:
        super().__init__(
            train, model, boundary=boundary, localcl=localcl, projection=projection, keep_projection=keep_projection
        )
        if model.head == "none":
            raise UsageError("ss-vfl-i trains the head alone: expected model.head linear or mlp, got none")
        if server_lr is not None:
            check_positive(server_lr=server_lr)
        self.server_lr = server_lr
        self.recompute_augmented = recompute_augmented

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training of the head, on bottom models as they are."""
        parties = federation.parties
        bottoms = {name: self.representation(party) for name, party in parties.items()}
        spec = msgspec.structs.replace(self.train_spec, lr=self.server_lr or self.train_spec.lr)
        alter = {}
        if self.recompute_augmented:
            alter = {party.name: _make_views(party.layout, get_rows(party)) for party in federation.parties.values()}
        return HeadTraining(federation, bottoms, federation.active.modules["top"], self._boundaries, spec, alter=alter)


def _make_views(layout: Layout, rows: Tensor) -> Alter:
    """Return random crops and flips of images; corruption of a table's rows (n, d)."""
    if layout.image is None:
        return UniformCorruption(layout, rows)
    return ImageAugmentation(layout.image, scale=(0.08, 1.0), jitter_p=0.0, blur_p=0.0)
