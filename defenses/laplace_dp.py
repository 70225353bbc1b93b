"""Laplace noise with a privacy budget."""

import torch
from torch import Tensor

from vflsec.defenses.clipped_noise import ClippedNoise


class LaplaceDP(ClippedNoise):
    """Each row is clipped to L1 norm C, plus Laplace(b) on every entry, b = strength · 2 C; no delta.

    Rows are (B, d). For gradients, C is the bound for the row's own loss, so rows are clipped to C / B (see
    ``ClippedNoise``). The standard deviation of the noise is sqrt(2) b. Each release of a row spends 2 C / b = 1 /
    strength, and n releases n times that.

    Source: Dwork et al. 2006, section 3; clipping: VFLAIR, row by row.

    Noise comes from a seeded generator of floats: it measures a mechanism and protects no real data. The least
    significant bits of float32 distinguish two opposite rows beyond the stated epsilon (Mironov 2012, On significance
    of the least significant bits for differential privacy).
    """

    name = "laplace-dp"
    reference = "Dwork et al. 2006, 'Calibrating noise to sensitivity', section 3"
    order = 1
    tradeoff = "laplace"

    def compose(self, multiplier: float, releases: int) -> dict[str, float]:
        """Return epsilon, which adds up."""
        return {"epsilon": releases / multiplier, "delta": 0.0}

    def find_multiplier(self, epsilon: float, releases: int) -> float:
        """Return b over the sensitivity."""
        return releases / epsilon

    def draw(self, like: Tensor, rng: torch.Generator) -> Tensor:
        """Return Laplace noise of scale 1: the difference of two exponential draws."""
        pair = torch.empty((2, *like.shape), device=like.device, dtype=like.dtype).exponential_(generator=rng)
        return pair[0] - pair[1]
