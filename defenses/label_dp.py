"""Label differential privacy by randomized response."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vflsec.core.defense import Defense


class LabelDP(Defense):
    """Randomized response: training sees each label with probability p, else one of the others, all alike.

    p = e^eps / (e^eps + C - 1) for C classes; labels are (N,), drawn once, before training, and every epoch sees the
    same draw. The strength is 1/eps, so that 0 is off and more is more; say ``label-dp:epsilon=2``, or ``--epsilon``.

    Source: Warner 1965; Ghazi et al. 2021 (arXiv 2102.06062), section 3.

    Guarantee: epsilon-label-differential privacy, exact, of each training row's label against everybody but the active
    party: replace the label, and nothing that is ever said about any row, nor the model, changes by more than epsilon,
    however often rows are released. Columns are not protected. Labels of validation rows, where an epoch is chosen by
    them, are not either.

    | case | result |
    |---|---|
    | strength 0 | the labels themselves |
    | strength without end | labels drawn evenly |
    """

    name = "label-dp"
    strengths = (0.25, 0.5, 1.0)
    reference = "Warner 1965; Ghazi et al. 2021, arXiv 2102.06062, section 3"
    guarantee = (
        "epsilon-label-differential privacy, exact: of each training row's label, against everybody but the active "
        "party, in all that is said in training and after; columns are not protected"
    )
    strength_name = "1/epsilon"
    points = ()
    by_epsilon = {}  # noqa: RUF012  (declared ClassVar in the base class)

    def on_labels(self, y: Tensor, *, features: Tensor, n_classes: int, rng: torch.Generator) -> Tensor:
        """Return what training sees in place of the labels ``y`` (N,)."""
        if not self.strength:
            return y
        flip = torch.rand(y.shape, generator=rng, device=y.device, dtype=torch.float64) >= self.kept(n_classes)
        shift = torch.randint(1, n_classes, y.shape, generator=rng, device=y.device)
        return torch.where(flip, (y + shift) % n_classes, y)

    def kept(self, n_classes: int) -> float:
        """Return the probability that a label stays as it is."""
        return 1 / (1 + (n_classes - 1) * math.exp(-1 / self.strength))

    def spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon, which no number of releases changes."""
        return {"epsilon": 1 / self.strength, "delta": 0.0} if self.strength else None
