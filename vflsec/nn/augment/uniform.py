"""Corruption by uniform numbers and a masked category."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.core.layout import Layout
from vflsec.nn.augment.columns import ColumnChoice


class UniformCorruption:
    """Replaces some raw columns of each row: a number by U(min, max) of its column, a category by the mask.

    The mask is the first slot of a one-hot block, which no training row uses.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section V-A: "30 % features are distorted by replacing the
    original value with a random value". The distribution and the mask are those of the authors' code; the paper leaves
    the embedding of the mask untrained, here it is trained like any other.

    | case | result |
    |---|---|
    | a number constant in the reference | that constant |

    Args:
        layout: of the party's matrix.
        reference: (n, d) training rows, n >= 1, for the ranges.
        rate: share of the raw columns, rounded to whole columns.

    Raises:
        UsageError: a rate outside [0, 1].
    """

    def __init__(self, layout: Layout, reference: Tensor, rate: float = 0.3) -> None:
        assert reference.shape == (len(reference), layout.width), "the reference has another width than its layout"
        self._chosen = ColumnChoice(layout, rate, reference.device)
        self._low, self._high = reference.amin(dim=0), reference.amax(dim=0)  # (d,)
        for column in layout.columns:
            if column.kind == "categorical":
                for bound in (self._low, self._high):
                    bound[column.start : column.start + column.width] = 0
                    bound[column.start] = 1

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return corrupted copies of rows (B, d)."""
        chosen = self._chosen(len(x), generator)
        share = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        return torch.where(chosen, torch.lerp(self._low, self._high, share), x)
