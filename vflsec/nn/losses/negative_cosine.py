"""Negative cosine similarity: SimSiam's loss."""

from __future__ import annotations

from torch import Tensor

from vflsec.nn.losses.unit import normalize


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return mean_i -cos(p_i, stop(z_i)), in [-1, 1].

    Source: Chen and He 2021 (SimSiam), arXiv 2011.10566, eq. 1; FedHSSL (arXiv 2208.08934), eq. 4.

    Args:
        p: predictions (B, d).
        z: targets (B, d), detached here.
    """
    assert p.shape == z.shape, "one target per prediction"
    return -(normalize(p) * normalize(z.detach())).sum(dim=1).mean()
