"""Max-norm: noise along each gradient, after which all rows are as long as the longest, on average."""

import torch
from torch import Tensor

from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class MaxNorm(Defense):
    """Gaussian noise along each row's own gradient, after which all rows have the same expected squared norm.

    For rows g_i in R^d and G = max_i ||g_i|| the release is
    g_i + strength · n_i · sqrt(G^2 - ||g_i||^2) · g_i / ||g_i||, with one n_i ~ N(0, 1) for each row, drawn anew for
    each release. The expected squared norm is ||g_i||^2 + strength^2 (G^2 - ||g_i||^2), which equals G^2 at the
    source's strength of 1.

    Source: Li et al. 2022 (arXiv 2102.08504), ``max_norm``, called ``expectation`` in its code. The strength is ours.

    The noise keeps the line of a gradient, so that only its sign is uncertain. The longest row is released without
    noise.

    | case | result |
    |---|---|
    | a row of zeros | stays zero: it has no direction |
    | all rows equally long, one row | the release itself |
    """

    name = "max-norm"
    strengths = (1.0, 2.0, 4.0)
    points = (Kind.GRADIENT,)
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, 'max_norm'"
    guarantee = (
        "none, empirical only; the direction of every gradient is kept up to its sign, and the longest is unchanged"
    )
    hides = "from the passive party: the length of gradients, which reveals a rare class (norm)"
    costs = "one pass over the batch and B random numbers"
    fails = "if classes differ in direction (direction, spectral), and in the mean of a row's releases (averaging)"

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return noised gradients (B, d)."""
        if g.numel() == 0:
            return g
        rows = g.double()  # in float32 the squares of a very short gradient are 0
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)  # (B, 1)
        longest = norms.max()
        lacking = ((longest - norms) * (longest + norms)).sqrt() / norms.where(norms > 0, 1.0)
        noise = torch.randn(norms.shape, generator=release.rng, device=g.device, dtype=torch.float64)
        released: Tensor = rows * (1 + self.strength * noise * lacking)
        return released.to(g.dtype)
