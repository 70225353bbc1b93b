"""FedLocalSSL: every party pre-trains alone on all its rows, then split learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vflsec.core.message import SERVER, Kind
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Need
from vflsec.methods.hybrid_ssl import LOCAL_DIFFERS, PLAIN, PRETRAINING_DIFFERS, TARGET_DIFFERS, HybridSSL
from vflsec.methods.split_method import SHOWS, SPLIT
from vflsec.nn.byol import BYOL
from vflsec.nn.moco import MoCo
from vflsec.nn.simsiam import SimSiam


class FedLocal(HybridSSL):
    """Self-supervised pre-training of each party on all its own rows, then split learning.

    Nothing is said in pre-training, unless ``pma`` has a server average the local top encoders. Covers SS-VFL's idea
    with the self-supervised methods of FedHSSL, which has it as baseline.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section V-A, baselines FedLocalSimSiam, -BYOL, -MoCo; with
    ``pma``, table V.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
        boundary: the protocol at the cut layer in fine-tuning.
        pma: whether a server averages local top encoders, projectors and predictors.
        projector: width of the projector.
        predictor: width of the predictor's hidden layer.
        ssl_options: of the self-supervised method.
        average: the protocol of ``pma``, ``model-average``, ``secure-average`` or ``file.py:Class``, an ``Averaging``.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, section V-A, baseline FedLocalSSL; table V"
    differs: ClassVar[tuple[str, ...]] = (
        *LOCAL_DIFFERS,
        *PRETRAINING_DIFFERS,
        "With pma=true a server averages top encoders, projectors and predictors (MoCo has none), with BatchNorm's "
        "running statistics, and each party has the same weight; table V of the paper does not name projectors.",
    )
    messages = {"pretrain": frozenset({Kind.PARAMETERS}), "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar above)
    visible_to = {  # noqa: RUF012
        **{side: own | {Need.PARAMETERS} for side, own in SHOWS.items()},
        SERVER: frozenset({Need.PARAMETERS}),
    }
    version = 2
    cross, local = False, True

    @classmethod
    def messages_in(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:
        """Return the kinds of messages; pre-training is silent without ``pma``."""
        return super().messages_in(phase, options) if phase != "pretrain" or options.get("pma") else frozenset()

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: str = "plain",
        pma: bool = False,
        projector: int = 512,
        predictor: int = 128,
        ssl_options: Mapping[str, Any] | None = None,
        average: str = PLAIN,
    ) -> None:
        self.pma = pma
        super().__init__(
            train,
            model,
            boundary=boundary,
            gamma=0.0,
            projector=projector,
            predictor=predictor,
            ssl_options=ssl_options,
            average=average,
        )


class FedLocalSimSiam(FedLocal):
    """SimSiam by each party alone on all its rows, then split learning."""

    name = "fedlocal-simsiam"
    prior = "fedlocal-simsiam"
    ssl = SimSiam
    differs = (*FedLocal.differs, *SimSiam.local_differs)


class FedLocalBYOL(FedLocal):
    """BYOL by each party alone on all its rows, then split learning."""

    name = "fedlocal-byol"
    prior = "fedlocal-byol"
    ssl = BYOL
    differs = (*FedLocal.differs, *TARGET_DIFFERS, *BYOL.local_differs)


class FedLocalMoCo(FedLocal):
    """MoCo by each party alone on all its rows, then split learning."""

    name = "fedlocal-moco"
    prior = "fedlocal-moco"
    ssl = MoCo
    differs = (*FedLocal.differs, *TARGET_DIFFERS, *MoCo.local_differs)
