"""Whether the nodes of a transcript can be those of trees: all that is said of a row lies on one path from the root."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


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
    row and tree agree if the largest of them is below all others. Phases are apart: at prediction a system may send a
    row elsewhere than in training.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], dict[str, int]] = {}
        self._deepest: dict[tuple[str, str, int], tuple[Ints, Ints]] = {}

    def contradiction(
        self, phase: str, split: str, step: int, rows: NDArray[np.str_], values: NDArray[np.floating]
    ) -> Contradiction | None:
        """Return what in a message contradicts an earlier line of it or of another message, or None.

        Args:
            phase: of the message.
            split: of its rows.
            step: the number of its first tree.
            rows: (B,) ids.
            values: (B, T) numbers of nodes, T the same in all messages of a phase with this step.
        """
        numbers = self._places.setdefault((phase, split), {})
        place = np.array([numbers.setdefault(row, len(numbers)) for row in rows.tolist()], dtype=np.int64)
        nodes = values.astype(np.int16)
        key = (phase, split, step)
        before_place, before = self._deepest.get(key, (place[:0], nodes[:0]))
        if before.shape[1] != nodes.shape[1]:  # trees of another route
            return None
        said = np.concatenate([before, nodes])
        known, where = np.unique(np.concatenate([before_place, place]), return_inverse=True)
        deepest = np.zeros((len(known), nodes.shape[1]), dtype=np.int16)
        np.maximum.at(deepest, where, said)
        self._deepest[key] = known, deepest
        reached = deepest[where]
        odd = (said > 0) & (reached >> (_level(reached) - _level(said)) != said)
        if not odd.any():
            return None
        one, tree = (int(number) for number in np.argwhere(odd)[0])
        deeper = int(np.argmax((where == where[one]) & (said[:, tree] == reached[one, tree])))
        first, last = sorted((one, deeper))
        return Contradiction(last - len(before), step + tree, int(said[last, tree]), int(said[first, tree]))


def _level(nodes: Ints) -> Ints:
    """Return the level of each node, 0 for the root; of 0 as of the root."""
    found: Ints = np.maximum(np.frexp(nodes.astype(np.float32))[1] - 1, 0)
    return found
