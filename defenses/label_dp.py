"""Label differential privacy by randomized response."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vflsec.base.seeds import make_rng
from vflsec.core.defense import Defense


@dataclass(kw_only=True, eq=False, repr=False)
class LabelDP(Defense):
    """Randomized response: each training label is kept with probability p, else replaced by a random other class.

    p = e^eps / (e^eps + C - 1) for C classes. Labels (N,) are drawn once before training, so every epoch uses the same
    draw. The strength is 1/eps, so that 0 is off and larger is stronger; write ``label-dp:epsilon=2``, or
    ``--epsilon``.

    Source: Warner 1965; Ghazi et al. 2021 (arXiv 2102.06062), section 3.

    Replacing a label changes all messages and the model of one training by at most epsilon, however often its row is
    released there. K trainings on the same rows, for example of a sweep, draw K times and spend K epsilon. With
    ``fixed`` the draw is a function of the seed of the data and the place of the row, the same in all trainings on the
    same split, which together spend epsilon: as if the answers were stored in place of the labels. Labels of
    validation rows that choose an epoch or a number of trees are not protected. With the option ``graft`` of
    ``secureboost``, messages are protected, but what the active party makes of the true labels is not: the values of
    leaves, and so predictions that it publishes.
    """

    name = "label-dp"
    strengths = (0.25, 0.5, 1.0)
    reference = "Warner 1965; Ghazi et al. 2021, arXiv 2102.06062, section 3"
    guarantee = (
        "epsilon-label-differential privacy, exact: of each training row's label, against everybody but the active "
        "party, in all messages of one training and its predictions; K trainings on the same rows spend K epsilon, "
        "unless fixed; columns are not protected"
    )
    strength_name = "1/epsilon"
    points = ()
    by_epsilon = {}  # noqa: RUF012  (declared ClassVar in the base class)
    hides = "from everybody but the active party: each training label, within epsilon"
    costs = "utility: a share 1 - p of the training labels is wrong"
    fails = "with a large epsilon; and attackers infer the labels that columns predict, as they can alone"

    fixed: bool = False

    def on_labels(self, y: Tensor, *, features: Tensor, n_classes: int, rng: torch.Generator) -> Tensor:
        """Return the training labels (N,) in place of ``y`` (N,)."""
        if not self.strength:
            return y
        if self.fixed:  # two strengths with the same draw would differ in rows that the stronger one has changed
            rng = make_rng(rng.initial_seed(), "fixed", self.strength, device=y.device)
        flip = torch.rand(
            y.shape, generator=rng, device=y.device, dtype=torch.float64
        ) >= self.compute_keep_probability(n_classes)
        shift = torch.randint(1, n_classes, y.shape, generator=rng, device=y.device)
        return torch.where(flip, (y + shift) % n_classes, y)

    def compute_keep_probability(self, n_classes: int) -> float:
        """Return the probability that a label stays as it is."""
        return 1 / (1 + (n_classes - 1) * math.exp(-1 / self.strength))

    def privacy_spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon, which adds up over trainings that draw anew, whatever they release."""
        return {"epsilon": (1 if self.fixed else releases) / self.strength, "delta": 0.0} if self.strength else None
