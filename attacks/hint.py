"""Hint attack: a row whose gradient is near that of a row with a known label has the same label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import references
from vflsec.core.checks import positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import Releases, received


class Hint(Attack):
    """Label inference from the distance between a row's gradient and those of a few rows whose label is known.

    In each turn, an epoch, the score of a class is minus the distance to the nearest gradient of its hints, in units of
    the mean distance in that turn; a row's scores are averaged over its turns. The source has hints of class 1 alone.

    Costs one pass over the messages. Fails where noise is much longer than the gradients.

    Source: released code of Li et al. 2022 (arXiv 2102.08504), hints of 1, 3 and 5 rows.

    Args:
        hints: auxiliary rows of each class that are used; None for all.
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "hint"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "released code of Li et al. 2022 (Marvell), arXiv 2102.08504"
    verified = "unverified: no figures are published"
    differs = (
        "Every class has hints; the released code has hints of class 1 alone.",
        "Distances are in units of their mean in each epoch, and averaged over epochs; the released code scores "
        "each batch by itself.",
        "The released code's variant by inner product is left out.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def __init__(self, *, hints: int | None = 5, turns: int | None = None) -> None:
        positive_or_none(hints=hints, turns=turns)
        self.hints = hints
        self.turns = turns

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the hints of each class and how many releases are read."""
        return {"hints": (1, 5, None), "turns": (None, 1, 5)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        known = references(view, self.hints, rng)
        scores = releases.values.new_zeros(len(releases.rows), view.n_classes)
        for lines in releases.by_turn():
            scores[lines] = self._nearness(releases, lines, known)
        return Guess({"train": releases.mean(scores)}, budget={"releases": len(scores)})

    def _nearness(self, releases: Releases, lines: Tensor, known: list[Tensor]) -> Tensor:
        """Return minus the distance (n, C) of each line to the nearest hint of each class, in units of the mean."""
        values, rows = releases.values[lines], releases.rows[lines]
        found = values.new_full((len(lines), len(known)), torch.nan)
        for c, hints in enumerate(known):
            near = values[torch.isin(rows, hints)]
            if len(near):
                found[:, c] = torch.cdist(values, near).amin(dim=1)
        scaled = found / found.nanmean().clamp_min(torch.finfo(values.dtype).tiny)
        return -scaled.nan_to_num(1.0)  # no hint of a class in this turn: neither near nor far
