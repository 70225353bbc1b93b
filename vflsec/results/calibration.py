"""How much a guess of classes tells of a row: probabilities from its scores, which no answer of the row has touched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.isotonic import IsotonicRegression

from vflsec.results.metrics import SURE, Labels, Scores, margins

COMMON = 0.9
"""A class of more rows than this is known by its name alone."""


def calibrated(scores: Scores, labels: Labels, first: NDArray[np.bool_]) -> Scores:
    """Return probabilities (n, C) from scores of any scale; each half of the rows is calibrated on the other half.

    Only the order of the margins of a class counts, so that probabilities, logits and distances give the same. Answers
    of other rows, which an adversary may not have, choose the scale but never the direction: what is stated is the most
    that the scores tell, and an attack that guesses the wrong way round tells nothing.

    Source: Zadrozny and Elkan 2002, "Transforming classifier scores into accurate multiclass probability estimates",
    sections 3 to 5: isotonic regression of each class against the rest, then normalized. Each step is shrunk towards
    1 / C by one row, so that no probability is 0 and few rows are no certainty.

    Args:
        scores: (n, C).
        labels: (n,), the answers.
        first: (n,), the rows of the first half.
    """
    shares, margin, classes = np.empty(scores.shape), rankdata(margins(scores), axis=0), scores.shape[1]
    for scored in (first, ~first):
        for c in range(classes):
            shares[scored, c] = _isotonic(margin[~scored, c], labels[~scored] == c, classes).predict(margin[scored, c])
    probability: Scores = shares / shares.sum(axis=1, keepdims=True)
    return probability


def knowledge(probability: Scores, labels: Labels, first: NDArray[np.bool_]) -> dict[str, float]:
    """Return the cross-entropy in bits per row, the share of rows known almost surely, and how many of these are right.

    Args:
        probability: (n, C), ``calibrated`` with ``labels`` and ``first``.
        labels: (n,), the answers.
        first: (n,), the rows of the first half.

    Most rows of a very common class are known by its name alone. ``known_of_class@0.99`` is therefore the mean over
    classes of the share of each that is known, without a class of more than ``COMMON`` of the rows, and
    ``right_of_class@0.99`` is of the rows that are taken for these classes. The shares that are right are missing if no
    row is known.

    Few rows are no certainty: with two classes, not even a perfect guess of fewer than 50 rows of a class in each half
    is known. A share would then be too small whatever leaks, and is missing: that of a class if this holds for any
    class that counts, that of all rows if it holds for every class.
    """
    guessed, known = probability.argmax(axis=1), probability.max(axis=1) > SURE
    sizes = np.bincount(labels, minlength=probability.shape[1])
    counted = np.flatnonzero((sizes > 0) & (sizes <= COMMON * len(labels)))
    of_class = known & np.isin(guessed, counted)
    perfect = calibrated(np.eye(probability.shape[1])[labels], labels, first)
    can_be_known = perfect[np.arange(len(labels)), labels] > SURE
    metrics, shares = {"cross_entropy": float(-np.log2(probability[np.arange(len(labels)), labels]).mean())}, {}
    if can_be_known.any():
        metrics["known@0.99"], shares["right@0.99"] = float(known.mean()), known
    if can_be_known[np.isin(labels, counted)].all():
        by_class = [(of_class & (guessed == c))[labels == c].mean() for c in counted]
        metrics["known_of_class@0.99"], shares["right_of_class@0.99"] = float(np.mean(by_class)), of_class
    return metrics | {name: float((guessed == labels)[rows].mean()) for name, rows in shares.items() if rows.any()}


def _isotonic(score: Scores, hits: NDArray[np.bool_], classes: int) -> IsotonicRegression:
    """Return the isotonic regression of ``hits`` on ``score``, each step shrunk towards 1 / C by one row."""
    steps, step, rows = np.unique(
        IsotonicRegression().fit_transform(score, hits).round(12), return_inverse=True, return_counts=True
    )
    shrunk = (steps * rows + 1 / classes) / (rows + 1)
    return IsotonicRegression(out_of_bounds="clip").fit(score, shrunk[step])
