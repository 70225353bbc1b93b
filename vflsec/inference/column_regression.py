"""Regression of the victim's columns on tables of what an adversary knows about each row."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.neural_network import MLPRegressor
from torch import Tensor

from vflsec.base.layout import Layout
from vflsec.core.scaling import standardized
from vflsec.core.view import Guess, View
from vflsec.inference.regression import unfinished

PENALTIES = np.logspace(-6, 5, 23)

ENOUGH = 300
"""Auxiliary rows from which a network is compared with ridge regression; with fewer it does not pay."""

FEWEST = 9
"""Auxiliary rows from which a third can be held out to compare both."""

Inputs = dict[str, Tensor]
"""Columns (n, p) to regress on, by split."""

Model = Literal["ridge", "mlp", "better"]


def regressed_columns(
    tables: Sequence[Inputs], view: View, *, rng: torch.Generator, model: Model | None = None, hidden: int = 32
) -> Guess:
    """Return the victim's columns (n, d) for every split of ``tables``.

    Each table has a regression of its own, fitted to its auxiliary rows. The last table that covers a split counts.
    One-hot columns are projected onto the simplex, which can only reduce the error.

    Args:
        tables: inputs of the regressions.
        view: of the adversary.
        rng: draws the network's weights and the rows that are held out.
        model: ``ridge``: y = W x + b with ||Y - X W||^2 + alpha_j ||w_j||^2, where leave-one-out errors choose alpha_j
            for each column j. ``mlp``: a network with one hidden layer. ``better``: for each column, the one with the
            smaller error on a held-out third of the auxiliary rows. None: ``ridge`` below 300 auxiliary rows, else
            ``better``.
        hidden: width of the hidden layer.
    """
    known, y = view.aux_rows.cpu().numpy(), view.aux_labels.cpu().double().numpy()
    values: dict[str, np.ndarray] = {}
    seed = int(torch.randint(2**31, (), generator=rng))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        for inputs in tables:
            x = {split: standardized(one, inputs[view.aux_split]).cpu().numpy() for split, one in inputs.items()}
            values |= _regressed(x, known, y, model, hidden, seed)
    found = {split: on_simplex(torch.from_numpy(columns), view.layout) for split, columns in values.items()}
    return Guess(found, converged=not unfinished(caught))


def _regressed(
    x: Mapping[str, np.ndarray], known: np.ndarray, y: np.ndarray, model: Model | None, hidden: int, seed: int
) -> dict[str, np.ndarray]:
    """Return predictions (n, d) by split, of one model or of the better one for each column."""
    models: list[Literal["ridge", "mlp"]] = ["mlp" if model == "mlp" else "ridge"]
    if (model == "better" and len(y) >= FEWEST) or (model is None and len(y) >= ENOUGH):
        models = ["ridge", "mlp"]
    fitted = [_predictions(one, x, x["train"][known], y, hidden, seed) for one in models]
    if len(models) == 1:
        return fitted[0]
    held_out = np.random.default_rng(seed).permutation(len(y)) < len(y) // 3
    rows = {"held out": x["train"][known[held_out]]}
    trials = [_predictions(one, rows, x["train"][known[~held_out]], y[~held_out], hidden, seed) for one in models]
    errors = [((trial["held out"] - y[held_out]) ** 2).mean(axis=0) for trial in trials]
    better = errors[1] < errors[0]  # (d,)
    return {split: np.where(better, fitted[1][split], fitted[0][split]) for split in x}


def _predictions(
    model: Literal["ridge", "mlp"],
    x: Mapping[str, np.ndarray],
    known: np.ndarray,
    y: np.ndarray,
    hidden: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Return predictions (n, d) by split of one model, fitted to ``known`` (m, p) and ``y`` (m, d)."""
    if len(y) < 3:  # too few to choose a penalty
        return {split: np.broadcast_to(y.mean(axis=0), (len(rows), y.shape[1])).copy() for split, rows in x.items()}
    if model == "ridge":
        regression = RidgeCV(PENALTIES, alpha_per_target=y.shape[1] > 1)
    else:
        regression = MLPRegressor(
            hidden_layer_sizes=(hidden,), alpha=1.0, solver="lbfgs", max_iter=1000, random_state=seed
        )
    regression.fit(known, y if y.shape[1] > 1 else y[:, 0])
    return {split: regression.predict(rows).reshape(len(rows), -1) for split, rows in x.items()}


def missed(x: Tensor, view: View) -> float:
    """Return the leave-one-out mean squared error of ridge regression on ``x`` (n, p) for the auxiliary rows.

    Zero with fewer than three auxiliary rows.
    """
    if len(view.aux_rows) < 3:
        return 0.0
    known = standardized(x)[view.aux_rows].cpu().numpy()
    y = view.aux_labels.cpu().double().numpy()
    several = y.shape[1] > 1
    score = RidgeCV(PENALTIES, alpha_per_target=several).fit(known, y if several else y[:, 0]).best_score_
    return -float(np.mean(score))


def on_simplex(values: Tensor, layout: Layout | None) -> Tensor:
    """Return values (n, d) with each one-hot block at the nearest point whose entries are >= 0 and sum to one.

    Source: Duchi et al., ICML 2008, figure 1.
    """
    found = values.clone()
    for _, kind, start, width in layout.columns if layout else ():
        if kind == "categorical":
            block = values[:, start : start + width]
            descending = block.sort(dim=1, descending=True).values
            excess = (descending.cumsum(dim=1) - 1) / torch.arange(1, width + 1, device=block.device)  # (n, width)
            last = (descending > excess).sum(dim=1, keepdim=True) - 1
            found[:, start : start + width] = (block - excess.gather(1, last)).clamp_min(0)
    return found
