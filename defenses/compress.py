"""Gradient compression: only the largest entries leave."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vflsec.core.checks import share
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class Compression(Defense):
    """Top-k: the entries of largest magnitude leave as they are, and all others leave as zeros.

    Of a tensor (B, d) of n = B·d entries, with k = floor((1 - strength)·n), an entry leaves if |g| > t, where t is the
    k-th largest |g| of the whole tensor. The comparison is strict, as in the source: the k-th largest is itself zeroed,
    and so are all entries that tie with it, so that a tensor of equal magnitudes leaves as zeros.

    Source: Fu et al. 2022 (USENIX Security), section 6, and their released code, which keeps .75, .5, .25 or .1 of the
    entries: strengths .25, .5, .75 and .9.

    From the passive party it hides rows and columns whose gradient is short. Costs one selection in n entries at each
    release, and no traffic is saved: the zeros travel. Fails against whoever looks at rows with long gradients, which
    leave almost whole: their sign and direction are exact, and which entries survive is itself a fact about them, so
    that ``norm`` may even gain. At ``embedding`` it hides the same from the active party, at prediction too.

    On credit-default, five seeds, strengths to .5 leave ``direction`` at 1.00; .1 and .25 cost one and two points of
    AUC, .5 none, and at .75 the one seed that was tried collapsed: what is left out is not drawn at random, and the sum
    of what is left is not the gradient.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | the release itself, bit for bit |
    | strength 1, or so high that k <= 1 | zeros |
    | all magnitudes equal, or one entry alone | zeros |
    | empty batch | the empty batch |

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

    def __init__(self, strength: float, *, at: Iterable[str] | None = None) -> None:
        super().__init__(strength, at=at)
        share(strength=strength)

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the gradients (B, d) with zeros in place of the smaller entries."""
        return self._largest(g)

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return the embeddings (B, d) with zeros in place of the smaller entries."""
        return self._largest(h)

    def _largest(self, value: Tensor) -> Tensor:
        magnitude, n = value.abs(), value.numel()
        kept = int((1 - self.strength) * n + 1e-6)  # 1 - .9 is a little less than a tenth
        if kept < 1:
            return torch.zeros_like(value)
        threshold = magnitude.flatten().kthvalue(n - kept + 1).values
        return torch.where(magnitude > threshold, value, 0.0)
