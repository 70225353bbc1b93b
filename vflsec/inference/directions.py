"""Principal directions of received values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def principal(values: Tensor) -> Tensor:
    """Return the first principal component (n,) of ``values`` (n, d), with the sign of positive skewness."""
    centered = values - values.mean(dim=0)
    axis = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -1]
    found: Tensor = centered @ axis
    return found if found.pow(3).sum() >= 0 else -found


def multiples(values: Tensor, batches: Iterable[Tensor]) -> Tensor:
    """Return the projection (R,) of each observation on the principal axis of its batch, over the batch's mean length.

    Args:
        values: (R, d) received values.
        batches: indices of the observations of each batch, in order. The sign of an axis is chosen so that it agrees
            with the axis of the batch before.
    """
    scores = torch.zeros_like(values[:, 0])
    before = torch.zeros_like(values[0])
    for indices in batches:
        batch = values[indices]
        axis = torch.linalg.eigh(batch.T @ batch).eigenvectors[:, -1]
        before = axis if axis @ before >= 0 else -axis
        found = batch @ before
        scores[indices] = found / found.abs().mean().clamp_min(torch.finfo(found.dtype).tiny)
    return scores


def span(inputs: Tensor) -> Tensor:
    """Return an orthonormal basis (B, r) of the column space of ``inputs`` (B, k), whose rank is r."""
    x = inputs.double()
    squares, directions = torch.linalg.eigh(x.T @ x)  # k is small, so this is much faster than an SVD of X
    kept = squares > 1e-9 * squares[-1].clamp_min(torch.finfo(torch.double).tiny)
    basis: Tensor = x @ directions[:, kept] / squares[kept].sqrt()
    return basis.to(inputs.dtype)
