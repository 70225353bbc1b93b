"""Whether the nodes of a transcript can be those of trees: all that is said of a row lies on one path from the root."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]

MOST = 2**27
"""Rows times trees of a transcript, which are kept in memory."""


class Contradiction(NamedTuple):
    """A node that is not on the path of another one of the same row and tree.

    Attributes:
        line: its position in the message.
        tree: its number.
        node: that is said.
        other: that is said in an earlier line.
    """

    line: int
    tree: int
    node: int
    other: int


class NodePaths:
    """Reads messages of nodes one after another, and finds what contradicts an earlier one.

    A message may leave out rows, trees and levels, and say 0 of any. Node i has the parent i // 2, so that nodes of one
    row and tree agree if all of them are on the path to the deepest one. What is said after training is apart: a system
    may then send a row elsewhere.
    """

    def __init__(self) -> None:
        self._said = {False: _Deepest(), True: _Deepest()}

    def contradiction(
        self, step: int, rows: NDArray[np.str_], values: NDArray[np.floating], *, afterwards: bool
    ) -> Contradiction | None:
        """Return what in a message contradicts an earlier line of it or of another message, or None.

        Args:
            step: the number of its first tree.
            rows: (B,) ids.
            values: (B, T) numbers of nodes.
            afterwards: whether it is of a phase after training.

        Raises:
            ValueError: trees of more rows than are kept in memory.
        """
        said, nodes = self._said[afterwards], values.astype(np.int16)
        at = said.places(rows, range(step, step + nodes.shape[1]))
        before = said.nodes[at]
        np.maximum.at(said.nodes, at, nodes)
        deepest = said.nodes[at]
        odd = ~(_on_the_path(nodes, deepest) & _on_the_path(before, deepest))
        if not odd.any():
            return None
        first, tree = (int(number) for number in np.argwhere(odd & (nodes > 0))[0])
        earlier = [int(before[first, tree])] if before[first, tree] else []
        for line in np.flatnonzero((at[0][:, 0] == at[0][first, 0]) & (nodes[:, tree] > 0)).tolist():
            node = int(nodes[line, tree])
            other = next((one for one in earlier if not _related(one, node)), None)
            if other is not None:
                return Contradiction(line, step + tree, node, other)
            earlier.append(node)
        raise AssertionError("the deepest node is not related to all others, so that two are not related")


class _Deepest:
    """The deepest node of each row in each tree that was said so far; 0 for none."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._trees: dict[int, int] = {}
        self.nodes = np.zeros((0, 0), dtype=np.int16)

    def places(self, rows: NDArray[np.str_], trees: range) -> tuple[Ints, Ints]:
        """Return the positions (B, 1) and (1, T) of rows and trees, after making room for them."""
        i = np.array([self._rows.setdefault(row, len(self._rows)) for row in rows.tolist()], dtype=np.int64)
        j = np.array([self._trees.setdefault(tree, len(self._trees)) for tree in trees], dtype=np.int64)
        if len(self._rows) * len(self._trees) > MOST:
            product = len(self._rows) * len(self._trees)
            raise ValueError(f"expected at most {MOST} rows times trees, found {product}: record fewer trees or rows")
        wanted = (len(self._rows), len(self._trees))
        if any(one > room for one, room in zip(wanted, self.nodes.shape, strict=True)):
            room = [
                max(2 * room, one) if one > room else room for one, room in zip(wanted, self.nodes.shape, strict=True)
            ]
            grown = np.zeros(room, dtype=np.int16)
            grown[: self.nodes.shape[0], : self.nodes.shape[1]] = self.nodes
            self.nodes = grown
        return i[:, None], j[None, :]


def _on_the_path(nodes: Ints, deepest: Ints) -> NDArray[np.bool_]:
    """Return which nodes are 0 or on the path from the root to the deepest ones."""
    return np.asarray((nodes == 0) | (deepest >> np.maximum(_level(deepest) - _level(nodes), 0) == nodes))


def _related(one: int, other: int) -> bool:
    """Whether one of two nodes is on the path to the other."""
    first, second = sorted((int(one), int(other)))
    return second >> (second.bit_length() - first.bit_length()) == first


def _level(nodes: Ints) -> Ints:
    """Return the level of each node, 0 for the root; of 0 as of the root."""
    found: Ints = np.maximum(np.frexp(nodes.astype(np.float32))[1] - 1, 0)
    return found
