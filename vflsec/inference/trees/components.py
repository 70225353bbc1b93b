"""Principal components of the nodes that rows share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from vflsec.core.view import View
from vflsec.inference.trees.nodes import Told, told, told_everywhere

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTH = 32
"""Largest number of components in a table of nodes, a power of two."""

MOST_NODES = 500
"""Nodes of one tree that are compared: those that divide rows most evenly."""

PASSES = 6
OVERSAMPLED = 16


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
    return shared(known, view.aux_split, told_everywhere(view, other))


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
