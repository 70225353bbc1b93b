"""FedHSSL: cross-party self-supervision, guided local self-supervision, partial model aggregation."""

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


class FedHSSL(HybridSSL):
    """Federated hybrid self-supervision: cross-party, guided local, and partially averaged models; then split learning.

    Source: FedHSSL (He et al. 2022, arXiv 2208.10278), algorithm 1.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
        boundary: the protocol at the cut layer in fine-tuning.
        gamma: weight of the cross-party guidance; 0 is FedLocalSSL for the local encoders, bit for bit.
        local_updates: of each party on one exchange of step 1, e in the paper.
        interleave: take steps 1 and 2 batch by batch, as the released code does, not one after the other.
        encoders: which make the embedding in fine-tuning, ``both`` or ``local``.
        pool: how both are joined, ``mean`` or ``concat``.
        projector: width of the projector.
        predictor: width of the predictor's hidden layer.
        ssl_options: of the self-supervised method.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.10278, algorithm 1"
    sends = {"pretrain": frozenset({Kind.EMBEDDING, Kind.PARAMETERS}), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar above)
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
            pma=True,
            local_updates=local_updates,
            interleave=interleave,
            encoders=encoders,
            pool=pool,
            projector=projector,
            predictor=predictor,
            ssl_options=ssl_options,
        )


class FedHSSLSimSiam(FedHSSL):
    """SimSiam across parties, guided locally, with averaged top encoders; then split learning."""

    name = "fedhssl-simsiam"
    prior = "fedlocal-simsiam"
    ssl = SimSiam


class FedHSSLBYOL(FedHSSL):
    """BYOL across parties, guided locally, with averaged top encoders; then split learning."""

    name = "fedhssl-byol"
    prior = "fedlocal-byol"
    ssl = BYOL


class FedHSSLMoCo(FedHSSL):
    """MoCo across parties, guided locally, with averaged top encoders; then split learning."""

    name = "fedhssl-moco"
    prior = "fedlocal-moco"
    ssl = MoCo
