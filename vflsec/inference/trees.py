"""What messages of federated trees say about rows: nodes that rows share, bounds on columns, sums over nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.protocol import FRACTION_BITS
from vflsec.core.view import View
from vflsec.inference.peeling import Equation, keys_of, peeled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTH = 32
"""Largest number of components in a table of nodes, a power of two."""

MOST_NODES = 500
"""Nodes of one tree that are compared: those that divide rows most evenly."""

PASSES = 6
OVERSAMPLED = 16

EQUATIONS = 1000
"""Largest number of told sums from which columns are solved."""

SMALLEST = 2000
"""Nodes whose histograms are solved exactly."""

PROJECTIONS = 20
RIDGE = 1e-9


class Told(NamedTuple):
    """Nodes of rows, as far as an adversary is told.

    Attributes:
        nodes: (n, T, L) the node of each row in each tree at each level, by split; 0 where it is not known.
        trees: (T,) their numbers.
        rounds: (T,) the round of boosting in which each tree was grown.
    """

    nodes: Mapping[str, Ints]
    trees: Ints
    rounds: Ints


def told(view: View, other: str) -> Told | None:
    """Return the nodes that the messages between the adversary and ``other`` contain; None without any.

    A passive adversary also knows the children to which its own columns send rows, the active party only what it
    receives. A node reveals those above it. An adversary that is not adaptive reads the first tree only.

    Args:
        view: of the adversary.
        other: name of the other party.
    """
    messages = [m for m in _between(view, other, Kind.NODES) if m.rows is not None]
    if view.side == "active":
        messages = [m for m in messages if m.sender == other]
    numbers = sorted({m.step + j for m in messages for j in range(m.payload["value"].shape[1])})
    numbers = numbers if view.adaptive else numbers[:1]
    depth = max((int(m.payload["value"].max()).bit_length() for m in messages if m.payload["value"].numel()), default=0)
    if depth < 2:
        return None
    place = {tree: t for t, tree in enumerate(numbers)}
    found = {s: np.zeros((len(x), len(numbers), depth), dtype=np.int64) for s, x in view.features.items()}
    for m in messages:
        if m.split not in found or (m.split == view.aux_split and m.phase in AFTERWARDS):
            continue
        value, rows = m.payload["value"].cpu().numpy().astype(np.int64), m.rows.cpu().numpy()  # type: ignore[union-attr]
        for j in range(value.shape[1]):
            if m.step + j in place:
                own = np.flatnonzero(value[:, j] > 0)
                found[m.split][rows[own], place[m.step + j], _level(value[own, j])] = value[own, j]
    for nodes in found.values():
        for level in range(depth - 2, -1, -1):
            nodes[:, :, level] = np.where(nodes[:, :, level] > 0, nodes[:, :, level], nodes[:, :, level + 1] // 2)
    trees = np.array(numbers, dtype=np.int64)
    return Told({s: x for s, x in found.items() if x.any()}, trees, trees // trees_of_a_round(view))


def partners(view: View) -> list[str]:
    """Return the parties from which the adversary received nodes, in order."""
    names = view.party.split("+")
    return list(dict.fromkeys(m.sender for m in view.messages if m.kind is Kind.NODES and m.receiver in names))


def components(view: View, other: str, *, everywhere: bool = False) -> dict[str, tuple[Floats, Floats]]:
    """Return ``shared`` of the nodes that the adversary is told, computed once for a view and its copies.

    Args:
        view: of the adversary.
        other: party with which it exchanges them.
        everywhere: whether only nodes count that are told of rows of every split: of a passive party, those that its
            own columns split, and their children. Else all nodes of training rows do, and of these rows only.
    """
    key = ("nodes", other, everywhere)
    if key not in view.memo:
        view.memo[key] = _components(view, other, everywhere=everywhere)
    found: dict[str, tuple[Floats, Floats]] = view.memo[key]
    return found


def _components(view: View, other: str, *, everywhere: bool) -> dict[str, tuple[Floats, Floats]]:
    known = told(view, other)
    if known is None or view.aux_split not in known.nodes:
        return {}
    if not everywhere:
        return shared(known._replace(nodes={view.aux_split: known.nodes[view.aux_split]}), view.aux_split)
    if view.side == "active":
        return shared(known, view.aux_split)
    kept = {t: {v for i in nodes for v in (i, 2 * i, 2 * i + 1)} for t, nodes in own_splits(view, other).items()}
    return shared(known, view.aux_split, kept)


def trees_of_a_round(view: View) -> int:
    """Return the number of trees between two messages with derivatives; without any, one for each class of several."""
    kinds = (Kind.GRADIENT, Kind.CIPHERTEXT)
    steps = sorted({m.step for m in view.messages if m.kind in kinds and m.rows is not None})
    several = view.n_classes if view.victim is None and view.n_classes > 2 else 1
    return min((b - a for a, b in pairwise(steps)), default=several)


def own_splits(view: View, other: str) -> dict[int, set[int]]:
    """Return the nodes that are split by columns of a passive party, by number of the tree.

    The party is the adversary itself; for an active adversary it is ``other``.
    """
    owners = [other] if view.side == "active" else view.party.split("+")
    found: dict[int, set[int]] = {}
    for m in _between(view, other, Kind.NODES):
        if m.sender in owners:  # it answers to which children its splits send rows
            for j in range(m.payload["value"].shape[1]):
                split = set(torch.unique(m.payload["value"][:, j].long() // 2).tolist()) - {0}
                found.setdefault(m.step + j, set()).update(split)
    return found


def shared(known: Told, split: str, kept: Mapping[int, set[int]] | None = None) -> dict[str, tuple[Floats, Floats]]:
    """Return principal components (n, r) of the nodes of each row by split, with their singular values (r,).

    Each node is a column, 1 for rows in it, standardized over the rows of ``split`` for which its tree is known. So a
    small node that two rows share counts more than a large one. Columns of round r are divided by the root of 1 + r:
    later trees follow residuals, which are smaller and noisier.

    Args:
        known: nodes.
        split: whose rows determine components.
        kept: nodes to use, by number of the tree; None for all.
    """
    blocks: list[Floats] = []
    codes: dict[str, list[Ints]] = {s: [] for s in known.nodes}
    n_codes = 0
    sizes = [len(x) for x in known.nodes.values()]
    whole = np.concatenate([known.nodes[s] for s in known.nodes])
    fitted = np.concatenate([np.full(len(x), s == split) for s, x in known.nodes.items()])
    for t, tree in enumerate(known.trees.tolist()):
        code, combinations = _coded(whole[:, t], None if kept is None else kept.get(tree, set()))
        block = _standardized(combinations, np.bincount(code[fitted & (code >= 0)], minlength=len(combinations)))
        for s, own in zip(known.nodes, np.split(code, np.cumsum(sizes)[:-1]), strict=True):
            codes[s].append(np.where(own >= 0, own + n_codes, -1))
        blocks.append(block / np.sqrt(1 + known.rounds[t]))
        n_codes += len(combinations)
    columns = sparse.block_diag(blocks, format="csr") if blocks else sparse.csr_matrix((0, 0))
    if not columns.shape[1]:
        return {}
    which = {s: _incidence(np.stack(own, axis=1), n_codes) for s, own in codes.items()}
    axes, values = _principal(which[split] @ columns.toarray() if _small(columns) else None, which[split], columns)
    onto = columns @ axes
    return {s: (np.asarray(one @ onto), values) for s, one in which.items()}


def weighed(components: Floats, values: Floats, power: int, most: int = WIDTH) -> Tensor:
    """Return columns (n, 2^k) with the kernel of ``components`` (n, r) with singular values to the given power.

    ``most`` is the largest number of components to use.

    They are a rotation of the components in which all columns have the same variance, so that standardizing them, as
    models do, does not change the kernel.
    """
    components, values = components[:, :most], values[:most]
    scale = (values / values[0]) ** (power - 1)
    rotation = _hadamard(len(values))[: len(values)]
    return torch.from_numpy(components * scale @ rotation / values[0] * np.sqrt(len(components)))


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


class Bounds(NamedTuple):
    """What splits say about the columns of a party.

    Attributes:
        units: U of them.
        lowest: (n, U) by split, the least number that a unit can have: the quantile of the middle of a bin, or 0 or 1.
        highest: (n, U) by split.
        expected: (n, U) by split, the mean over the bins between them.
        weights: (V, U) the number of each unit in each bin.
    """

    units: tuple[Unit, ...]
    lowest: Mapping[str, Floats]
    highest: Mapping[str, Floats]
    expected: Mapping[str, Floats]
    weights: Floats


def bounds(view: View, victim: str) -> Bounds | None:
    """Return the bounds that the directions of rows at splits of ``victim`` imply; None if nothing was said of bins."""
    declared = [m.payload for m in _between(view, victim, Kind.CONTROL) if "column" in m.payload]
    if not declared:
        return None
    column, ordered = (declared[0][key].cpu().numpy() for key in ("column", "ordered"))
    units = tuple(_units(column, ordered))
    mass = _masses(view, victim, column)
    places = {b: u for u, unit in enumerate(units) for b in range(unit.first, unit.last + 1)}
    low = {
        s: np.tile([unit.first if unit.ordered else 0 for unit in units], (len(x), 1)) for s, x in view.features.items()
    }
    high = {
        s: np.tile([unit.last if unit.ordered else 1 for unit in units], (len(x), 1)) for s, x in view.features.items()
    }
    splits = {
        (m.step, node): int(b)
        for m in _between(view, victim, Kind.CONTROL)
        if "nodes" in m.payload
        for node, b in zip(m.payload["nodes"].tolist(), m.payload["bins"].tolist(), strict=True)
    }
    for split, rows, node, b in _directions(view, victim, splits):
        u, right = places[b], node % 2 == 1
        if units[u].ordered and right:
            low[split][rows, u] = np.maximum(low[split][rows, u], b + 1)
        elif units[u].ordered:
            high[split][rows, u] = np.minimum(high[split][rows, u], b)
        elif right:
            others = [v for v, unit in enumerate(units) if unit.column == units[u].column and v != u]
            low[split][rows, u] = 1
            high[split][rows[:, None], others] = 0
        else:
            high[split][rows, u] = 0
    _set_exactly(view, victim, column, units, low[view.aux_split], high[view.aux_split])
    weights = np.zeros((len(column), len(units)))
    lowest: dict[str, Floats] = {}
    highest: dict[str, Floats] = {}
    expected: dict[str, Floats] = {}
    for u, unit in enumerate(units):
        weights[unit.first : unit.last + 1, u] = _middles(mass[unit.first : unit.last + 1]) if unit.ordered else 1
    for split in view.features:
        upper = np.maximum(low[split], high[split])  # a defense can make directions disagree
        lowest[split], highest[split], expected[split] = _numbers(units, mass, weights, low[split], upper)
    return Bounds(units, lowest, highest, expected, weights)


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
    rows, told_sums = _equations(view, victim, len(known.weights))
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


def _between(view: View, other: str, kind: Kind) -> list[Message]:
    """Return the messages of ``kind`` between the adversary and ``other``."""
    pairs = {pair for name in view.party.split("+") for pair in ((name, other), (other, name))}
    return [m for m in view.messages if m.kind is kind and (m.sender, m.receiver) in pairs]


def _level(nodes: Ints) -> Ints:
    """Return the level of each node, 0 for the root."""
    found: Ints = np.frexp(nodes.astype(np.float64))[1].astype(np.int64) - 1
    return found


def _coded(nodes: Ints, kept: set[int] | None) -> tuple[Ints, Ints]:
    """Return a code (n,) of the nodes (n, L) of each row in one tree, -1 if none is known, and its nodes (k, L)."""
    if kept is not None:
        nodes = np.where(np.isin(nodes, list(kept)), nodes, 0)
    code = np.zeros(len(nodes), dtype=np.int64)
    for level in range(nodes.shape[1]):
        own = nodes[:, level]
        code = np.unique(code * (int(own.max(initial=0)) + 1) + own, return_inverse=True)[1].reshape(-1)
    first = np.full(int(code.max(initial=-1)) + 1, -1)
    first[code[::-1]] = np.arange(len(code))[::-1]
    combinations = nodes[first]
    known = combinations.any(axis=1) if kept is None else np.ones(len(combinations), dtype=bool)
    number = np.where(known, known.cumsum() - 1, -1)
    return number[code], combinations[known]


def _standardized(combinations: Ints, counts: Ints) -> Floats:
    """Return columns (k, m) of the nodes of one tree, with mean 0 and variance 1 over rows.

    Args:
        combinations: (k, L) nodes of each code.
        counts: (k,) rows with each code.
    """
    rows = np.bincount(combinations.ravel(), np.repeat(counts, combinations.shape[1]), minlength=2)
    share = rows / max(1, counts.sum())
    share[:2] = 0  # unknown, and the root
    varying = np.flatnonzero((share > 0) & (share < 1))
    evenly = np.argsort(-share[varying] * (1 - share[varying]), kind="stable")
    nodes = np.sort(varying[evenly[:MOST_NODES]])
    inside = np.zeros((len(combinations), len(nodes)))
    for level in combinations.T if len(nodes) else ():
        at = np.searchsorted(nodes, level).clip(max=len(nodes) - 1)
        of = np.flatnonzero(nodes[at] == level)
        inside[of, at[of]] = 1
    found: Floats = (inside - share[nodes]) / np.sqrt(share[nodes] * (1 - share[nodes]))
    return found


def _incidence(codes: Ints, n_codes: int) -> sparse.csr_matrix:
    """Return the matrix (n, n_codes) with a 1 for each code (n, T) of a row."""
    rows, trees = np.nonzero(codes >= 0)
    ones = np.ones(len(rows))
    return sparse.csr_matrix((ones, (rows, codes[rows, trees])), shape=(len(codes), n_codes))


def _small(columns: sparse.csr_matrix) -> bool:
    return bool(columns.shape[1] <= WIDTH)


def _principal(x: Floats | None, which: sparse.csr_matrix, columns: sparse.csr_matrix) -> tuple[Floats, Floats]:
    """Return the principal axes (m, r) of ``which @ columns`` and its singular values (r,), the largest first.

    By subspace iteration (Halko, Martinsson, Tropp 2011, SIAM Review 53), or exactly if there are few columns ``x``.
    """
    if x is not None:
        squares, axes = np.linalg.eigh(x.T @ x)
    else:
        rng = np.random.default_rng(0)
        basis = rng.normal(size=(columns.shape[1], min(columns.shape[1], WIDTH + OVERSAMPLED)))
        for _ in range(PASSES):
            basis = np.linalg.qr(columns.T @ (which.T @ (which @ (columns @ basis))))[0]
        scores = which @ (columns @ basis)
        squares, inner = np.linalg.eigh(scores.T @ scores)
        axes = basis @ inner
    squares, axes = squares[::-1][:WIDTH], axes[:, ::-1][:, :WIDTH]
    kept = squares > 1e-9 * squares[0]
    axes = axes[:, kept] * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])[kept]
    return axes, np.sqrt(squares[kept])


def _hadamard(least: int) -> Floats:
    """Return an orthogonal matrix of +-1 / sqrt(w) whose width w is the power of two from ``least`` on."""
    found = np.ones((1, 1))
    while len(found) < least:
        found = np.block([[found, found], [found, -found]]) / np.sqrt(2)
    return found


def _units(column: Ints, ordered: NDArray[np.bool_]) -> Iterator[Unit]:
    for j in np.unique(column).tolist():
        bins = np.flatnonzero(column == j)
        if ordered[bins[0]]:
            yield Unit(j, int(bins[0]), int(bins[-1]), ordered=True)
        else:
            yield from (Unit(j, b, b, ordered=False) for b in bins.tolist())


def _masses(view: View, victim: str, column: Ints) -> Floats:
    """Return the share of rows in each bin (V,): from histograms of roots, else the same for all bins of a column."""
    total = np.zeros(len(column))
    for m in _between(view, victim, Kind.HISTOGRAM):
        total += m.payload["value"][m.payload["nodes"] == 1][:, :, 2].sum(dim=0).cpu().numpy()
    total = total.clip(0)
    for j in np.unique(column):
        own = column == j
        total[own] = total[own] / total[own].sum() if total[own].sum() > 0 else 1 / own.sum()
    return total


def _middles(mass: Floats) -> Floats:
    """Return the quantile of the middle of each bin (k,) of a number."""
    found: Floats = mass.cumsum() - mass / 2
    return found


def _directions(view: View, victim: str, splits: Mapping[tuple[int, int], int]) -> Iterator[tuple[str, Ints, int, int]]:
    """Yield split, rows and the child to which they go, with the bin at which their node is split."""
    first = min((m.step for m in _between(view, victim, Kind.NODES)), default=0)
    for m in _between(view, victim, Kind.NODES):
        if m.sender != victim or m.rows is None or m.split not in view.features:
            continue
        value, rows = m.payload["value"].cpu().numpy(), m.rows.cpu().numpy()
        for j in range(value.shape[1]):
            if m.step + j > first and not view.adaptive:
                break
            for node in np.unique(value[:, j]).tolist():
                if (m.step + j, node // 2) in splits:
                    yield m.split, rows[value[:, j] == node], node, splits[m.step + j, node // 2]


def _numbers(
    units: Sequence[Unit], mass: Floats, weights: Floats, low: Ints, high: Ints
) -> tuple[Floats, Floats, Floats]:
    """Return the lowest, highest and expected number (n, U) of each unit, from the lowest and highest bin (n, U)."""
    lowest, highest, expected = (np.zeros(low.shape) for _ in range(3))
    for u, unit in enumerate(units):
        if unit.ordered:
            lowest[:, u], highest[:, u] = weights[low[:, u], u], weights[high[:, u], u]
            before = np.concatenate([[0], mass[unit.first : unit.last + 1].cumsum()])
            expected[:, u] = (before[low[:, u] - unit.first] + before[high[:, u] - unit.first + 1]) / 2
        else:
            lowest[:, u], highest[:, u] = low[:, u], high[:, u]
    for j in {unit.column for unit in units if not unit.ordered}:
        own = [u for u, unit in enumerate(units) if unit.column == j]
        possible = mass[[units[u].first for u in own]] * highest[:, own]
        expected[:, own] = possible / possible.sum(axis=1, keepdims=True).clip(np.finfo(float).tiny)
    return lowest, highest, expected


def _set_exactly(view: View, victim: str, column: Ints, units: Sequence[Unit], low: Ints, high: Ints) -> None:
    """Set the bounds (n, U) of training rows whose bins follow from histograms exactly."""
    places = {b: u for u, unit in enumerate(units) for b in range(unit.first, unit.last + 1)}

    def possible(rows: Ints, b: int) -> NDArray[np.bool_]:
        u = places[b]
        if units[u].ordered:
            found: NDArray[np.bool_] = (low[rows, u] <= b) & (b <= high[rows, u])
            return found
        return high[rows, u] > 0  # type: ignore[no-any-return]

    equations = _exact_equations(view, victim)
    found = peeled(equations, column, len(low), possible) if equations else np.zeros((len(low), 0), np.int64)
    for j in range(found.shape[1]):
        rows = np.flatnonzero(found[:, j] >= 0)
        own = np.array([places[b] for b in found[rows, j]], dtype=np.int64)
        if len(rows) and units[own[0]].ordered:
            low[rows, own], high[rows, own] = found[rows, j], found[rows, j]
        elif len(rows):
            others = [u for u, unit in enumerate(units) if unit.column == units[own[0]].column]
            high[rows[:, None], others] = 0
            low[rows, own], high[rows, own] = 1, 1


def _exact_equations(view: View, victim: str) -> list[Equation]:
    """Return what histograms say of nodes, told ones and those that follow by subtraction from their parents."""
    derivatives, nodes = _own_knowledge(view, victim)
    sums: dict[tuple[int, int], NDArray[np.float64]] = {}
    for m in _between(view, victim, Kind.HISTOGRAM):
        value = m.payload["value"].cpu().double().numpy()
        sums |= {(m.step, node): value[i] for i, node in enumerate(m.payload["nodes"].tolist())}
    for tree, of_tree in nodes.items():
        for node in sorted(of_tree):
            parent, sibling = (tree, node // 2), (tree, node ^ 1)
            if (tree, node) not in sums and parent in sums and sibling in sums:
                sums[tree, node] = sums[parent] - sums[sibling]
    found = []
    columns = _columns_of(view, victim) if sums else 1
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
        if len(rows) * columns != counts.sum():
            continue  # some rows were withheld
        pair = derived[place[rows]][:, [tree - first, derived.shape[1] // 2 + tree - first]]
        units = [np.rint(x * 2.0**FRACTION_BITS).astype(np.int64) for x in (pair, value[:, :2])]
        found.append(Equation(rows, keys_of(units[0]), keys_of(units[1]), counts))
    return sorted(found, key=lambda one: len(one.rows))[:SMALLEST]


def _own_knowledge(view: View, victim: str) -> tuple[dict[int, tuple[Ints, Floats]], dict[int, dict[int, Ints]]]:
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


def _equations(view: View, victim: str, n_bins: int) -> tuple[Floats, Floats]:
    """Return weights (E, n) of training rows and the sums (E, V) over them in each bin, of the first told nodes."""
    n = len(view.features[view.aux_split])
    derivatives, nodes = _own_knowledge(view, victim)
    weights: list[Floats] = []
    sums: list[Floats] = []
    for m in _between(view, victim, Kind.HISTOGRAM):
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
            if len(rows) != round(float(told_sums[i, :, 2].sum() / _columns_of(view, victim))):
                continue  # some rows were withheld
            inside = np.zeros(n)
            inside[rows] = 1
            parts = (0, 1, 2) if first is not None else (2,)
            weights += [inside * own for own in known]
            sums += [told_sums[i, :, part] for part in parts]
            if len(weights) >= EQUATIONS:
                return np.stack(weights), np.stack(sums)
    if not weights:
        return np.zeros((0, n)), np.zeros((0, n_bins))
    return np.stack(weights), np.stack(sums)


def _columns_of(view: View, victim: str) -> int:
    """Return the number of raw columns in the histograms of ``victim``."""
    (column, *_) = [m.payload["column"] for m in _between(view, victim, Kind.CONTROL) if "column" in m.payload]
    return len(torch.unique(column))
