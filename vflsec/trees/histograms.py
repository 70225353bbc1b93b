"""Sums of weights over the rows of each node and bin."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from vflsec.base.errors import UsageError

EXACT = 2.0**53
"""Sums of integers in float64 are exact below it."""


def histogram(
    bins: NDArray[np.int32], nodes: NDArray[np.int64], weights: NDArray[np.int64], n_nodes: int, n_bins: int
) -> NDArray[np.int64]:
    """Return exact sums (n_nodes, n_bins, k + 1) of integer weights; the last of them counts rows.

    They are a product with a sparse matrix of ones, one for each row and column: faster than a pass for each weight.

    Args:
        bins: (B, d) the bin of each row in each of d columns; no two columns share a bin.
        nodes: (B,) the node of each row, or -1 for none.
        weights: (B, k), each of them below 2^53 / B.
        n_nodes: of all nodes.
        n_bins: of all columns.

    Raises:
        UsageError: a weight above that: sums may not be exact in float64.
    """
    most = max(int(weights.max(initial=0)), -int(weights.min(initial=0)))
    if most * len(weights) >= EXACT:
        raise UsageError(
            f"expected integers below {int(EXACT / len(weights))} for exact sums over {len(weights)} rows, got {most}: "
            "lower the noise on derivatives, or share fewer rows"
        )
    inside = np.flatnonzero(nodes >= 0)
    rows, columns = len(inside), bins.shape[1]
    cells = n_nodes * n_bins
    index = np.int32 if max(cells, rows * columns) < 2**31 else np.int64
    place = bins.take(inside, axis=0).astype(index, copy=False)
    np.add(place, (nodes[inside] * n_bins).astype(index)[:, None], out=place)
    place = place.ravel()
    assert not place.size or (place.min() >= 0 and place.max() < cells), "a bin or a node is out of range"
    starts = np.arange(0, rows * columns + 1, columns, dtype=index) if columns else np.zeros(rows + 1, index)
    ones = csc_array((_ones(place.size), place, starts), shape=(cells, rows))
    right = np.ones((rows, weights.shape[1] + 1))
    right[:, :-1] = weights.take(inside, axis=0)
    found: NDArray[np.int64] = (ones @ right).astype(np.int64).reshape(n_nodes, n_bins, -1)
    return found


def _ones(size: int) -> NDArray[np.float64]:
    """Return ones that nobody may change: new memory would take longer to get than to add up."""
    return _many_ones(1 << size.bit_length())[:size]


@lru_cache(maxsize=1)
def _many_ones(size: int) -> NDArray[np.float64]:
    found = np.ones(size)
    found.flags.writeable = False
    return found
