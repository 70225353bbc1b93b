"""Logistic regression on the adversary's own columns and on their squares, without the federation."""

from dataclasses import replace

import torch

from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import regress_classes, standardize


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


class Squares(LogisticRegression):
    """Regularized logistic regression on own columns and their squares, fitted to the auxiliary samples only.

    It reads neither the model nor messages. Its leak is a baseline that an adversary reaches without joining, and a
    candidate for *alone* if classes differ in the spread of columns or in their distance from a center. A linear rule
    cannot express this, and trees need many labels for it. Columns are standardized over the training rows.

    Source: Hastie, Tibshirani, Friedman 2009, "The Elements of Statistical Learning", section 5.1.

    Args:
        folds: of the cross-validation; at most the number of auxiliary samples of the rarest class. C = 1 below two.
    """

    name = "squares"
    by_row = False
    version = 3
    reference = "Hastie, Tibshirani, Friedman 2009, The Elements of Statistical Learning, section 5.1"
    fails = "if classes differ in products of columns, or too few labels are known"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, C) for every split."""
        scaled = {split: standardize(x, view.features["train"]) for split, x in view.features.items()}
        wide = {split: torch.cat([x, x.square()], dim=1) for split, x in scaled.items()}
        return regress_classes(replace(view, features=wide), folds=self.folds, rng=rng)
