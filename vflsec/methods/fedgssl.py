"""FedGSSL: cross-party self-supervision guides that of each party, then split learning."""

from __future__ import annotations

from typing import ClassVar

from vflsec.core.message import Kind
from vflsec.core.view import Need
from vflsec.methods.hybrid_ssl import (
    BOTH_DIFFERS,
    CROSS_DIFFERS,
    GUIDED_DIFFERS,
    LOCAL_DIFFERS,
    PRETRAINING_DIFFERS,
    HybridSSL,
)
from vflsec.methods.split_method import SHOWS, SPLIT
from vflsec.nn.byol import BYOL
from vflsec.nn.moco import MoCo
from vflsec.nn.simsiam import SimSiam


class FedGSSL(HybridSSL):
    """Cross-party self-supervision on aligned rows guides each party's own on all its rows; then split learning.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), algorithm 1 without step 3, section V-C; ``encoders=local`` is
    FedGSSL* of table V.

    Args: those of ``HybridSSL``.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, algorithm 1, steps 1 and 2; table V"
    differs: ClassVar[tuple[str, ...]] = (
        *CROSS_DIFFERS,
        *LOCAL_DIFFERS,
        *GUIDED_DIFFERS,
        *BOTH_DIFFERS,
        *PRETRAINING_DIFFERS,
    )
    messages = {"pretrain": frozenset({Kind.EMBEDDING}), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar above)
    visible_to = {**SHOWS, "passive": SHOWS["passive"] | {Need.EMBEDDINGS}}  # noqa: RUF012
    cross, local = True, True


class FedGSSLSimSiam(FedGSSL):
    """SimSiam guided across parties, then split learning."""

    name = "fedgssl-simsiam"
    prior = "fedlocal-simsiam"
    ssl = SimSiam
    differs = (*FedGSSL.differs, *SimSiam.cross_differs, *SimSiam.local_differs)


class FedGSSLBYOL(FedGSSL):
    """BYOL guided across parties, then split learning."""

    name = "fedgssl-byol"
    prior = "fedlocal-byol"
    ssl = BYOL
    differs = (*FedGSSL.differs, *BYOL.cross_differs, *BYOL.local_differs)


class FedGSSLMoCo(FedGSSL):
    """MoCo guided across parties, then split learning."""

    name = "fedgssl-moco"
    prior = "fedlocal-moco"
    ssl = MoCo
    differs = (*FedGSSL.differs, *MoCo.cross_differs, *MoCo.local_differs)
