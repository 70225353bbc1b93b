"""NT-Xent: InfoNCE whose negatives are the rest of the batch, in both directions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.nn.losses.unit import normalize


def nt_xent(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Return the mean over all 2B rows of the cross-entropy of finding a row's partner among the 2B - 1 others.

    Row i of ``a`` and row i of ``b`` are partners; the other 2B - 2 rows, of both, are negatives. Symmetric in its two
    arguments; gradients flow into whichever of them requires one, so detach a side that must not learn.

    Source: Chen et al. 2020 (SimCLR), arXiv 2002.05709, eq. 1; SS-VFL's in-batch loss, eq. 2, taken both ways.

    Args:
        a: rows (B, d).
        b: their partners (B, d).
        temperature: tau.
    """
    assert a.shape == b.shape, "one partner per row"
    rows = normalize(torch.cat([a, b]))  # (2B, d)
    logits = rows @ rows.T / temperature  # (2B, 2B)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    partner = torch.arange(len(rows), device=rows.device).roll(len(a))
    return F.cross_entropy(logits.masked_fill(itself, float("-inf")), partner)
