"""Principal directions of what was received."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def principal(values: Tensor) -> Tensor:
    """Return each row's (n,) first principal component of ``values`` (n, d), the longer tail positive."""
    centered = values - values.mean(dim=0)
    axis = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -1]
    found: Tensor = centered @ axis
    return found if found.pow(3).sum() >= 0 else -found


def multiples(values: Tensor, batches: Iterable[Tensor]) -> Tensor:
    """Return which multiple (R,) of its batch's principal axis each line of ``values`` is, in units of the batch.

    Args:
        values: (R, d) what was received.
        batches: positions of the lines of each batch, in order; an axis is turned to agree with the one before.
    """
    scores = torch.zeros_like(values[:, 0])
    before = torch.zeros_like(values[0])
    for lines in batches:
        batch = values[lines]
        axis = torch.linalg.eigh(batch.T @ batch).eigenvectors[:, -1]
        before = axis if axis @ before >= 0 else -axis
        found = batch @ before
        scores[lines] = found / found.abs().mean().clamp_min(torch.finfo(found.dtype).tiny)
    return scores


def span(inputs: Tensor) -> Tensor:
    """Return an orthonormal basis (B, r) of the span of ``inputs``' k columns (B, k): r is their rank."""
    x = inputs.double()
    squares, directions = torch.linalg.eigh(x.T @ x)  # k is small: many times faster than a decomposition of X
    kept = squares > 1e-9 * squares[-1].clamp_min(torch.finfo(torch.double).tiny)
    basis: Tensor = x @ directions[:, kept] / squares[kept].sqrt()
    return basis.to(inputs.dtype)
