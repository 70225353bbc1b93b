"""The joint bottom model of colluding parties on their concatenated columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SideBySide(nn.Module):
    """Apply each model to its own columns and concatenate the embeddings, (B, sum of columns) -> (B, sum of widths).

    Args:
        models: bottom models, in the order of the columns.
        columns: number of columns of each.
    """

    def __init__(self, models: Sequence[nn.Module], columns: Sequence[int]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.columns = list(columns)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined embeddings."""
        parts = torch.split(x, self.columns, dim=1)
        return torch.cat([model(part) for model, part in zip(self.models, parts, strict=True)], dim=1)
