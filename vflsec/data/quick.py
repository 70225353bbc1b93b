"""What columns are worth: the utility of the better of two models that need no tuning."""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vflsec.data.encode import Matrix, dense
from vflsec.results.metrics import METRICS

MOST_ROWS = 20_000
MOST_VALUES = 2_000_000
"""Rows, and rows times columns, that the models are fitted to; more hardly change what they show."""
TREES = 60
PART = 10_000
"""Test rows that are dense at a time."""


def quick_utility(
    train: Matrix, labels: np.ndarray, test: Matrix, answers: np.ndarray, *, n_classes: int, metric: str
) -> float:
    """Return the utility on test rows of logistic regression or boosted trees, whichever does better in training.

    The choice is made on a fifth of the training rows, to which neither is fitted; the chosen model is then fitted to
    all. NaN if a class is missing there.

    Args:
        train: (n, d) encoded columns.
        labels: (n,) class indices.
        test: (m, d).
        answers: (m,).
        n_classes: C.
        metric: of ``METRICS``.
    """
    rows = min(MOST_ROWS, max(200, MOST_VALUES // max(1, train.shape[1])))
    train, labels = train[:rows], labels[:rows]
    if not isinstance(train, np.ndarray):  # no model can use a category that does not occur in these rows
        seen = np.unique(train.indices)
        train, test = dense(train[:, seen]), test[:, seen]
    held_out = np.arange(len(labels)) % 5 == 4
    if any(len(np.unique(some)) < n_classes for some in (labels[held_out], labels[~held_out])):
        return float("nan")
    models = (
        make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200)),
        HistGradientBoostingClassifier(max_iter=max(5, 2 * TREES // n_classes), early_stopping=False, random_state=0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the budget is fixed
        fitted = [model.fit(train[~held_out], labels[~held_out]) for model in models]
        chosen = max(fitted, key=lambda model: METRICS[metric](model.predict_proba(train[held_out]), labels[held_out]))
        chosen.fit(train, labels)
    parts = [dense(test[at : at + PART]) for at in range(0, test.shape[0], PART)]
    return METRICS[metric](np.concatenate([chosen.predict_proba(part) for part in parts]), answers)
