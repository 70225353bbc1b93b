"""A queue of keys: the negatives that MoCo remembers from earlier batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vflsec.core.checks import positive
from vflsec.nn.losses.unit import unit


class Queue(nn.Module):
    """The last ``size`` keys (size, d), first in, first out; random directions until they are replaced.

    The start is drawn from torch's global stream, as the weights of a layer are: whoever builds networks seeds it.

    Source: He et al. 2020 (MoCo), arXiv 1911.05722, section 3.2, "dictionary as a queue". Batches need not divide it.

    Args:
        size: how many keys it holds.
        width: d.
    """

    keys: Tensor
    pointer: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        positive(queue=size)
        self.register_buffer("keys", unit(torch.randn(size, width)))
        self.register_buffer("pointer", torch.tensor(0))  # where the oldest key is, and the next one goes

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Put keys (B, d), scaled to length one, in place of the oldest; of more than ``size`` the last ones stay."""
        size, n = len(self.keys), len(keys)
        new = torch.arange(max(0, n - size), n, device=self.keys.device)  # no slot twice: which write wins is undefined
        self.keys[(self.pointer + new) % size] = unit(keys)[new]
        self.pointer.add_(n).remainder_(size)
