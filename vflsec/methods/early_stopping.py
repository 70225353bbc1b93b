"""Early stopping and the choice of an epoch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.core.federation import Federation
from vflsec.core.settings import TrainSpec


class EarlyStopping:
    """A model in training, its best state so far, and the epoch of that state.

    A score must exceed the best one to count as better; training ends after ``patience`` further epochs without one.
    A checkpoint can keep all of it.

    Args:
        model: what is trained.
        epochs: at most.
        patience: epochs without a better score after which training stops, or None.
    """

    def __init__(self, model: nn.Module, *, epochs: int, patience: int | None) -> None:
        self.model = model
        self.epochs = epochs
        self.patience = patience
        self.epoch = self.best_epoch = 0
        self.best_score = float("-inf")
        self._best: dict[str, Tensor] = {}

    @property
    def done(self) -> bool:
        """Whether training is over."""
        return self.epoch >= self.epochs or (self.patience is not None and self.epoch > self.best_epoch + self.patience)

    def count(self, score: float | None = None) -> None:
        """Count one more epoch, with the score of the model after it, the larger the better; None if not scored."""
        if score is not None and score > self.best_score:
            self._best = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
            self.best_epoch, self.best_score = self.epoch, score
        self.epoch += 1

    def take_best(self) -> None:
        """Put the model back to its best state."""
        if self._best:
            self.model.load_state_dict(self._best)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model, its best state, and the counts."""
        return {
            "counts": torch.tensor([self.epoch, self.best_epoch]),
            "score": torch.tensor(self.best_score, dtype=torch.float64),
            **{f"model.{key}": value for key, value in self.model.state_dict().items()},
            **{f"best.{key}": value for key, value in self._best.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that ``state_dict`` returned."""
        self.epoch, self.best_epoch = (int(count) for count in state["counts"])
        self.best_score = float(state["score"])
        own, best = (
            {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
            for start in ("model.", "best.")
        )
        self.model.load_state_dict(own)
        self._best = best


def selection_split(spec: TrainSpec, federation: Federation) -> str | None:
    """Return the split whose metric chooses the epoch, or None if the last one is taken.

    Raises:
        UsageError: validation rows are needed, and there are none.
    """
    if spec.select == "paper_best_on_test":
        return "test"
    if spec.select == "last" and not spec.patience:
        return None
    if not federation.n_rows("val"):
        raise UsageError("early stopping and best_on_val need validation rows, got none: add --set data.validation=0.1")
    return "val"
