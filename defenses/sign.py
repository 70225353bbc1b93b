"""Signs: of every entry the sign leaves, with one magnitude for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from vflsec.core.checks import share
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class SignOnly(Defense):
    """Entries leave as c · sign(g), where c is the mean |g| of the batch (B, d), or of the entry's own row.

    Each entry is replaced with probability ``strength``, independently and afresh at each release; 1 replaces all. A
    mixture (1 - s)·g + s·c·sign(g) would be the smoother knob, and no protection: whoever knows s undoes it.

    Source: Bernstein et al. 2018 (arXiv 1802.04434, signSGD), section 1, with the mean magnitude as its scale as in
    their later work on error feedback (Karimireddy et al. 2019, arXiv 1901.09847, section 4). Neither is a defense:
    they save traffic. As one it was made here.

    From the passive party it hides how long a row's gradient is: with ``scale="batch"`` and strength 1 all rows of a
    batch without zeros are equally long. ``norm`` is left with what rows have in common, for a batch with more of the
    rare class has a larger c (credit-default, one seed: .60, from .94); ``scale="row"`` keeps each row's mean magnitude
    and hides only how it is spread over columns. Costs one mean and one draw of B·d numbers. Fails against
    ``direction``, ``averaging`` and all that read the sign, because the sign of a loss's gradient is the label where
    there are two classes. Below 1, what was hidden in one epoch leaves in another. Rows of zeros leave as zeros, and
    stay visible. At ``embedding`` it hides the same from the active party, at prediction too.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | the release itself, bit for bit |
    | an entry is zero | zero |
    | empty batch | the empty batch |

    Args:
        strength: the share of entries of which only the sign leaves, in [0, 1].
        scale: whose mean magnitude is sent in their place.
        at: the kinds of release to act on.

    Raises:
        UsageError: a strength above 1.
    """

    name = "sign"
    strengths = (0.25, 0.5, 1.0)
    points = (Kind.GRADIENT, Kind.EMBEDDING)
    reference = "after Bernstein et al. 2018 (signSGD), arXiv 1802.04434; as a defense made here"
    guarantee = "none, empirical only; it does not hide direction"

    def __init__(
        self, strength: float, *, scale: Literal["batch", "row"] = "batch", at: Iterable[str] | None = None
    ) -> None:
        super().__init__(strength, at=at)
        share(strength=strength)
        self.scale = scale

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the gradients (B, d) with signs in place of entries."""
        return self._signs(g, release.rng)

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return the embeddings (B, d) with signs in place of entries."""
        return self._signs(h, release.rng)

    def _signs(self, value: Tensor, rng: torch.Generator) -> Tensor:
        if value.numel() == 0:
            return value
        magnitude = value.abs().mean(dim=1, keepdim=True) if self.scale == "row" else value.abs().mean()
        drawn = torch.rand(value.shape, generator=rng, device=value.device)  # in [0, 1): strength 1 replaces all
        return torch.where(drawn < self.strength, value.sign() * magnitude, value)
