"""Noisy samples: a party blurs its own columns of some rows."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.core.checks import non_negative, share
from vflsec.core.integrity import IntegrityAttack, When
from vflsec.core.message import Step


class NoisySample(IntegrityAttack):
    """Add Gaussian noise to each row with probability ``rate`` before it is embedded.

    Rows and noise are drawn anew in each step; parties that collude blur the same rows, each with noise of its own.
    What the party then sends, and learns from the gradient, is honest.

    Costs nothing. Fails where the other parties know the answer, and does less where training has met the noise
    (``when=both``) than where it comes unexpected (``when=predict``).

    Source: Zou et al. 2024 (VFLAIR, arXiv 2310.09827) and released code, noisy sample: a tenth of the rows in training,
    all at prediction, and columns cut off at 0 and 1; ours are standardized and not cut off.

    Args:
        scale: standard deviation of the noise, in that of a column of numbers.
        rate: share of rows.
        when: in ``train``, at ``predict``, or ``both``.
    """

    name = "noisy-sample"
    reference = "Zou et al. 2024 (VFLAIR), arXiv 2310.09827 and released code, noisy sample"
    verified = "moments of the noise; with scale=0: equality with honest training"
    differs = (
        "The same share of rows is blurred in training and at prediction (rate); the source blurs a tenth in "
        "training and all at prediction.",
        "Columns are standardized and not cut off; the source cuts them off at 0 and 1.",
    )

    def __init__(self, *, scale: float = 2.0, rate: float = 0.5, when: When = "both") -> None:
        non_negative(scale=scale)
        share(rate=rate)
        self.scale = scale
        self.rate = rate
        self.when = when

    def on_features(self, x: Tensor, step: Step) -> Tensor:
        """Return the columns ``x`` (B, p), those of some rows with noise."""
        if not step.within(self.when):
            return x
        noise = torch.randn(x.shape, generator=self.noise(step, x.device), device=x.device, dtype=x.dtype)
        return torch.where(self.some(self.rate, step)[:, None], x + self.scale * noise, x)
