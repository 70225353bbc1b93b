"""FedCSSL: cross-party self-supervision on aligned rows, then split learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vflsec.core.message import Kind
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Need
from vflsec.methods.hybrid_ssl import (
    CROSS_DIFFERS,
    PRETRAINING_DIFFERS,
    HybridSSL,
)
from vflsec.methods.split_method import SHOWS, SPLIT
from vflsec.nn.byol import BYOL
from vflsec.nn.moco import MoCo
from vflsec.nn.simsiam import SimSiam


class FedCSSL(HybridSSL):
    """Self-supervised pre-training across parties on aligned rows alone, then split learning.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), algorithm 1 with step 1 alone, section V-C; covers VFed-SSD.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
        boundary: the protocol at the cut layer in fine-tuning.
        local_updates: of each party on one exchange, e in the paper.
        projector: width of the projector.
        predictor: width of the predictor's hidden layer.
        ssl_options: of the self-supervised method.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, algorithm 1, step 1 (FedCSSL; VFed-SSD)"
    differs: ClassVar[tuple[str, ...]] = (
        *CROSS_DIFFERS,
        *PRETRAINING_DIFFERS,
        "The learning rate is that of FedHSSL's step 1 at gamma 0.5.",
        "Fine-tuning reads the cross-party encoder alone, which is all that was trained.",
    )
    messages = {"pretrain": frozenset({Kind.EMBEDDING}), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar above)
    visible_to = {**SHOWS, "passive": SHOWS["passive"] | {Need.EMBEDDINGS}}  # noqa: RUF012
    cross, local = True, False

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: str = "plain",
        local_updates: int = 1,
        projector: int = 512,
        predictor: int = 128,
        ssl_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            train,
            model,
            boundary=boundary,
            gamma=0.5,  # guides nothing here; the learning rate is then that of FedHSSL's step 1
            local_updates=local_updates,
            projector=projector,
            predictor=predictor,
            ssl_options=ssl_options,
        )


class FedCSSLSimSiam(FedCSSL):
    """SimSiam across parties on aligned rows, then split learning."""

    name = "fedcssl-simsiam"
    prior = "fedlocal-simsiam"
    ssl = SimSiam
    differs = (*FedCSSL.differs, *SimSiam.cross_differs)


class FedCSSLBYOL(FedCSSL):
    """BYOL across parties on aligned rows, then split learning.

    The released code's step across parties has one loss for SimSiam and BYOL, and no moving average: where this step is
    all there is, the two are the same.
    """

    name = "fedcssl-byol"
    prior = "fedlocal-byol"
    ssl = BYOL
    differs = (*FedCSSL.differs, *BYOL.cross_differs)


class FedCSSLMoCo(FedCSSL):
    """MoCo across parties on aligned rows, then split learning."""

    name = "fedcssl-moco"
    prior = "fedlocal-moco"
    ssl = MoCo
    differs = (*FedCSSL.differs, *MoCo.cross_differs)
