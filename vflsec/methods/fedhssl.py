"""FedHSSL: cross-party self-supervision, guided local self-supervision, partial model aggregation."""

from __future__ import annotations

from typing import ClassVar

from vflsec.core.message import SERVER, Kind
from vflsec.core.view import Need
from vflsec.methods.hybrid_ssl import (
    BOTH_DIFFERS,
    CROSS_DIFFERS,
    GUIDED_DIFFERS,
    LOCAL_DIFFERS,
    PMA_DIFFERS,
    PRETRAINING_DIFFERS,
    TARGET_DIFFERS,
    HybridSSL,
)
from vflsec.methods.split_method import SHOWS, SPLIT
from vflsec.nn.byol import BYOL
from vflsec.nn.moco import MoCo
from vflsec.nn.simsiam import SimSiam


class FedHSSL(HybridSSL):
    """Federated hybrid self-supervision: cross-party, guided local, and partially averaged models; then split learning.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), algorithm 1.

    Args: those of ``HybridSSL``.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, algorithm 1"
    differs: ClassVar[tuple[str, ...]] = (
        *CROSS_DIFFERS,
        *LOCAL_DIFFERS,
        *GUIDED_DIFFERS,
        *PMA_DIFFERS,
        *BOTH_DIFFERS,
        *PRETRAINING_DIFFERS,
    )
    messages = {"pretrain": frozenset({Kind.EMBEDDING, Kind.PARAMETERS}), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar above)
    visible_to = {  # noqa: RUF012
        **{side: own | {Need.EMBEDDINGS, Need.PARAMETERS} for side, own in SHOWS.items()},
        SERVER: frozenset({Need.PARAMETERS}),
    }
    version = 2
    cross, local = True, True
    pma = True


class FedHSSLSimSiam(FedHSSL):
    """SimSiam across parties, guided locally, with averaged top encoders; then split learning."""

    name = "fedhssl-simsiam"
    prior = "fedlocal-simsiam"
    ssl = SimSiam
    differs = (*FedHSSL.differs, *SimSiam.cross_differs, *SimSiam.local_differs)


class FedHSSLBYOL(FedHSSL):
    """BYOL across parties, guided locally, with averaged top encoders; then split learning."""

    name = "fedhssl-byol"
    prior = "fedlocal-byol"
    ssl = BYOL
    differs = (*FedHSSL.differs, *TARGET_DIFFERS, *BYOL.cross_differs, *BYOL.local_differs)


class FedHSSLMoCo(FedHSSL):
    """MoCo across parties, guided locally, with averaged top encoders; then split learning."""

    name = "fedhssl-moco"
    prior = "fedlocal-moco"
    ssl = MoCo
    differs = (*FedHSSL.differs, *TARGET_DIFFERS, *MoCo.cross_differs, *MoCo.local_differs)
