"""Every release of a row, side by side: earlier models send other functions of the same columns."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import solveh_banded
from scipy.sparse import diags_array
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.layout import Layout
from vflsec.core.message import Kind
from vflsec.core.view import View, memoize
from vflsec.inference.regression import standardize
from vflsec.inference.releases import Releases, read_releases
from vflsec.inference.trees.nodes import weigh_components

LANDMARKS = 256
"""Rows whose span holds the components, beside up to ``MAX_AUX_ROWS`` auxiliary rows."""

MAX_AUX_ROWS = 1024

LINEAR = (8, 16)
"""Numbers of first components that a linear model reads: with more, it fits noise."""

MAX_COORDINATES = 40
"""Coordinates up to which the rows' places are computed: time and memory grow with their square."""

CURVED = (32, 64, 128)
"""Numbers of first components whose distances a kernel compares: columns are no linear function of releases."""

NEIGHBORS = 4
"""Releases of a row through which a polynomial runs: the bottom model changes smoothly from step to step."""

MAX_RELATIVE_LENGTH = 3.0
"""Times the median length beyond which a row does not count among those that give the components."""

NEGLIGIBLE = 1e-10
"""Share of the largest variance below which a component is a rounding error."""


class Trajectories(NamedTuple):
    """Functions of all releases of each row.

    Attributes:
        every: (n, k) whose inner products are those of the standardized releases side by side.
        components: (n, r) the first principal components, each with variance one.
        completed: coordinates (n, k) that explain each message as it was sent, by k; of aligned releases
            only, and of those alone that have more units together than coordinates, and each at most 16.
    """

    every: Tensor
    components: Tensor
    completed: Mapping[tuple[int, int], Tensor]

    def take_first(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """Return the first components by their number, without repetitions."""
        most = self.components.shape[1]
        return {min(number, most): self.components[:, :number] for number in numbers}


def fit_trajectories(view: View, routes: Sequence[tuple[str | None, str | None]]) -> list[Trajectories]:
    """Return functions of all embeddings of each row in the split of the auxiliary rows, as sent and aligned in time.

    The bottom model changes during training, so the releases of a row are many projections of its columns. The first
    principal components are what most releases share; the last ones are noise and drift within an epoch, of which
    aligned releases have less.

    The list is empty if no row has a second release that the adversary reads. The result is computed once for a view
    and its copies with the same auxiliary rows, and must not be changed.

    Args:
        view: of the adversary.
        routes: pairs of a sender and a phase, side by side; None for any sender, and for the last phase of any.

    Raises:
        InsufficientView: there is no such message about these rows.
    """
    return _fit_all(view, tuple(routes), tuple(view.aux_rows.tolist()))


@memoize
def _fit_all(
    view: View, routes: tuple[tuple[str | None, str | None], ...], known: tuple[int, ...]
) -> list[Trajectories]:
    del known  # which are landmarks
    received = [read_releases(view, Kind.EMBEDDING, split=view.aux_split, sender=s, phase=p) for s, p in routes]
    releases = [part for part in received if int(part.epoch.max())]
    results = []
    for aligned in (False, True) if releases else ():
        blocks = chain.from_iterable(join_epochs(part, aligned=aligned) for part in releases)
        u, values = find_components(blocks, pick_landmarks(view))
        if len(values):
            every = weigh_components((u * values).cpu().numpy(), values.cpu().numpy(), 1, len(values)).to(u.device)
            components = u[:, : max(CURVED)] * len(u) ** 0.5
            completed = _complete_choices(releases, components, view.layout) if aligned else {}
            results.append(Trajectories(every, components, completed))
    return results


def has_several_releases(view: View, *, sender: str | None) -> bool:
    """Return whether a row of the auxiliary split has embeddings of several epochs."""
    return bool(read_releases(view, Kind.EMBEDDING, split=view.aux_split, sender=sender).epoch.max())


def join_functions(view: View, *, sender: str | None, with_completed: bool = False) -> list[Tensor]:
    """Return the functions (n, k) of all embeddings of each row that a linear model may read; none without any."""
    results = fit_trajectories(view, [(sender, None)])
    functions = [x for each in results for x in (each.every, *each.take_first((*LINEAR, *CURVED)).values())]
    return [*functions, *(x for each in results for x in each.completed.values() if with_completed)]


def _complete_choices(
    releases: Sequence[Releases], components: Tensor, layout: Layout | None
) -> dict[tuple[int, int], Tensor]:
    """Return what completes each number of coordinates that a row's releases more than determine, and none alone."""
    lengths = components.square().sum(dim=1)
    usual = lengths <= MAX_RELATIVE_LENGTH**2 * lengths.median()
    if any(part.values.shape[1] > max(LINEAR) for part in releases):
        return {}
    width = layout.width if layout else max(LINEAR)
    most = min(components.shape[1] - 1, MAX_COORDINATES)
    numbers = sorted({k for k in (*LINEAR, width, width * 3 // 2) if k <= most})
    choices = [(k, 1) for k in numbers] + [(width, 2)] * (width <= most)  # a linear model changes more smoothly
    return {
        (k, order): complete_coordinates(releases, components[:, :k], usual, order=order) for k, order in choices if k
    }


class EpochBlock(NamedTuple):
    """The releases (n, d) of one epoch, and the number (n,) of the message with each; NaN for a row without any."""

    values: Tensor
    time: Tensor


def join_epochs(releases: Releases, *, aligned: bool = False) -> Iterator[Tensor]:
    """Yield the standardized releases (n, d) of the rows in each epoch.

    Epochs are equal numbers of messages. A row that has several releases in an epoch gets their mean, and a row without
    any keeps its last; before its first it is at the mean, which is zero. Rows of different batches are sent by
    different models, which hides the components that say least: ``aligned`` releases are interpolated to the middle of
    their epoch.
    """
    blocks = split_by_epoch(releases)
    current = releases.values.new_zeros(releases.n_rows, releases.values.shape[1], dtype=torch.float64)
    for values, time in interpolate_epochs(blocks, releases) if aligned else blocks:
        present = ~time.isnan()
        if present.any():
            current = current.clone()
            current[present] = standardize(values[present])
        yield current


def split_by_epoch(releases: Releases) -> Iterator[EpochBlock]:
    """Yield the mean release of each row in each epoch."""
    n_epochs = int(releases.epoch.max()) + 1
    epoch = releases.message * n_epochs // (int(releases.message.max()) + 1)
    for number in range(n_epochs):
        present = releases.select(epoch == number)
        has_any = torch.bincount(present.rows, minlength=releases.n_rows) > 0
        time = present.mean(present.message.double()[:, None])[:, 0].masked_fill(~has_any, torch.nan)
        yield EpochBlock(present.mean(present.values.double()), time)


def interpolate_epochs(blocks: Iterator[EpochBlock], releases: Releases) -> Iterator[EpochBlock]:
    """Yield each epoch as it would be in the middle, by the polynomial through up to ``NEIGHBORS`` epochs around it."""
    n_epochs = int(releases.epoch.max()) + 1
    window: deque[EpochBlock] = deque(maxlen=min(NEIGHBORS, n_epochs))
    done = 0
    for number, block in enumerate(blocks):
        window.append(block)
        if len(window) < window.maxlen:  # type: ignore[operator]
            continue
        last = n_epochs if number == n_epochs - 1 else max(number - 1, 1)
        for epoch in range(done, last):
            yield _interpolate(window, epoch - (number + 1 - len(window)))
        done = last


def _interpolate(window: Sequence[EpochBlock], place: int) -> EpochBlock:
    """Return the block at ``place`` in the middle of its epoch; rows that miss an epoch of the window stay."""
    times = torch.stack([block.time for block in window])  # (k, n)
    values, time = window[place]
    middle = time[~time.isnan()].median() if not time.isnan().all() else time[0]
    target = torch.clamp(middle, times.amin(dim=0), times.amax(dim=0))
    moved = torch.zeros_like(values)
    for k, block in enumerate(window):
        others = torch.cat([times[:k], times[k + 1 :]])
        weight = ((target - others) / (times[k] - others)).prod(dim=0)
        moved += weight[:, None] * block.values
    return EpochBlock(torch.where(moved.isfinite().all(dim=1)[:, None], moved, values), time)


def pick_landmarks(view: View) -> Tensor:
    """Return the positions of the auxiliary rows, and of others at equal distances."""
    n = len(view.features[view.aux_split])
    chosen = torch.zeros(n, dtype=torch.bool, device=view.aux_rows.device)
    chosen[:: max(1, n // LANDMARKS)] = True
    chosen[view.aux_rows[:MAX_AUX_ROWS]] = True
    return torch.nonzero(chosen)[:, 0]


def find_components(blocks: Iterator[Tensor], landmarks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left singular vectors (n, r) and singular values (r,) of ``blocks`` (n, d) side by side.

    They are those of the rows' projections onto the span of the rows at ``landmarks`` (l,). Inner products with
    landmarks stay as they are, and so does a ridge regression that is fitted to landmarks. The memory is that of n l
    numbers, for any number and width of blocks.

    Rows that are much longer than others, wild in many releases, have coordinates but decide none.

    Source: Williams and Seeger 2001, "Using the Nystroem method to speed up kernel machines".
    """
    products = lengths = torch.zeros(0)
    for block in blocks:
        products = products if len(products) else block.new_zeros(len(block), len(landmarks))
        lengths = block.square().sum(dim=1) + (lengths if len(lengths) else 0)
        products.addmm_(block, block[landmarks].T)
    usual = lengths <= MAX_RELATIVE_LENGTH**2 * lengths.median()
    among = usual[landmarks]
    products = products[:, among]
    variances, axes = torch.linalg.eigh((products[landmarks[among]] + products[landmarks[among]].T) / 2)
    kept = variances > NEGLIGIBLE * variances[-1]
    projected = products @ axes[:, kept] / variances[kept].sqrt()  # (n, r)
    squares, rotation = torch.linalg.eigh(projected[usual].T @ projected[usual])
    kept = squares > NEGLIGIBLE * squares[-1:]
    values = squares[kept].flip(0).sqrt()
    return projected @ rotation[:, kept].flip(1) / values, values


SWEEPS = 20

MAX_NOISE_RATIO = 0.98
"""Share of the noise of the sweep before, from which on another sweep would tell nothing more."""

MAX_FITTED_ROWS = 16_384
"""Rows, evenly spaced, that fit the functions at most; others are placed by them."""

MIN_CHANGE = 1e-16
"""Least variance of the changes from message to message, by which the noise is divided."""

RIDGE = 1e-10
"""Added to the diagonal of normal equations, as a share of its mean, so that they have one solution."""

MIN_NOISE = 1e-9
"""Least variance of the noise, as a share of that of a unit: releases are rounded to single precision."""


class _ReleaseModel:
    """Releases of one sender and phase as linear functions of the coordinates of rows, one for each message."""

    def __init__(self, releases: Releases, fitted: Tensor, order: int) -> None:
        self.releases = releases._replace(values=standardize(releases.values).double())
        self.order = order
        self.fitted = self.releases.select(fitted[releases.rows])
        self.by_message, self.of_fitted = group_by_size(self.fitted.message), _ByRow(self.fitted)
        self.n_messages = int(releases.message.max()) + 1
        self.total, self.n_values = self.fitted.values.square().sum(), self.fitted.values.numel()
        self.noise, self.change = 1.0, self.n_messages / len(releases.values)  # begins with models that hardly change

    def fit(self, x: Tensor) -> Tensor:
        """Return the functions (S, k + 1, d) of the coordinates ``x`` (n, k + 1) that explain rows that fit them."""
        k = x.shape[1]
        squares = x.new_zeros(self.n_messages, k, k)
        products = x.new_zeros(self.n_messages, k, self.releases.values.shape[1])
        for messages, releases in self.by_message:
            of_rows = x[self.fitted.rows[releases]]
            squares[messages] = of_rows.mT @ of_rows
            products[messages] = of_rows.mT @ self.fitted.values[releases]
        models = smooth_models(squares, products, self.order, self.noise / self.change)
        # the variances of the noise and of the changes of models, from the residuals of both
        residual = self.total + (models * (squares @ models - 2 * products)).sum()
        self.noise = max(float(residual) / max(self.n_values, 1), MIN_NOISE)
        if self.n_messages > self.order:
            self.change = max(float(models.diff(n=self.order, dim=0).square().mean()), MIN_CHANGE)
        return models


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


def place_rows(models: Sequence[_ReleaseModel], weights: Sequence[Tensor], *, fitted: bool) -> Tensor:
    """Return the coordinates (n, k) that explain the releases of rows, with a prior of variance one.

    Args:
        models: of the same rows.
        weights: (S, k + 1, d) of each model.
        fitted: whether only rows that fit the models are placed; others are then at zero.
    """
    n, k = models[0].releases.n_rows, weights[0].shape[1] - 1
    upper = torch.triu_indices(k, k, device=weights[0].device)
    squares, products = weights[0].new_zeros(n, upper.shape[1]), weights[0].new_zeros(n, k)
    for model, function in zip(models, weights, strict=True):
        releases = model.of_fitted if fitted else _ByRow(model.releases)
        slopes, constant = function[:, :k], function[:, k]
        squares += releases.add((slopes @ slopes.mT)[:, upper[0], upper[1]]) / model.noise
        explained = -releases.add((slopes @ constant[:, :, None])[..., 0])
        for unit in range(function.shape[2]):
            explained += releases.add(slopes[..., unit].contiguous(), releases.values[:, unit].contiguous())
        products += explained / model.noise
    full = squares.new_zeros(n, k, k)
    full[:, upper[0], upper[1]] = full[:, upper[1], upper[0]] = squares
    return torch.as_tensor(torch.linalg.solve(full + torch.eye(k, dtype=full.dtype, device=full.device), products))


def group_by_size(keys: Tensor) -> list[tuple[Tensor, Tensor]]:
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
    band[0] += RIDGE * (band[0].mean() + rate)
    flat = products.reshape(n * k, d).cpu().numpy()
    models = solveh_banded(band.reshape(len(band), -1), flat, lower=True, check_finite=False)
    return torch.from_numpy(models).view(n, k, d).to(products)


def complete_coordinates(releases: Sequence[Releases], coordinates: Tensor, usual: Tensor, *, order: int = 2) -> Tensor:
    """Return coordinates (n, k) of rows, of which the values in each message are most nearly a linear function.

    Components of aligned releases mix errors of interpolation into what they say least about. Alternating least squares
    fits each message as it was sent: its function given the coordinates, then the coordinates given all functions.
    Functions change little from message to message, as much as the releases say. The memory is that of n k^2 numbers
    and of the releases.

    Source: Koren, Bell, Volinsky 2009, "Matrix factorization techniques for recommender systems".

    Args:
        releases: of each sender and phase, about the same rows.
        coordinates: (n, k) to begin with.
        usual: (n,) rows that may fit the functions; others are placed by them only.
        order: of the changes from message to message that are small: 1, or 2 for changes of changes.
    """
    fitted = torch.zeros_like(usual)
    candidates = torch.nonzero(usual)[:, 0]
    fitted[candidates[:: -(-len(candidates) // MAX_FITTED_ROWS)]] = True
    models = [_ReleaseModel(part, fitted, order) for part in releases]
    z = _whiten(coordinates, fitted)
    for _ in range(SWEEPS):
        before = [model.noise for model in models]
        weights = [model.fit(F.pad(z, (0, 1), value=1.0)) for model in models]
        if all(model.noise >= MAX_NOISE_RATIO * noise for model, noise in zip(models, before, strict=True)):
            break
        z = _whiten(place_rows(models, weights, fitted=True), fitted)
    return _whiten(place_rows(models, weights, fitted=False), fitted)


def _whiten(x: Tensor, usual: Tensor) -> Tensor:
    """Return ``x`` (n, k) with covariance one among ``usual`` rows, turned as little as that allows."""
    centered = x - x[usual].mean(dim=0)
    variances, axes = torch.linalg.eigh(centered[usual].T @ centered[usual] / usual.sum())
    scales = variances.clamp_min((NEGLIGIBLE * variances[-1]).clamp_min(torch.finfo(x.dtype).tiny)).sqrt()
    return torch.as_tensor(centered @ (axes / scales) @ axes.T)
