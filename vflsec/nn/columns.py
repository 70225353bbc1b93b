"""The identity as bottom model: a party's columns unchanged."""

from __future__ import annotations

from torch import nn


class Columns(nn.Identity):
    """(B, d) -> (B, d).

    Args:
        width: d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
