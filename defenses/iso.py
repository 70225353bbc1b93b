"""ISO: white Gaussian noise, scaled by the largest row norm of the release."""

import torch
from torch import Tensor

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

    def on_gradient(self, h: Tensor, release: Release) -> Tensor:
        """Return noised gradients (B, m)."""
        if h.numel() == 0:
            return h
        scale = torch.linalg.vector_norm(h, dim=1).max() * (self.strength / h.shape[1] ** 0.5)
        noise = torch.randn(h.shape, generator=release.rng, device=h.device, dtype=h.dtype)
        return noise.mul_(scale).add_(h)

    on_embedding = on_gradient

    def on_parameters(self, p: Tensor, release: Release) -> Tensor:
        """Return a noised copy of one parameter tensor, any shape; running statistics stay as they are."""
        if release.buffer:  # a variance with noise may be negative
            return p
        rows = p.reshape(len(p), -1) if p.dim() > 1 else p.reshape(1, -1)
        return self.on_gradient(rows, release).reshape(p.shape)
