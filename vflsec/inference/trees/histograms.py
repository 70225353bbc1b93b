"""Equations between rows of nodes and histograms of these nodes, and rows whose bins follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.core.message import AFTERWARDS, Kind
from vflsec.core.view import View
from vflsec.inference.trees.nodes import Floats, Ints, list_messages
from vflsec.trees.histograms import FRACTION_BITS

EQUATIONS = 1000
"""Largest number of sums from which columns are solved."""

SMALLEST = 2000
"""Nodes whose histograms are solved exactly."""


def list_exact(view: View, victim: str) -> list[Equation]:
    """Return what histograms say of nodes: sent ones, and those that follow by subtraction from their parents."""
    derivatives, nodes = _get_knowledge(view, victim)
    sums: dict[tuple[int, int], NDArray[np.float64]] = {}
    for m in list_messages(view, victim, Kind.HISTOGRAM):
        value = m.payload["value"].cpu().double().numpy()
        sums |= {(m.step, node): value[i] for i, node in enumerate(m.payload["nodes"].tolist())}
    for tree, of_tree in nodes.items():
        for node in sorted(of_tree):
            parent, sibling = (tree, node // 2), (tree, node ^ 1)
            if (tree, node) not in sums and parent in sums and sibling in sums:
                sums[tree, node] = sums[parent] - sums[sibling]
    equations = []
    for (tree, node), value in sums.items():
        first = max((step for step in derivatives if step <= tree), default=None)
        if first is None or node not in nodes.get(tree, {}):
            continue
        sampled, derived = derivatives[first]
        place = np.full(len(view.features[view.aux_split]), -1)
        place[sampled] = np.arange(len(sampled))
        rows = nodes[tree][node]
        rows = rows[place[rows] >= 0]
        counts = np.rint(value[:, 2]).astype(np.int64)
        pair = derived[place[rows]][:, [tree - first, derived.shape[1] // 2 + tree - first]]
        units = [np.rint(x * 2.0**FRACTION_BITS).astype(np.int64) for x in (pair, value[:, :2])]
        equations.append(Equation(rows, encode_pairs(units[0]), encode_pairs(units[1]), counts))
    return sorted(equations, key=lambda equation: len(equation.rows))[:SMALLEST]


def list_equations(view: View, victim: str, column: Ints) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return weights (E, n) of training rows and the sums (E, V) over them in each bin, of the first nodes.

    The third value says for which columns (E, columns) they hold: a tree may have drawn some columns only, and
    histograms without withheld rows say nothing. Bins belong to ``column`` (V,), numbered from 0.
    """
    n = len(view.features[view.aux_split])
    derivatives, nodes = _get_knowledge(view, victim)
    weights: list[Floats] = []
    sums: list[Floats] = []
    holds: list[NDArray[np.bool_]] = []
    messages = list_messages(view, victim, Kind.HISTOGRAM)
    entries = [(m, i, node) for m in messages for i, node in enumerate(m.payload["nodes"].tolist())]
    for m, i, node in entries:
        first = max((step for step in derivatives if step <= m.step), default=None)
        histogram = m.payload["value"][i].cpu().double().numpy()  # (V, 3)
        rows = nodes.get(m.step, {}).get(node, np.zeros(0, dtype=np.int64))
        known = np.ones((1, n))
        if first is not None:
            sampled, value = derivatives[first]
            known = np.zeros((3, n))
            known[0, sampled] = value[:, m.step - first]
            known[1, sampled] = value[:, value.shape[1] // 2 + m.step - first]
            known[2, sampled] = 1
            rows = rows[known[2, rows] > 0]
        complete = np.bincount(column, np.rint(histogram[:, 2])) == len(rows)
        if complete.any():
            weights += list(np.isin(np.arange(n), rows) * known)
            sums += list(histogram.T[-len(known) :])
            holds += [complete] * len(known)
        if len(weights) >= EQUATIONS:
            break
    if not weights:
        return np.zeros((0, n)), np.zeros((0, len(column))), np.zeros((0, column.max(initial=-1) + 1), dtype=bool)
    return np.stack(weights), np.stack(sums), np.stack(holds)


def _get_knowledge(view: View, victim: str) -> tuple[dict[int, tuple[Ints, Floats]], dict[int, dict[int, Ints]]]:
    """Return derivatives, with their rows, by step, and rows by tree and node, as the adversary sent or noted them."""
    names = view.party.split("+")
    derivatives: dict[int, tuple[Ints, Floats]] = {}
    nodes: dict[int, dict[int, Ints]] = {}
    for m in view.messages:
        if m.split != view.aux_split or m.phase in AFTERWARDS or m.sender not in names:
            continue
        if m.kind is Kind.GRADIENT:
            value = m.payload["value"].cpu().double().numpy()
            derivatives[m.step] = np.arange(len(value)) if m.rows is None else m.rows.cpu().numpy(), value
        elif m.kind is Kind.NODES and m.receiver == victim and m.rows is not None:
            value, rows = m.payload["value"][:, 0].cpu().numpy(), m.rows.cpu().numpy()
            of_tree = nodes.setdefault(m.step, {})
            of_tree.update({node: rows[value == node] for node in np.unique(value[value > 0]).tolist()})
    return derivatives, nodes


PASSES = 10
MAX_SEARCHED_ROWS = 2
"""Rows whose keys are searched for; more in a bin are not told apart."""

MAX_CANDIDATE_ROWS = 4000
"""Rows among which two are searched for."""

FACTORS = np.array([0x5851F42D4C957F2D, 0x14057B7EF767814F], dtype=np.int64)
"""Odd numbers by which a row's integers become one key; sums of keys are modulo 2^64."""


class Unit(NamedTuple):
    """What is bounded: a number's quantile, or whether a category is the one of a bin.

    Attributes:
        column: number of the raw column.
        first: its first bin.
        last: its last bin; the same for a category.
        ordered: whether it is a number.
    """

    column: int
    first: int
    last: int
    ordered: bool


class PossibleBins:
    """Rows can be in the bins between their bounds.

    Few sets of bins are possible for many rows, so that sets are counted instead of rows.

    Args:
        units: U of them.
        low: (n, U) the lowest bin of a number, 1 for the category that a row is of.
        high: (n, U) the highest bin of a number, 0 for a category that a row is not of.
    """

    def __init__(self, units: Sequence[Unit], low: Ints, high: Ints) -> None:
        self._columns: dict[int, tuple[int, Ints, NDArray[np.bool_]]] = {}
        for j in dict.fromkeys(unit.column for unit in units):
            here = find_units(units, j)
            bins = np.arange(units[here[0]].first, units[here[-1]].last + 1)
            between = (low[:, here] <= bins) & (bins <= high[:, here]) if units[here[0]].ordered else high[:, here] > 0
            packed, set_of = np.unique(np.packbits(between, axis=1), axis=0, return_inverse=True)
            sets = np.unpackbits(packed, axis=1, count=len(bins)).astype(bool)
            self._columns |= dict.fromkeys(bins.tolist(), (int(bins[0]), set_of.reshape(-1), sets))

    def find_rows(self, rows: Ints, b: int) -> NDArray[np.bool_]:
        """Return whether each of some rows (m,) can be in bin ``b``."""
        start, set_of, sets = self._columns[b]
        return np.asarray(sets[set_of[rows], b - start])

    def numbers(self, rows: Ints, start: int, stop: int) -> Ints:
        """Return how many of some rows (m,) can be in each bin from ``start`` to ``stop`` of one column."""
        first, set_of, sets = self._columns[start]
        return np.bincount(set_of[rows], minlength=len(sets)) @ sets[:, start - first : stop - first]


def find_units(units: Sequence[Unit], column: int) -> list[int]:
    """Return the positions of the units of a column."""
    return [u for u, unit in enumerate(units) if unit.column == column]


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


def encode_pairs(integers: Ints) -> Ints:
    """Return one key (...,) for pairs (..., 2) of integers, such that keys add up as pairs do."""
    with np.errstate(over="ignore"):
        return np.asarray((integers * FACTORS).sum(axis=-1))


def peel_bins(equations: Sequence[Equation], column: Ints, n: int, possible: PossibleBins) -> Ints:
    """Return the bin (n, columns) of each row in each column, or -1 where it does not follow.

    A bin with one or two rows, or with all but one or two of those that can be in it, has the only rows whose keys add
    up to its sum. Rows with a known bin are taken out of the sums of all other nodes, so that more bins have few rows.
    Bins of a ``column`` (V,) stand together.
    """
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], len(column))
    bins = np.full((n, len(first)), -1, dtype=np.int64)
    ordered = sorted(equations, key=lambda equation: len(equation.rows))
    for _ in range(PASSES):
        before = int((bins >= 0).sum())
        for equation in ordered:
            for j, (start, stop) in enumerate(zip(first, last, strict=True)):
                _peel_column(equation, bins[:, j], int(start), int(stop), possible)
        if int((bins >= 0).sum()) == before:
            break
    return bins


def _peel_column(equation: Equation, bins: Ints, start: int, stop: int, possible: PossibleBins) -> None:
    """Find rows in the bins ``start`` to ``stop`` of one column from one equation; ``bins`` (n,) gets their bins."""
    before = bins[equation.rows]
    known = before >= 0
    counts = equation.counts[start:stop].copy()
    if known.all() or counts.sum() != len(equation.rows):  # rows were withheld, or the column not drawn
        return
    sums = equation.sums[start:stop].copy()
    with np.errstate(over="ignore"):
        np.subtract.at(sums, before[known] - start, equation.keys[known])
    np.subtract.at(counts, before[known] - start, 1)
    rows, keys = equation.rows[~known], equation.keys[~known]
    others = possible.numbers(rows, start, stop) - counts
    for b in np.flatnonzero((counts > 0) & ((counts <= MAX_SEARCHED_ROWS) | (others <= MAX_SEARCHED_ROWS))):
        open_rows = np.flatnonzero((bins[rows] < 0) & possible.find_rows(rows, start + int(b)))
        chosen = _choose(keys[open_rows], int(sums[b]), int(counts[b]))
        bins[rows[open_rows[chosen]]] = start + b


def _choose(keys: Ints, total: int, count: int) -> Ints:
    """Return the positions of the only ``count`` keys that add up to ``total``, or none."""
    none = np.zeros(0, dtype=np.int64)
    others = len(keys) - count
    with np.errstate(over="ignore"):
        target = np.int64(total)
        if others < 0:
            return none
        if others == 0:
            return np.arange(len(keys)) if keys.sum() == target else none
        if count <= MAX_SEARCHED_ROWS:
            return _choose_few(keys, target, count)
        if others <= MAX_SEARCHED_ROWS:
            left = _choose_few(keys, keys.sum() - target, others)
            return np.setdiff1d(np.arange(len(keys)), left) if len(left) else none
    return none


def _choose_few(keys: Ints, target: np.int64, count: int) -> Ints:
    """Return the positions of the only one or two keys that add up to ``target``, or none."""
    none = np.zeros(0, dtype=np.int64)
    if count == 1:
        hits = np.flatnonzero(keys == target)
        return hits if len(hits) == 1 else none
    if len(keys) > MAX_CANDIDATE_ROWS:
        return none
    ordered, needed = np.sort(keys), target - keys
    partners = np.searchsorted(ordered, needed, "right") - np.searchsorted(ordered, needed, "left")
    hits = np.flatnonzero(partners - (needed == keys) > 0)
    return hits if len(hits) == 2 else none
