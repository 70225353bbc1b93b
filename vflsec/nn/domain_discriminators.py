"""PrADA's domain discriminators: one for each group of columns, between source and target rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from vflsec.nn.gradient_reversal import reverse
from vflsec.nn.parallel import ParallelLinear, parallel_layers

HIDDEN = 10


class DomainDiscriminators(nn.Module):
    """D_i: Linear(d_i, width)-BatchNorm-LeakyReLU-Linear(10)-BatchNorm-LeakyReLU-Linear(2) on each f_i.

    Source: PrADA (Kang et al. 2022), eq. 2; layers of its authors' code for Census-Income.

    Args:
        widths: d_i of each f_i.
        width: of the first layer.
        spectral: bring the first layer's largest singular value to one.
    """

    def __init__(self, widths: Sequence[int], *, width: int = 24, spectral: bool = True) -> None:
        super().__init__()
        g = len(widths)
        layers = parallel_layers(
            [(own, width, HIDDEN) for own in widths], wrap_first=spectral_norm if spectral else None
        )
        self.layers = nn.Sequential(*layers, ParallelLinear([HIDDEN] * g, [2] * g))

    def forward(self, f: Tensor) -> Tensor:
        """Return logits (B, g, 2) that rows f (B, sum of widths) are the source's (0) or the target's (1)."""
        logits: Tensor = self.layers(f)
        return logits.view(len(f), -1, 2)

    def loss(self, source: Tensor, target: Tensor, alpha: float) -> Tensor:
        """Return L_adv, the sum over groups of the mean cross-entropy; its gradient is multiplied by -alpha.

        The mean is over the rows of both domains, as in the authors' code: half of eq. 2, which adds a mean of each.

        Args:
            source: f of the source's rows, (B, sum of widths).
            target: f of the target's rows.
            alpha: weight of the reversed gradient; the discriminators themselves learn with weight one.
        """
        logits: Tensor = self(reverse(torch.cat([source, target]), alpha))
        domain = torch.arange(2, device=logits.device).repeat_interleave(torch.tensor([len(source), len(target)]))
        each: Tensor = F.cross_entropy(logits.transpose(1, 2), domain[:, None].expand(-1, logits.shape[1]))
        return each * logits.shape[1]
