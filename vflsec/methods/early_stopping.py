"""What selection of an epoch remembers, as a module, so that a checkpoint keeps it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class EarlyStopping(nn.Module):
    """A model in training, its best state so far, and how long ago that was.

    The rule is that of ``SplitTraining``: a score must be larger than the best one; training is over after ``patience``
    further epochs without one.

    Args:
        model: what is trained.
        epochs: at most.
        patience: epochs without a better score after which training stops, or None.
    """

    epoch: Tensor
    best_epoch: Tensor
    best_score: Tensor

    def __init__(self, model: nn.Module, *, epochs: int, patience: int | None) -> None:
        super().__init__()
        self.model = model
        self.best = copy.deepcopy(model)
        self.epochs = epochs
        self.patience = patience
        self.register_buffer("epoch", torch.zeros((), dtype=torch.long))
        self.register_buffer("best_epoch", torch.zeros((), dtype=torch.long))
        self.register_buffer("best_score", torch.tensor(float("-inf"), dtype=torch.float64))

    @property
    def done(self) -> bool:
        """Whether training is over."""
        epoch = int(self.epoch)
        return epoch >= self.epochs or (self.patience is not None and epoch > int(self.best_epoch) + self.patience)

    def count(self, score: float | None = None) -> None:
        """Count one more epoch, after which the model reached ``score``, the larger the better, if one was taken."""
        if score is not None and score > float(self.best_score):
            self.best.load_state_dict(self.model.state_dict())
            self.best_score.fill_(score)
            self.best_epoch.copy_(self.epoch)
        self.epoch += 1

    def take_best(self) -> None:
        """Put the model back to its best state."""
        self.model.load_state_dict(self.best.state_dict())
