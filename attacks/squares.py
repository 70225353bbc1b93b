"""Logistic regression on the adversary's own columns and their squares: classes that differ in spread."""

from dataclasses import replace

import torch

from vflsec.attacks.logistic import LogisticRegression
from vflsec.core.view import Guess, View
from vflsec.inference.regression import regress_classes, standardize


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
