"""Norm attack: the gradient of a rare class is long."""

from __future__ import annotations

import torch

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import divided
from vflsec.core.checks import positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import percentiles, received


class Norm(Attack):
    """Label inference from the length of the gradient that comes back for each row. Two classes.

    A model that has learned that one class is rare is surer of the other, and its loss has a longer gradient where it
    errs. Lengths are ranked within each turn, an epoch, because they shrink as training goes on, and a row's ranks are
    averaged over its turns, which also averages what noise a defense adds to each release.

    The longer is guessed to be class 1, the rare one; with auxiliary labels, whichever they speak for.

    Costs one pass over the messages. Fails where classes are balanced, where the model is sure of all rows, and against
    noise that makes all rows equally long (max-norm).

    Source: Li et al. 2022 (arXiv 2102.08504), section 3.1.

    Args:
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "norm"
    needs = frozenset({Need.GRADIENTS})
    classes = 2
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, section 3.1"
    verified = "closed-form AUC on Gaussian gradients"
    differs = (
        "Lengths are ranked within each epoch and averaged over epochs; the source scores each batch by itself.",
        "Auxiliary labels, where there are any, choose the direction and the threshold; the source takes the "
        "longer to be class 1.",
    )

    def __init__(self, *, turns: int | None = None) -> None:
        positive_or_none(turns=turns)
        self.turns = turns

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        lengths = torch.linalg.vector_norm(releases.values, dim=1)
        score = releases.mean(percentiles(releases, lengths)[:, None])[:, 0]
        return Guess({"train": divided(view, score)}, budget={"releases": len(lengths)})
