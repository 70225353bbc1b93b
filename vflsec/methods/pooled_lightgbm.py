"""Gradient-boosted trees on pooled columns, by LightGBM."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vflsec.base.checks import positive
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive
from vflsec.core.federation import Federation
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.pooled_method import PooledMethod


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
        positive(rounds=rounds, learning_rate=learning_rate, leaf_rows=leaf_rows, patience=patience)
        if leaves < 2:
            raise UsageError(f"expected leaves >= 2, got {leaves}: a tree with one leaf splits nothing")
        self.rounds = rounds
        self.learning_rate = learning_rate
        self.leaves = leaves
        self.leaf_rows = leaf_rows
        self.patience = patience

    def build_model(self, columns: int, n_classes: int) -> nn.Module:
        """Return the module that holds the trees, none as yet."""
        return _Trees(n_classes)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if LightGBM is not installed."""
        _lightgbm()

    def fit_model(self, model: nn.Module, federation: Federation) -> None:
        """Grow the trees on one thread, so that the sums in them do not depend on how many there are."""
        lightgbm, labels = _lightgbm(), federation.active.labels
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
            split: lightgbm.Dataset(self.pooled(federation, split).cpu().numpy(), labels[split].cpu().numpy())
            for split in ("train", "val")
            if federation.n_rows(split)
        }
        held_out = [sets["val"]] if "val" in sets else []
        stop = [lightgbm.early_stopping(self.patience, verbose=False)] if held_out else []
        booster = lightgbm.train(parameters, sets["train"], self.rounds, valid_sets=held_out, callbacks=stop)
        assert isinstance(model, _Trees)
        model.take(booster.model_to_string())  # up to the best round, where one was chosen


class _Trees(nn.Module):
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
        booster = _lightgbm().Booster(model_str=self.text.cpu().numpy().tobytes().decode())
        scores = torch.from_numpy(booster.predict(x.cpu().numpy(), raw_score=True, num_threads=1))
        scores = scores if self.n_classes > 2 else torch.stack([torch.zeros_like(scores), scores], dim=1)
        return scores.float().to(x.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make room first: the length of the text is known only after training."""
        stored = state_dict.get(f"{prefix}text")
        if stored is not None:
            self.text = torch.empty_like(stored, device=self.text.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _lightgbm() -> Any:
    try:
        return import_module("lightgbm")  # imported where it is needed: an extra
    except ModuleNotFoundError:
        raise UsageError("method lightgbm needs lightgbm: pip install 'vflsec[bench]'") from None
