"""Columns of a party from the sides of its splits and its histograms."""

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.core.view import View, memoize
from vflsec.inference.opinion_pool import Opinion
from vflsec.inference.regression import project_categories, project_simplex
from vflsec.inference.trees.bounds import ColumnBounds, find_bounds
from vflsec.inference.trees.histograms import list_equations
from vflsec.inference.trees.nodes import Floats

PROJECTIONS = 60
CLOSE = 1e-6
"""Error of all equations, in units of their length, at which projections end."""

RIDGE = 1e-9
FORBIDDEN = -1e9
"""Takes the place of the share of a bin in which a row cannot be; all others are far above it."""

MIN_QUANTILE_ROWS = 5
"""Auxiliary rows from which the values of quantiles are fitted."""

TREES, LEAF = 100, 2
MAX_FITTED_ROWS = 5000
"""Training rows that are learned from, drawn among all that are not auxiliary."""


@memoize
def solve_bins(view: View, victim: str) -> Floats:
    """Return numbers (n, U) of training rows that agree with bounds and with the sums over nodes that ``victim`` sent.

    A histogram holds, for each bin, the sum of a derivative w over the rows of a node that are in the bin. The active
    party knows w and the rows of the node: a linear equation in the shares (n, V) with which rows are in each bin, and
    so are numbers of rows, with w = 1. For each column, projections on the equations and on the shares that bounds
    allow, which sum to one, alternate. They start from the shares of all rows in the bins between the bounds. The
    number of a row is the mean over its bins.
    """
    known = find_bounds(view, victim)
    assert known is not None
    in_order = dict.fromkeys(unit.column for unit in known.units)
    columns = [[u for u, unit in enumerate(known.units) if unit.column == j] for j in in_order]
    ranges = [np.arange(known.units[units[0]].first, known.units[units[-1]].last + 1) for units in columns]
    of_bins = np.repeat(np.arange(len(columns)), [len(bins) for bins in ranges])
    all_rows, all_sums, holds = list_equations(view, victim, of_bins)
    numbers = known.expected[view.aux_split].copy()
    length = np.linalg.norm(all_rows, axis=1, keepdims=True).clip(np.finfo(float).tiny)
    all_rows, all_sums = all_rows / length, all_sums / length
    before = np.zeros(0, dtype=bool)
    for units, bins, here in zip(columns, ranges, holds.T, strict=True):
        if not here.any():
            continue
        if not np.array_equal(here, before):  # columns have the same equations, unless trees draw some of them
            before, rows = here, all_rows[here]
            gram = rows @ rows.T
            step = rows.T @ np.linalg.pinv(gram + RIDGE * np.eye(len(gram)), rcond=1e-7, hermitian=True)  # (n, E)
        sums = all_sums[here]
        allowed = _find_allowed_bins(known, view.aux_split, units, bins)
        x = allowed * known.mass[bins].clip(np.finfo(float).tiny)
        x /= x.sum(axis=1, keepdims=True)
        for _ in range(PROJECTIONS):
            missing = sums[:, bins] - rows @ x
            if np.abs(missing).max() < CLOSE:
                break
            x = _project(x + step @ missing, allowed)
        numbers[:, units] = x @ known.weights[bins][:, units]
    return numbers


def _project(x: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Return the nearest shares (n, k) that are at least 0, sum to one in each row and are 0 where not ``allowed``."""
    return project_simplex(torch.from_numpy(np.where(allowed, x, FORBIDDEN))).numpy()


def _find_allowed_bins(known: ColumnBounds, split: str, units: list[int], bins: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each row can be in each bin (n, k) of one column; in all of them where bounds disagree."""
    lowest, highest = known.lowest[split][:, units], known.highest[split][:, units]
    if known.units[units[0]].ordered:
        middle = known.weights[bins, units[0]]
        possible = (lowest <= middle) & (middle <= highest)
    else:
        possible = highest > 0
    none = ~possible.any(axis=1, keepdims=True)
    return possible | none  # type: ignore[no-any-return]


def recover_columns(view: View, victim: str) -> dict[str, Tensor]:
    """Return the columns (n, d) of ``victim`` by split; the mean of the auxiliary rows where nothing is known.

    Numbers of training rows agree with histograms, those of other rows lie between bounds only. Quantiles become values
    by isotonic regression on the auxiliary rows, if there are at least 5, else by the quantiles of a normal
    distribution.
    """
    return {**fill_between(view, victim), view.aux_split: solve_histograms(view, victim)}


def solve_histograms(view: View, victim: str) -> Tensor:
    """Return the columns (n, d) of training rows, in accordance with bounds and histograms."""
    known = find_bounds(view, victim)
    numbers = {} if known is None else {view.aux_split: solve_bins(view, victim)}
    return _fill_values(view, known, numbers)[view.aux_split]


def fill_between(view: View, victim: str) -> dict[str, Tensor]:
    """Return the columns (n, d) of all rows by split, in accordance with bounds."""
    known = find_bounds(view, victim)
    return _fill_values(view, known, {} if known is None else known.expected)


def _fill_values(view: View, known: ColumnBounds | None, numbers: Mapping[str, Floats]) -> dict[str, Tensor]:
    layout = view.layout or Layout.numeric(view.n_classes)
    mean = view.aux_labels.double().mean(dim=0).cpu().numpy() if len(view.aux_rows) else np.zeros(layout.width)
    values = {s: np.tile(mean, (len(view.features[s]), 1)) for s in numbers or view.features}
    if known is None:
        return {s: torch.from_numpy(x) for s, x in values.items()}
    for number, column in enumerate(layout.columns):
        units = [u for u, unit in enumerate(known.units) if unit.column == number]
        if units and known.units[units[0]].ordered:
            of_training = numbers[view.aux_split][:, units[0]]
            if any(np.ptp(x[view.aux_split][:, units[0]]) > 0 for x in (known.lowest, known.highest)):  # it is split
                for s, x in values.items():
                    x[:, column.start] = _map_quantiles(numbers[s][:, units[0]], of_training, column, view)
        elif units and len(units) <= column.width:  # the first slot is of categories that no training row has
            place = slice(column.start + column.width - len(units), column.start + column.width)
            for s, x in values.items():
                x[:, column.start : column.start + column.width] = 0
                x[:, place] = numbers[s][:, units]
    return {s: project_categories(torch.from_numpy(x), layout) for s, x in values.items()}


def _map_quantiles(quantiles: Floats, of_training: Floats, column: EncodedColumn, view: View) -> Floats:
    """Return the values of quantiles (n,), by those of the training rows (m,) that are as well known."""
    rows = view.aux_rows.cpu().numpy()
    if len(rows) < MIN_QUANTILE_ROWS:
        return np.asarray(np.vectorize(NormalDist().inv_cdf)(quantiles.clip(1e-6, 1 - 1e-6)))
    values = view.aux_labels[:, column.start].cpu().double().numpy()
    isotonic = IsotonicRegression(out_of_bounds="clip").fit(of_training[rows], values)
    return np.asarray(isotonic.predict(quantiles))


def learn_columns(view: View, victim: str, rng: torch.Generator) -> dict[str, list[Opinion]]:
    """Return two opinions on the columns of ``victim`` for each split but the training rows.

    Randomized trees are fitted to the columns (n, d) that were recovered for training rows. One forest reads the own
    columns, the other also the bounds that follow from splits. The auxiliary rows are left out of both.
    """
    known, device = find_bounds(view, victim), view.aux_rows.device
    assert known is not None
    targets = solve_histograms(view, victim).numpy()
    auxiliary = view.aux_rows.cpu().numpy()
    rows = np.setdiff1d(np.arange(len(targets)), auxiliary)
    rows = rows[torch.randperm(len(rows), generator=rng)[:MAX_FITTED_ROWS].numpy()]
    opinions: dict[str, list[Opinion]] = {split: [] for split in view.features if split != view.aux_split}
    if not len(rows):
        return opinions
    columns = {split: x.cpu().double().numpy() for split, x in view.features.items()}
    both = {split: np.hstack([x, known.expected[split]]) for split, x in columns.items()}
    for x in (columns, both):
        seed = int(torch.randint(2**31, (), generator=rng))
        forest = ExtraTreesRegressor(TREES, min_samples_leaf=LEAF, random_state=seed)
        forest.fit(x[view.aux_split][rows], targets[rows, 0] if targets.shape[1] == 1 else targets[rows])
        held_out = _predict(forest, x[view.aux_split][auxiliary]).to(device)
        for split, guesses in opinions.items():
            guesses.append(Opinion(_predict(forest, x[split]).to(device), held_out))
    return opinions


def _predict(forest: ExtraTreesRegressor, x: Floats) -> Tensor:
    return torch.from_numpy(forest.predict(x).reshape(len(x), -1))
