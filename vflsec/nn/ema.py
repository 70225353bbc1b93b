"""Exponential moving average of weights: how a target network follows the online one."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def update_average(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Set every parameter of ``target`` to momentum · target + (1 - momentum) · online.

    Parameters only: BatchNorm's running statistics are those of the target's own inputs.

    Source: Grill et al. 2020 (BYOL), arXiv 2006.07733, eq. 1; He et al. 2020 (MoCo), arXiv 1911.05722, eq. 2.
    """
    for average, new in zip(target.parameters(), online.parameters(), strict=True):
        average.lerp_(new, 1 - momentum)
