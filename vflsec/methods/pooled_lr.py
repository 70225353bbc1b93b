"""Logistic regression on pooled columns."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor, nn

from vflsec.base.seeds import derive
from vflsec.core.federation import Federation
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.pooled_method import PooledMethod

PENALTIES = np.logspace(-4, 2, 7)
ITERATIONS = 2000


class PooledLogisticRegression(PooledMethod):
    """L2-regularised logistic regression on the columns of all parties, of the labeled aligned rows.

    Columns are taken as the parties' networks get them: standardized numbers and one-hot categories. The penalty C is
    chosen among 10^-4 .. 10^2 by log loss on stratified folds of the training rows; no other row is looked at. It is
    multinomial where there are more than two classes.

    Source: the baseline LR of PrADA (Kang et al. 2022), table I; common practice.

    Args:
        train: not read.
        model: not read.
        columns: ``all``, or ``active`` for the active party's own alone.
        folds: of the search for C; fewer where a class has fewer training rows, none (C = 1) below two.
    """

    name = "lr"
    reference = "Kang et al. 2022 (PrADA), table I, baseline LR; scikit-learn's LogisticRegression"
    differs = (
        "Categories are one-hot, and the penalty is chosen by log loss on folds; the paper names neither encoding "
        "nor penalty.",
    )

    def __init__(
        self, train: TrainSpec, model: ModelSpec, *, columns: Literal["all", "active"] = "all", folds: int = 5
    ) -> None:
        super().__init__(train, model, columns=columns)
        self.folds = folds

    def build_model(self, columns: int, n_classes: int) -> nn.Module:
        """Return the linear map; in double precision, as it is fitted."""
        return _Linear(columns, n_classes)

    def fit_model(self, model: nn.Module, federation: Federation) -> None:
        """Choose C on folds, then fit on all training rows."""
        x, y = self.pooled(federation, "train").cpu().double().numpy(), federation.active.labels["train"].cpu().numpy()
        folds = min(self.folds, int(np.bincount(y).min()))
        penalty = self._penalty(x, y, folds, derive(federation.seed, "folds") % 2**32) if folds > 1 else 1.0
        found = LogisticRegression(C=penalty, max_iter=ITERATIONS).fit(x, y)
        assert isinstance(model, _Linear)
        model.take(found.coef_, found.intercept_)

    def _penalty(self, x: np.ndarray, y: np.ndarray, folds: int, seed: int) -> float:
        split = StratifiedKFold(folds, shuffle=True, random_state=seed)
        estimator = LogisticRegression(max_iter=ITERATIONS)
        search = GridSearchCV(estimator, {"C": PENALTIES}, scoring="neg_log_loss", cv=split, refit=False)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # a fit that has not converged is judged by its log loss
            return float(search.fit(x, y).best_params_["C"])


class _Linear(nn.Module):
    """Weights (C, d) and intercepts (C,); with two classes the first has zeros."""

    weight: Tensor
    intercept: Tensor

    def __init__(self, columns: int, n_classes: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(n_classes, columns, dtype=torch.float64))
        self.register_buffer("intercept", torch.zeros(n_classes, dtype=torch.float64))

    def take(self, coefficients: np.ndarray, intercepts: np.ndarray) -> None:
        """Take what scikit-learn found: one row for each class, or one alone, of class 1 against class 0."""
        rows = slice(-len(intercepts), None)
        self.weight[rows] = torch.from_numpy(coefficients).to(self.weight)
        self.intercept[rows] = torch.from_numpy(intercepts).to(self.intercept)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C)."""
        return (x.double() @ self.weight.T + self.intercept).float()
