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

SWEEPS = 20

SETTLED = 0.98
"""Share of the noise of the sweep before, from which on another sweep would tell nothing more."""

FITTED = 16_384
"""Rows, evenly spaced, that fit the functions at most; others are placed by them."""

NEGLIGIBLE = 1e-10

LEAST_NOISE = 1e-9
"""Least variance of the noise, as a share of that of a unit: releases are rounded to single precision."""


class _Route:
    """Releases of one route as linear functions of the coordinates of rows, one for each message."""

    def __init__(self, releases: Releases, fitted: Tensor, order: int) -> None:
        self.all, self.order = releases._replace(values=standardized(releases.values).double()), order
        self.fitted = self.all.where(fitted[releases.rows])
        self.by_message, self.of_fitted = groups_of_equal_size(self.fitted.message), _ByRow(self.fitted)
        self.n_messages = int(releases.message.max()) + 1
        self.total, self.n_values = self.fitted.values.square().sum(), self.fitted.values.numel()
        self.noise, self.change = 1.0, self.n_messages / len(releases.values)  # begins with models that hardly change

    def fit(self, x: Tensor) -> Tensor:
        """Return the functions (S, k + 1, d) of the coordinates ``x`` (n, k + 1) that explain rows that fit them."""
        k = x.shape[1]
        squares, products = (
            x.new_zeros(self.n_messages, k, k),
            x.new_zeros(self.n_messages, k, self.all.values.shape[1]),
        )
        for messages, releases in self.by_message:
            of_rows = x[self.fitted.rows[releases]]
            squares[messages] = of_rows.mT @ of_rows
            products[messages] = of_rows.mT @ self.fitted.values[releases]
        models = smooth_models(squares, products, self.order, self.noise / self.change)
        self._learn_variances(models, squares, products)
        return models

    def _learn_variances(self, models: Tensor, squares: Tensor, products: Tensor) -> None:
        """Set the variance of the noise and that of the changes of models from the residuals of both."""
        residual = self.total + (models * (squares @ models - 2 * products)).sum()
        self.noise = max(float(residual) / max(self.n_values, 1), LEAST_NOISE)
        if self.n_messages > self.order:
            self.change = max(float(models.diff(n=self.order, dim=0).square().mean()), 1e-16)


class _ByRow:
    """The releases of each row, to be summed over."""

    def __init__(self, releases: Releases) -> None:
        order = releases.rows.argsort(stable=True)
        self.message, self.values = releases.message[order], releases.values[order]
        sizes = torch.bincount(releases.rows, minlength=releases.n_rows)
        self.starts = sizes.cumsum(0) - sizes

    def add(self, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sums (n, p) of ``numbers`` (S, p) over the messages of each row, times ``weights`` of releases."""
        return F.embedding_bag(self.message, numbers, self.starts, mode="sum", per_sample_weights=weights)


def place_rows(routes: Sequence[_Route], models: Sequence[Tensor], *, fitted: bool) -> Tensor:
    """Return the coordinates (n, k) that explain the releases of rows, with a prior of variance one.

    Args:
        routes: of the same rows.
        models: (S, k + 1, d) of each route.
        fitted: whether only rows that fit the models are placed; others are then at zero.
    """
    n, k = routes[0].all.n_rows, models[0].shape[1] - 1
    upper = torch.triu_indices(k, k, device=models[0].device)
    squares, products = models[0].new_zeros(n, upper.shape[1]), models[0].new_zeros(n, k)
    for route, model in zip(routes, models, strict=True):
        releases, slopes, constant = route.of_fitted if fitted else _ByRow(route.all), model[:, :k], model[:, k]
        squares += releases.add((slopes @ slopes.mT)[:, upper[0], upper[1]]) / route.noise
        explained = -releases.add((slopes @ constant[:, :, None])[..., 0])
        for unit in range(model.shape[2]):
            explained += releases.add(slopes[..., unit].contiguous(), releases.values[:, unit].contiguous())
        products += explained / route.noise
    full = squares.new_zeros(n, k, k)
    full[:, upper[0], upper[1]] = full[:, upper[1], upper[0]] = squares
    placed: Tensor = torch.linalg.solve(full + torch.eye(k, dtype=full.dtype, device=full.device), products)
    return placed


def groups_of_equal_size(keys: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the keys (m,) with the same number c of items, and their items (m, c), for each number that occurs."""
    distinct, sizes = torch.unique(keys, return_counts=True)
    items = np.split(keys.argsort(stable=True).cpu().numpy(), np.cumsum(sizes.cpu().numpy())[:-1])
    groups = []
    for size in torch.unique(sizes).tolist():
        of_size = torch.nonzero(sizes == size)[:, 0]
        groups.append(
            (
                distinct[of_size],
                torch.from_numpy(np.stack([items[number] for number in of_size.tolist()])).to(keys.device),
            )
        )
    return groups


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
        usual: (n,) rows that may fit the functions; others are placed by them only.
        order: of the changes from message to message that are small: 1, or 2 for changes of changes.
    """
    fitted = torch.zeros_like(usual)
    candidates = torch.nonzero(usual)[:, 0]
    fitted[candidates[:: -(-len(candidates) // FITTED)]] = True
    routes = [_Route(part, fitted, order) for part in releases]
    z = _whitened(coordinates, fitted)
    for _ in range(SWEEPS):
        before = [route.noise for route in routes]
        models = [route.fit(F.pad(z, (0, 1), value=1.0)) for route in routes]
        if all(route.noise >= SETTLED * noise for route, noise in zip(routes, before, strict=True)):
            break
        z = _whitened(place_rows(routes, models, fitted=True), fitted)
    return _whitened(place_rows(routes, models, fitted=False), fitted)


def _whitened(x: Tensor, usual: Tensor) -> Tensor:
    """Return ``x`` (n, k) with covariance one among ``usual`` rows, turned as little as that allows."""
    centered = x - x[usual].mean(dim=0)
    variances, axes = torch.linalg.eigh(centered[usual].T @ centered[usual] / usual.sum())
    scales = variances.clamp_min((NEGLIGIBLE * variances[-1]).clamp_min(torch.finfo(x.dtype).tiny)).sqrt()
    found: Tensor = centered @ (axes / scales) @ axes.T
    return found
