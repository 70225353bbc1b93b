"""Base class of references on pooled columns, as if one party had the columns of all."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from vflsec.base.errors import Diverged
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
    visible_to = {}  # noqa: RUF012

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
        """Fit the model and return its mean loss on the training rows.

        Raises:
            Diverged: a column or the loss is not finite.
        """
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
        logits: Tensor = federation.active.modules["pooled"](self.pooled(federation, split))
        return logits.log_softmax(dim=1)

    def representation(self, party: Party) -> nn.Module:
        """Return the identity: a party has its columns and no model."""
        return nn.Identity()

    def pooled(self, federation: Federation, split: str) -> Tensor:
        """Return the columns that are read, side by side (n, sum of d), the active party's first."""
        return torch.cat([party.features[split] for party in self._read(federation)], dim=1)

    def _read(self, federation: Federation) -> list[Party]:
        return [federation.active] if self.columns == "active" else list(federation.parties.values())
