"""Augmentations: seeded random changes of rows that keep their meaning.

Each is called with rows (B, d) and a generator on their device, and returns new rows (B, d).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vflsec.core.layout import Layout
from vflsec.nn.augment.image import ImageAugmentation
from vflsec.nn.augment.scarf import ScarfCorruption
from vflsec.nn.augment.uniform import UniformCorruption

__all__ = ["ImageAugmentation", "ScarfCorruption", "TwoViews", "UniformCorruption", "two_views"]

TwoViews = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]


def two_views(layout: Layout, reference: Tensor) -> TwoViews:
    """Return what makes two views of rows: of images two alterations, of a table the rows themselves and a corruption.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), the authors' code.

    Args:
        layout: of the party's matrix.
        reference: (n, d) training rows, n >= 1.
    """
    if layout.image:
        alter = ImageAugmentation(layout.image)
        return lambda x, generator: (alter(x, generator), alter(x, generator))
    corrupt = UniformCorruption(layout, reference)
    return lambda x, generator: (x, corrupt(x, generator))
