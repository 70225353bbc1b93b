"""Imputation: the victim's columns from one's own, as any party could guess them without a federation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.neural_network import MLPRegressor
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.checks import one_of, positive
from vflsec.core.layout import Layout
from vflsec.core.view import Guess, Need, View

PENALTIES = np.logspace(-1, 5, 13)
ENOUGH = 300
"""Auxiliary rows from which on a network may beat ridge regression; on fewer it costs time and never did."""

FEWEST = 9
"""Auxiliary rows of which a third can be left out to compare both."""

Inputs = dict[str, Tensor]
Model = Literal["ridge", "mlp", "better"]


class Imputation(Attack):
    """Recovery of the victim's columns from one's own, fitted on auxiliary rows; it hears no message.

    Its leak is a prior: columns of two parties about the same people are correlated, and whoever holds some complete
    rows knows how. It is *alone* beside every attack on columns.

    *ridge*: y = W x + b with ||Y - X W||^2 + alpha_j ||w_j||^2, one alpha of 10^-1 .. 10^5 for each column j by its
    leave-one-out error; the largest is as good as guessing the mean. *mlp*: a network with one hidden layer. None:
    ridge up to 300 auxiliary rows; beyond, as *better*: for each column the one that is better on a third of them.
    One-hot columns are then projected onto the simplex, which can only bring them nearer to the truth.

    x (n, p) is standardized by all training rows, y is (n, d) encoded. Costs 0.02 s, a network a few seconds. Fails
    where the parties' columns are independent, and where auxiliary rows are fewer than what it takes to see a
    dependence.

    Source: common practice.

    Args:
        model: ``ridge``, ``mlp``, ``better``, or None.
        hidden: width of the network's hidden layer.
    """

    name = "imputation"
    baseline = True
    side = "either"
    target = "features"
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of attacks on columns"
    verified = "scikit-learn's own estimators"
    differs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, victim: str | None = None, model: Model | None = None, hidden: int = 32) -> None:
        if model is not None:
            one_of(("ridge", "mlp", "better"), model=model)
        positive(hidden=hidden)
        self.victim = victim
        self.model = model
        self.hidden = hidden

    def alone(self) -> Attack | None:
        """Return the attack itself, for it is what an adversary can do alone."""
        return Imputation(victim=self.victim, model=self.model, hidden=self.hidden)

    def inputs(self, view: View) -> list[Inputs]:
        """Return what the victim's columns are regressed on, (n, p) by split.

        Each table has a regression of its own, fitted on its auxiliary rows; of a split that several have the last one
        counts.
        """
        return [dict(view.features)]

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every row of which something is known."""
        tables = [standardized(inputs, view) for inputs in self.inputs(view)]
        known, y = view.aux_rows.cpu().numpy(), view.aux_labels.cpu().double().numpy()
        values: dict[str, np.ndarray] = {}
        seed = int(torch.randint(2**31, (), generator=rng))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            for x in tables:
                values |= self._regressed(x, known, y, seed)
        unfinished = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        found = {split: on_simplex(torch.from_numpy(y), view.layout) for split, y in values.items()}
        return Guess(found, converged=not unfinished)

    def _regressed(
        self, x: Mapping[str, np.ndarray], known: np.ndarray, y: np.ndarray, seed: int
    ) -> dict[str, np.ndarray]:
        models: list[Literal["ridge", "mlp"]] = ["mlp" if self.model == "mlp" else "ridge"]
        if (self.model == "better" and len(y) >= FEWEST) or (self.model is None and len(y) >= ENOUGH):
            models = ["ridge", "mlp"]
        fitted = [self._predictions(model, x, x["train"][known], y, seed) for model in models]
        if len(models) == 1:
            return fitted[0]
        held_out = np.random.default_rng(seed).permutation(len(y)) < len(y) // 3
        rows = {"held out": x["train"][known[held_out]]}
        trials = [self._predictions(m, rows, x["train"][known[~held_out]], y[~held_out], seed) for m in models]
        errors = [((trial["held out"] - y[held_out]) ** 2).mean(axis=0) for trial in trials]
        better = errors[1] < errors[0]  # (d,)
        return {split: np.where(better, fitted[1][split], fitted[0][split]) for split in x}

    def _predictions(
        self, model: Literal["ridge", "mlp"], x: Mapping[str, np.ndarray], known: np.ndarray, y: np.ndarray, seed: int
    ) -> dict[str, np.ndarray]:
        if len(y) < 3:  # nothing to choose a penalty with
            return {split: np.broadcast_to(y.mean(axis=0), (len(rows), y.shape[1])).copy() for split, rows in x.items()}
        if model == "ridge":
            regression = RidgeCV(PENALTIES, alpha_per_target=y.shape[1] > 1)
        else:
            sizes = (self.hidden,)
            regression = MLPRegressor(
                hidden_layer_sizes=sizes, alpha=1.0, solver="lbfgs", max_iter=1000, random_state=seed
            )
        regression.fit(known, y if y.shape[1] > 1 else y[:, 0])
        return {split: regression.predict(rows).reshape(len(rows), -1) for split, rows in x.items()}


def standardized(inputs: Inputs, view: View) -> dict[str, np.ndarray]:
    """Return inputs (n, p) at zero mean and unit deviation over the rows among which the auxiliary ones are."""
    reference = inputs[view.aux_split].double()
    mean, deviation = reference.mean(dim=0), reference.std(dim=0, correction=0).clamp_min(1e-12)
    return {split: ((x - mean) / deviation).cpu().numpy() for split, x in inputs.items()}


def missed(x: Tensor, view: View) -> float:
    """Return the mean squared error of ridge regression on x (n, p) of auxiliary rows that were left out, one by one.

    Zero below three auxiliary rows, which tell nothing.
    """
    if len(view.aux_rows) < 3:
        return 0.0
    known = standardized({view.aux_split: x}, view)[view.aux_split][view.aux_rows.cpu().numpy()]
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
