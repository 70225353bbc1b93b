"""Imputation: the victim's columns from own columns, as any party could guess them without a federation."""

import torch

from vflsec.base.checks import check_positive
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import Model, regress_columns


class Imputation(Attack):
    """Regression of the victim's columns on own columns, fitted to the auxiliary rows. It reads no message.

    Its leak is a baseline: columns of two parties about the same people are correlated, and complete rows show how. It
    is *alone* beside every attack on columns.

    Own columns (n, p) are standardized over all training rows; the victim's columns (n, d) are encoded. Ridge
    regression has one penalty alpha in 10^-6 .. 10^5 for each column, chosen by its leave-one-out error. One-hot
    columns are projected onto the simplex.

    Source: common practice.

    Args:
        victim: whose columns; None for the first other party.
        model: ``ridge``; ``mlp``, a network with one hidden layer; ``better``, for each column the better of both on
            a third of the auxiliary rows. None for ``ridge`` below 300 auxiliary rows, else ``better``.
        hidden: width of the network's hidden layer.
    """

    name = "imputation"
    version = 3
    baseline = True
    side = "either"
    target = "features"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of attacks on columns"
    differs = ()
    verified = "scikit-learn's own estimators"
    costs = "a ridge regression for each column; from 300 auxiliary rows on, a small network"
    fails = "if the parties' columns are independent, or with too few auxiliary rows to see a dependence"

    def __init__(self, *, victim: str | None = None, model: Model | None = None, hidden: int = 32) -> None:
        check_positive(hidden=hidden)
        self.victim = victim
        self.model = model
        self.hidden = hidden

    def alone(self) -> Attack | None:
        """Return the same attack, which is what an adversary can do alone."""
        return Imputation(victim=self.victim, model=self.model, hidden=self.hidden)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split."""
        return regress_columns([dict(view.features)], view, rng=rng, model=self.model, hidden=self.hidden)
