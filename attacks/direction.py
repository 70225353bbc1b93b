"""Direction attack: gradients of one class point the same way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import references
from vflsec.core.checks import positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import Releases, received


class Direction(Attack):
    """Label inference from the angle between a row's gradient and those of rows whose label is known.

    In each turn, an epoch, the score of a class is the cosine between the row's gradient and the mean direction of
    that class's reference rows in the same turn; a row's scores are averaged over its turns. The reference is what the
    adversary received, noise included: Li et al.'s attacker sees one clean gradient of class 1, which no View holds, so
    with ``references=1`` this attacker is weaker than theirs under noise, and with all auxiliary rows about as strong.

    Costs one pass over the messages. Fails where noise is isotropic and much longer than the gradients.

    Source: Li et al. 2022 (arXiv 2102.08504), section 3.2.

    Args:
        references: auxiliary rows of each class that serve as reference; None for all.
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "direction"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, section 3.2"
    verified = "closed-form AUC on Gaussian gradients"
    differs = (
        "The reference is the mean of received gradients of known rows, noise included; the source has one clean "
        "gradient of class 1.",
        "Every class has a reference; the source has one of class 1.",
        "Scores are averaged over epochs; the source reports quantiles over batches.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def __init__(self, *, references: int | None = None, turns: int | None = None) -> None:
        positive_or_none(references=references, turns=turns)
        self.references = references
        self.turns = turns

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        known = references(view, self.references, rng)
        scores = releases.values.new_zeros(len(releases.rows), view.n_classes)
        for lines in releases.by_turn():
            scores[lines] = self._cosines(releases, lines, known)
        return Guess({"train": releases.mean(scores)}, budget={"releases": len(scores)})

    def _cosines(self, releases: Releases, lines: Tensor, known: list[Tensor]) -> Tensor:
        """Return the cosine (n, C) of each line with each class; 0 to a class without a reference in this turn."""
        directions = F.normalize(releases.values[lines], dim=1)  # (n, d)
        means = [directions[torch.isin(releases.rows[lines], rows)].sum(dim=0) for rows in known]
        return directions @ F.normalize(torch.stack(means), dim=1).T
