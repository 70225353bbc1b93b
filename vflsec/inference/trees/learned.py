"""Columns of rows in no histogram, learned from training rows whose columns histograms give away."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from vflsec.core.view import View
from vflsec.inference.opinion_pool import Opinion
from vflsec.inference.trees.bounds import bounds
from vflsec.inference.trees.values import by_histograms

TREES = 100
LEAF = 2
MOST = 5000
"""Training rows that are learned from, drawn among all that are not auxiliary."""


def learned(view: View, victim: str, rng: torch.Generator) -> dict[str, list[Opinion]]:
    """Return two opinions on the columns of ``victim`` for each split but the training rows.

    Randomized trees are fitted to the columns (n, d) that were recovered for training rows. One forest reads the own
    columns, the other also the bounds that follow from splits. The auxiliary rows are left out of both.

    Args:
        view: of the active party, with bounds on the columns of ``victim``.
        victim: whose columns.
        rng: draws the rows and the trees.
    """
    known, device = bounds(view, victim), view.aux_rows.device
    assert known is not None
    targets = by_histograms(view, victim).numpy()
    rows = np.setdiff1d(np.arange(len(targets)), view.aux_rows.cpu().numpy())
    rows = rows[torch.randperm(len(rows), generator=rng)[:MOST].numpy()]
    others = [split for split in view.features if split != view.aux_split]
    found: dict[str, list[Opinion]] = {split: [] for split in others}
    if not len(rows):
        return found
    columns = {split: x.cpu().double().numpy() for split, x in view.features.items()}
    both = {split: np.hstack([x, known.expected[split]]) for split, x in columns.items()}
    for x in (columns, both):
        seed = int(torch.randint(2**31, (), generator=rng))
        forest = ExtraTreesRegressor(TREES, min_samples_leaf=LEAF, random_state=seed)
        forest.fit(x[view.aux_split][rows], targets[rows, 0] if targets.shape[1] == 1 else targets[rows])
        held_out = _predicted(forest, x[view.aux_split][view.aux_rows.cpu().numpy()])
        for split in others:
            found[split].append(Opinion(_predicted(forest, x[split]).to(device), held_out.to(device)))
    return found


def _predicted(forest: ExtraTreesRegressor, x: NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(forest.predict(x).reshape(len(x), -1))
