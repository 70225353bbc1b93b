"""Metrics of a guess: of (n, C) scores against (n,) labels, and of (n, d) values against true values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.stats import rankdata
from sklearn.metrics import f1_score, roc_curve

Scores = NDArray[np.floating]
Labels = NDArray[np.integer]

TAIL = 0.05
"""Share of the rows on either side that can hold any value without moving a scale."""

WILD = 100.0
"""Scales from the middle beyond which a value is wild: an encoded column and an embedding are within it."""

ALARM, QUIET, UNSEEN = "batches to an alarm", "batches without an alarm", "batches too faint to tell"
"""What the budget of an attack says of its victim: when it noticed, or for how long it did not, or could not."""


def score_positive(scores: Scores) -> Scores:
    """Return the score (n,) of class 1 against class 0 on a binary task."""
    return np.asarray(scores[:, 1].astype(float) - scores[:, 0])  # large scores do not overflow


def compute_margins(scores: Scores) -> Scores:
    """Return by how much the score of each class exceeds the largest of the others (n, C)."""
    second, largest = np.partition(np.asarray(scores, dtype=float), -2, axis=1)[:, -2:].T[:, :, None]
    return np.asarray(scores - np.where(scores == largest, second, largest))


def auc(scores: Scores, labels: Labels) -> float:
    """Return the area under the ROC curve: of class 1 if C = 2, else the mean over classes, one against the rest."""
    sides = [(labels == c, scores[:, c]) for c in np.unique(labels)] if scores.shape[1] > 2 else []
    curves = [roc_curve(*side) for side in sides or [(labels == 1, score_positive(scores))]]
    areas = [np.trapezoid(true, false) for false, true, _ in curves]
    return min(1.0, float(np.mean(areas)))  # a sum of trapezoids is subject to rounding


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
    score = score_positive(scores)
    steps = np.sort(score)
    at_most = [
        np.searchsorted(np.sort(part), steps, side="right") / len(part) for part in (score[labels == c] for c in (0, 1))
    ]
    return float(np.abs(at_most[1] - at_most[0]).max())


def tpr_at(scores: Scores, labels: Labels, *, fpr: float) -> float:
    """Return the true positive rate at a false positive rate of at most ``fpr``; NaN with fewer than 1 / fpr negatives.

    It is that of class 1 if C = 2, else the mean over classes, one against the rest by ``compute_margins``.

    Source: Carlini et al. 2022, "Membership inference attacks from first principles", section III: an attack that is
    confident about a few rows is a leak that its AUC hides.
    """
    classes = np.array([1]) if scores.shape[1] == 2 else np.unique(labels)
    if min(np.sum(labels != c) for c in classes) * fpr < 1:
        return float("nan")
    margin = compute_margins(scores)
    curves = (roc_curve(labels == c, margin[:, c], drop_intermediate=False) for c in classes)
    return float(np.mean([true[false <= fpr].max() for false, true, _ in curves]))


def find_scale(x: Scores) -> tuple[Scores, Scores]:
    """Return middle and scale (d,) of the columns of ``x`` (n, d), which few rows cannot move.

    These are up to ``TAIL`` of the rows on either side. The scale is that of a normal distribution with the same 5 %
    and 95 % quantiles, but at least the median distance of the values that differ from the median: most rows of a rare
    category, or of a ReLU, have the same value. It is 0 for a constant.
    """
    n, scales = len(x), []
    for part in np.array_split(np.asarray(x), 1 + np.size(x) // 2**22, axis=1):  # for memory
        ordered = np.sort(np.ascontiguousarray(part.T), axis=1).astype(float, copy=False)  # in the precision of x
        middle, cut = ordered[:, (n - 1) // 2], min(-int(-TAIL * n // 1), (n - 1) // 2)
        away = np.sort(np.abs(ordered - middle[:, None]), axis=1)
        equal = (away == 0).sum(axis=1)
        typical = np.take_along_axis(away, np.minimum(equal + (n - equal - 1) // 2, n - 1)[:, None], axis=1)[:, 0]
        scales.append((middle, np.maximum((ordered[:, n - 1 - cut] - ordered[:, cut]) / 3.29, typical)))
    middles, widths = zip(*scales, strict=True)
    return np.concatenate(middles), np.concatenate(widths)


def remove_wild(values: Scores, truth: Scores) -> tuple[Scores, Scores]:
    """Return guesses and truth (n, d) such that a few wild ones decide nothing; others keep every bit.

    Where the truth is beyond ``WILD`` scales of its column, both become the column's middle: the entry says nothing. A
    guess that is outside of the range of the truth by more than this range is cut off at its end.
    """
    middle, scale = find_scale(truth)
    is_wild = np.abs(truth - middle) > WILD * scale
    values, truth = (np.where(is_wild, middle.astype(x.dtype), x) for x in (values, truth))
    low, high = truth.min(axis=0), truth.max(axis=0)
    outside = np.maximum(low - values, values - high) > high - low
    return np.where(outside, np.clip(values, low, high), values), truth


def r2(values: Scores, truth: Scores) -> float:
    """Return the share of the variance of all columns together that is recovered; 0 for guessing the means.

    It is that of ``remove_wild`` entries, without wild ones. A constant column adds nothing; NaN if all are.
    """
    values, truth = remove_wild(values, truth)
    spread = ((truth - truth.mean(axis=0)) ** 2).sum()
    return float(1 - ((values - truth) ** 2).sum() / spread) if spread else np.nan


def mse(values: Scores, truth: Scores) -> float:
    """Return the mean squared error over all entries, in the units of the encoded columns (deviations of numbers).

    It is that of ``remove_wild`` entries, without wild ones.
    """
    values, truth = remove_wild(values, truth)
    return float(((values - truth) ** 2).mean())


def psnr(values: Scores, truth: Scores) -> float:
    """Return the peak signal-to-noise ratio in dB, 10 log10(range^2 / mse), of ``remove_wild``; at most 100."""
    values, truth = remove_wild(values, truth)
    return float(min(100.0, 10 * np.log10((truth.max() - truth.min()) ** 2 / max(mse(values, truth), 1e-30))))


SINGLE = 2.0**-24
"""What rounding to single precision changes, relative to the largest value of a column."""


def exact(values: Scores, truth: Scores) -> float:
    """Return the share of rows whose every value is right in single precision."""
    return float((np.abs(values - truth) <= SINGLE * np.abs(truth).max(axis=0)).all(axis=1).mean())


def measure_words(words: Scores, truth: Scores) -> float:
    """Return the share of words (n, T) that are right, among those that count; NaN if none does."""
    count = find_words_that_count(truth)
    return float((words == truth)[count].mean()) if count.any() else np.nan


def find_words_that_count(truth: Scores) -> NDArray[np.bool_]:
    """Return which words (n, T) count: not padding, which is 0, nor those of a position with one word in all rows."""
    return np.asarray((truth != 0) & (np.ptp(truth, axis=0) > 0))


def count_gained(words: Scores, truth: Scores, prior: Scores) -> float:
    """Return the share of words that are right among those that ``prior`` gets wrong; 0 if it gets none wrong."""
    missed = (prior != truth) & find_words_that_count(truth)
    return float((words == truth)[missed].mean()) if missed.any() else 0.0


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
    "exact": exact,
    "tokens": measure_words,
}


def is_possible(metric: str, value: float) -> bool:
    """Whether ``metric`` can have this value."""
    if metric in ("mse", "cross_entropy"):
        return value >= 0
    return value <= (1 if metric == "r2" else 100) if metric in VALUES else 0 <= value <= 1


def list_metrics(n_classes: int) -> tuple[str, ...]:
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

TEXT = ("tokens", "exact")
"""The metrics of recovered text; ``gained`` is the share of right words among those that *alone* gets wrong."""


def score_chance(metric: str, truth: NDArray[Any]) -> float:
    """Return the metric of a guess without any information.

    That is an AUC of 1/2, the share of the commonest class, an R2 of 0, or the F1 of naming every row positive; of
    exact values the share of the commonest row, if it occurs more than once; of words that of the commonest one.
    """
    if metric == "tokens":
        return float(np.bincount(words := truth[find_words_that_count(truth)]).max() / len(words))
    if metric == "exact":
        largest = int(np.unique(truth, axis=0, return_counts=True)[1].max())
        return largest / len(truth) if largest > 1 else 0.0
    if metric in ("auc", "r2"):
        return 0.5 if metric == "auc" else 0.0
    if metric == "f1":
        positive = float(np.mean(truth == 1))
        return 2 * positive / (1 + positive)
    return float(np.bincount(truth).max() / len(truth))


COMMON = 0.9
"""A class of more rows than this is known by its name alone."""


def calibrate(scores: Scores, labels: Labels, first: NDArray[np.bool_]) -> Scores:
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
    shares, margin, classes = np.empty(scores.shape), rankdata(compute_margins(scores), axis=0), scores.shape[1]
    for scored in (first, ~first):
        for c in range(classes):
            shares[scored, c] = _predict_hits(margin[~scored, c], labels[~scored] == c, margin[scored, c], classes)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def score_knowledge(probability: Scores, labels: Labels, first: NDArray[np.bool_]) -> dict[str, float]:
    """Return the cross-entropy in bits per row, the share of rows known almost surely, and how many of these are right.

    Args:
        probability: (n, C), ``calibrate`` with ``labels`` and ``first``.
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
    perfect = calibrate(np.eye(probability.shape[1])[labels], labels, first)
    can_be_known = perfect[np.arange(len(labels)), labels] > SURE
    metrics, shares = {"cross_entropy": float(-np.log2(probability[np.arange(len(labels)), labels]).mean())}, {}
    if can_be_known.any():
        metrics["known@0.99"], shares["right@0.99"] = float(known.mean()), known
    if can_be_known[np.isin(labels, counted)].all():
        by_class = [(of_class & (guessed == c))[labels == c].mean() for c in counted]
        metrics["known_of_class@0.99"], shares["right_of_class@0.99"] = float(np.mean(by_class)), of_class
    return metrics | {name: float((guessed == labels)[rows].mean()) for name, rows in shares.items() if rows.any()}


def _predict_hits(score: Scores, hits: NDArray[np.bool_], at: Scores, classes: int) -> Scores:
    """Return the isotonic regression of ``hits`` on ``score``, each step shrunk to 1 / C by one row, ``at`` scores."""
    values, row, rows = np.unique(score, return_inverse=True, return_counts=True)
    share, step = np.unique(
        isotonic_regression(np.bincount(row, hits) / rows, weights=rows).x.round(12), return_inverse=True
    )
    size = np.bincount(step, rows)
    shrunk = (share * size + 1 / classes) / (size + 1)
    return np.asarray(np.interp(at, values, isotonic_regression(shrunk[step], weights=rows).x))
