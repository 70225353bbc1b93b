"""Encoder of a table: categories embedded, then fully connected layers with BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vflsec.core.errors import UsageError
from vflsec.core.layout import Layout
from vflsec.nn.bottoms import Encoder, dense

EMBEDDING = 32


class TabularEncoder(Encoder):
    """Linear-BatchNorm-ReLU blocks on numbers and embedded categories, (B, d) -> (B, last hidden width, or cut).

    The bottom is the embedding and all blocks but the last; the top the last block, then Linear(cut) if there is a cut.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), table III: "1 Emb + 2 FC". Embeddings of width 32
    and deviation 1e-4 are those of its authors' code, which has blocks of 512 for a thousand columns.

    Args:
        layout: of the party's matrix.
        hidden: widths of the blocks.
        cut: width of the cut layer, or None.

    Raises:
        UsageError: no hidden layer.
    """

    def __init__(self, layout: Layout, hidden: Sequence[int] = (128, 128), cut: int | None = None) -> None:
        if not hidden:
            raise UsageError(
                "expected widths in model.bottom for model.encoder=tabular, got none: give one, or take mlp"
            )
        bottom, features = nn.Sequential(), layout.width
        if any(column.kind == "categorical" for column in layout.columns):
            embedding = _Embedding(layout)
            bottom, features = bottom.append(embedding), embedding.width
        bottom.extend(dense(features, hidden[:-1]))
        top = nn.Sequential(*dense([features, *hidden][-2], hidden[-1:], cut))
        super().__init__(bottom, top, cut or hidden[-1])


class _Embedding(nn.Module):
    """Embeds one-hot blocks, then appends the numbers: (B, d) -> (B, 32 · categories + numbers).

    A product, not a look-up, so that mixtures of categories work and have a gradient.
    """

    numbers: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.blocks = [(column.start, column.width) for column in layout.columns if column.kind == "categorical"]
        numbers = [column.start for column in layout.columns if column.kind == "numeric"]
        self.register_buffer("numbers", torch.tensor(numbers, dtype=torch.long), persistent=False)
        self.weight = nn.Parameter(torch.empty(sum(width for _, width in self.blocks), EMBEDDING))
        self.width = EMBEDDING * len(self.blocks) + len(numbers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the embeddings, N(0, 1e-4^2)."""
        nn.init.normal_(self.weight, std=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.split(self.weight, [width for _, width in self.blocks])
        embedded = [x[:, at : at + width] @ w for (at, width), w in zip(self.blocks, weights, strict=True)]
        return torch.cat([*embedded, x[:, self.numbers]], dim=1)
