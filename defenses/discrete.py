"""Discretization: entries are rounded to a coarse grid."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vflsec.base.checks import check_positive
from vflsec.base.errors import UsageError
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


@dataclass(kw_only=True, eq=False, repr=False)
class Discretization(Defense):
    """Multistep gradients: every entry is rounded to the nearest multiple of s = strength · bound.

    Q(g) = s · round(g / s), entry by entry; [-bound, bound] has 2 / strength bins. Halves are rounded to the even
    multiple.

    Source: Fu et al. 2022 (USENIX Security), section 6, "DiscreteSGD", and their released code: bound .03 (Criteo
    .001), and 6, 12, 18 or 24 bins, which are strengths 1/3, 1/6, 1/9 and 1/12. Their text clips entries to the bound,
    their code does not; the bound only sets the spacing here too, unless ``clip``. A fixed bound fits one batch size
    only, because gradients of a mean loss shrink with the batch. Without a bound, the largest |g| of each release takes
    its place, which is independent of scale and reveals that number.

    | case | result |
    |---|---|
    | all entries zero | zeros |
    | strength >= 2, no bound | zeros |

    Args:
        strength: the spacing of the grid in units of the bound, 2 / bins.
        bound: the magnitude that the bins cover; None for the largest |g| of each release.
        clip: whether entries are first clipped to [-bound, bound].
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
    hides = (
        "from the passive party: differences below s, and gradients below s / 2; at embedding, from the active party"
    )
    costs = "one rounding"
    fails = (
        "if classes differ in sign and size of entries, as gradients of a loss do (direction); norm can gain where "
        "only longer rows survive the grid"
    )

    bound: float | None = None
    clip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound is not None:
            check_positive(bound=self.bound)
        elif self.clip:
            raise UsageError("expected a bound to clip to, got none: add for example bound=0.03")

    def on_gradient(self, h: Tensor, release: Release) -> Tensor:
        """Return gradients (B, d) on the grid."""
        if h.numel() == 0:
            return h
        bound = h.abs().max() if self.bound is None else h.new_tensor(self.bound)
        if self.clip:
            h = h.clamp(-bound, bound)
        spacing = bound * self.strength
        return torch.where(spacing > 0, (h / spacing).round() * spacing, h)

    on_embedding = on_gradient
