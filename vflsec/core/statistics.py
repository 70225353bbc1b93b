"""Intervals: over seeds for claims about a defense, over rows for claims about one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from vflsec.core.metrics import Labels, Scores, positive_score

LEVEL = 0.95
REPLICATES = 400


class Interval(NamedTuple):
    """A mean with its 95 % interval and the number of values behind it."""

    mean: float
    low: float
    high: float
    n: int


def over_seeds(values: Sequence[float]) -> Interval:
    """Return mean and t interval over seeds; with one seed there is no such interval and both ends are NaN."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, float("nan"), float("nan"), len(x))
    half = float(_t_quantile(len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half, len(x))


@lru_cache
def _t_quantile(freedom: int) -> Any:
    return stats.t.ppf((1 + LEVEL) / 2, freedom)  # slow, and the same for every pair of defenses


MANY = 50_000
"""Rows beyond which a bootstrap of R2 draws blocks of neighboring rows."""


def over_rows(metric: str, scores: Scores, labels: Any, rng: np.random.Generator) -> tuple[float, float]:
    """Return the percentile bootstrap interval of ``auc`` or ``f1`` (binary), ``accuracy`` or ``r2`` over rows."""
    if metric == "r2":
        values = _bootstrap_r2(scores, labels, rng)
    elif metric == "accuracy":  # the bootstrap of a share is a binomial draw
        hits = (scores.argmax(axis=1) == labels).mean()
        values = rng.binomial(len(labels), hits, REPLICATES) / len(labels)
    elif metric == "f1":
        values = _bootstrap_f1(scores.argmax(axis=1), labels, rng)
    else:
        values = _bootstrap_auc(positive_score(scores), labels, rng)
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _bootstrap_r2(values: Scores, truth: Scores, rng: np.random.Generator) -> np.ndarray:
    """R2 of REPLICATES resamples; each weighs the rows' squared errors and squared distances to the mean."""
    errors = ((values - truth) ** 2).sum(axis=1)
    spread = ((truth - truth.mean(axis=0)) ** 2).sum(axis=1)
    if len(truth) > MANY:  # model parameters, for example: resample blocks of them
        starts = np.arange(0, len(truth), -(-len(truth) // MANY))
        errors, spread = np.add.reduceat(errors, starts), np.add.reduceat(spread, starts)
    weight = rng.multinomial(len(errors), np.full(len(errors), 1 / len(errors)), REPLICATES)
    return np.asarray(1 - (weight @ errors) / (weight @ spread))


def _bootstrap_f1(guessed: Labels, labels: Labels, rng: np.random.Generator) -> np.ndarray:
    """F1 of REPLICATES resamples: a resample is a draw of how many rows are of which class and guessed as which."""
    counts = np.bincount(2 * labels + guessed, minlength=4)
    _, wrong, missed, hit = rng.multinomial(len(labels), counts / len(labels), REPLICATES).T
    return np.asarray(2 * hit / np.maximum(2 * hit + wrong + missed, 1))


def _bootstrap_auc(score: Scores, labels: Labels, rng: np.random.Generator) -> np.ndarray:
    """AUC of REPLICATES resamples. Rows are sorted once; a resample is a weight per row, ties count half."""
    order = np.argsort(score, kind="stable")
    positive = labels[order] == 1
    starts = np.flatnonzero(np.r_[True, np.diff(score[order]) > 0])  # first row of each group of equal scores
    values = np.empty(REPLICATES)
    for i in range(REPLICATES):
        weight = np.bincount(rng.integers(len(score), size=len(score)), minlength=len(score)).astype(float)
        above = np.add.reduceat(weight * positive, starts)
        below = np.add.reduceat(weight * ~positive, starts)
        pairs = (above * (np.cumsum(below) - below / 2)).sum()
        values[i] = pairs / (above.sum() * below.sum()) if above.sum() and below.sum() else 0.5
    return values
