"""Noisy samples: a party adds noise to its own columns of some rows."""

import torch
from torch import Tensor

from vflsec.base.checks import check_non_negative, share
from vflsec.core.attack import IntegrityAttack, When
from vflsec.core.message import Step


class NoisySample(IntegrityAttack):
    """Add Gaussian noise to the columns of each row with probability ``rate``, before it is embedded.

    Rows and noise are drawn anew in each step. Colluding parties share the draw of rows, and each draws its own noise.
    The party sends the embedding of the noisy columns, and learns from its gradient, as the protocol says.

    Source: Zou et al. 2024 (VFLAIR, arXiv 2310.09827) and released code, noisy sample: a tenth of the rows in training,
    all at prediction, and columns clipped to [0, 1]; here they are standardized and not clipped.

    Args:
        scale: standard deviation of the noise; a numeric column has 1.
        rate: share of rows.
        when: in ``train``, at ``predict``, or ``both``.
    """

    name = "noisy-sample"
    reference = "Zou et al. 2024 (VFLAIR), arXiv 2310.09827 and released code, noisy sample"
    verified = "moments of the noise; with scale=0: equality with honest training"
    differs = (
        "The same share of rows gets noise in training and at prediction (rate); in the source, a tenth in training "
        "and all at prediction.",
        "Columns are standardized and not clipped; the source clips them to [0, 1].",
    )
    costs = "nothing beyond training"
    fails = "if the other parties' columns suffice; has less effect if training included it (when=both)"

    def __init__(self, *, scale: float = 2.0, rate: float = 0.5, when: When = "both") -> None:
        check_non_negative(scale=scale)
        share(rate=rate)
        self.scale = scale
        self.rate = rate
        self.when = when

    def on_features(self, x: Tensor, step: Step) -> Tensor:
        """Return the columns ``x`` (B, p), those of some rows with noise."""
        if not step.is_part_of(self.when):
            return x
        noise = torch.randn(x.shape, generator=self.noise(step, x.device), device=x.device, dtype=x.dtype)
        return torch.where(self.draw_rows(self.rate, step)[:, None], x + self.scale * noise, x)
