"""Rows that stand for all: a few rows of a matrix and how every other is made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

_RELATIVE = 2.0**-32  # singular values below it, of the largest, are rounding: the message has 24 bits


class Factors(NamedTuple):
    """delta = coefficients @ delta[rows].

    Attributes:
        rows: (r,) positions of independent rows, r the rank.
        coefficients: (B, r).
    """

    rows: NDArray[np.intp]
    coefficients: NDArray[np.float64]


def factor(delta: NDArray[np.float64], unit: float = 0.0) -> Factors:
    """Return rows of ``delta`` (B, C) that span the others, and the coefficients of all by them.

    Both are functions of the space that the columns of ``delta`` span, and so of delta W^T, whatever W is, as long as
    its rank is C: whoever gets delta W^T in full could compute them. The rows are the pivots of a QR decomposition of
    an orthonormal basis, so that coefficients stay within 2^(r-1); with one column, the row is the longest and the
    coefficients are the signed ratios to it.

    Args:
        delta: (B, C).
        unit: that its entries are rounded to when they are sent; directions that rounding by half of it explains are
            left out. The rows of a softmax gradient in float32 add up to zero but for that.
    """
    basis, sizes, _ = linalg.svd(delta, full_matrices=False)
    noise = unit / 2 * (len(delta) ** 0.5 + delta.shape[1] ** 0.5)  # the norm of a matrix of errors is below it
    basis = basis[:, : int((sizes > max(_RELATIVE * sizes[0], noise)).sum())]
    if not basis.shape[1]:
        return Factors(np.empty(0, np.intp), basis)
    _, pivots = linalg.qr(basis.T, mode="r", pivoting=True)
    rows = pivots[: basis.shape[1]].astype(np.intp)
    return Factors(rows, linalg.solve(basis[rows].T, basis.T).T)
