"""ISO: white Gaussian noise, scaled by the largest row norm of the release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from vflsec.base.seeds import Generators
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class IsotropicNoise(Defense):
    """Gaussian noise whose expected row norm is about lambda times the largest row norm of the batch.

    For rows d_i in R^m it adds N(0, s^2) to every entry, s = lambda · max_i ||d_i||_2 / sqrt(m), drawn anew for each
    release.

    Source: FedHSSL (arXiv 2208.08934), section VI; Li et al. 2022 (arXiv 2102.08504), ``iso``. lambda multiplies the
    standard deviation; Marvell's paper writes t for the variance ratio, t = lambda^2.

    Embeddings and gradients are (B, m). A parameter tensor of two or more dimensions counts as (out, rest) rows, one of
    a single dimension as one row. BatchNorm's running statistics are released in clear.

    | case | result |
    |---|---|
    | all rows zero | the release itself |
    | one row | noise scaled by that row's norm |
    """

    name = "iso"
    strength_name = "lambda"
    points = (Kind.GRADIENT, Kind.EMBEDDING, Kind.PARAMETERS)
    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, section VI; Li et al. 2022, arXiv 2102.08504, 'iso'"
    guarantee = "none, empirical only; the noise scale depends on private data, so it is not differential privacy"
    hides = (
        "from the receiver: gradients, embeddings or parameters, in noise that is lambda times as long as the longest "
        "row"
    )
    costs = "one pass over the batch and B m random numbers; utility, because noise slows learning"
    fails = "over epochs: the noise is drawn anew, so the mean of a row's releases is its own value (averaging)"

    def on_gradient(self, rows: Tensor, release: Release) -> Tensor:
        """Return noised gradients (B, m)."""
        if rows.numel() == 0:
            return rows
        noise = torch.randn(rows.shape, generator=release.rng, device=rows.device, dtype=rows.dtype)
        return add_noise(rows, noise, self.strength / rows.shape[1] ** 0.5)

    @staticmethod
    def change_runs(defenses: Sequence[Defense], rows: Tensor, release: Release) -> Tensor:
        """Return noised rows (R, B, m); each run draws from its own stream."""
        noise = torch.empty_like(rows)
        for part, stream in zip(noise, cast("Generators", release.rng), strict=True):
            part.normal_(generator=stream)
        factors = [defense.strength / rows.shape[2] ** 0.5 for defense in defenses]
        return add_noise(rows, noise, rows.new_tensor(factors)[:, None, None])

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return noised embeddings (B, m)."""
        return self.on_gradient(h, release)

    def on_parameters(self, p: Tensor, release: Release) -> Tensor:
        """Return a noised copy of one parameter tensor, any shape; running statistics stay as they are."""
        if release.buffer:  # a variance with noise may be negative
            return p
        rows = p.reshape(len(p), -1) if p.dim() > 1 else p.reshape(1, -1)
        return self.on_gradient(rows, release).reshape(p.shape)


def add_noise(rows: Tensor, noise: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``rows`` (..., B, m) and ``noise``, ``factor`` (..., 1, 1) times as long as the longest of the B rows."""
    scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).amax(dim=-2, keepdim=True) * factor
    return noise.mul_(scale).add_(rows)
