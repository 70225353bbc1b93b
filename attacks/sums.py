"""Sums attack: noised sums over batches, of all epochs, solved for the residual of each row."""

from dataclasses import replace

import torch

from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import regress_classes
from vflsec.inference.sums import estimate_labels, solve_sums


class SolvedSums(Attack):
    """Label inference from sealed sums: a linear system in the residuals p - y, with known weights and known noise.

    A passive party knows the weight of each row in each sum, since it has computed them, and the variance of the noise.
    Of two classes with a linear head, Kalman filters over the batches of all epochs give the mean of each row's label:
    a function of own columns, which all sums tell together, and a part of the row's own (``vflsec.inference.sums``).
    Else a filter gives the mean of each row's residuals, which are joined with own columns. A regularized logistic
    regression on either is fitted to the auxiliary samples. Without noise and with at least as many parameters as a
    batch has rows, the residuals are exact, and their signs are the labels.

    Source: this project; reconstruction from noised sums: Dinur and Nissim 2003.
    """

    name = "sums"
    version = 3
    needs = frozenset({Need.SUMS, Need.FEATURES, Need.MODEL, Need.AUX_LABELS})
    reference = "this project; Dinur and Nissim 2003, Revealing information while preserving privacy"
    verified = "exact residuals of a batch without noise; a naive posterior of a Gaussian linear model"
    differs = (THRESHOLD,)
    costs = "the Jacobians of each row in each epoch, and a linear system of (P, P) or (B, B) for each batch"
    fails = "with noise, and if a batch has many more rows than the model has parameters"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, C) of the training rows."""
        known, split = estimate_labels(view), view.aux_split
        if known is None:
            solved = solve_sums(view)
            assert solved is not None, "the view has sums"
            known = torch.cat([view.features[split], solved], dim=1)
        return regress_classes(replace(view, features={split: known}), folds=5, rng=rng)
