"""Completion of the matrix of rows and steps: where each row lies, if every step's model had been asked about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import solveh_banded
from scipy.sparse import diags_array
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.scaling import standardized
from vflsec.inference.releases import Releases

SWEEPS = 40

NEGLIGIBLE = 1e-10

LEAST_NOISE = 1e-9
"""Least variance of the noise, as a share of that of a unit: releases are rounded to single precision."""


class _Route:
    """Releases of one route as linear functions of the coordinates of rows, one for each message.

    Matrices of messages and rows hold a number for each release: one, and the value of each unit.
    """

    def __init__(self, releases: Releases, order: int, usual: Tensor) -> None:
        self.n_messages, self.order = int(releases.message.max()) + 1, order
        place, values = torch.stack([releases.rows, releases.message]), standardized(releases.values)
        columns, shape = (torch.ones_like(values[:, 0]), *values.T), (releases.n_rows, self.n_messages)
        tables = (torch.sparse_coo_tensor(place, column, shape, check_invariants=False) for column in columns)
        self.by_row = [table.coalesce() for table in tables]
        self.by_message = [table.T.coalesce() for table in self.by_row]
        counted = values[usual[releases.rows]]
        self.total, self.n_values = counted.square().sum(), counted.numel()
        self.noise, self.change = 1.0, self.n_messages / len(values)  # begins with models that hardly change

    def precision(self, x: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums (n, k, k) of squared slopes and (n, k) of slopes times releases, given ``x`` (n, k + 1).

        Both are divided by the variance of the noise.
        """
        k, weighted = x.shape[1] - 1, x * usual
        (counts, *units), (of_message, *units_of_message) = self.by_row, self.by_message
        squares = (of_message @ (weighted[:, :, None] * x[:, None]).flatten(1)).view(-1, k + 1, k + 1)
        products = torch.stack([unit @ weighted for unit in units_of_message], dim=2)  # (S, k + 1, d)
        models = smooth_models(squares, products, self.order, self.noise / self.change)
        self._learn_variances(models, squares, products)
        slopes, constant = models[:, :k], models[:, k:]
        explained = -counts @ (slopes * constant).sum(dim=2)
        for unit, slope in zip(units, slopes.unbind(dim=2), strict=True):
            explained += unit @ slope
        return (counts @ (slopes @ slopes.mT).flatten(1)).view(-1, k, k) / self.noise, explained / self.noise

    def _learn_variances(self, models: Tensor, squares: Tensor, products: Tensor) -> None:
        """Set the variance of the noise and that of the changes of models from the residuals of both."""
        residual = self.total + (models * (squares @ models - 2 * products)).sum()
        self.noise = max(float(residual) / max(self.n_values, 1), LEAST_NOISE)
        if self.n_messages > self.order:
            self.change = max(float(models.diff(n=self.order, dim=0).square().mean()), 1e-16)


def smooth_models(squares: Tensor, products: Tensor, order: int, rate: float) -> Tensor:
    """Return models V (S, k, d) that minimize their squared errors plus ``rate`` times their squared changes.

    Args:
        squares: (S, k, k) X^T X of each message.
        products: (S, k, d) X^T Y of each message.
        order: 1: changes from message to message. 2: changes of changes.
        rate: weight of the changes.
    """
    n, k, d = products.shape
    band = np.zeros((order * k + 1, n, k))
    for below in range(k):
        band[below, :, : k - below] = squares.diagonal(-below, dim1=1, dim2=2).cpu().numpy()
    if n > order:
        signs = {1: (-1.0, 1.0), 2: (1.0, -2.0, 1.0)}[order]
        changes = diags_array(signs, offsets=range(order + 1), shape=(n - order, n))
        for later in range(order + 1):
            band[later * k, : n - later] += rate * (changes.T @ changes).diagonal(later)[:, None]
    band[0] += 1e-10 * (band[0].mean() + rate)
    flat = products.reshape(n * k, d).cpu().numpy()
    models = solveh_banded(band.reshape(len(band), -1), flat, lower=True, check_finite=False)
    return torch.from_numpy(models).view(n, k, d).to(products)


def completed(releases: Sequence[Releases], coordinates: Tensor, usual: Tensor, *, order: int = 2) -> Tensor:
    """Return coordinates (n, k) of rows, of which the values in each message are most nearly a linear function.

    Components of aligned releases mix errors of interpolation into what they say least about. Alternating least squares
    fits each message as it was sent: its function given the coordinates, then the coordinates given all functions.
    Functions change little from message to message, as much as the releases say. The memory is that of n k^2 numbers
    and of the releases.

    Source: Koren, Bell, Volinsky 2009, "Matrix factorization techniques for recommender systems".

    Args:
        releases: of routes that share their rows.
        coordinates: (n, k) to begin with.
        usual: (n,) rows that fit the functions; others are placed by them only.
        order: of the changes from message to message that are small: 1, or 2 for changes of changes.
    """
    routes, weight = [_Route(part, order, usual) for part in releases], usual[:, None].to(coordinates.dtype)
    z = _whitened(coordinates, usual)
    prior = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    for _ in range(SWEEPS):
        x = F.pad(z, (0, 1), value=1.0)
        squares, products = (sum(parts) for parts in zip(*(r.precision(x, weight) for r in routes), strict=True))
        z = _whitened(torch.linalg.solve(squares + prior, products), usual)
    return z


def _whitened(x: Tensor, usual: Tensor) -> Tensor:
    """Return ``x`` (n, k) with covariance one among ``usual`` rows, turned as little as that allows."""
    centered = x - x[usual].mean(dim=0)
    variances, axes = torch.linalg.eigh(centered[usual].T @ centered[usual] / usual.sum())
    scales = variances.clamp_min((NEGLIGIBLE * variances[-1]).clamp_min(torch.finfo(x.dtype).tiny)).sqrt()
    found: Tensor = centered @ (axes / scales) @ axes.T
    return found
