"""Bins of rows between their bounds that agree with the sums in histograms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vflsec.core.view import View
from vflsec.inference.trees.bounds import Bounds
from vflsec.inference.trees.histograms import linear_equations

Floats = NDArray[np.float64]

PROJECTIONS = 60
CLOSE = 1e-6
"""Error of all equations, in units of their length, at which projections end."""

RIDGE = 1e-9
FORBIDDEN = -1e9
"""Takes the place of the share of a bin in which a row cannot be; all others are far above it."""


def solved(view: View, victim: str, known: Bounds) -> Floats:
    """Return numbers (n, U) of training rows that also agree with the sums over nodes that ``victim`` told.

    A histogram holds, for each bin, the sum of a derivative w over the rows of a node that are in the bin. The active
    party knows w and the rows of the node: a linear equation in the shares (n, V) with which rows are in each bin, and
    so are numbers of rows, with w = 1. For each column, projections on the equations and on the shares that bounds
    allow, which sum to one, alternate. They start from the shares of all rows in the bins between the bounds. The
    number of a row is the mean over its bins. It is computed once for a view and its copies.

    Args:
        view: of the active party.
        victim: whose columns.
        known: their bounds.
    """
    key = ("solved", victim)
    if key not in view.memo:
        view.memo[key] = _solved(view, victim, known)
    found: Floats = view.memo[key]
    return found


def _solved(view: View, victim: str, known: Bounds) -> Floats:
    columns = [[u for u, unit in enumerate(known.units) if unit.column == j] for j in _columns(known)]
    ranges = [np.arange(known.units[own[0]].first, known.units[own[-1]].last + 1) for own in columns]
    of_bins = np.repeat(np.arange(len(columns)), [len(bins) for bins in ranges])
    all_rows, all_sums, holds = linear_equations(view, victim, of_bins)
    found = known.expected[view.aux_split].copy()
    length = np.linalg.norm(all_rows, axis=1, keepdims=True).clip(np.finfo(float).tiny)
    all_rows, all_sums = all_rows / length, all_sums / length
    before = np.zeros(0, dtype=bool)
    for units, bins, here in zip(columns, ranges, holds.T, strict=True):
        if not here.any():
            continue
        if not np.array_equal(here, before):  # columns have the same equations, unless trees draw some of them
            before, rows = here, all_rows[here]
            gram = rows @ rows.T
            step = rows.T @ np.linalg.pinv(gram + RIDGE * np.eye(len(gram)), rcond=1e-7, hermitian=True)  # (n, E)
        sums = all_sums[here]
        allowed = _allowed(known, view.aux_split, units, bins)
        x = allowed * known.mass[bins].clip(np.finfo(float).tiny)
        x /= x.sum(axis=1, keepdims=True)
        for _ in range(PROJECTIONS):
            missing = sums[:, bins] - rows @ x
            if np.abs(missing).max() < CLOSE:
                break
            x = _nearest(x + step @ missing, allowed)
        found[:, units] = x @ known.weights[bins][:, units]
    return found


def _columns(known: Bounds) -> list[int]:
    """Return the columns with bins, in their order."""
    return list(dict.fromkeys(unit.column for unit in known.units))


def _allowed(known: Bounds, split: str, units: list[int], bins: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each row can be in each bin (n, k) of one column; in all of them where bounds disagree."""
    lowest, highest = known.lowest[split][:, units], known.highest[split][:, units]
    if known.units[units[0]].ordered:
        middle = known.weights[bins, units[0]]
        found = (lowest <= middle) & (middle <= highest)
    else:
        found = highest > 0
    none = ~found.any(axis=1, keepdims=True)
    return found | none  # type: ignore[no-any-return]


def _nearest(x: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Return the nearest shares (n, k) that are at least 0, sum to one in each row and are 0 where not ``allowed``.

    Source: Duchi et al., ICML 2008, figure 1.
    """
    inside = np.where(allowed, x, FORBIDDEN)
    descending = -np.sort(-inside, axis=1)
    excess = (descending.cumsum(axis=1) - 1) / np.arange(1, x.shape[1] + 1)
    last = (descending > excess).sum(axis=1, keepdims=True) - 1
    found: Floats = (inside - np.take_along_axis(excess, last, axis=1)).clip(0)
    return found
