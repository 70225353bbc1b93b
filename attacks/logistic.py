"""Logistic regression on the adversary's own columns, without the federation."""

import torch

from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import regress_classes


class LogisticRegression(Attack):
    """Regularized logistic regression on own columns, fitted to the auxiliary samples only.

    It reads neither the model nor messages. Its leak is a baseline that an adversary reaches without joining, and a
    candidate for *alone* beside every attack: a small neural network on few labels is a weaker opponent.
    The penalty C, of 10^-4 .. 10^2, has the best log loss in cross-validation on the auxiliary samples.

    Source: common practice; ``A_prior`` of FedHSSL (arXiv 2208.08934), section VI-B, asks the same question.

    Args:
        folds: of the cross-validation; at most the number of auxiliary samples of the rarest class. C = 1 below two.
    """

    name = "logistic"
    baseline = True
    by_row = True
    version = 4
    side = "either"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of this toolkit"
    verified = "scikit-learn's own estimator"
    differs = (THRESHOLD,)
    costs = "36 small fits"
    fails = "if own columns have little to do with the label, or too few labels are known"

    def __init__(self, *, folds: int = 5) -> None:
        self.folds = folds

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, C) for every split."""
        return regress_classes(view, folds=self.folds, rng=rng)
