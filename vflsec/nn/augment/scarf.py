"""Scarf's corruption: values of other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.core.layout import Layout
from vflsec.nn.augment.columns import ColumnChoice


class ScarfCorruption:
    """Replaces some raw columns of each row by draws from their empirical marginal distributions.

    Each value is that of a random reference row, drawn anew for each column. A category's one-hot block moves as a
    whole: what is corrupted is the category, not its embedding. A drawn value can equal the one it replaces.

    Source: Scarf (Bahri et al. 2022, arXiv 2106.15147), algorithm 1, with its rate of 0.6; VFLHLP, section 4.2.

    Args:
        layout: of the party's matrix.
        reference: (n, d) training rows, n >= 1.
        rate: share of the raw columns, rounded to whole columns.

    Raises:
        UsageError: a rate outside [0, 1].
    """

    def __init__(self, layout: Layout, reference: Tensor, rate: float = 0.6) -> None:
        assert reference.shape == (len(reference), layout.width), "the reference has another width than its layout"
        self._chosen = ColumnChoice(layout, rate, reference.device)
        self._reference = reference

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return corrupted copies of rows (B, d)."""
        chosen = self._chosen(len(x), generator)
        drawn = (len(x), self._chosen.columns)
        donors = torch.randint(len(self._reference), drawn, generator=generator, device=x.device)
        return torch.where(chosen, self._reference.gather(0, donors.index_select(1, self._chosen.owner)), x)
