"""Many small logistic regressions at once: the same rows, each with its own sample of them and its own penalty."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

STEPS = 100
HALVINGS = 30
TOLERANCE = 1e-8
"""Largest entry of the gradient at which a regression has converged, relative to the weight of its rows."""


def coefficients(
    x: NDArray[np.floating], y: NDArray[np.integer], sampled: NDArray[np.bool_], penalties: NDArray[np.floating]
) -> tuple[NDArray[np.float64], bool]:
    """Return the coefficients (M, p + 1, k) of M regressions, the intercept last, and whether all have converged.

    Each minimizes C times the summed log loss of its rows plus half the square of its slopes, as scikit-learn's
    ``LogisticRegression`` does, by Newton's method with halved steps.

    Args:
        x: (n, p) rows.
        y: (n,) classes 0 to K - 1. With two classes there is a single vector of coefficients (k = 1), else k = K.
        sampled: (M, n) the rows of each regression; each class must occur among them.
        penalties: (M,) values of C.
    """
    z = np.concatenate([x, np.ones((len(x), 1))], axis=1)  # (n, q)
    n_classes, width = int(y.max()) + 1, z.shape[1]
    k = 1 if n_classes == 2 else n_classes
    wanted = np.eye(n_classes)[y][:, -k:]  # (n, k)
    weight = sampled * penalties[:, None]  # (M, n)
    ridge = np.ones(width)
    ridge[-1] = 0
    # Adding a number to all intercepts changes nothing: a small curvature keeps them where they are.
    curved = np.diag(np.tile(np.where(ridge > 0, ridge, 0.0 if k == 1 else 1e-9), k))
    found, scale = np.zeros((len(weight), width, k)), np.maximum(1.0, weight.sum(axis=1))

    def loss(b: NDArray[np.float64], of: NDArray[np.floating]) -> NDArray[np.float64]:
        linear = z @ b
        total = np.logaddexp.reduce(_with_zero(linear) if k == 1 else linear, axis=2) - (linear * wanted).sum(axis=2)
        return np.asarray((of * total).sum(axis=1) + (ridge[:, None] * b**2).sum(axis=(1, 2)) / 2)

    left = np.arange(len(weight))
    for _ in range(STEPS):
        b, own = found[left], weight[left]
        p = softmax(_with_zero(z @ b) if k == 1 else z @ b, axis=2)[:, :, -k:]  # (M, n, k)
        slope = z.T @ (own[:, :, None] * (p - wanted)) + ridge[:, None] * b  # (M, q, k)
        steep = np.abs(slope).max(axis=(1, 2)) > TOLERANCE * scale[left]
        left, b, own, p, slope = (one[steep] for one in (left, b, own, p, slope))
        if not len(left):
            return found, True
        hessian = np.tile(curved, (len(left), 1, 1))
        for i, j in product(range(k), repeat=2):
            share = own * (p[:, :, i] * ((i == j) - p[:, :, j]))  # (M, n)
            hessian[:, i * width : (i + 1) * width, j * width : (j + 1) * width] += z.T @ (share[:, :, None] * z)
        flat = slope.transpose(0, 2, 1).reshape(len(left), -1, 1)
        step = np.linalg.solve(hessian, flat).reshape(-1, k, width).transpose(0, 2, 1)
        now, decrease, size = loss(b, own), (slope * step).sum(axis=(1, 2)), np.ones(len(left))
        for _ in range(HALVINGS):
            worse = loss(b - size[:, None, None] * step, own) > now - 1e-4 * size * decrease + 1e-12 * np.abs(now)
            if not worse.any():
                break
            size[worse] /= 2
        found[left] = b - size[:, None, None] * step
    return found, False


def log_probabilities(x: NDArray[np.floating], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-probabilities (M, n, K) of rows (n, p) by coefficients (M, p + 1, k)."""
    linear = x @ b[:, :-1] + b[:, -1:]
    logits = _with_zero(linear) if linear.shape[2] == 1 else linear
    return np.asarray(logits - np.logaddexp.reduce(logits, axis=2, keepdims=True))


def _with_zero(linear: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logits (M, n, 2) of two classes by those of the second one (M, n, 1)."""
    return np.concatenate([np.zeros_like(linear), linear], axis=2)
