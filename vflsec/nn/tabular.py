"""Encoder of a table: categories embedded, then fully connected layers with BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vflsec.base.errors import UsageError
from vflsec.core.layout import Layout
from vflsec.nn.bottoms import Encoder, dense
from vflsec.nn.wide import CategoryEmbedding

EMBEDDING = 32
DEVIATION = 1e-4


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
            embedding = CategoryEmbedding(layout, EMBEDDING, DEVIATION)
            bottom, features = bottom.append(embedding), embedding.width
        bottom.extend(dense(features, hidden[:-1]))
        top = nn.Sequential(*dense([features, *hidden][-2], hidden[-1:], cut))
        super().__init__(bottom, top, cut or hidden[-1])
