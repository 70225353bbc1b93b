"""Figures of what was recovered: each is up to what the adversary cannot tell, and says so."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest
from sklearn.linear_model import RidgeCV

from vflsec.results import metrics
from vflsec.results.statistics import over_rows
from vflsec.secure.transcripts.audit import Figure, Floats

SEED = 0
"""Of the bootstrap, which draws rows, and of the rows that are known."""

DRAWS = 50
"""Of the rows that are known."""


def labels(guess: NDArray[Any], truth: NDArray[Any]) -> Figure:
    """Return the accuracy of ``guess`` (n,) up to a renaming of the classes, which one known label of each fixes."""
    hits = int((names(guess, truth)[guess] == truth).sum())
    return share("labels", hits, len(truth), metric="accuracy", chance=metrics.chance("accuracy", truth))


def names(guess: NDArray[Any], truth: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each guessed class the true class that it is, in the one-to-one naming that agrees with most rows."""
    counts = np.zeros((max(int(guess.max()), int(truth.max()), 1) + 1,) * 2, dtype=np.int64)
    np.add.at(counts, (guess, truth), 1)
    named: NDArray[np.int64] = linear_sum_assignment(-counts)[1]
    return named


def share(of: str, hits: int, n: int, *, metric: str = "share", chance: float = 0.0) -> Figure:
    """Return how many of ``n`` were recovered, with the Wilson interval."""
    ends = binomtest(hits, n).proportion_ci(method="wilson")
    return Figure(of=of, metric=metric, value=hits / n, chance=chance, n=n, ci95=(float(ends.low), float(ends.high)))


def vectors(of: str, guess: Floats, truth: Floats) -> Figure:
    """Return 1 - |guess - truth|² / |truth|², at least 0: which share of the size of ``truth`` was recovered."""
    lost = float(((guess - truth) ** 2).sum() / (truth**2).sum())
    return Figure(of=of, metric="r2", value=max(0.0, 1 - lost), chance=0.0, n=truth.size)


def ranking(of: str, score: Floats, truth: NDArray[Any]) -> Figure:
    """Return the AUC of ``score`` (n,) for class 1, the better of both directions."""
    two = np.stack([-score, score], axis=1)
    value = metrics.auc(two, truth)
    low, high = over_rows("auc", two, truth, np.random.default_rng(SEED))
    ends = (low, high) if value >= 0.5 else (1 - high, 1 - low)
    return Figure(of=of, metric="auc", value=max(value, 1 - value), chance=0.5, n=len(truth), ci95=ends)


def geometry(of: str, guess: Floats, truth: Floats) -> Figure:
    """Return the correlation between the inner products of all pairs of rows, of ``guess`` (n, d) and ``truth`` (n, k).

    Inner products are what a rotation leaves; a few known rows fix the rotation. The interval is Fisher's, as if only
    rows were independent, which pairs are not.
    """
    above = np.triu_indices(len(truth), 1)
    value = float(np.corrcoef((guess @ guess.T)[above], (truth @ truth.T)[above])[0, 1])
    half = 1.96 / np.sqrt(max(len(truth) - 3, 1))
    center = np.arctanh(np.clip(value, -1 + 1e-15, 1 - 1e-15))
    ends = (float(np.tanh(center - half)), float(np.tanh(center + half)))
    return Figure(of=of, metric="correlation", value=max(0.0, value), chance=0.0, n=len(truth), ci95=ends)


def with_known_rows(of: str, guess: Floats, truth: Floats) -> tuple[Figure, ...]:
    """Return the R2 of all columns of ``truth`` (n, g) by a linear map of ``guess`` that 3 g known rows fix.

    It is of the rows that are not known, around the mean of those that are; nothing if there are too few rows. Which
    rows are known is drawn several times: the value is the mean over draws, the interval has 95 % of them.
    """
    known = 3 * truth.shape[1]
    if len(truth) < 2 * known:
        return ()
    rng, reached = np.random.default_rng(SEED), []
    for _ in range(DRAWS):
        order = rng.permutation(len(truth))
        train, test = order[:known], order[known:]
        found = RidgeCV(alphas=np.logspace(-12, 3, 31)).fit(guess[train], truth[train]).predict(guess[test])
        off = ((found - truth[test]) ** 2).sum() / ((truth[test] - truth[train].mean(axis=0)) ** 2).sum()
        reached.append(max(0.0, 1 - float(off)))
    low, high = np.quantile(reached, [0.025, 0.975])
    of = f"{of}, {known} known rows"
    value = float(np.mean(reached))
    return (Figure(of=of, metric="r2", value=value, chance=0.0, n=len(truth) - known, ci95=(float(low), float(high))),)
