"""Values of rows with one release each, learned from what all releases tell of training rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.inference.kernel_mixture import Kernel, unit_rows

MOST = 1200
"""Rows whose guesses are learned, beside the auxiliary rows."""

LENGTHS = (1.0, 2.0, 4.0)
"""Candidate length scales; standardized rows have a squared norm of about 1."""

NOISE = torch.logspace(-3, 1, 5, dtype=torch.float64)
"""Candidate variances of the noise; a kernel has variance one."""


class Learned(NamedTuple):
    """Guesses (m, k) of other rows, and those (P, k) of the rows that are learned from, each without its own target."""

    guesses: Tensor
    left_out: Tensor


def drawn(n_rows: int, known: Tensor, rng: torch.Generator) -> Tensor:
    """Return the positions of the rows to learn from: the ``known`` ones, then up to ``MOST`` others at random."""
    others = torch.randperm(n_rows, generator=rng).to(known.device)
    return torch.cat([known, others[~torch.isin(others, known)][:MOST]])


def learn(targets: Tensor, given: Tensor, x: Tensor, n_scored: int) -> Learned:
    """Fit a Gaussian process with a kernel of distances to guesses of rows, and predict other rows.

    The leave-one-out error of the first ``n_scored`` targets chooses the length scale and the noise.

    Source: Hinton, Vinyals, Dean 2015, "Distilling the knowledge in a neural network"; Rasmussen and Williams 2006,
    sections 2.2 and 5.4.2.

    Args:
        targets: (P, k) guesses of the rows to learn from.
        given: (P, q) what is known of these rows.
        x: (m, q) the same of the other rows.
        n_scored: targets that choose.
    """
    mean, given, x = targets.mean(dim=0), unit_rows(given, given), unit_rows(x, given)
    best, chosen = float("inf"), None
    for length in LENGTHS:
        kernel = Kernel(given / length, nonlinear=True)
        values, vectors = torch.linalg.eigh(kernel.between(kernel.x, kernel.x))
        rotated = vectors.T @ (targets - mean)
        for noise in NOISE.tolist():
            inverse = 1 / (values.clamp_min(0) + noise)
            solved = vectors @ (rotated * inverse[:, None])
            errors = solved / (vectors.square() @ inverse)[:, None]
            error = float(errors[:, :n_scored].square().mean())
            if error < best:
                best, chosen = error, (kernel, length, solved, targets - errors)
    assert chosen is not None
    kernel, length, solved, left_out = chosen
    return Learned(kernel.times(x / length, kernel.x, solved) + mean, left_out)
