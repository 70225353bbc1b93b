"""Metrics of a guess: of (n, C) scores against (n,) labels, and of (n, d) values against true values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score, roc_auc_score, roc_curve

Scores = NDArray[np.floating]
Labels = NDArray[np.integer]


def positive_score(scores: Scores) -> Scores:
    """Return the score (n,) of class 1 against class 0 on a binary task."""
    difference: Scores = scores[:, 1] - scores[:, 0]
    return difference


def margins(scores: Scores) -> Scores:
    """Return by how much the score of each class exceeds the largest of the others (n, C)."""
    second, largest = np.partition(np.asarray(scores, dtype=float), -2, axis=1)[:, -2:].T[:, :, None]
    return np.asarray(scores - np.where(scores == largest, second, largest))


def auc(scores: Scores, labels: Labels) -> float:
    """Return the area under the ROC curve: of class 1 if C = 2, else the mean over classes, one against the rest."""
    if scores.shape[1] == 2:
        found = roc_auc_score(labels, positive_score(scores))
    else:
        found = np.mean([roc_auc_score(labels == c, scores[:, c]) for c in np.unique(labels)])
    return min(1.0, float(found))  # its sum of trapezoids is subject to rounding


def accuracy(scores: Scores, labels: Labels) -> float:
    """Return the share of rows whose largest score is at the true class: the papers' label recovery accuracy."""
    return float(np.mean(scores.argmax(axis=1) == labels))


def top5(scores: Scores, labels: Labels) -> float:
    """Return the share of rows whose true class is among the five largest scores."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    return float(np.mean((best == labels[:, None]).any(axis=1)))


def f1(scores: Scores, labels: Labels) -> float:
    """Return F1 over the whole set (macro if C > 2); 0 where nothing is predicted positive."""
    average = "binary" if scores.shape[1] == 2 else "macro"
    return float(f1_score(labels, scores.argmax(axis=1), average=average, zero_division=0))


def ks(scores: Scores, labels: Labels) -> float:
    """Return the Kolmogorov-Smirnov distance between the scores of the two classes: max(TPR - FPR)."""
    score = positive_score(scores)
    steps = np.sort(score)
    at_most = [
        np.searchsorted(np.sort(own), steps, side="right") / len(own) for own in (score[labels == c] for c in (0, 1))
    ]
    return float(np.abs(at_most[1] - at_most[0]).max())


def tpr_at(scores: Scores, labels: Labels, *, fpr: float) -> float:
    """Return the true positive rate at a false positive rate of at most ``fpr``; NaN with fewer than 1 / fpr negatives.

    It is that of class 1 if C = 2, else the mean over classes, one against the rest by ``margins``.

    Source: Carlini et al. 2022, "Membership inference attacks from first principles", section III: an attack that is
    confident about a few rows is a leak that its AUC hides.
    """
    classes = np.array([1]) if scores.shape[1] == 2 else np.unique(labels)
    if min(np.sum(labels != c) for c in classes) * fpr < 1:
        return float("nan")
    margin = margins(scores)
    curves = (roc_curve(labels == c, margin[:, c], drop_intermediate=False) for c in classes)
    return float(np.mean([true[false <= fpr].max() for false, true, _ in curves]))


def r2(values: Scores, truth: Scores) -> float:
    """Return the share of the variance of all columns together that is recovered; 0 for guessing the means."""
    spread = ((truth - truth.mean(axis=0)) ** 2).sum()
    return float(1 - ((values - truth) ** 2).sum() / spread)


def mse(values: Scores, truth: Scores) -> float:
    """Return the mean squared error over all entries, in the units of the encoded columns (deviations of numbers)."""
    return float(((values - truth) ** 2).mean())


def psnr(values: Scores, truth: Scores) -> float:
    """Return the peak signal-to-noise ratio in dB, 10 log10(range^2 / mse), over all entries; at most 100."""
    return float(min(100.0, 10 * np.log10((truth.max() - truth.min()) ** 2 / max(mse(values, truth), 1e-30))))


METRICS: dict[str, Callable[[Scores, Any], float]] = {
    "auc": auc,
    "accuracy": accuracy,
    "top5": top5,
    "f1": f1,
    "ks": ks,
    "tpr@0.001": partial(tpr_at, fpr=0.001),
    "tpr@0.01": partial(tpr_at, fpr=0.01),
    "r2": r2,
    "mse": mse,
    "psnr": psnr,
}


def possible(metric: str, value: float) -> bool:
    """Whether ``metric`` can have this value."""
    if metric in ("mse", "cross_entropy"):
        return value >= 0
    if metric in VALUES:
        return value <= (1 if metric == "r2" else 100)
    return 0 <= value <= 1


def applicable(n_classes: int) -> tuple[str, ...]:
    """Return the metrics that say something about a task with C classes; the first is its headline."""
    if n_classes == 2:
        return ("auc", "accuracy", "f1", "ks")
    return ("accuracy", "auc", "f1", *(("top5",) if n_classes > 5 else ()))


MEMBERSHIP = ("auc", "accuracy")
"""The metrics of guessed membership."""

RARE = ("tpr@0.001", "tpr@0.01")
"""The metrics of a guess that is sure of few rows only."""

SURE = 0.99
"""The probability above which a row is known."""

VALUES = ("r2", "mse", "psnr")
"""The metrics of recovered columns."""


def chance(metric: str, truth: NDArray[Any]) -> float:
    """Return the metric of a guess without any information.

    That is an AUC of 1/2, the share of the commonest class, an R2 of 0, or the F1 of naming every row positive.
    """
    if metric in ("auc", "r2"):
        return 0.5 if metric == "auc" else 0.0
    if metric == "f1":
        positive = float(np.mean(truth == 1))
        return 2 * positive / (1 + positive)
    return float(np.bincount(truth).max() / len(truth))
