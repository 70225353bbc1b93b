"""Equations between the rows of nodes and the histograms of these nodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vflsec.core.message import AFTERWARDS, Kind
from vflsec.core.protocol import FRACTION_BITS
from vflsec.core.view import View
from vflsec.inference.peeling import Equation, keys_of
from vflsec.inference.trees.nodes import between

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

EQUATIONS = 1000
"""Largest number of told sums from which columns are solved."""

SMALLEST = 2000
"""Nodes whose histograms are solved exactly."""


def exact_equations(view: View, victim: str) -> list[Equation]:
    """Return what histograms say of nodes, told ones and those that follow by subtraction from their parents."""
    derivatives, nodes = own_knowledge(view, victim)
    sums: dict[tuple[int, int], NDArray[np.float64]] = {}
    for m in between(view, victim, Kind.HISTOGRAM):
        value = m.payload["value"].cpu().double().numpy()
        sums |= {(m.step, node): value[i] for i, node in enumerate(m.payload["nodes"].tolist())}
    for tree, of_tree in nodes.items():
        for node in sorted(of_tree):
            parent, sibling = (tree, node // 2), (tree, node ^ 1)
            if (tree, node) not in sums and parent in sums and sibling in sums:
                sums[tree, node] = sums[parent] - sums[sibling]
    found = []
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
        found.append(Equation(rows, keys_of(units[0]), keys_of(units[1]), counts))
    return sorted(found, key=lambda one: len(one.rows))[:SMALLEST]


def linear_equations(view: View, victim: str, column: Ints) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return weights (E, n) of training rows and the sums (E, V) over them in each bin, of the first told nodes.

    The third value says for which columns (E, columns) they hold: a tree may have drawn some columns only, and
    histograms without withheld rows say nothing.

    Args:
        view: of the active party.
        victim: whose columns.
        column: (V,) of each bin, numbered from 0.
    """
    n = len(view.features[view.aux_split])
    derivatives, nodes = own_knowledge(view, victim)
    weights: list[Floats] = []
    sums: list[Floats] = []
    holds: list[NDArray[np.bool_]] = []
    for m in between(view, victim, Kind.HISTOGRAM):
        first = max((step for step in derivatives if step <= m.step), default=None)
        told_sums = m.payload["value"].cpu().double().numpy()
        for i, node in enumerate(m.payload["nodes"].tolist()):
            rows = nodes.get(m.step, {}).get(node, np.zeros(0, dtype=np.int64))
            known = [np.ones(n)]
            if first is not None:
                sampled, value = derivatives[first]
                outputs = value.shape[1] // 2
                spread = np.zeros((3, n))
                spread[0, sampled] = value[:, m.step - first]
                spread[1, sampled] = value[:, outputs + m.step - first]
                spread[2, sampled] = 1
                known, rows = list(spread), rows[spread[2, rows] > 0]
            complete = np.bincount(column, np.rint(told_sums[i, :, 2])) == len(rows)
            if not complete.any():
                continue
            inside = np.zeros(n)
            inside[rows] = 1
            parts = (0, 1, 2) if first is not None else (2,)
            weights += [inside * own for own in known]
            sums += [told_sums[i, :, part] for part in parts]
            holds += [complete] * len(parts)
            if len(weights) >= EQUATIONS:
                return np.stack(weights), np.stack(sums), np.stack(holds)
    if not weights:
        return np.zeros((0, n)), np.zeros((0, len(column))), np.zeros((0, column.max(initial=-1) + 1), dtype=bool)
    return np.stack(weights), np.stack(sums), np.stack(holds)


def own_knowledge(view: View, victim: str) -> tuple[dict[int, tuple[Ints, Floats]], dict[int, dict[int, Ints]]]:
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
