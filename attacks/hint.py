"""Hint attack: a row whose gradient is close to that of a labeled row has the same label."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vflsec.base.checks import check_positive_or_none
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import draw_references
from vflsec.inference.releases import Releases, read_releases


class Hint(Attack):
    """Label inference from the distance between a row's gradient and the gradients of a few rows with a known label.

    In each epoch, the score of a class is the negative distance to the nearest gradient of its hints, divided by the
    mean distance in that epoch. A row's scores are averaged over epochs. The source has hints of class 1 only.

    Source: released code of Li et al. 2022 (arXiv 2102.08504), hints of 1, 3 and 5 rows.

    Args:
        hints: number of auxiliary rows of each class that are used; None for all.
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "hint"
    version = 3
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "released code of Li et al. 2022 (Marvell), arXiv 2102.08504"
    verified = "unverified: no figures are published"
    differs = (
        "Every class has hints; the released code has hints of class 1 only.",
        "Distances are in units of their mean in each epoch, and averaged over epochs; the released code scores "
        "each batch separately.",
        "The released code's variant by inner product is left out.",
        THRESHOLD,
    )
    costs = "one pass over the messages"
    fails = "under noise that is much longer than the gradients"

    def __init__(self, *, hints: int | None = 5, releases: int | None = None) -> None:
        check_positive_or_none(hints=hints, releases=releases)
        self.hints = hints
        self.releases = releases

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the number of hints of each class and of releases."""
        return {"hints": (1, 5, None), "releases": (None, 1, 5)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        known = draw_references(view, self.hints, rng)
        scores = releases.values.new_zeros(len(releases.rows), view.n_classes)
        for indices in releases.group_by_epoch():
            scores[indices] = self._score_nearness(releases, indices, known)
        return Guess({"train": releases.mean(scores)}, budget={"releases": len(scores)})

    def _score_nearness(self, releases: Releases, indices: Tensor, known: list[Tensor]) -> Tensor:
        """Return the negative distance (n, C) of each observation to the nearest hint of each class, over the mean."""
        values, rows = releases.values[indices], releases.rows[indices]
        distances = values.new_full((len(indices), len(known)), torch.nan)
        for c, hints in enumerate(known):
            near = values[torch.isin(rows, hints)]
            if len(near):
                distances[:, c] = torch.cdist(values, near).amin(dim=1)
        scaled = distances / distances.nanmean().clamp_min(torch.finfo(values.dtype).tiny)
        return -scaled.nan_to_num(1.0)  # a class without a hint in this epoch is at the mean distance
