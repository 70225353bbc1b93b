"""InfoNCE with given negatives: MoCo's loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.nn.losses.unit import normalize


def info_nce(p: Tensor, z: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of finding each row's positive among 1 + Q keys.

    mean_i -log( exp(cos(p_i, z_i)/tau) / (exp(cos(p_i, z_i)/tau) + sum_q exp(cos(p_i, n_q)/tau)) ).

    Source: He et al. 2020 (MoCo), arXiv 1911.05722, eq. 1; FedHSSL (arXiv 2208.08934), eq. 2, which prints no tau.

    Args:
        p: queries (B, d).
        z: the positive key of each query (B, d), detached here.
        negatives: keys (Q, d) that are negatives of every query, detached here.
        temperature: tau.
    """
    assert p.shape == z.shape, "one positive per query"
    query = normalize(p)
    positive = (query * normalize(z.detach())).sum(dim=1, keepdim=True)  # (B, 1)
    logits = torch.cat([positive, query @ normalize(negatives.detach()).T], dim=1) / temperature  # (B, 1 + Q)
    return F.cross_entropy(logits, torch.zeros(len(p), dtype=torch.long, device=p.device))
