"""Split order: the directions of rows at a party's splits order them by its columns."""

from __future__ import annotations

from statistics import NormalDist
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from vflsec.core.attack import Attack
from vflsec.core.layout import Column, Layout
from vflsec.core.view import Guess, Need, View
from vflsec.inference.column_regression import on_simplex
from vflsec.inference.trees.bounds import Bounds, bounds
from vflsec.inference.trees.sums import solved

FEWEST = 5
"""Auxiliary rows from which the values of quantiles are fitted."""


class SplitOrder(Attack):
    """Recovery of a party's columns from the side of its splits to which rows go, and from its histograms.

    The active party chooses a bin, by its number, and learns which rows go left. In an ordered column these have
    smaller values than the others, so that each split at another bin halves what is unknown. Over all trees each row
    has bounds on the quantile of each column. Of training rows histograms tell more, since the active party knows the
    derivatives that were added up: which rows are in a bin of few rows follows exactly
    (``vflsec.inference.peeling``), and the others obey linear equations (``vflsec.inference.trees.sums``). A category's
    bin tells which rows are of it.

    Quantiles become values by isotonic regression on the auxiliary rows, if there are at least 5, else by the quantiles
    of a normal distribution. A column that no tree splits has its mean.

    Source: Luo et al. 2021 (arXiv 2010.10152) restrict the paths of trees; Weng et al. 2020 (arXiv 2011.09290) read
    sums over rows with known derivatives.

    Args:
        victim: whose columns; None for the first other party.
    """

    name = "split-order"
    side = "active"
    target = "features"
    version = 2
    needs = frozenset({Need.NODES, Need.HISTOGRAMS})
    wants = frozenset({Need.HISTOGRAMS, Need.AUX_LABELS})
    reference = "Luo et al. 2021, arXiv 2010.10152; Weng et al. 2020, arXiv 2011.09290"
    verified = "the exact order of rows where a column is split at every bin; all bins from sums over small nodes"
    differs: ClassVar[tuple[str, ...]] = (
        "Luo et al. restrict the possible paths by a prediction; here the active party is told the path of each row.",
        "Luo et al. know thresholds; here bins are numbers without values, which auxiliary rows give.",
        "Weng et al. encode magic numbers in the derivatives they send; here the party follows the protocol.",
    )
    costs = "a search in each histogram, and one linear system with an equation for each of up to 1,000 sums"
    fails = "for columns that are split in few places, and if nodes are few and have many rows"

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return values (n, d) for every split."""
        victim = view.victim or self.victim or next(name for name in view.parties if name not in view.party.split("+"))
        layout = view.layout or Layout.numeric(view.n_classes)
        known = bounds(view, victim)
        n_known = len(view.aux_rows)
        mean = view.aux_labels.double().mean(dim=0).cpu().numpy() if n_known else np.zeros(layout.width)
        found = {s: np.tile(mean, (len(x), 1)) for s, x in view.features.items()}
        if known is None:
            return Guess({s: torch.from_numpy(x) for s, x in found.items()})
        numbers = {**known.expected, view.aux_split: solved(view, victim, known)}
        for number, column in enumerate(layout.columns):
            own = [u for u, unit in enumerate(known.units) if unit.column == number]
            if not own:
                continue
            if known.units[own[0]].ordered:
                self._number(found, numbers, known, own[0], column, view)
            elif len(own) <= column.width:  # the first slot is of categories that no training row has
                place = slice(column.start + column.width - len(own), column.start + column.width)
                for s, x in found.items():
                    x[:, column.start : column.start + column.width] = 0
                    x[:, place] = numbers[s][:, own]
        values = {s: on_simplex(torch.from_numpy(x), layout) for s, x in found.items()}
        return Guess(values, budget={"units": len(known.units)})

    def _number(
        self,
        found: dict[str, NDArray[np.float64]],
        numbers: dict[str, NDArray[np.float64]],
        known: Bounds,
        unit: int,
        column: Column,
        view: View,
    ) -> None:
        """Set the values of a numeric column, unless no tree says anything of it."""
        lowest, highest = known.lowest[view.aux_split][:, unit], known.highest[view.aux_split][:, unit]
        if np.ptp(lowest) == 0 and np.ptp(highest) == 0:
            return
        rows = view.aux_rows.cpu().numpy()
        if len(rows) >= FEWEST:
            values = view.aux_labels[:, column.start].cpu().double().numpy()
            fitted = IsotonicRegression(out_of_bounds="clip").fit(numbers[view.aux_split][rows, unit], values)
            for s, x in found.items():
                x[:, column.start] = fitted.predict(numbers[s][:, unit])
            return
        normal = np.vectorize(NormalDist().inv_cdf)
        for s, x in found.items():
            x[:, column.start] = normal(numbers[s][:, unit].clip(1e-6, 1 - 1e-6))
