"""The identity as bottom model: a party's columns unchanged."""

from __future__ import annotations

from torch import Tensor, nn

from vflsec.core.sparse_rows import SparseRows


class Columns(nn.Identity):
    """(B, d) -> (B, d).

    Args:
        width: d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns, dense."""
        return x.dense() if isinstance(x, SparseRows) else x
