"""FedGSSL: cross-party self-supervision guides that of each party, then split learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vflsec.core.message import Kind
from vflsec.core.method import ModelSpec, TrainSpec
from vflsec.core.view import Need
from vflsec.methods.hybrid_ssl import HybridSSL
from vflsec.methods.split_method import SHOWS, SPLIT
from vflsec.nn.byol import BYOL
from vflsec.nn.moco import MoCo
from vflsec.nn.simsiam import SimSiam


class FedGSSL(HybridSSL):
    """Cross-party self-supervision on aligned rows guides each party's own on all its rows; then split learning.

    Source: FedHSSL (He et al. 2022, arXiv 2208.10278), algorithm 1 without step 3, section V-C; ``encoders=local`` is
    FedGSSL* of table V.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
        boundary: the protocol at the cut layer in fine-tuning.
        gamma: weight of the cross-party guidance; 0 is FedLocalSSL for the local encoders, bit for bit.
        local_updates: of each party on one exchange of step 1, e in the paper.
        interleave: take steps 1 and 2 batch by batch, as the released code does, not one after the other.
        encoders: which make the embedding in fine-tuning, ``both`` (FedGSSL) or ``local`` (FedGSSL*).
        pool: how both are joined, ``mean`` or ``concat``.
        projector: width of the projector.
        predictor: width of the predictor's hidden layer.
        ssl_options: of the self-supervised method.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.10278, algorithm 1, steps 1 and 2; table V"
    sends = {"pretrain": frozenset({Kind.EMBEDDING}), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar above)
    shows = {**SHOWS, "passive": SHOWS["passive"] | {Need.EMBEDDINGS}}  # noqa: RUF012
    cross, local = True, True

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: str = "plain",
        gamma: float = 0.5,
        local_updates: int = 1,
        interleave: bool = False,
        encoders: Literal["both", "local"] = "both",
        pool: Literal["mean", "concat"] = "mean",
        projector: int = 512,
        predictor: int = 128,
        ssl_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            train,
            model,
            boundary=boundary,
            gamma=gamma,
            local_updates=local_updates,
            interleave=interleave,
            encoders=encoders,
            pool=pool,
            projector=projector,
            predictor=predictor,
            ssl_options=ssl_options,
        )


class FedGSSLSimSiam(FedGSSL):
    """SimSiam guided across parties, then split learning."""

    name = "fedgssl-simsiam"
    prior = "fedlocal-simsiam"
    ssl = SimSiam


class FedGSSLBYOL(FedGSSL):
    """BYOL guided across parties, then split learning."""

    name = "fedgssl-byol"
    prior = "fedlocal-byol"
    ssl = BYOL


class FedGSSLMoCo(FedGSSL):
    """MoCo guided across parties, then split learning."""

    name = "fedgssl-moco"
    prior = "fedlocal-moco"
    ssl = MoCo
