"""References on pooled columns, as if one party had the columns of all."""

import warnings
from abc import abstractmethod
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor, nn

from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import derive
from vflsec.core.federation import Federation
from vflsec.core.method import Method, Progress
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec


class PooledMethod(Method):
    """A classical model of the columns of all parties side by side, of the labeled aligned rows.

    A reference for utility, and no federation: it assumes that all columns are in one place. No message is sent,
    there is no adversary, and no defense acts. Parties have no model of their own; their representation is
    their columns.

    Args:
        train: not read: these models have settings of their own.
        model: not read.
        columns: ``all``, or ``active`` for the active party's own alone: what it reaches without a federation.
    """

    messages = {"train": frozenset()}  # noqa: RUF012  (declared ClassVar in the base class)
    receives = {}  # noqa: RUF012

    def __init__(self, train: TrainSpec, model: ModelSpec, *, columns: Literal["all", "active"] = "all") -> None:
        super().__init__(train, model)
        self.columns = columns

    @abstractmethod
    def build_model(self, columns: int, n_classes: int) -> nn.Module:
        """Return the module (B, columns) -> logits (B, C) that holds what is learned, as tensors; not yet fitted."""

    @abstractmethod
    def fit_model(self, model: nn.Module, federation: Federation) -> None:
        """Fit ``model`` on the training rows of ``pooled``."""

    def build(self, federation: Federation) -> None:
        """Give the active party, who has the labels, the model."""
        columns = sum(party.n_features for party in self._read(federation))
        federation.active.modules["pooled"] = self.build_model(columns, federation.n_classes).to(federation.device)

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Fit the model and return its mean loss on the training rows."""
        for party in self._read(federation):
            if not torch.isfinite(party.features["train"]).all():
                raise Diverged(f"{self.name} expects finite columns, got nan or infinity at {party.name}")
        self.fit_model(federation.active.modules["pooled"], federation)
        loss = float(nn.functional.cross_entropy(self.predict(federation, "train"), federation.active.labels["train"]))
        if not loss < float("inf"):
            raise Diverged(f"the loss of {self.name} is {loss}")
        progress(phase, 1, 1)
        return [loss]

    @torch.no_grad()
    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return log-probabilities (n, C)."""
        logits: Tensor = federation.active.modules["pooled"](self.join_columns(federation, split))
        return logits.log_softmax(dim=1)

    def representation(self, party: Party) -> nn.Module:
        """Return the identity: a party has its columns and no model."""
        return nn.Identity()

    def join_columns(self, federation: Federation, split: str) -> Tensor:
        """Return the columns that are read, side by side (n, sum of d), the active party's first."""
        return torch.cat([party.features[split] for party in self._read(federation)], dim=1)

    def _read(self, federation: Federation) -> list[Party]:
        return [federation.active] if self.columns == "active" else list(federation.parties.values())


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
        penalty: C; None for the search.
    """

    name = "lr"
    reference = "Kang et al. 2022 (PrADA), table I, baseline LR; scikit-learn's LogisticRegression"
    differs = (
        "Categories are one-hot, and the penalty is chosen by log loss on folds; the paper names neither encoding "
        "nor penalty.",
    )
    search = {"penalty": (1e-4, 1e2)}  # noqa: RUF012

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        columns: Literal["all", "active"] = "all",
        folds: int = 5,
        penalty: float | None = None,
    ) -> None:
        super().__init__(train, model, columns=columns)
        check_positive_or_none(penalty=penalty)
        self.folds, self.penalty = folds, penalty

    def build_model(self, columns: int, n_classes: int) -> nn.Module:
        """Return the linear map; in double precision, as it is fitted."""
        return _LogisticModel(columns, n_classes)

    def fit_model(self, model: nn.Module, federation: Federation) -> None:
        """Choose C on folds, then fit on all training rows."""
        x = self.join_columns(federation, "train").cpu().double().numpy()
        y = federation.active.labels["train"].cpu().numpy()
        folds = min(self.folds, int(np.bincount(y).min()))
        penalty = self.penalty
        if penalty is None and folds > 1:
            penalty = self._choose_penalty(x, y, folds, derive(federation.seed, "folds") % 2**32)
        regression = LogisticRegression(C=penalty or 1.0, max_iter=ITERATIONS).fit(x, y)
        assert isinstance(model, _LogisticModel)
        model.take(regression.coef_, regression.intercept_)

    def _choose_penalty(self, x: np.ndarray, y: np.ndarray, folds: int, seed: int) -> float:
        split = StratifiedKFold(folds, shuffle=True, random_state=seed)
        estimator = LogisticRegression(max_iter=ITERATIONS)
        search = GridSearchCV(estimator, {"C": PENALTIES}, scoring="neg_log_loss", cv=split, refit=False)
        with warnings.catch_warnings():
            # a fit that has not converged is judged by its log loss
            warnings.simplefilter("ignore", ConvergenceWarning)
            return float(search.fit(x, y).best_params_["C"])


class _LogisticModel(nn.Module):
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


class PooledLightGBM(PooledMethod):
    """Gradient-boosted decision trees on the columns of all parties, of the labeled aligned rows.

    Columns are taken as the parties' networks get them: a category is its one-hot columns, of which LightGBM makes one
    bundle again. Defaults are LightGBM's own, for the paper states none. Where there are validation rows, the trees up
    to the best log loss on them are kept, else all. Needs the extra ``bench``: lightgbm.

    Federated boosting without loss, as SecureBoost (Cheng et al. 2021) is, grows the trees that one party with all
    columns would: of the utility of SecureBoost this is the measure.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section V, the baseline LGB; Ke et al. 2017.

    Args:
        train: not read.
        model: not read.
        columns: ``all``, or ``active`` for the active party's own alone.
        rounds: trees, of each class where there are more than two.
        learning_rate: shrinkage of each tree.
        leaves: at most, of each tree.
        leaf_rows: at least, in each leaf.
        patience: rounds without a better log loss on validation rows after which no tree is added.
    """

    name = "lightgbm"
    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, baseline LGB; Ke et al. 2017 (LightGBM)"
    differs = (
        "Categories are one-hot, and rounds, leaves and rate are LightGBM's defaults; the paper names no settings.",
    )
    search = {"rounds": (10, 300), "leaves": (4, 64)}  # noqa: RUF012

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        columns: Literal["all", "active"] = "all",
        rounds: int = 100,
        learning_rate: float = 0.1,
        leaves: int = 31,
        leaf_rows: int = 20,
        patience: int = 20,
    ) -> None:
        super().__init__(train, model, columns=columns)
        check_positive(rounds=rounds, learning_rate=learning_rate, leaf_rows=leaf_rows, patience=patience)
        if leaves < 2:
            raise UsageError(f"expected leaves >= 2, got {leaves}: a tree with one leaf splits nothing")
        self.rounds = rounds
        self.learning_rate = learning_rate
        self.leaves = leaves
        self.leaf_rows = leaf_rows
        self.patience = patience

    def build_model(self, columns: int, n_classes: int) -> nn.Module:
        """Return the module that holds the trees, none as yet."""
        return _LightGBMText(n_classes)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if LightGBM is not installed."""
        _import_lightgbm()

    def fit_model(self, model: nn.Module, federation: Federation) -> None:
        """Grow the trees on one thread, so that the sums in them do not depend on how many there are."""
        lightgbm, labels = _import_lightgbm(), federation.active.labels
        several = federation.n_classes > 2
        parameters = {
            "objective": "multiclass" if several else "binary",
            "num_class": federation.n_classes if several else 1,
            "learning_rate": self.learning_rate,
            "num_leaves": self.leaves,
            "min_data_in_leaf": self.leaf_rows,
            "seed": derive(federation.seed, "lightgbm") % 2**31,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": 1,
            "verbosity": -1,
        }
        sets = {
            split: lightgbm.Dataset(self.join_columns(federation, split).cpu().numpy(), labels[split].cpu().numpy())
            for split in ("train", "val")
            if federation.n_rows(split)
        }
        held_out = [sets["val"]] if "val" in sets else []
        stop = [lightgbm.early_stopping(self.patience, verbose=False)] if held_out else []
        booster = lightgbm.train(parameters, sets["train"], self.rounds, valid_sets=held_out, callbacks=stop)
        assert isinstance(model, _LightGBMText)
        model.take(booster.model_to_string())  # up to the best round, where one was chosen


class _LightGBMText(nn.Module):
    """LightGBM's own text of a model, as bytes, so that it is stored as every other model is."""

    text: Tensor

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.register_buffer("text", torch.empty(0, dtype=torch.uint8))

    def take(self, text: str) -> None:
        """Keep the model in ``text``."""
        self.text = torch.tensor(np.frombuffer(text.encode(), dtype=np.uint8), device=self.text.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C); of two classes the first has zeros."""
        booster = _import_lightgbm().Booster(model_str=self.text.cpu().numpy().tobytes().decode())
        scores = torch.from_numpy(booster.predict(x.cpu().numpy(), raw_score=True, num_threads=1))
        scores = scores if self.n_classes > 2 else torch.stack([torch.zeros_like(scores), scores], dim=1)
        return scores.float().to(x.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make room first: the length of the text is known only after training."""
        stored = state_dict.get(f"{prefix}text")
        if stored is not None:
            self.text = torch.empty_like(stored, device=self.text.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _import_lightgbm() -> Any:
    try:
        return import_module("lightgbm")  # imported where it is needed: an extra
    except ModuleNotFoundError:
        raise UsageError("method lightgbm needs lightgbm: pip install 'vflsec[bench]'") from None
