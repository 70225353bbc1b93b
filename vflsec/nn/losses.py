"""Losses of self-supervised learning; all read directions only, so rows of any length will do."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-12
"""Length below which a row counts as zero."""


def normalize(rows: Tensor) -> Tensor:
    """Return rows (B, d) scaled to length one.

    A zero row has no direction: it stays zero. Its gradient is the plain one, not that divided by a tiny length, which
    one step would turn into a diverged model.
    """
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / length.where(length > TINY, 1.0)


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return mean_i -cos(p_i, stop(z_i)), in [-1, 1], of predictions p (B, d) and targets z (B, d), detached here.

    Source: Chen and He 2021 (SimSiam), arXiv 2011.10566, eq. 1; FedHSSL (arXiv 2208.08934), eq. 4.
    """
    assert p.shape == z.shape, "one target per prediction"
    return -(normalize(p) * normalize(z.detach())).sum(dim=1).mean()


def regression(p: Tensor, z: Tensor) -> Tensor:
    """Return mean_i ||p_i/|p_i| - stop(z_i)/|z_i|||^2 = mean_i 2 - 2 cos(p_i, stop(z_i)), in [0, 4].

    Targets z (B, d) are detached here, and predictions p (B, d) are not. A zero row counts as orthogonal to everything,
    2.

    Source: Grill et al. 2020 (BYOL), arXiv 2006.07733, eq. 2; FedHSSL (arXiv 2208.08934), eq. 3.
    """
    return 2 + 2 * negative_cosine(p, z)


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


def nt_xent(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Return the mean over all 2B rows of the cross-entropy of finding a row's partner among the 2B - 1 others.

    Row i of ``a`` (B, d) and row i of ``b`` (B, d) are partners; the other 2B - 2 rows, of both, are negatives.
    Symmetric in its two arguments; gradients flow into whichever of them requires one, so detach a side that must not
    learn.

    Source: Chen et al. 2020 (SimCLR), arXiv 2002.05709, eq. 1; SS-VFL's in-batch loss, eq. 2, taken both ways.
    """
    assert a.shape == b.shape, "one partner per row"
    rows = normalize(torch.cat([a, b]))  # (2B, d)
    logits = rows @ rows.T / temperature  # (2B, 2B)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    partner = torch.arange(len(rows), device=rows.device).roll(len(a))
    return F.cross_entropy(logits.masked_fill(itself, float("-inf")), partner)


def scarf_loss(z: Tensor, corrupted: Tensor, temperature: float) -> Tensor:
    """Return mean_i [ -s_ii/tau + log( (1/N) sum_j exp(s_ij/tau) ) ], s_ij = cos(z_i, corrupted_j).

    ``z`` and ``corrupted`` (N, d) are projections of the same rows, clean and corrupted. Zero where all rows are alike;
    -log N would be perfect. Gradients flow into both arguments.

    Source: Bahri et al. 2022 (Scarf), arXiv 2106.15147, algorithm 1; VFLHLP, eq. 6. VFLHLP's eq. 5 prints the clean
    row's norm for the second one; this is the cosine.
    """
    assert z.shape == corrupted.shape, "one corrupted row per clean row"
    s = normalize(z) @ normalize(corrupted).T / temperature  # (N, N)
    return (torch.logsumexp(s, dim=1) - s.diagonal()).mean() - math.log(len(z))
