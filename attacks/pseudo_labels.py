"""Pseudo-labels: Gaussian classes of own columns, fitted to few labels and to guesses of all other rows."""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.covariance import EmpiricalCovariance, empirical_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import THRESHOLD
from vflsec.core.checks import positive
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import log_probabilities

RIDGE = 0.1
"""Share of the identity in each class's covariance."""

FOLDS = 5


class PseudoLabels(Attack):
    """Gaussian classes of own columns, fitted to the auxiliary samples and then to pseudo-labels of all rows.

    Each class has a mean and a covariance of its own (quadratic discriminant analysis). In each round, the most likely
    class of a training row is its label for models that then guess other rows. Rows are divided into folds anew, and no
    row is guessed by a model that was fitted to its own pseudo-label. Auxiliary samples keep their labels and are in
    every fit. While a class has no more rows than there are columns, its covariance is singular, and all classes share
    one (linear discriminant analysis). With one auxiliary sample of each class there is no covariance at first, and a
    logistic regression makes the first guesses.

    It reads neither the model nor messages. Its leak is a baseline that an adversary reaches without joining, and a
    candidate for *alone* if rows form clusters and many of them have no known label.

    Source: McLachlan 1975, "Iterative reclassification procedure for constructing an asymptotically optimal rule of
    allocation in discriminant analysis", JASA 70; Friedman 1989 for the regularized covariance.

    Args:
        rounds: number of rounds.
    """

    name = "pseudo-labels"
    baseline = True
    side: ClassVar[Literal["passive", "active", "either"]] = "either"
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    reference = "McLachlan 1975, Journal of the American Statistical Association 70"
    verified = "the Bayes rule of a Gaussian mixture; scikit-learn's own estimators"
    differs: ClassVar[tuple[str, ...]] = (
        "The paper has two classes with one covariance. Here there is any number, each with its own, regularized.",
        "The paper fits one model to all guesses. Here a row is guessed by a model that was fitted without it.",
        "The paper repeats until no guess changes. Here the number of rounds is fixed.",
        THRESHOLD,
    )
    costs = "rounds x folds discriminant analyses of all training rows"
    fails = "if classes are far from Gaussian, or if the first guesses are so poor that they confirm each other"

    def __init__(self, *, rounds: int = 10) -> None:
        positive(rounds=rounds)
        self.rounds = rounds

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log-probabilities (n, C), up to a constant of each row, for every split."""
        split, known, labels = view.aux_split, view.aux_rows.cpu(), view.aux_labels.cpu()
        if len(torch.unique(labels)) == 1:  # a single class
            same = torch.nn.functional.one_hot(labels[:1], view.n_classes).float()
            return Guess({name: same.expand(len(own), -1) for name, own in view.features.items()})
        scaler = StandardScaler().fit(view.features[split].double().cpu().numpy())
        x = {
            name: torch.from_numpy(scaler.transform(own.double().cpu().numpy())) for name, own in view.features.items()
        }
        models = [_gaussians(x[split][known], labels)]
        guessed = log_probabilities(models[0], x[split], view.n_classes)
        for _ in range(self.rounds):
            pseudo = guessed.argmax(dim=1)
            pseudo[known] = labels
            fold = torch.randperm(len(pseudo), generator=rng) % FOLDS
            models = []
            for k in torch.unique(fold):
                fitted = fold != k
                fitted[known] = True
                models.append(_gaussians(x[split][fitted], pseudo[fitted]))
                guessed[fold == k] = log_probabilities(models[-1], x[split][fold == k], view.n_classes)
        scores = {split: guessed}
        for name in [name for name in x if name != split]:
            scores[name] = torch.stack([log_probabilities(model, x[name], view.n_classes) for model in models]).mean(0)
        return Guess(scores, budget={"fits": 1 + self.rounds * len(models)})


class _Regularized(EmpiricalCovariance):  # type: ignore[misc]
    """The covariance of a class, with a share of the identity.

    This is ``reg_param`` of the analysis, which decomposes the rows. A covariance is far smaller than many rows.
    """

    def fit(self, X: np.ndarray, y: None = None) -> _Regularized:
        covariance = empirical_covariance(X)
        self.covariance_ = (1 - RIDGE) * covariance + RIDGE * np.eye(X.shape[1])
        return self


def _gaussians(x: Tensor, y: Tensor) -> ClassifierMixin:
    """Return a discriminant analysis of rows (n, p) with labels (n,); for one row of each class, a regression."""
    fewest = int(torch.bincount(y)[torch.unique(y)].min())
    if fewest > x.shape[1]:
        model = QuadraticDiscriminantAnalysis(solver="eigen", covariance_estimator=_Regularized())
    elif len(y) > len(torch.unique(y)):
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    else:
        model = LogisticRegression()
    with warnings.catch_warnings():  # a class of one row adds nothing to the shared covariance
        warnings.filterwarnings("ignore", message="Only one sample available")
        return model.fit(np.asarray(x), np.asarray(y))
