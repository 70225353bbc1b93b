"""Discretisation: entries are rounded to a coarse grid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vflsec.core.checks import positive
from vflsec.core.defense import Defense, Release
from vflsec.core.errors import UsageError
from vflsec.core.message import Kind


class Discretisation(Defense):
    """Multistep gradients: every entry leaves as the nearest multiple of s = strength · bound.

    Q(g) = s · round(g / s), entry by entry; [-bound, bound] has 2 / strength bins. Halves go to the even multiple.

    Source: Fu et al. 2022 (USENIX Security), section 6, "DiscreteSGD", and their released code: bound .03 (Criteo
    .001), and 6, 12, 18 or 24 bins, which are strengths 1/3, 1/6, 1/9 and 1/12. Their text bounds the entries as well,
    their code does not: the bound sets the spacing alone, as here unless ``clip``. A bound that fits one batch size
    fits no other, because gradients of a mean loss shrink with it: without a bound the largest |g| of each release is
    taken, which is scale-free, and tells that one number.

    From the passive party it hides differences below s, and rows whose gradient is below s / 2 altogether. Costs one
    rounding. Fails where classes differ by their entries' sign and size, as those of a loss do: with half a dozen bins
    they stay apart, and ``direction`` reaches what it does without. Where the longer rows survive the grid and the
    shorter do not, ``norm`` gains (planted toy data, strength 1.5, two seeds: .82 becomes .86), and no other attack: an
    attacker who rounds clean gradients before it takes their lengths gains as much, because ``norm`` reads them badly,
    not because more has left. At ``embedding`` it hides the same from the active party, at prediction too.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | the release itself, bit for bit |
    | all entries zero | zeros |
    | strength >= 2, no bound | zeros |
    | empty batch | the empty batch |

    Args:
        strength: the grid's spacing in units of the bound, 2 / bins.
        bound: the magnitude that the bins cover; None for the largest |g| of each release.
        clip: whether entries are first limited to [-bound, bound].
        at: the kinds of release to act on.

    Raises:
        UsageError: a bound that is not positive, or clipping without one.
    """

    name = "discrete"
    strengths = (1 / 12, 1 / 6, 1 / 3)
    points = (Kind.GRADIENT, Kind.EMBEDDING)
    reference = (
        "Fu et al. 2022, Label Inference Attacks Against Vertical Federated Learning, USENIX Security, section 6"
    )
    guarantee = "none, empirical only"

    def __init__(
        self, strength: float, *, bound: float | None = None, clip: bool = False, at: Iterable[str] | None = None
    ) -> None:
        super().__init__(strength, at=at)
        if bound is not None:
            positive(bound=bound)
        elif clip:
            raise UsageError("expected a bound to clip to, got none: add for example bound=0.03")
        self.bound = bound
        self.clip = clip

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the gradients (B, d) on the grid."""
        return self._rounded(g)

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return the embeddings (B, d) on the grid."""
        return self._rounded(h)

    def _rounded(self, value: Tensor) -> Tensor:
        if value.numel() == 0:
            return value
        bound = value.abs().max() if self.bound is None else value.new_tensor(self.bound)
        if self.clip:
            value = value.clamp(-bound, bound)
        spacing = bound * self.strength
        return torch.where(spacing > 0, (value / spacing).round() * spacing, value)
