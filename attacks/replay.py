"""Replay attack (ExPLoit): find the head and the labels that would have sent the gradients that came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from vflsec.core.attack import Attack
from vflsec.core.checks import positive, positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import received
from vflsec.inference.surrogate_head import SETTLED, Known, alternated, changed, onehot, scored, started


class Replay(Attack):
    """Label inference by a surrogate head W (C, d) and labels y that together explain the recorded gradients g (n, d).

    Under a linear head a row's gradient is Σ_j a_j (W_j − W_y), where a_j >= 0 is the probability that the model gives
    to the wrong class j. Which these are depends on the other parties, so each row has its own. Three steps alternate:
    errors a of each row for each class it might be of (non-negative least squares), the probability of each class
    (n, C) from how well it explains the row, and W by least squares. The known labels start W and stay fixed. Errors
    have a Gaussian prior around 1/C whose weight is the variance that is left unexplained, so under noise the classes
    become clouds around their means, and without noise cones: a row is of the class in whose cone it lies, however
    short its gradient is. A class's score is minus the squared distance to its cone.

    A row's gradient is its mean direction over its releases, so neither 1/B nor the shrinking of gradients in training
    matters, and noise averages out. W is fitted on at most ``rows`` rows; then all are labeled.

    Departs from the source, which fits both by gradient descent, reads p off the embedding that was sent and needs the
    class prior and an entropy term to name classes and to make labels hard: here known labels do the first and the
    enumeration of classes the second.

    Costs rounds · rows · C³ times about 100 operations: 0.1 s at 2 classes, 1 s at 10. Fails where noise is much longer
    than the gradients, where d < C − 1, so that cones overlap, and the less linear the head is in this party's
    embedding.

    Source: Kariyappa & Qureshi 2021, ExPLoit (arXiv 2112.01299).

    Args:
        rounds: of the alternation.
        rows: training rows on which W is fitted, the known ones first.
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "replay"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "Kariyappa & Qureshi 2021 (ExPLoit), arXiv 2112.01299, by alternating least squares"
    verified = "recovers labels under a linear head; unverified against the source: only the abstract could be read"
    differs = (
        "Labels and head are fitted by alternating least squares; the source fits both by gradient descent.",
        "Known labels name the classes; the source uses the class prior, and an entropy term to make labels hard.",
        "The probabilities of wrong classes are free for each row; the source computes them from the embedding "
        "that was sent.",
        "Only the abstract of the source could be read.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def __init__(self, *, rounds: int = 40, rows: int = 2000, turns: int | None = None) -> None:
        positive(rounds=rounds, rows=rows)
        self.rounds = rounds
        self.rows = rows
        positive_or_none(turns=turns)
        self.turns = turns

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary how many releases are read: gradients turn as training goes on."""
        return {"turns": (None, 1, 5)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        directions = releases.mean(F.normalize(releases.values, dim=1))
        directions = directions / directions.norm(dim=1).mean().clamp_min(torch.finfo(directions.dtype).tiny)
        others = torch.ones(len(directions), dtype=torch.bool, device=directions.device)
        others[view.aux_rows] = False
        drawn = torch.randperm(int(others.sum()), generator=rng)[: max(0, self.rows - len(view.aux_rows))]
        rows = torch.cat([view.aux_rows, others.nonzero()[:, 0][drawn.to(others.device)]])
        known = Known(torch.arange(len(view.aux_rows), device=rows.device), onehot(view, directions.dtype))
        fit = before = started(directions[rows], known)
        for _ in range(self.rounds):
            before, fit = fit, alternated(fit, directions[rows], known)
        return Guess(
            {"train": scored(fit.head, directions)},
            converged=changed(before, fit) <= SETTLED,
            budget={"rounds": self.rounds, "rows": len(rows)},
        )
