"""The nodes of trees in which rows are, as far as messages tell them, and principal components of them."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.view import View, memoize

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTH = 32
"""Largest number of components in a table of nodes, a power of two."""

MAX_COMPARED_NODES = 500
"""Nodes of one tree that are compared: those that divide rows most evenly."""

POWERS = (1, 3, 9)
"""Exponents of singular values: from shared nodes as they are to hardly more than the first component."""

PASSES = 6
OVERSAMPLED = 16


class KnownNodes(NamedTuple):
    """Nodes of rows, as far as messages tell them to an adversary.

    Attributes:
        nodes: (n, T, L) the node of each row in each tree at each level, by split; 0 where it is not known.
        trees: (T,) their numbers.
        rounds: (T,) the round of boosting in which each tree was grown.
    """

    nodes: Mapping[str, Ints]
    trees: Ints
    rounds: Ints


def collect_nodes(view: View, other: str) -> KnownNodes | None:
    """Return the nodes that the messages between the adversary and ``other`` contain; None without any.

    A passive adversary also knows the children to which its own columns send rows, the active party only what it
    receives. A node reveals those above it. An adversary that is not adaptive reads the first tree only.
    """
    messages = [m for m in list_messages(view, other, Kind.NODES) if m.rows is not None]
    if view.side == "active":
        messages = [m for m in messages if m.sender == other]
    numbers = sorted({m.step + j for m in messages for j in range(m.payload["value"].shape[1])})
    numbers = numbers if view.adaptive else numbers[:1]
    depth = max((int(m.payload["value"].max()).bit_length() for m in messages if m.payload["value"].numel()), default=0)
    if depth < 2:
        return None
    place = {tree: t for t, tree in enumerate(numbers)}
    paths = {s: np.zeros((len(x), len(numbers), depth), dtype=np.int64) for s, x in view.features.items()}
    for m in messages:
        if m.split not in paths or (m.split == view.aux_split and m.phase in AFTERWARDS):
            continue
        value, rows = m.payload["value"].cpu().numpy().astype(np.int64), m.rows.cpu().numpy()  # type: ignore[union-attr]
        for j in range(value.shape[1]):
            if m.step + j in place:
                named = np.flatnonzero(value[:, j] > 0)
                nodes = value[named, j]
                level = np.frexp(nodes.astype(np.float64))[1].astype(np.int64) - 1  # 0 for the root
                paths[m.split][rows[named], place[m.step + j], level] = nodes
    for nodes in paths.values():
        for level in range(depth - 2, -1, -1):
            nodes[:, :, level] = np.where(nodes[:, :, level] > 0, nodes[:, :, level], nodes[:, :, level + 1] // 2)
    trees = np.array(numbers, dtype=np.int64)
    return KnownNodes({s: x for s, x in paths.items() if x.any()}, trees, trees // count_trees(view))


def list_partners(view: View) -> list[str]:
    """Return the parties from which the adversary received nodes, in order."""
    names = view.party.split("+")
    return list(dict.fromkeys(m.sender for m in view.messages if m.kind is Kind.NODES and m.receiver in names))


def count_trees(view: View) -> int:
    """Return the number of trees between two messages with derivatives; without any, one for each class of several."""
    kinds = (Kind.GRADIENT, Kind.CIPHERTEXT)
    steps = sorted({m.step for m in view.messages if m.kind in kinds and m.rows is not None})
    several = view.n_classes if view.victim is None and view.n_classes > 2 else 1
    return min((b - a for a, b in pairwise(steps)), default=several)


def list_splits(view: View, other: str) -> dict[int, set[int]]:
    """Return the nodes that are split by columns of a passive party, by number of the tree.

    The party is the adversary itself; for an active adversary it is ``other``.
    """
    owners = [other] if view.side == "active" else view.party.split("+")
    splits: dict[int, set[int]] = {}
    for m in list_messages(view, other, Kind.NODES):
        if m.sender in owners:  # it answers to which children its splits send rows
            for j in range(m.payload["value"].shape[1]):
                nodes = set(torch.unique(m.payload["value"][:, j].long() // 2).tolist()) - {0}
                splits.setdefault(m.step + j, set()).update(nodes)
    return splits


def list_new_nodes(view: View, other: str) -> dict[int, set[int]]:
    """Return the nodes of which a passive party knows rows of every split, by number of the tree.

    These are the nodes that it splits, and their children.
    """
    return {t: {v for i in nodes for v in (i, 2 * i, 2 * i + 1)} for t, nodes in list_splits(view, other).items()}


def list_messages(view: View, other: str, kind: Kind) -> list[Message]:
    """Return the messages of ``kind`` between the adversary and ``other``."""
    pairs = {pair for name in view.party.split("+") for pair in ((name, other), (other, name))}
    return [m for m in view.messages if m.kind is kind and (m.sender, m.receiver) in pairs]


def sum_by_place(values: Tensor, place: Tensor, count: int) -> Tensor:
    """Return the sums (..., count) of values (..., k) at the same place (k,)."""
    flat = values.reshape(-1, len(place))  # much faster than with more dimensions
    sums = values.new_zeros(len(flat), count).scatter_add(1, place.expand_as(flat), flat)
    return sums.view(*values.shape[:-1], count)


def take_at_place(sums: Tensor, place: Tensor) -> Tensor:
    """Return the entries (..., *k) of ``sums`` (..., count) at places (*k); an index has a much slower gradient."""
    flat = sums.reshape(-1, sums.shape[-1])
    return flat.gather(1, place.flatten().expand(len(flat), -1)).view(*sums.shape[:-1], *place.shape)


@memoize
def get_components(view: View, other: str, *, everywhere: bool = False) -> dict[str, tuple[Floats, Floats]]:
    """Return ``compute_components`` of the nodes that the adversary knows.

    Args:
        view: of the adversary.
        other: party with which it exchanges them.
        everywhere: whether only nodes count that are known of rows of every split: of a passive party, those that its
            own columns split, and their children. Else all nodes of training rows do, and of these rows only.
    """
    known = collect_nodes(view, other)
    if known is None or view.aux_split not in known.nodes:
        return {}
    if not everywhere:
        known = known._replace(nodes={view.aux_split: known.nodes[view.aux_split]})
    kept = list_new_nodes(view, other) if everywhere and view.side != "active" else None
    return compute_components(known, view.aux_split, kept)


def compute_components(
    known: KnownNodes, split: str, kept: Mapping[int, set[int]] | None = None
) -> dict[str, tuple[Floats, Floats]]:
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
        code, combinations = _encode(whole[:, t], None if kept is None else kept.get(tree, set()))
        block = _standardize(combinations, np.bincount(code[fitted & (code >= 0)], minlength=len(combinations)))
        for s, part in zip(known.nodes, np.split(code, np.cumsum(sizes)[:-1]), strict=True):
            codes[s].append(np.where(part >= 0, part + n_codes, -1))
        blocks.append(block / np.sqrt(1 + known.rounds[t]))
        n_codes += len(combinations)
    if not sum(block.shape[1] for block in blocks):
        return {}
    columns = sparse.csr_array(sparse.block_diag([sparse.csr_array(block) for block in blocks]))
    incidence = {}
    for s, parts in codes.items():
        of_rows = np.stack(parts, axis=1)  # (n, T)
        rows, of_trees = np.nonzero(of_rows >= 0)
        entries = np.ones(len(rows)), (rows, of_rows[rows, of_trees])
        incidence[s] = sparse.csr_array(entries, shape=(len(of_rows), n_codes))
    axes, values = _find_axes(incidence[split], columns)
    onto = columns @ axes
    return {s: (np.asarray(which @ onto), values) for s, which in incidence.items()}


def weigh_components(components: Floats, values: Floats, power: int, most: int = WIDTH) -> Tensor:
    """Return columns (n, 2^k) with the kernel of ``components`` (n, r) with singular values to the given power.

    ``most`` is the largest number of components to use.

    They are a rotation of the components in which all columns have the same variance, so that standardizing them, as
    models do, does not change the kernel.
    """
    components, values = components[:, :most], values[:most]
    scale = (values / values[0]) ** (power - 1)
    rotation = np.ones((1, 1))  # of Hadamard: orthogonal, with entries of the same size
    while len(rotation) < len(values):
        rotation = np.block([[rotation, rotation], [rotation, -rotation]]) / np.sqrt(2)
    return torch.from_numpy(components * scale @ rotation[: len(values)] / values[0] * np.sqrt(len(components)))


def _encode(nodes: Ints, kept: set[int] | None) -> tuple[Ints, Ints]:
    """Return a code (n,) of the nodes (n, L) of each row in one tree, -1 if none is known, and its nodes (k, L)."""
    if kept is not None:
        nodes = np.where(np.isin(nodes, list(kept)), nodes, 0)
    code = np.zeros(len(nodes), dtype=np.int64)
    for level in nodes.T:
        code = np.unique(code * (int(level.max(initial=0)) + 1) + level, return_inverse=True)[1].reshape(-1)
    first = np.full(int(code.max(initial=-1)) + 1, -1)
    first[code[::-1]] = np.arange(len(code))[::-1]
    combinations = nodes[first]
    known = combinations.any(axis=1) if kept is None else np.ones(len(combinations), dtype=bool)
    number = np.where(known, known.cumsum() - 1, -1)
    return number[code], combinations[known]


def _standardize(combinations: Ints, counts: Ints) -> Floats:
    """Return columns (k, m) of the nodes of one tree, with mean 0 and variance 1 over rows.

    The nodes of each code are ``combinations`` (k, L), and ``counts`` (k,) rows have it.
    """
    rows = np.bincount(combinations.ravel(), np.repeat(counts, combinations.shape[1]), minlength=2)
    share = rows / max(1, counts.sum())
    share[:2] = 0  # unknown, and the root
    varying = np.flatnonzero((share > 0) & (share < 1))
    evenly = np.argsort(-share[varying] * (1 - share[varying]), kind="stable")
    nodes = np.sort(varying[evenly[:MAX_COMPARED_NODES]])
    inside = np.zeros((len(combinations), len(nodes)))
    for level in combinations.T if len(nodes) else ():
        at = np.searchsorted(nodes, level).clip(max=len(nodes) - 1)
        codes = np.flatnonzero(nodes[at] == level)
        inside[codes, at[codes]] = 1
    return np.asarray((inside - share[nodes]) / np.sqrt(share[nodes] * (1 - share[nodes])))


def _find_axes(which: sparse.csr_array, columns: sparse.csr_array) -> tuple[Floats, Floats]:
    """Return the principal axes (m, r) of ``which @ columns`` and its singular values (r,), the largest first.

    By subspace iteration (Halko, Martinsson, Tropp 2011, SIAM Review 53), or exactly if there are few columns.
    """
    if columns.shape[1] <= WIDTH:
        x = which @ columns.toarray()
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
