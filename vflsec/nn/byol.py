"""BYOL: two views, one through a moving average of the network."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from vflsec.base.checks import fraction
from vflsec.nn.ema import update_average
from vflsec.nn.losses.regression import regression
from vflsec.nn.siamese import Siamese


class BYOL(Siamese):
    """Predictions of one view against the other view's projections by a moving average of the network, 2 - 2 cos.

    Between parties there is no moving average, and the loss is -cos, as in FedHSSL's code.

    Source: Grill et al. 2020, arXiv 2006.07733, section 3.1; FedHSSL (arXiv 2208.08934), eq. 3. FedHSSL's code moves
    the average before each forward pass and while evaluating; here it moves after each step.

    Args, besides those of ``Siamese``:
        momentum: weight of the old average in each step; FedHSSL's paper has 0.995, its code 0.999.
    """

    name = "byol"
    cross_differs = (
        "Across parties: no moving average is kept, and the loss is -cos, that of SimSiam, as in the authors' "
        "code; table II has the average and eq. 3 for BYOL.",
    )
    local_differs = (
        "The moving average follows each optimizer step, and covers parameters alone: BatchNorm's statistics are "
        "the target's own. The authors' code moves it before each forward pass, and at 0.999; momentum is the "
        "paper's 0.995.",
    )

    def __init__(
        self, encoder: nn.Module, width: int, *, projector: int = 512, predictor: int = 128, momentum: float = 0.995
    ) -> None:
        super().__init__(encoder, width, projector=projector, predictor=predictor)
        fraction(momentum=momentum)
        self.momentum = momentum
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)

    def after_step(self) -> None:
        """Move the target network towards the online one."""
        update_average(self.target, nn.Sequential(self.encoder, self.projector), self.momentum)

    @torch.no_grad()
    def _targets(self, v1: Tensor, v2: Tensor, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
        return self.target(v1), self.target(v2)

    def _ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        return regression(p, z)
