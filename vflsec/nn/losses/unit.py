"""Rows of length one."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-12
"""Length below which a row counts as zero."""


def normalize(rows: Tensor) -> Tensor:
    """Return rows (B, d) scaled to length one.

    A zero row has no direction: it stays zero. Its gradient is the plain one, not that divided by a tiny length, which
    one step would turn into a diverged model.
    """
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / length.where(length > TINY, 1.0)
