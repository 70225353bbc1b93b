"""Columns of a party from the sides of its splits and its histograms."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.core.view import View
from vflsec.inference.column_regression import on_simplex
from vflsec.inference.trees.bounds import Bounds, bounds
from vflsec.inference.trees.sums import solved

Floats = NDArray[np.float64]

FEWEST = 5
"""Auxiliary rows from which the values of quantiles are fitted."""


def recovered(view: View, victim: str) -> dict[str, Tensor]:
    """Return the columns (n, d) of ``victim`` by split; the mean of the auxiliary rows where nothing is known.

    Numbers of training rows agree with histograms, those of other rows lie between bounds only. Quantiles become values
    by isotonic regression on the auxiliary rows, if there are at least 5, else by the quantiles of a normal
    distribution.

    Args:
        view: of the active party.
        victim: whose columns.
    """
    return {**between_bounds(view, victim), view.aux_split: by_histograms(view, victim)}


def by_histograms(view: View, victim: str) -> Tensor:
    """Return the columns (n, d) of training rows, in accordance with bounds and histograms."""
    known = bounds(view, victim)
    numbers = {} if known is None else {view.aux_split: solved(view, victim, known)}
    return _values(view, known, numbers)[view.aux_split]


def between_bounds(view: View, victim: str) -> dict[str, Tensor]:
    """Return the columns (n, d) of all rows by split, in accordance with bounds."""
    known = bounds(view, victim)
    return _values(view, known, {} if known is None else known.expected)


def _values(view: View, known: Bounds | None, numbers: Mapping[str, Floats]) -> dict[str, Tensor]:
    layout = view.layout or Layout.numeric(view.n_classes)
    mean = view.aux_labels.double().mean(dim=0).cpu().numpy() if len(view.aux_rows) else np.zeros(layout.width)
    found = {s: np.tile(mean, (len(view.features[s]), 1)) for s in numbers or view.features}
    if known is None:
        return {s: torch.from_numpy(x) for s, x in found.items()}
    for number, column in enumerate(layout.columns):
        own = [u for u, unit in enumerate(known.units) if unit.column == number]
        if own and known.units[own[0]].ordered:
            if _is_split(known, own[0], view.aux_split):
                for s, x in found.items():
                    x[:, column.start] = _valued(
                        numbers[s][:, own[0]], numbers[view.aux_split][:, own[0]], column, view
                    )
        elif own and len(own) <= column.width:  # the first slot is of categories that no training row has
            place = slice(column.start + column.width - len(own), column.start + column.width)
            for s, x in found.items():
                x[:, column.start : column.start + column.width] = 0
                x[:, place] = numbers[s][:, own]
    return {s: on_simplex(torch.from_numpy(x), layout) for s, x in found.items()}


def _is_split(known: Bounds, unit: int, split: str) -> bool:
    """Whether any tree says anything of a number."""
    return any(float(np.ptp(one[split][:, unit])) > 0 for one in (known.lowest, known.highest))


def _valued(numbers: Floats, of_training: Floats, column: EncodedColumn, view: View) -> Floats:
    """Return the values of quantiles (n,), by those of the training rows (m,) that are as well known."""
    rows = view.aux_rows.cpu().numpy()
    if len(rows) < FEWEST:
        normal: Floats = np.vectorize(NormalDist().inv_cdf)(numbers.clip(1e-6, 1 - 1e-6))
        return normal
    values = view.aux_labels[:, column.start].cpu().double().numpy()
    found: Floats = IsotonicRegression(out_of_bounds="clip").fit(of_training[rows], values).predict(numbers)
    return found
