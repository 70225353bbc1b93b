"""Logistic regression from few labels: the penalty is chosen on folds of the auxiliary samples."""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor

from vflsec.core.view import Guess, View

PENALTIES = np.logspace(-4, 2, 7)
"""The values of scikit-learn's C that are tried."""

SMALL = 200
"""Weights up to which Newton's method is the faster one, by far."""


def regressed(view: View, *, folds: int, rng: torch.Generator) -> Guess:
    """Return what logistic regression of own columns, fitted on the auxiliary samples, says of every split.

    Args:
        view: of the adversary.
        folds: of the search for the penalty; fewer where a class has fewer auxiliary samples, none (C = 1) below two.
        rng: of the folds.
    """
    x, y = view.features["train"][view.aux_rows].cpu().numpy(), view.aux_labels.cpu().numpy()
    if len(np.unique(y)) == 1:  # nothing to tell apart
        same = torch.nn.functional.one_hot(view.aux_labels[:1].cpu(), view.n_classes).float()
        return Guess({split: same.expand(len(own), -1) for split, own in view.features.items()})
    folds = min(folds, int(np.bincount(y)[np.unique(y)].min()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model = _fit(x, y, folds, seed=int(torch.randint(2**31, (), generator=rng)))
    scores = {split: log_probabilities(model, own, view.n_classes) for split, own in view.features.items()}
    unfinished = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    return Guess(scores, converged=not unfinished, budget={"fits": folds * len(PENALTIES) + 1})


def _fit(x: np.ndarray, y: np.ndarray, folds: int, seed: int) -> LogisticRegression:
    if folds < 2:
        return LogisticRegression(max_iter=2000).fit(x, y)
    split = StratifiedKFold(folds, shuffle=True, random_state=seed)
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": PENALTIES}, scoring="neg_log_loss", cv=split)
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


class Searched(NamedTuple):
    """A classifier and its log-likelihood on folds."""

    model: LogisticRegression
    value: float


def searched(x: np.ndarray, y: np.ndarray, folds: int, seed: int) -> Searched:
    """Return the classifier with the penalty of best log-likelihood on folds, and that; C = 1 below two folds."""
    small = x.shape[1] * len(np.unique(y)) <= SMALL
    make = partial(LogisticRegression, max_iter=2000, solver="newton-cholesky" if small else "lbfgs")
    if folds < 2:
        return Searched(make().fit(x, y), 0.0)
    split = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y))
    place = np.searchsorted(np.unique(y), y)
    values = []
    for penalty in PENALTIES:
        fitted = [(make(C=penalty).fit(x[fit], y[fit]), out) for fit, out in split]
        values.append(sum(m.predict_log_proba(x[out])[np.arange(len(out)), place[out]].sum() for m, out in fitted))
    return Searched(make(C=PENALTIES[np.argmax(values)]).fit(x, y), float(max(values)))
