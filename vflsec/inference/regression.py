"""Logistic regression from few labels, with a penalty that cross-validation on the auxiliary samples chooses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from vflsec.base.sparse_rows import matrix_of
from vflsec.core.scaling import near
from vflsec.core.view import Guess, View
from vflsec.inference import many_regressions

PENALTIES = np.logspace(-4, 2, 7)
"""Candidate values of scikit-learn's C."""

SMALL = 200
"""Number of weights up to which Newton's method is much faster than L-BFGS."""


def regressed(view: View, *, folds: int, rng: torch.Generator) -> Guess:
    """Return the guess of a logistic regression on own columns, fitted to the auxiliary samples, for every split.

    Args:
        view: of the adversary.
        folds: of the cross-validation; at most the number of auxiliary samples of the rarest class. C = 1 below two.
        rng: draws the folds.
    """
    features = {split: near(own, view.features["train"]) for split, own in view.features.items()}
    x, y = matrix_of(features["train"][view.aux_rows]), view.aux_labels.cpu().numpy()
    if len(np.unique(y)) == 1:  # a single class
        same = torch.nn.functional.one_hot(view.aux_labels[:1].cpu(), view.n_classes).float()
        return Guess({split: same.expand(len(own), -1) for split, own in view.features.items()})
    folds = min(folds, int(np.bincount(y)[np.unique(y)].min()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model = searched(x, y, folds, seed=int(torch.randint(2**31, (), generator=rng))).model
    scores = {split: log_probabilities(model, own, view.n_classes) for split, own in features.items()}
    return Guess(scores, converged=not unfinished(caught), budget={"fits": folds * len(PENALTIES) + 1})


def unfinished(caught: Sequence[warnings.WarningMessage]) -> bool:
    """Whether scikit-learn warned that a fit had not converged."""
    return any(issubclass(warning.category, ConvergenceWarning) for warning in caught)


def log_probabilities(model: ClassifierMixin, own: Tensor, n_classes: int) -> Tensor:
    """Return log-probabilities (n, C) of a fitted linear classifier for rows (n, p).

    A class without an auxiliary sample is the least likely one of every row.
    """
    known = torch.from_numpy(_log_softmax(model, matrix_of(own)))
    scores = torch.full((len(own), n_classes), float(known.min()) - 1.0, dtype=known.dtype)
    scores[:, torch.as_tensor(model.classes_)] = known
    return scores


def _log_softmax(model: ClassifierMixin, x: np.ndarray | csr_array) -> np.ndarray:
    """Return log-probabilities of the known classes. Scikit-learn's own end at the logarithm of the smallest number."""
    decision = model.decision_function(x)  # (n,) if two classes are known
    logits = decision if decision.ndim > 1 else np.stack([np.zeros_like(decision), decision], axis=1)
    return np.asarray(log_softmax(logits, axis=1))


class Searched(NamedTuple):
    """A classifier and its log-likelihood in cross-validation."""

    model: LogisticRegression
    value: float


def searched(x: np.ndarray | csr_array, y: np.ndarray, folds: int, seed: int) -> Searched:
    """Return the classifier with the penalty of the best log-likelihood on folds; C = 1 below two folds."""
    # LogisticRegressionCV takes as long, and its warm starts change the decision values by up to 5e-3.
    small = x.shape[1] * len(np.unique(y)) <= SMALL
    make = partial(LogisticRegression, max_iter=2000, solver="newton-cholesky" if small else "lbfgs")
    if folds < 2:
        return Searched(make().fit(x, y), 0.0)
    split = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y))
    place = np.searchsorted(np.unique(y), y)
    if small and isinstance(x, np.ndarray):
        values = _at_once(x, place, split)
    else:
        fitted = [[(make(C=penalty).fit(x[fit], y[fit]), out) for fit, out in split] for penalty in PENALTIES]
        values = [sum(_log_softmax(m, x[out])[np.arange(len(out)), place[out]].sum() for m, out in f) for f in fitted]
    return Searched(make(C=PENALTIES[np.argmax(values)]).fit(x, y), float(max(values)))


def _at_once(x: np.ndarray, y: np.ndarray, split: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Return the log-likelihood of each penalty on folds; all regressions are fitted at once."""
    held_out = np.zeros((len(split), len(y)), dtype=bool)
    for fold, (_, out) in enumerate(split):
        held_out[fold, out] = True
    each = np.tile(held_out, (len(PENALTIES), 1))  # (penalties folds, n)
    fitted, converged = many_regressions.coefficients(x, y, ~each, np.repeat(PENALTIES, len(split)))
    if not converged:
        warnings.warn("a regression on folds has not converged", ConvergenceWarning, stacklevel=2)
    told = many_regressions.log_probabilities(x, fitted)[:, np.arange(len(y)), y]  # (penalties folds, n)
    return [float(one) for one in (told * each).reshape(len(PENALTIES), -1).sum(axis=1)]
