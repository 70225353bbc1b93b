"""Completion of the matrix of rows and steps: where each row lies, if every step's model had been asked about it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.scaling import standardized
from vflsec.inference.releases import Releases

SWEEPS = 20
RIDGE = 1e-4
"""Penalty as a share: of the number of rows for a step's model, and of the mean precision for a row's coordinates."""

NEGLIGIBLE = 1e-10


class _Factor:
    """Releases of one route as linear functions of the coordinates of rows, one for each message.

    Matrices of messages and rows hold a number for each release: one, and the value of each unit.
    """

    def __init__(self, releases: Releases) -> None:
        shape = (releases.n_rows, int(releases.message.max()) + 1)
        place, values = torch.stack([releases.rows, releases.message]), standardized(releases.values)
        columns = (torch.ones_like(values[:, 0]), *values.T)
        tables = (torch.sparse_coo_tensor(place, own, shape, check_invariants=False) for own in columns)
        self.by_row = [own.coalesce() for own in tables]
        self.by_message = [own.T.coalesce() for own in self.by_row]

    def precision(self, x: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums (n, k, k) of squared slopes and (n, k) of slopes times releases, given ``x`` (n, k + 1)."""
        k, weighted = x.shape[1] - 1, x * usual
        (counts, *units), (of_message, *units_of_message) = self.by_row, self.by_message
        squares = (of_message @ (weighted[:, :, None] * x[:, None]).flatten(1)).view(-1, k + 1, k + 1)
        products = torch.stack([own @ weighted for own in units_of_message], dim=2)  # (S, k + 1, d)
        penalty = RIDGE * squares[:, -1:, -1:].clamp_min(1) * torch.eye(k + 1, dtype=x.dtype, device=x.device)
        slopes, constant = torch.linalg.solve(squares + penalty, products).split((k, 1), dim=1)
        explained = -counts @ (slopes * constant).sum(dim=2)
        for own, slope in zip(units, slopes.unbind(dim=2), strict=True):
            explained += own @ slope
        return (counts @ (slopes @ slopes.mT).flatten(1)).view(-1, k, k), explained


def completed(releases: Sequence[Releases], coordinates: Tensor, usual: Tensor) -> Tensor:
    """Return coordinates (n, k) of rows, of which the values in each message are most nearly a linear function.

    Components of aligned releases mix errors of interpolation into what they say least about. Alternating least squares
    fits each message as it was sent: its function given the coordinates, then the coordinates given all functions. The
    memory is that of n k^2 numbers and of the releases.

    Source: Koren, Bell, Volinsky 2009, "Matrix factorization techniques for recommender systems".

    Args:
        releases: of routes that share their rows.
        coordinates: (n, k) to begin with; a row without a release keeps its place among them.
        usual: (n,) rows that fit the functions; others are placed by them only.
    """
    factors, weight = [_Factor(own) for own in releases], usual[:, None].to(coordinates.dtype)
    found = _whitened(coordinates, usual)
    for _ in range(SWEEPS):
        x = F.pad(found, (0, 1), value=1.0)
        squares, products = (sum(own) for own in zip(*(f.precision(x, weight) for f in factors), strict=True))
        prior = (RIDGE * squares.diagonal(dim1=1, dim2=2).mean()).clamp_min(NEGLIGIBLE)
        regular = squares + prior * torch.eye(found.shape[1], dtype=found.dtype, device=found.device)
        found = _whitened(torch.linalg.solve(regular, products + prior * found), usual)
    return found


def _whitened(x: Tensor, usual: Tensor) -> Tensor:
    """Return ``x`` (n, k) with covariance one among ``usual`` rows, turned as little as that allows."""
    centered = x - x[usual].mean(dim=0)
    variances, axes = torch.linalg.eigh(centered[usual].T @ centered[usual] / usual.sum())
    scales = variances.clamp_min(NEGLIGIBLE * variances[-1]).sqrt()
    found: Tensor = centered @ (axes / scales) @ axes.T
    return found
