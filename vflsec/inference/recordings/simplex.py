"""Loss gradients of a softmax seen through an unknown rotation: which rotation it was, without one label."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESTARTS = 40
ROUNDS = 100


def simplex(classes: int) -> Floats:
    """Return an orthonormal basis (C, C - 1) of the vectors whose entries sum to zero, in which loss gradients lie."""
    basis: Floats = np.linalg.svd(np.ones((classes, 1)))[0][:, 1:]
    return basis


def upright(rows: Floats, classes: int, rng: np.random.Generator) -> Floats:
    """Return a map (r, C) under which ``rows`` (n, r) become loss gradients, up to the names of the classes.

    A row of softmax(z) - y has one negative entry, its label's. Alternately each row is given to the class whose entry
    is least and the rotation is fitted to that; of several starts the one with the most such rows wins. One output has
    only a sign to find: class 1, of negative rows, is taken to be the rarer.
    """
    if classes == 1:
        return np.array([[1.0 if (rows < 0).mean() < 0.5 else -1.0]])
    basis = simplex(classes)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(lengths > 0, lengths, 1)
    best, most = basis.T, -1.0
    for _ in range(RESTARTS):
        turn, fitted = np.eye(classes - 1), np.linalg.qr(rng.normal(size=(classes - 1, classes - 1)))[0]
        for _ in range(ROUNDS):
            if np.array_equal(turn, fitted):
                break
            turn = fitted
            fitted = rotation(units, -basis[(units @ turn @ basis.T).argmin(axis=1)])
        found = (((units @ turn @ basis.T) < 0).sum(axis=1) == 1).mean()
        if found > most:
            best, most = turn @ basis.T, found
    return best


def rotation(a: Floats, b: Floats) -> Floats:
    """Return the orthogonal matrix R that brings ``a`` R nearest to ``b``; both (n, r)."""
    left, _, right = np.linalg.svd(a.T @ b)
    turn: Floats = left @ right
    return turn
