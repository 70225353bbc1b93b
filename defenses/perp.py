"""Perp: noise perpendicular to each gradient, which makes its length random."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_non_negative
from vflsec.base.errors import UsageError
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


@dataclass(kw_only=True, eq=False, repr=False)
class PerpendicularNoise(Defense):
    """A random vector perpendicular to each gradient is added, after which its norm is uniform between two bounds.

    For rows g_i in R^d and G = max_i ||g_i||, it draws a target norm t_i = strength · U[lower, upper] · G and releases
    g_i + sqrt(t_i^2 - ||g_i||^2) · w_i, with w_i uniform on the unit sphere of the space orthogonal to g_i, drawn anew
    for each release. A row that is longer than its target stays as it is; there is none if strength · lower >= 1, as in
    the source, whose strength is 1.

    Source: Li et al. 2022 (arXiv 2102.08504), the ``perp`` baseline of its code. The strength is ours.

    A gradient turns by an angle whose cosine is ||g_i|| / t_i; the mean over its releases is still g_i. Gradients are
    (B, d) with d >= 2.

    | case | result |
    |---|---|
    | a row of zeros | a vector of the target norm, in any direction |
    | all rows zero | the release itself |
    | d = 1 | refused: nothing is perpendicular |

    Args:
        strength: multiplies both bounds; the source's is 1.
        lower: smallest target norm, in units of the longest row.
        upper: largest target norm.
    """

    name = "perp"
    strengths = (1.0, 2.0, 4.0)
    points = (Kind.GRADIENT,)
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, the perpendicular-noise baseline of its code"
    guarantee = "none, empirical only; the scale depends on private data, so it is not differential privacy"
    hides = "from the passive party: the length of gradients, and part of their direction"
    costs = "one pass over the batch and B (d + 1) random numbers"
    fails = "in few dimensions, where little is perpendicular, and in the mean of a row's releases (averaging)"

    lower: float = 1.0
    upper: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative(lower=self.lower)
        if not self.lower <= self.upper < float("inf"):
            raise UsageError(f"expected a finite upper >= lower, got lower={self.lower} and upper={self.upper}")

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return noised gradients (B, d)."""
        if g.numel() == 0:
            return g
        if g.shape[1] < 2:
            raise UsageError("perp needs a cut layer of width 2 or more, got 1: nothing is perpendicular to a number")
        norms = torch.linalg.vector_norm(g, dim=1, keepdim=True, dtype=torch.float64)  # (B, 1)
        share = torch.rand(norms.shape, generator=release.rng, device=g.device, dtype=torch.float64)
        targets = self.strength * norms.max() * (self.lower + (self.upper - self.lower) * share)
        lengths = (targets.square() - norms.square()).clamp(min=0).sqrt().to(g.dtype)
        directions = g / norms.where(norms > 0, 1.0).to(g.dtype)
        across = torch.randn(g.shape, generator=release.rng, device=g.device, dtype=g.dtype)
        across -= (across * directions).sum(dim=1, keepdim=True) * directions
        return F.normalize(across, dim=1).mul_(lengths).add_(g)
