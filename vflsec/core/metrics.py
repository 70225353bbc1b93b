"""Measures of a score against labels: AUC, accuracy, top-5, F1, KS. Each takes (n, C) scores and (n,) labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score, roc_auc_score

Scores = NDArray[np.floating]
Labels = NDArray[np.integer]


def positive_score(scores: Scores) -> Scores:
    """Return the score (n,) of class 1 against class 0 on a binary task."""
    difference: Scores = scores[:, 1] - scores[:, 0]
    return difference


def auc(scores: Scores, labels: Labels) -> float:
    """Return the area under the ROC curve: of class 1 if C = 2, else the mean over classes, one against the rest."""
    if scores.shape[1] == 2:
        return float(roc_auc_score(labels, positive_score(scores)))
    return float(np.mean([roc_auc_score(labels == c, scores[:, c]) for c in np.unique(labels)]))


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


METRICS: dict[str, Callable[[Scores, Labels], float]] = {
    "auc": auc,
    "accuracy": accuracy,
    "top5": top5,
    "f1": f1,
    "ks": ks,
}


def applicable(n_classes: int) -> tuple[str, ...]:
    """Return the metrics that say something about a task with C classes."""
    if n_classes == 2:
        return ("auc", "accuracy", "f1", "ks")
    return ("accuracy", "auc", "f1", *(("top5",) if n_classes > 5 else ()))


def chance(metric: str, labels: Labels) -> float:
    """Return what a guesser without any information reaches: AUC 1/2, or the share of the commonest class."""
    if metric == "auc":
        return 0.5
    return float(np.bincount(labels).max() / len(labels))
