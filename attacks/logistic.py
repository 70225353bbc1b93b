"""Logistic regression on the adversary's own columns: what its auxiliary labels are worth without the federation."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import regressed


class LogisticRegression(Attack):
    """Regularised logistic regression from own columns to labels, fitted on the auxiliary samples alone.

    It reads neither the model nor a message, so its leak is a prior: an adversary who never joined reaches it. It is a
    candidate for *alone* beside every attack, because a small neural network on few labels is a weak opponent.

    Costs 36 small fits. Fails where own columns have little to do with the label, or too few labels are known.

    The penalty C is chosen among 10^-4 .. 10^2 by log loss on folds of the auxiliary samples.

    Source: common practice; ``A_prior`` of FedHSSL (arXiv 2208.08934), section VI-B, asks the same question.

    Args:
        folds: of the search for C; fewer where a class has fewer auxiliary samples, none (C = 1) below two.
    """

    name = "logistic"
    baseline = True
    version = 2
    side: ClassVar[Literal["passive", "active", "either"]] = "either"
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of this toolkit"
    verified = "scikit-learn's own estimator"
    differs: ClassVar[tuple[str, ...]] = (
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def __init__(self, *, folds: int = 5) -> None:
        self.folds = folds

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, C) for every split."""
        return regressed(view, folds=self.folds, rng=rng)
