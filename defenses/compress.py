"""Gradient compression: only the largest entries are released."""

import torch
from torch import Tensor

from vflsec.base.checks import share
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class Compression(Defense):
    """Top-k of a whole batch: the entries of largest magnitude are released as they are, all others as zeros.

    For a tensor (B, d) with n = B·d entries, and k = floor((1 - strength)·n), an entry is released if |g| > t, where t
    is the k-th largest |g| of the tensor. The comparison is strict, as in the source: the k-th largest entry is zeroed,
    and so are all that tie with it. A tensor of equal magnitudes becomes zeros.

    Source: Fu et al. 2022 (USENIX Security), section 6, and their released code, which keeps .75, .5, .25 or .1 of the
    entries: strengths .25, .5, .75 and .9.

    | case | result |
    |---|---|
    | strength 1, or so high that k <= 1 | zeros |
    | all magnitudes equal, or one entry only | zeros |

    Args:
        strength: the share of entries that is zeroed, in [0, 1].
        at: the kinds of release to act on.

    Raises:
        UsageError: a strength above 1.
    """

    name = "compress"
    strengths = (0.1, 0.25, 0.5)
    points = (Kind.GRADIENT, Kind.EMBEDDING)
    reference = (
        "Fu et al. 2022, Label Inference Attacks Against Vertical Federated Learning, USENIX Security, section 6"
    )
    guarantee = "none, empirical only"
    hides = (
        "from the passive party: rows and columns with short gradients; at embedding, the same from the active party"
    )
    costs = (
        "one selection among n entries for each release, and utility: dropped entries are not a random sample, so the "
        "sum of the others is not the gradient. Traffic stays the same, because zeros are sent"
    )
    fails = (
        "on rows with long gradients, whose sign and direction are released almost unchanged (direction); which "
        "entries survive is informative too, so norm can gain"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        share(strength=self.strength)

    def on_gradient(self, h: Tensor, release: Release) -> Tensor:
        """Return gradients (B, d) with zeros in place of the smaller entries."""
        magnitude, n = h.abs(), h.numel()
        kept = int((1 - self.strength) * n + 1e-6)  # 1 - .9 is slightly less than .1
        if kept < 1:
            return torch.zeros_like(h)
        threshold = magnitude.flatten().kthvalue(n - kept + 1).values
        return torch.where(magnitude > threshold, h, 0.0)

    on_embedding = on_gradient
