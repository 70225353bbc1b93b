"""Canaries: training rows whose labels are tossed, so that whoever guesses them bounds epsilon from below.

Steinke, Nasr and Jagielski 2023 (Privacy auditing with one (1) training run), algorithm 1, for labels: the coin of a
row decides between two labels, and a guess says which it was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.results.empirical_epsilon import most_confident

Integers = NDArray[np.int64]


class Canaries(NamedTuple):
    """The rows and what their coins decide between.

    Attributes:
        rows: (m,) positions among the training rows, in random order.
        pairs: (m, 2) two different labels of each, in ascending order: tails and heads.
    """

    rows: Integers
    pairs: Integers

    def guessed(self, scores: NDArray[np.floating], labels: Integers) -> tuple[int, int, int]:
        """Return how many guesses of coins are right, how many are made, and of how many coins.

        Args:
            scores: (n, C) of all training rows, larger for more likely labels.
            labels: (n,) theirs, as they were tossed.
        """
        tails, heads = self.pairs.T
        margins = scores[self.rows, heads] - scores[self.rows, tails]
        return most_confident(margins, labels[self.rows] == heads)


def toss(labels: Integers, n: int, n_classes: int, rng: np.random.Generator) -> tuple[Integers, Canaries]:
    """Return ``labels`` (N,) with those of ``n`` random rows tossed between their own and another one."""
    rows = rng.permutation(len(labels))[:n]
    others = (labels[rows] + rng.integers(1, n_classes, size=n)) % n_classes
    pairs = np.sort(np.stack([labels[rows], others], axis=1), axis=1)
    tossed = labels.copy()
    tossed[rows] = pairs[np.arange(n), rng.integers(2, size=n)]
    return tossed, Canaries(rows, pairs)
