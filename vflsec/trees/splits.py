"""The choice of splits from histograms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.core.protocol import FRACTION_BITS

UNIT = 2.0**-FRACTION_BITS


class Rule(NamedTuple):
    """When a node may be split.

    Attributes:
        l2: penalty on the values of leaves.
        least_rows: of each child.
        least_hessian: sum of second derivatives of each child.
        least_gain: that a split must exceed.
    """

    l2: float
    least_rows: int
    least_hessian: float
    least_gain: float


class Best(NamedTuple):
    """The best split of each of N nodes.

    Attributes:
        gain: (N,), -inf for a node without a split.
        bin: (N,).
    """

    gain: NDArray[np.floating]
    bin: NDArray[np.integer]


def best_splits(sums: NDArray[np.int64], column: NDArray[np.integer], ordered: NDArray[np.bool_], rule: Rule) -> Best:
    """Return the best split of each node: of a number the rows up to a bin go left, of a category all other rows.

    The gain is G_L^2 / (H_L + l2) + G_R^2 / (H_R + l2) - G^2 / (H + l2).

    Source: Chen and Guestrin 2016 (XGBoost), equation 7; Cheng et al. 2021 (SecureBoost), algorithm 2.

    Args:
        sums: (N, V, 3) of first and second derivatives in units of 2^-FRACTION_BITS, and of rows.
        column: (V,) of each bin; bins of a column stand together.
        ordered: (V,) whether it is a number's.
        rule: when a node may be split.
    """
    if not len(column):
        return Best(np.full(len(sums), -np.inf), np.zeros(len(sums), dtype=np.int64))
    first = np.flatnonzero(np.diff(column, prepend=-1))  # the first bin of each column
    before = np.cumsum(sums, axis=1)
    start = before[:, first] - sums[:, first]
    of_column = before[:, np.append(first[1:], len(column)) - 1] - start
    drawn = of_column[..., 2].argmax(axis=1)  # a column that was not drawn has no rows; all others have the same
    whole = of_column[np.arange(len(sums)), drawn][:, None]
    left = before - np.repeat(start, np.diff(np.append(first, len(column))), axis=1)
    left = np.where(ordered[:, None], left, whole - sums)
    sides = np.stack([left, whole - left])
    g, h, rows = (sides[..., k] * unit for k, unit in enumerate((UNIT, UNIT, 1)))
    g_whole, h_whole = whole[..., 0] * UNIT, whole[..., 1] * UNIT
    allowed = (rows.min(axis=0) >= rule.least_rows) & (h.min(axis=0) >= rule.least_hessian)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_side = g**2 / (h + rule.l2)
        gain = of_side[0] + of_side[1] - g_whole**2 / (h_whole + rule.l2)
    gain = np.where(allowed & (gain > rule.least_gain), gain, -np.inf)
    chosen = gain.argmax(axis=1)
    return Best(gain[np.arange(len(gain)), chosen], chosen)
