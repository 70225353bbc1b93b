"""Boosting replay: boosting on guessed labels, in the trees of the training, improves the guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import THRESHOLD
from vflsec.core.checks import non_negative, positive
from vflsec.core.view import Guess, Need, View
from vflsec.inference.instance_spaces import Regressed, regressed
from vflsec.inference.opinion_pool import Opinion, pooled
from vflsec.inference.replay import Ensemble, Replayed, observed, replayed

FOLDS = 5
"""Parts of the auxiliary rows, of which each is guessed without its labels."""


class BoostingReplay(Attack):
    """Label inference from the node of each row in each tree, by repeating the training on guessed labels.

    A passive party knows which rows are together in a node, and how the value of a leaf follows from labels. It starts
    from the guess of ``instance-space``, with the auxiliary labels put in. With these labels it replays the boosting:
    probabilities, derivatives and the value of each node. The new score of a row is the sum of the values of its nodes,
    from each of which the row's own label is taken out: it would only confirm itself. The new scores, as probabilities,
    are the labels of the next replay. Many replays drift away from the labels.

    The guess is a weighted mean of the start and the last replay (``vflsec.inference.opinion_pool``). Weights depend on
    predictions of the auxiliary rows, each part of them guessed without its labels. Test rows are scored by the nodes
    that the party splits itself, which are all that it is told at prediction.

    Source: this project. Values of nodes: Chen and Guestrin 2016 (XGBoost), equation 5; what a passive party sees:
    Cheng et al. 2021 (SecureBoost, arXiv 1901.08755).

    Args:
        replays: how often the boosting is replayed.
        learning_rate: of the training. Parties agree on it, but no message says it: set it if it is not the default of
            ``secureboost``. One that is much too large makes the guess worse, one that is too small hardly does.
        l2: of the training, likewise.
    """

    name = "boosting-replay"
    stream = "instance-space"  # whose guess it starts from
    needs = frozenset({Need.NODES, Need.AUX_LABELS})
    reference = "this project; Chen and Guestrin 2016 (XGBoost), equation 5; Cheng et al. 2021 (SecureBoost)"
    verified = "the scores of trainings of which all nodes and labels are known, left-out values against a naive loop"
    differs: ClassVar[tuple[str, ...]] = (THRESHOLD,)
    costs = "six times instance-space after its principal components, and sums over rows and trees"
    fails = (
        "if nodes are withheld or the guess of instance-space is poor; it expects one tree for each class in a round, "
        "and gains less if some rounds are not shown"
    )

    def __init__(self, *, replays: int = 2, learning_rate: float = 0.3, l2: float = 1.0) -> None:
        positive(replays=replays, learning_rate=learning_rate)
        non_negative(l2=l2)
        self.replays = replays
        self.learning_rate = learning_rate
        self.l2 = l2

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the probability of each class, (n, C), for training rows, and test rows if any node of them is told.

        Where all nodes are withheld, or with a single auxiliary row, it is the guess of ``instance-space``.
        """
        first, trees = regressed(view, rng), observed(view)
        budget = {"candidates": first.tried, "replays": self.replays}
        if trees is None or first.left_out is None or len(view.aux_rows) < 2:
            return Guess(first.scores, budget=budget)
        scored = self._scored(view, first, trees)
        held_out = self._held_out(view, trees, rng)
        guess = {}
        for split, start in first.scores.items():
            last = "replay" if split == view.aux_split else "replay everywhere"
            opinions = [Opinion(start, held_out["start"]), Opinion(scored[last][split], held_out[last])]
            guess[split] = pooled(opinions, view.aux_labels)
        return Guess(guess, budget=budget)

    def _held_out(self, view: View, trees: Ensemble, rng: torch.Generator) -> dict[str, Tensor]:
        """Return scores (m, C) of the auxiliary rows, each part of them without its labels, by name."""
        m = len(view.aux_rows)
        order, folds = torch.randperm(m, generator=rng).to(view.aux_rows.device), min(FOLDS, m)
        found: dict[str, Tensor] = {}
        for fold in range(folds):
            out = order[fold::folds]
            rest = torch.ones(m, dtype=torch.bool, device=out.device)
            rest[out] = False
            part = view.knowing(torch.nonzero(rest)[:, 0])
            for name, tables in self._scored(part, regressed(part, rng), trees).items():
                own = tables[view.aux_split]
                found.setdefault(name, own.new_zeros(m, view.n_classes))[out] = own[view.aux_rows[out]]
        return found

    def _scored(self, view: View, first: Regressed, trees: Ensemble) -> dict[str, Mapping[str, Tensor]]:
        """Return scores (n, C) by split: of the start, and of the last replay by all nodes or those told everywhere."""
        split, left_out = view.aux_split, first.left_out
        assert left_out is not None
        guessed = Opinion(first.scores[split], left_out)
        for _ in range(self.replays):
            logits = _logits(self._replayed(trees, guessed, view).left_out, view)
            guessed = Opinion(logits, logits[view.aux_rows])
        found: dict[str, Mapping[str, Tensor]] = {"start": first.scores, "replay": {split: guessed.scores}}
        seen = observed(view, everywhere=True) if len(first.scores) > 1 else None
        if seen is not None:
            scores = self._replayed(seen, guessed, view).scores
            found["replay everywhere"] = {s: _logits(own, view) for s, own in scores.items()}
        return found

    def _replayed(self, trees: Ensemble, guessed: Opinion, view: View) -> Replayed:
        """Return a replay with guesses for labels, and with the known ones."""
        q = guessed.calibrated(view.aux_labels).scores.cpu().numpy().copy()
        q[view.aux_rows.cpu().numpy()] = np.eye(view.n_classes)[view.aux_labels.cpu().numpy()]
        targets = q[:, 1:] if view.n_classes == 2 else q
        return replayed(trees, targets, view.aux_split, learning_rate=self.learning_rate, l2=self.l2)


def _logits(scores: NDArray[np.float64], view: View) -> Tensor:
    """Return logits (n, C) of scores (n, C'); those of two classes sum to zero."""
    found = np.concatenate([-scores, scores], axis=1) / 2 if view.n_classes == 2 else scores
    return torch.from_numpy(found).to(view.aux_rows.device)
