"""Scarf's loss: InfoNCE between clean and corrupted rows, one direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vflsec.nn.losses.unit import normalize


def scarf_loss(z: Tensor, corrupted: Tensor, temperature: float) -> Tensor:
    """Return mean_i [ -s_ii/tau + log( (1/N) sum_j exp(s_ij/tau) ) ], s_ij = cos(z_i, corrupted_j).

    Zero where all rows are alike; -log N would be perfect. Gradients flow into both arguments.

    Source: Bahri et al. 2022 (Scarf), arXiv 2106.15147, algorithm 1; VFLHLP, eq. 6. VFLHLP's eq. 5 prints the clean
    row's norm for the second one; this is the cosine.

    Args:
        z: projections of clean rows (N, d).
        corrupted: projections of the same rows, corrupted (N, d).
        temperature: tau.
    """
    assert z.shape == corrupted.shape, "one corrupted row per clean row"
    s = normalize(z) @ normalize(corrupted).T / temperature  # (N, N)
    return (torch.logsumexp(s, dim=1) - s.diagonal()).mean() - math.log(len(z))
