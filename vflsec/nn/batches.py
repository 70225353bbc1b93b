"""Random batches of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def batches(count: int, size: int, order: torch.Generator, device: torch.device) -> list[Tensor]:
    """Return ``count`` rows in a random order, in batches; a single row left over joins the batch before it.

    BatchNorm cannot learn from one row.
    """
    found = list(torch.split(torch.randperm(count, generator=order).to(device), size))
    return [*found[:-2], torch.cat(found[-2:])] if len(found) > 1 and len(found[-1]) == 1 else found
