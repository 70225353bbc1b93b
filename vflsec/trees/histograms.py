"""Sums of weights over the rows of each node and bin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def histogram(
    bins: NDArray[np.int32], nodes: NDArray[np.int64], weights: NDArray[np.int64], n_nodes: int, n_bins: int
) -> NDArray[np.int64]:
    """Return exact sums (n_nodes, n_bins, k + 1) of integer weights; the last of them counts rows.

    Args:
        bins: (B, d) the bin of each row in each of d columns; no two columns share a bin.
        nodes: (B,) the node of each row, or -1 for none.
        weights: (B, k) whose sums are below 2^53.
    """
    inside = np.flatnonzero(nodes >= 0)
    at = nodes[inside] * n_bins
    found = np.zeros((weights.shape[1] + 1, n_nodes * n_bins))
    each = [np.ascontiguousarray(weights[inside, k], dtype=np.float64) for k in range(weights.shape[1])]
    for column in range(bins.shape[1]):
        place = at + bins[inside, column]
        for k, weight in enumerate(each):
            found[k] += np.bincount(place, weight, minlength=n_nodes * n_bins)
        found[-1] += np.bincount(place, minlength=n_nodes * n_bins)
    return np.moveaxis(found.reshape(-1, n_nodes, n_bins), 0, -1).astype(np.int64)
