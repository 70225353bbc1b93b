"""Spectral attack: two classes lie along the longest axis of what is exchanged."""

from __future__ import annotations

import torch

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import divided
from vflsec.core.checks import positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.directions import principal
from vflsec.inference.releases import percentiles, received


class Spectral(Attack):
    """Label inference from the first principal component of the gradients that came back. Two classes.

    In each turn, an epoch, gradients are centered and projected on their first right singular vector; the sign of each
    turn is that which agrees with the turns before. A row's ranks are averaged over its turns. Which end is class 1 say
    the auxiliary labels; without any, it is the end with the longer tail, as of a rare class.

    Costs one singular value decomposition for each turn. Fails where something else than the class moves the gradients
    most, and where noise is longer than their spread.

    Source: Sun et al. 2022 (arXiv 2203.01451), who project embeddings; on gradients as in Li et al. 2022.

    Args:
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "spectral"
    needs = frozenset({Need.GRADIENTS})
    classes = 2
    reference = "Sun et al. 2022, arXiv 2203.01451"
    verified = "unverified: only the abstract could be read"
    differs = (
        "Gradients are projected; the source projects embeddings (see spectral-embedding).",
        "Each epoch has an axis of its own, and a row's ranks are averaged over epochs.",
        "Auxiliary labels choose the direction and the threshold; the source's rule could not be read.",
    )

    def __init__(self, *, turns: int | None = None) -> None:
        positive_or_none(turns=turns)
        self.turns = turns

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        scores = torch.zeros_like(releases.values[:, 0])
        agreed = scores.new_zeros(releases.n_rows)
        for lines in releases.by_turn():
            found, rows = principal(releases.values[lines]), releases.rows[lines]
            sign = torch.sign(found @ agreed[rows])
            scores[lines] = found * (sign if sign else 1.0)
            agreed[rows] += scores[lines] / scores[lines].std().clamp_min(torch.finfo(scores.dtype).tiny)
        score = releases.mean(percentiles(releases, scores)[:, None])[:, 0]
        return Guess({"train": divided(view, score)}, budget={"releases": len(scores)})
