"""Direction attack: gradients of one class point the same way."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_positive_or_none
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import draw_references
from vflsec.inference.releases import Releases, read_releases


class Direction(Attack):
    """Label inference from the angle between a row's gradient and the gradients of rows with a known label.

    In each epoch, the score of a class is the cosine between the row's gradient and the mean direction of that class's
    reference rows. A row's scores are averaged over epochs. References are received gradients, which include any noise.
    The attacker of Li et al. has one noiseless gradient of class 1, which no view contains. Under noise this attack is
    weaker than theirs with ``references=1``, and about as strong with all auxiliary rows.

    Source: Li et al. 2022 (arXiv 2102.08504), section 3.2.

    Args:
        references: number of auxiliary rows of each class that serve as references; None for all.
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "direction"
    version = 3
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, section 3.2"
    verified = "closed-form AUC on Gaussian gradients"
    differs = (
        "The reference is the mean of received gradients of known rows, noise included; the source has one clean "
        "gradient of class 1.",
        "Every class has a reference; the source has one of class 1.",
        "Scores are averaged over epochs; the source reports quantiles over batches.",
        THRESHOLD,
    )
    costs = "one pass over the messages"
    fails = "under isotropic noise that is much longer than the gradients"

    def __init__(self, *, references: int | None = None, releases: int | None = None) -> None:
        check_positive_or_none(references=references, releases=releases)
        self.references = references
        self.releases = releases

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        known = draw_references(view, self.references, rng)
        scores = releases.values.new_zeros(len(releases.rows), view.n_classes)
        for indices in releases.group_by_epoch():
            scores[indices] = self._score_cosines(releases, indices, known)
        return Guess({"train": releases.mean(scores)}, budget={"releases": len(scores)})

    def _score_cosines(self, releases: Releases, indices: Tensor, known: list[Tensor]) -> Tensor:
        """Return the cosine (n, C) of each observation with each class; 0 for a class without a reference."""
        directions = F.normalize(releases.values[indices], dim=1)  # (n, d)
        means = [directions[torch.isin(releases.rows[indices], rows)].sum(dim=0) for rows in known]
        return directions @ F.normalize(torch.stack(means), dim=1).T
