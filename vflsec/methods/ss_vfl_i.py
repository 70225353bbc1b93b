"""SS-VFL-I: parties pre-train alone and send embeddings of the labeled rows once; a head is trained on these."""

from __future__ import annotations

from typing import Literal

import msgspec
from torch import Tensor

from vflsec.base.checks import positive
from vflsec.base.errors import UsageError
from vflsec.core.federation import Federation
from vflsec.core.layout import Layout
from vflsec.core.message import Kind
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Need
from vflsec.methods.head_training import Alter, HeadTraining
from vflsec.methods.local_training import own_rows
from vflsec.methods.split_method import SHOWS
from vflsec.methods.split_training import SplitTraining
from vflsec.methods.ss_vfl import SSVFL
from vflsec.nn.augment import ImageAugmentation, UniformCorruption
from vflsec.protocols.plain import PlainBoundary


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
    visible_to = {**SHOWS, "passive": SHOWS["passive"] - {Need.GRADIENTS}}  # noqa: RUF012
    last_phase_options = SSVFL.last_phase_options | {"server_lr", "recompute_augmented"}
    prior = "ss-vfl-i"
    shares_head = False

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        localcl: Literal["moco", "inbatch"] = "moco",
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
            positive(server_lr=server_lr)
        self.server_lr = server_lr
        self.recompute_augmented = recompute_augmented

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training of the head, on bottom models as they are."""
        bottoms = {party.name: self.representation(party) for party in federation.parties.values()}
        spec = msgspec.structs.replace(self.train_spec, lr=self.server_lr or self.train_spec.lr)
        alter = {}
        if self.recompute_augmented:
            alter = {party.name: _alteration(party.layout, own_rows(party)) for party in federation.parties.values()}
        return HeadTraining(federation, bottoms, federation.active.modules["top"], self._boundaries, spec, alter=alter)


def _alteration(layout: Layout, rows: Tensor) -> Alter:
    """Return random crops and flips of images; corruption of a table's rows (n, d)."""
    if layout.image is None:
        return UniformCorruption(layout, rows)
    return ImageAugmentation(layout.image, scale=(0.08, 1.0), jitter_p=0.0, blur_p=0.0)
