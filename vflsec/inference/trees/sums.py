"""Columns between their bounds that agree with the sums in histograms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vflsec.core.view import View
from vflsec.inference.trees.bounds import Bounds
from vflsec.inference.trees.histograms import linear_equations

Floats = NDArray[np.float64]

PROJECTIONS = 20
RIDGE = 1e-9


def solved(view: View, victim: str, known: Bounds) -> Floats:
    """Return numbers (n, U) of training rows that also agree with the sums over nodes that ``victim`` told.

    A histogram holds, for each bin, the sum of a derivative w over the rows of a node. Times the number of each bin,
    it is the sum of w x over these rows, where the active party knows w and the rows: a linear equation in the x of all
    rows, and so are numbers of rows, with w = 1. Projections on the equations and on the bounds alternate, from the
    mean between the bounds.

    Args:
        view: of the active party.
        victim: whose columns.
        known: their bounds.
    """
    split = view.aux_split
    x = known.expected[split]
    rows, told_sums = linear_equations(view, victim, len(known.weights))
    if not len(rows):
        return x
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    rows, sums = rows / length, told_sums @ known.weights / length
    gram = rows @ rows.T
    inverse = np.linalg.pinv(gram + RIDGE * np.eye(len(gram)), rcond=1e-7, hermitian=True)
    for _ in range(PROJECTIONS):
        x = x + rows.T @ (inverse @ (sums - rows @ x))
        x = x.clip(known.lowest[split], known.highest[split])
    return x
