"""Signs: only the sign of every entry is released, with a common magnitude."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vflsec.base.checks import share
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


@dataclass(kw_only=True, eq=False, repr=False)
class SignOnly(Defense):
    """Entries are released as c · sign(g), where c is the mean magnitude of the batch (B, d), or of the row.

    Each entry is replaced with probability ``strength``, independently and anew for each release; 1 replaces all. A
    mixture (1 - s)·g + s·c·sign(g) would be smoother, but protects nothing: it can be inverted by anyone who knows s.

    Source: Bernstein et al. 2018 (arXiv 1802.04434, signSGD), section 1, with the mean magnitude as its scale as in
    later work on error feedback (Karimireddy et al. 2019, arXiv 1901.09847, section 4). Both save traffic and are no
    defenses; the use as a defense is ours.

    | case | result |
    |---|---|
    | an entry is zero | zero |

    Args:
        strength: the share of entries of which only the sign is released, in [0, 1].
        scale: whether c is the mean magnitude of the batch or of the row.
        at: the kinds of release to act on.

    Raises:
        UsageError: a strength above 1.
    """

    name = "sign"
    strengths = (0.25, 0.5, 1.0)
    points = (Kind.GRADIENT, Kind.EMBEDDING)
    reference = "after Bernstein et al. 2018 (signSGD), arXiv 1802.04434; as a defense made here"
    guarantee = "none, empirical only; it does not hide direction"
    hides = (
        "from the passive party: the length of gradients. With scale=batch and strength 1, all rows of a batch without "
        "zeros are equally long; with scale=row, each keeps its mean magnitude. At embedding, the same from the active "
        "party"
    )
    costs = "one mean and one draw of B d random numbers"
    fails = (
        "against direction, averaging and all that read the sign; against norm where c itself depends on the classes "
        "in the batch; below strength 1, over epochs; rows of zeros stay visible"
    )
    contrib = True

    scale: Literal["batch", "row"] = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        share(strength=self.strength)

    def on_gradient(self, h: Tensor, release: Release) -> Tensor:
        """Return gradients (B, d) with signs in place of entries."""
        if h.numel() == 0:
            return h
        magnitude = h.abs().mean(dim=1, keepdim=True) if self.scale == "row" else h.abs().mean()
        drawn = torch.rand(h.shape, generator=release.rng, device=h.device)  # below 1: strength 1 replaces all
        return torch.where(drawn < self.strength, h.sign() * magnitude, h)

    on_embedding = on_gradient
