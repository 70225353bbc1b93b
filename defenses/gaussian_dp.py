"""Gaussian noise with a privacy budget."""

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vflsec.base.checks import check_inside
from vflsec.base.errors import UsageError
from vflsec.defenses.clipped_noise import ClippedNoise

Accountant = Literal["rdp", "prv"]

MAX_NOISE = 1e6
"""Largest noise that is tried, over the sensitivity and the square root of the number of releases."""

PRV_UP_TO = 100.0
"""Largest epsilon that PRV computes; its grid grows with epsilon. Beyond, RDP's bound is reported."""

ORDERS = (1 + np.geomspace(1e-4, 1e6, 400)).tolist()
"""Orders of the Renyi divergence; opacus's own, 1.1 to 63, do not suffice for very small or very large noise."""


@dataclass(kw_only=True, eq=False, repr=False)
class GaussianDP(ClippedNoise):
    """Each row is clipped to L2 norm C, plus N(0, (sigma · 2 C)^2) on every entry, with its epsilon at a given delta.

    Rows are (B, d). For gradients, C is the bound for the row's own loss, so rows are clipped to C / B (see
    ``ClippedNoise``). n releases of a row are n Gaussian mechanisms of noise multiplier sigma, composed by opacus at
    sampling rate 1. Full-batch Gaussians compose exactly (Dong et al. 2019: like one of sigma / sqrt(n)); RDP is an
    upper bound, and PRV is almost tight.

    Source: Dwork and Roth 2014, appendix A; accounting: opacus, Mironov 2017 (arXiv 1702.07476) and Gopi et al. 2021
    (arXiv 2106.02848); clipping: VFLAIR, row by row.

    Noise comes from a seeded generator of floats: it measures a mechanism and protects no real data.

    Args, besides those of ``ClippedNoise``:
        delta: at which epsilon is reported.
        accountant: ``rdp``, a bound at every strength; ``prv``, tighter up to epsilon 100, and ``rdp`` beyond.
    """

    name = "gaussian-dp"
    reference = "Dwork and Roth 2014, appendix A; accounting by opacus (Mironov 2017; Gopi et al. 2021)"
    order = 2
    tradeoff = "gaussian"

    delta: float = 1e-5
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inside(delta=self.delta)

    def compose(self, multiplier: float, releases: int) -> dict[str, float]:
        """Return epsilon at delta."""
        return {"epsilon": compute_epsilon(multiplier, releases, self.delta, self.accountant), "delta": self.delta}

    def find_multiplier(self, epsilon: float, releases: int) -> float:
        """Return the noise multiplier for ``epsilon`` at delta."""
        return find_multiplier(epsilon, releases, self.delta, self.accountant)

    def draw(self, like: Tensor, rng: torch.Generator) -> Tensor:
        """Return standard normal noise."""
        return torch.randn(like.shape, generator=rng, device=like.device, dtype=like.dtype)


@lru_cache(maxsize=4096)
def compute_epsilon(multiplier: float, releases: int, delta: float, accountant: Accountant = "rdp") -> float:
    """Return the epsilon at ``delta`` of ``releases`` Gaussian mechanisms on a row, by opacus's accountant.

    ``multiplier`` is the deviation over the sensitivity.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # PRV takes the logarithm of 1 minus the sampling rate, which is 0 here
        from opacus.accountants import PRVAccountant, RDPAccountant  # lazily: it takes seconds

        renyi, numerical = RDPAccountant(), PRVAccountant()
        renyi.history = numerical.history = [(multiplier, 1.0, releases)]
        bound = max(0.0, float(renyi.get_epsilon(delta, alphas=ORDERS)))  # its conversion can fall below 0
        return bound if accountant == "rdp" or bound > PRV_UP_TO else float(numerical.get_epsilon(delta))


@lru_cache(maxsize=256)
def find_multiplier(target: float, releases: int, delta: float, accountant: Accountant = "rdp") -> float:
    """Return the smallest noise multiplier, to six digits, with which ``releases`` releases spend at most ``target``.

    Raises:
        UsageError: an epsilon too small for any noise.
    """
    unit = math.sqrt(releases)
    if compute_epsilon(MAX_NOISE * unit, releases, delta, accountant) > target:
        raise UsageError(f"expected a larger epsilon for gaussian-dp, got {target:g}: no noise is enough")
    low, high = 1e-6, MAX_NOISE
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        enough = compute_epsilon(middle * unit, releases, delta, accountant) <= target
        low, high = (low, middle) if enough else (middle, high)
    return high * unit
