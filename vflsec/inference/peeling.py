"""Which rows are in a bin, from exact sums over its rows: bins with few rows first, whose rows are then taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PASSES = 10
FEW = 2
"""Rows whose keys are searched for; more in a bin are not told apart."""

LONGEST = 4000
"""Rows among which two are searched for."""

FACTORS = np.array([0x5851F42D4C957F2D, 0x14057B7EF767814F], dtype=np.int64)
"""Odd numbers by which a row's integers become one key; sums of keys are modulo 2^64."""


class Possible(Protocol):
    """Which rows can be in which bins, by what is known apart from sums."""

    def rows_in(self, rows: Ints, b: int) -> NDArray[np.bool_]:
        """Return whether each of some rows (m,) can be in bin ``b``."""

    def numbers(self, rows: Ints, start: int, stop: int) -> Ints:
        """Return how many of some rows (m,) can be in each bin from ``start`` to ``stop`` of one column."""


class Equation(NamedTuple):
    """What a histogram says of the rows of one node.

    Attributes:
        rows: (m,) positions of the rows.
        keys: (m,) of the rows, see ``keys_of``.
        sums: (V,) of the keys of the rows in each bin.
        counts: (V,) numbers of rows in each bin.
    """

    rows: Ints
    keys: Ints
    sums: Ints
    counts: Ints


def keys_of(integers: Ints) -> Ints:
    """Return one key (...,) for pairs (..., 2) of integers, such that keys add up as pairs do."""
    with np.errstate(over="ignore"):
        found: Ints = (integers * FACTORS).sum(axis=-1)
    return found


def peeled(equations: Sequence[Equation], column: Ints, n: int, possible: Possible) -> Ints:
    """Return the bin (n, columns) of each row in each column, or -1 where it is not found.

    A bin with one or two rows, or with all but one or two of those that can be in it, has the only rows whose keys add
    up to its sum. Rows that are found are taken out of the sums of all other nodes, so that more bins have few rows.

    Args:
        equations: of histograms.
        column: (V,) of each bin; bins of a column stand together.
        n: rows.
        possible: which rows can be in which bins.
    """
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], len(column))
    found = np.full((n, len(first)), -1, dtype=np.int64)
    ordered = sorted(equations, key=lambda one: len(one.rows))
    for _ in range(PASSES):
        before = int((found >= 0).sum())
        for one in ordered:
            for j, (start, stop) in enumerate(zip(first, last, strict=True)):
                _peel(one, found[:, j], int(start), int(stop), possible)
        if int((found >= 0).sum()) == before:
            break
    return found


def _peel(one: Equation, found: Ints, start: int, stop: int, possible: Possible) -> None:
    """Find rows in the bins ``start`` to ``stop`` of one column from one equation; ``found`` (n,) gets their bins."""
    own = found[one.rows]
    known = own >= 0
    if known.all() or one.counts[start:stop].sum() != len(one.rows):  # rows were withheld, or the column not drawn
        return
    sums, counts = one.sums[start:stop].copy(), one.counts[start:stop].copy()
    with np.errstate(over="ignore"):
        np.subtract.at(sums, own[known] - start, one.keys[known])
    np.subtract.at(counts, own[known] - start, 1)
    rows, keys = one.rows[~known], one.keys[~known]
    others = possible.numbers(rows, start, stop) - counts
    for b in np.flatnonzero((counts > 0) & ((counts <= FEW) | (others <= FEW))):
        open_rows = np.flatnonzero((found[rows] < 0) & possible.rows_in(rows, start + int(b)))
        chosen = _chosen(keys[open_rows], int(sums[b]), int(counts[b]))
        found[rows[open_rows[chosen]]] = start + b


def _chosen(keys: Ints, total: int, count: int) -> Ints:
    """Return the positions of the only ``count`` keys that add up to ``total``, or none."""
    none = np.zeros(0, dtype=np.int64)
    others = len(keys) - count
    with np.errstate(over="ignore"):
        target = np.int64(total)
        if others < 0:
            return none
        if others == 0:
            return np.arange(len(keys)) if keys.sum() == target else none
        if count <= FEW:
            return _few(keys, target, count)
        if others <= FEW:
            left = _few(keys, keys.sum() - target, others)
            return np.setdiff1d(np.arange(len(keys)), left) if len(left) else none
    return none


def _few(keys: Ints, target: np.int64, count: int) -> Ints:
    """Return the positions of the only one or two keys that add up to ``target``, or none."""
    none = np.zeros(0, dtype=np.int64)
    if count == 1:
        hits = np.flatnonzero(keys == target)
        return hits if len(hits) == 1 else none
    if len(keys) > LONGEST:
        return none
    ordered, needed = np.sort(keys), target - keys
    partners = np.searchsorted(ordered, needed, "right") - np.searchsorted(ordered, needed, "left")
    hits = np.flatnonzero(partners - (needed == keys) > 0)
    return hits if len(hits) == 2 else none
