"""Logistic regression on the adversary's own columns: what its auxiliary labels are worth without the federation."""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression as Classifier
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View

PENALTIES = np.logspace(-4, 2, 7)


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
        x, y = view.features["train"][view.aux_rows].cpu().numpy(), view.aux_labels.cpu().numpy()
        if len(np.unique(y)) == 1:  # nothing to tell apart
            same = torch.nn.functional.one_hot(view.aux_labels[:1].cpu(), view.n_classes).float()
            return Guess({split: same.expand(len(own), -1) for split, own in view.features.items()})
        folds = min(self.folds, int(np.bincount(y)[np.unique(y)].min()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            model = self._fit(x, y, folds, seed=int(torch.randint(2**31, (), generator=rng)))
        scores = {split: log_probabilities(model, own, view.n_classes) for split, own in view.features.items()}
        unfinished = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        return Guess(scores, converged=not unfinished, budget={"fits": folds * len(PENALTIES) + 1})

    def _fit(self, x: np.ndarray, y: np.ndarray, folds: int, seed: int) -> Classifier:
        if folds < 2:
            return Classifier(max_iter=2000).fit(x, y)
        split = StratifiedKFold(folds, shuffle=True, random_state=seed)
        search = GridSearchCV(Classifier(max_iter=2000), {"C": PENALTIES}, scoring="neg_log_loss", cv=split)
        return search.fit(x, y).best_estimator_


def log_probabilities(model: ClassifierMixin, own: Tensor, n_classes: int) -> Tensor:
    """Return what a fitted linear or quadratic classifier says of rows (n, p), (n, C).

    A class without an auxiliary sample is the least likely one everywhere.
    """
    decision = torch.from_numpy(model.decision_function(own.cpu().numpy()))  # (n,) if two classes are known
    logits = decision if decision.dim() > 1 else torch.stack([torch.zeros_like(decision), decision], dim=1)
    known = logits.log_softmax(dim=1)
    scores = torch.full((len(own), n_classes), float(known.min()) - 1.0, dtype=known.dtype)
    scores[:, torch.as_tensor(model.classes_)] = known
    return scores
