"""Random batches of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.base.seeds import Generators
from vflsec.core.stacked import stack


def batches(count: int, size: int, order: torch.Generator, device: torch.device) -> list[Tensor]:
    """Return ``count`` rows in random batches; a last batch of one row joins the one before, for BatchNorm."""
    *others, last = torch.split(_permutation(count, order).to(device), size)
    return [*others[:-1], torch.cat([others[-1], last])] if others and len(last) == 1 else [*others, last]


def _permutation(count: int, order: torch.Generator) -> Tensor:
    if isinstance(order, Generators):
        return stack([torch.randperm(count, generator=one) for one in order])
    return torch.randperm(count, generator=order)
