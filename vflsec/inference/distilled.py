"""Values of rows with one release each, learned from what all releases tell of training rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from vflsec.inference.kernel_mixture import Kernel, unit_rows

MOST = 1200
"""Rows whose guesses are learned, beside the auxiliary rows."""

LENGTHS = (0.5, 1.0, 2.0, 4.0, 16.0)
"""Candidate length scales of each part; standardized rows have a squared norm of about 1."""

SEARCHED = 400
"""Rows, evenly spaced, on which length scales are chosen at most."""

TREES, LEAF = 100, 3

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


def learn(targets: Tensor, parts: Sequence[tuple[Tensor, Tensor]], n_scored: int, rng: torch.Generator) -> Learned:
    """Learn guesses of rows with a Gaussian process and with randomized trees, and predict other rows.

    The process has a kernel of distances. The leave-one-out error of the first ``n_scored`` targets chooses its noise
    and a length scale of each part: a few numbers that another party sent can say more than many local columns. Trees
    follow steps and interactions. Errors of left-out rows weigh the two for each target.

    Source: Hinton, Vinyals, Dean 2015, "Distilling the knowledge in a neural network"; Rasmussen and Williams 2006,
    sections 2.2, 5.1 and 5.4.2; Geurts, Ernst, Wehenkel 2006, "Extremely randomized trees".

    Args:
        targets: (P, k) guesses of the rows to learn from, repetitions of ``n_scored`` columns.
        parts: what is known of these rows (P, q), and the same of the other rows (m, q).
        n_scored: targets that choose.
        rng: draws the trees.
    """
    units = [(unit_rows(x.double(), x.double()), unit_rows(new.double(), x.double())) for x, new in parts]
    process, trees = _by_process(targets, units, n_scored), _by_trees(targets, units, rng)
    difference = (trees.left_out - process.left_out)[:, :n_scored]
    missing = (targets - process.left_out)[:, :n_scored]
    smallest = torch.finfo(targets.dtype).tiny
    share = ((difference * missing).sum(dim=0) / difference.square().sum(dim=0).clamp_min(smallest)).clamp(0, 1)
    share = share.repeat(targets.shape[1] // n_scored)
    return Learned(*(a + share * (b - a) for a, b in zip(process, trees, strict=True)))


def _by_trees(targets: Tensor, units: Sequence[tuple[Tensor, Tensor]], rng: torch.Generator) -> Learned:
    x, new = (torch.cat(side, dim=1).cpu().numpy() for side in zip(*units, strict=True))
    seed = int(torch.randint(2**31, (), generator=rng))
    trees = ExtraTreesRegressor(
        TREES, min_samples_leaf=LEAF, max_features=0.6, bootstrap=True, oob_score=True, random_state=seed
    )
    with warnings.catch_warnings():  # few rows are in every sample
        warnings.simplefilter("ignore")
        trees.fit(x, targets.cpu().numpy())
    guesses = trees.predict(new).reshape(len(new), -1), trees.oob_prediction_.reshape(targets.shape)
    return Learned(*(torch.from_numpy(part).to(targets) for part in guesses))


def _by_process(targets: Tensor, units: Sequence[tuple[Tensor, Tensor]], n_scored: int) -> Learned:
    given, new = zip(*units, strict=True)
    searched = slice(None, None, -(-len(targets) // SEARCHED))
    tried = (
        _fit([x[searched] for x in given], lengths, targets[searched], n_scored)
        for lengths in product(LENGTHS, repeat=len(units))
    )
    fitted = _fit(given, min(tried, key=lambda each: each.error).lengths, targets, n_scored)
    kernel = fitted.kernel
    guesses = kernel.times(_scaled(new, fitted.lengths), kernel.x, fitted.coefficients) + targets.mean(dim=0)
    return Learned(guesses, fitted.left_out)


class _Fitted(NamedTuple):
    error: float
    lengths: tuple[float, ...]
    kernel: Kernel
    coefficients: Tensor
    left_out: Tensor


def _scaled(units: Sequence[Tensor], lengths: Sequence[float]) -> Tensor:
    return torch.cat([x / length for x, length in zip(units, lengths, strict=True)], dim=1)


def _fit(units: Sequence[Tensor], lengths: tuple[float, ...], targets: Tensor, n_scored: int) -> _Fitted:
    """Return the process with the noise of the least leave-one-out error."""
    kernel, mean = Kernel(_scaled(units, lengths), nonlinear=True), targets.mean(dim=0)
    values, vectors = torch.linalg.eigh(kernel.between(kernel.x, kernel.x))
    rotated, squares, tried = vectors.T @ (targets - mean), vectors.square(), []
    for noise in NOISE.tolist():
        inverse = 1 / (values.clamp_min(0) + noise)
        solved = vectors @ (rotated * inverse[:, None])
        errors = solved / (squares @ inverse)[:, None]
        error = float(errors[:, :n_scored].square().mean())
        tried.append(_Fitted(error, lengths, kernel, solved, targets - errors))
    return min(tried, key=lambda fitted: fitted.error)
