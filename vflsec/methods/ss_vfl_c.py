"""SS-VFL-C: parties pre-train alone, then split learning goes on from there."""

from __future__ import annotations

from vflsec.core.message import Kind
from vflsec.methods.split_method import SPLIT
from vflsec.methods.ss_vfl import SSVFL


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
