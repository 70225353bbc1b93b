"""Random raw columns of each row: a category's one-hot block is chosen as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core.layout import Layout


class ColumnChoice:
    """For each row, round(rate · n) of the n raw columns, without replacement.

    | case | result |
    |---|---|
    | rate = 0, or so small that it rounds to no column | nothing is chosen |
    | rate = 1 | every column is chosen |

    Args:
        layout: of the party's matrix.
        rate: share of the raw columns, 0 to 1.
        device: of the rows.

    Attributes:
        columns: n.
        owner: (d,) the raw column that each encoded column belongs to.

    Raises:
        UsageError: a rate outside [0, 1].
    """

    def __init__(self, layout: Layout, rate: float, device: torch.device) -> None:
        if not 0 <= rate <= 1:
            raise UsageError(f"expected 0 <= rate <= 1, got {rate}")
        self.columns = len(layout.columns)
        owners = [j for j, column in enumerate(layout.columns) for _ in range(column.width)]
        self.owner = torch.tensor(owners, device=device)
        self._count = round(rate * self.columns)

    def __call__(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return a mask (rows, d), true where a row's encoded column belongs to one of the chosen."""
        draws = torch.rand(rows, self.columns, generator=generator, device=self.owner.device)
        largest = draws.topk(self._count, dim=1, sorted=False).indices
        chosen = torch.zeros_like(draws, dtype=torch.bool).scatter_(1, largest, True)  # (rows, n)
        return chosen.index_select(1, self.owner)
