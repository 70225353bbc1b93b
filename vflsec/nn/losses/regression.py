"""Squared distance between directions: BYOL's loss."""

from __future__ import annotations

from torch import Tensor

from vflsec.nn.losses.negative_cosine import negative_cosine


def regression(p: Tensor, z: Tensor) -> Tensor:
    """Return mean_i ||p_i/|p_i| - stop(z_i)/|z_i|||^2 = mean_i 2 - 2 cos(p_i, stop(z_i)), in [0, 4].

    Source: Grill et al. 2020 (BYOL), arXiv 2006.07733, eq. 2; FedHSSL (arXiv 2208.08934), eq. 3. A zero row counts as
    orthogonal to everything, 2.

    Args:
        p: predictions (B, d).
        z: targets (B, d), detached here.
    """
    return 2 + 2 * negative_cosine(p, z)
