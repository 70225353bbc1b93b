"""The nodes of trees in which rows are, as far as messages tell them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.message import AFTERWARDS, Kind, Message
from vflsec.core.view import View

Ints = NDArray[np.int64]


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
    messages = [m for m in between(view, other, Kind.NODES) if m.rows is not None]
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
    for m in between(view, other, Kind.NODES):
        if m.sender in owners:  # it answers to which children its splits send rows
            for j in range(m.payload["value"].shape[1]):
                split = set(torch.unique(m.payload["value"][:, j].long() // 2).tolist()) - {0}
                found.setdefault(m.step + j, set()).update(split)
    return found


def told_everywhere(view: View, other: str) -> dict[int, set[int]]:
    """Return the nodes that a passive party is also told of at prediction, by number of the tree: of its own splits.

    These are the nodes that it splits, and their children.
    """
    return {t: {v for i in nodes for v in (i, 2 * i, 2 * i + 1)} for t, nodes in own_splits(view, other).items()}


def between(view: View, other: str, kind: Kind) -> list[Message]:
    """Return the messages of ``kind`` between the adversary and ``other``."""
    pairs = {pair for name in view.party.split("+") for pair in ((name, other), (other, name))}
    return [m for m in view.messages if m.kind is kind and (m.sender, m.receiver) in pairs]


def _level(nodes: Ints) -> Ints:
    """Return the level of each node, 0 for the root."""
    found: Ints = np.frexp(nodes.astype(np.float64))[1].astype(np.int64) - 1
    return found


def sums_of(values: Tensor, place: Tensor, count: int) -> Tensor:
    """Return the sums (..., count) of values (..., k) at the same place (k,)."""
    flat = values.reshape(-1, len(place))  # much faster than with more dimensions
    sums = values.new_zeros(len(flat), count).scatter_add(1, place.expand_as(flat), flat)
    return sums.view(*values.shape[:-1], count)
