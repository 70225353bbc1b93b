"""A queue of keys: MoCo's negatives from earlier batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vflsec.base.checks import positive
from vflsec.nn.losses.unit import unit


class Queue(nn.Module):
    """The last ``size`` keys (size, d), first in, first out; random directions until they are replaced.

    The initial keys are drawn from torch's global stream, as the weights of a layer are.

    Source: He et al. 2020 (MoCo), arXiv 1911.05722, section 3.2, "dictionary as a queue". Batches need not divide it.

    Args:
        size: number of keys.
        width: d.
    """

    keys: Tensor
    pointer: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        positive(queue=size)
        self.register_buffer("keys", unit(torch.randn(size, width)))
        self.register_buffer("pointer", torch.tensor(0))  # position of the oldest key, which is replaced next

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Replace the oldest keys by keys (B, d), scaled to unit length; if B > ``size``, only the last ones enter."""
        size, n = len(self.keys), len(keys)
        new = torch.arange(
            max(0, n - size), n, device=self.keys.device
        )  # each slot once: the order of writes is undefined
        self.keys[(self.pointer + new) % size] = unit(keys)[new]
        self.pointer.add_(n).remainder_(size)
