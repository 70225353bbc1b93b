"""A small transformer in two parts: the lower one where the text is, the upper one where the labels are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.layout import PADDING, Layout
from vflsec.base.sparse_rows import SparseRows, find_words


class TransformerBlock(nn.Module):
    """Self-attention and two linear layers, each after a LayerNorm and added to its input: (B, T, d) -> (B, T, d).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), with the norm first as in GPT-2.

    Args:
        width: d.
        heads: of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attention, self.output = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, h: Tensor, mask: Tensor, *, most: int | None = None) -> Tensor:
        """Return the states of the first ``most`` positions, which read those where ``mask`` (B, T) is true."""
        rows, length, width = h.shape
        parts = self.attention(self.norm(h)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (B, heads, T, d / heads) each
        read = F.scaled_dot_product_attention(query[:, :, :most], key, value, attn_mask=mask[:, None, None])
        h = h[:, :most] + self.output(read.transpose(1, 2).flatten(2))
        states: Tensor = h + self.network(h)
        return states


class Blocks(nn.ModuleList):
    """Blocks in a row, (B, T, d) -> (B, T, d); the first position is always read, so that there is one."""

    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__(TransformerBlock(width, heads) for _ in range(blocks))

    def forward(self, h: Tensor, mask: Tensor, *, most: int | None = None) -> Tensor:
        """Return the states of the first ``most`` positions after the last block, zero where ``mask`` is false."""
        read = mask | (torch.arange(mask.shape[1], device=mask.device) == 0)
        for number, block in enumerate(self, start=1):
            h = block(h, read, most=most if number == len(self) else None)
        return h * mask[:, :most, None]


def split_positions(h: Tensor, length: int) -> Tensor:
    """Return rows (B, T·d) as sequences (B, T, d)."""
    return h.reshape(len(h), length, h.shape[1] // length)


@dataclass(frozen=True)
class Text:
    """Texts as defenses leave them.

    Attributes:
        words: (B, T) by number.
        noise: (B, T, d), which is added to the embeddings of the words; None for none.
    """

    words: Tensor
    noise: Tensor | None = None

    def select(self, rows: Tensor) -> Text:
        """Return those of some rows."""
        return Text(self.words[rows], None if self.noise is None else self.noise[rows])


def read_words(x: Tensor | Text, words: nn.Embedding) -> tuple[Tensor, Tensor]:
    """Return the embeddings (B, T, d) of encoded text (B, T·V), and where it is no padding (B, T)."""
    if isinstance(x, Text):
        h = words(x.words)
        return h if x.noise is None else h + x.noise, x.words != PADDING
    size = words.num_embeddings
    if isinstance(x, SparseRows) and not x.requires_grad:
        tokens = find_words(x, size)
        return words(tokens), tokens != PADDING
    weights = split_positions(x, x.shape[1] // size)  # a mixture of words has a mixture of their embeddings
    return weights @ words.weight, weights[..., PADDING + 1 :].sum(dim=2) > 0


class LowerModel(nn.Module):
    """Embeddings of words and positions, then the first blocks: encoded text (B, T·V) -> hidden states (B, T·d).

    Args:
        layout: of the text.
        hidden: d.
        heads: of the attention.
        blocks: below the cut.

    Attributes:
        width: of a row of states, T·d.
    """

    def __init__(self, layout: Layout, hidden: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.layout, self.length, self.width = layout, len(layout.columns), len(layout.columns) * hidden
        self.words, self.positions = nn.Embedding(len(layout.vocabulary), hidden), nn.Embedding(self.length, hidden)
        self.blocks = Blocks(blocks, hidden, heads)

    def forward(self, x: Tensor | Text) -> Tensor:
        """Return the hidden states of each row side by side, (B, T·d), zero at padding."""
        h, mask = read_words(x, self.words)
        positions = torch.arange(self.length, device=h.device).expand(len(h), -1)
        states: Tensor = self.blocks(h + self.positions(positions), mask)
        return states.flatten(1)


class UpperBlocks(nn.Module):
    """The last blocks on the states of a text, of which it returns that of [start]: (B, T, d) -> (B, d).

    Args:
        hidden: d.
        heads: of the attention.
        blocks: above the cut.
    """

    def __init__(self, hidden: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.width = Blocks(blocks, hidden, heads), nn.LayerNorm(hidden), hidden

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the last state of the first position."""
        state: Tensor = self.norm(self.blocks(states, mask, most=1)[:, 0])
        return state


class UpperModel(nn.Module):
    """What reads the states of each text, then a linear head on that and on the other embeddings.

    A position whose states are all zero is padding, as in ``Message.as_table``.

    Args:
        widths: of the parties' embeddings.
        lengths: T of each party with text; 0 for the others.
        readers: of each party with text, (B, T, d) and a mask (B, T) -> (B, ``width``).
        n_classes: C.
    """

    def __init__(self, widths: Sequence[int], lengths: Sequence[int], readers: Sequence[Any], n_classes: int) -> None:
        super().__init__()
        self.lengths, self.readers = tuple(lengths), nn.ModuleList(readers)
        columns = sum(width for width, length in zip(widths, lengths, strict=True) if not length)
        self.head = nn.Linear(columns + sum(reader.width for reader in readers), n_classes)

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Return logits (B, C) from what each party sent: (B, T·d) of text, (B, d_k) of columns."""
        parts, readers = [], iter(self.readers)
        for sent, length in zip(embeddings, self.lengths, strict=True):
            states = split_positions(sent, length) if length else sent
            parts.append(next(readers)(states, (states != 0).any(dim=2)) if length else sent)
        logits: Tensor = self.head(torch.cat(parts, dim=1))
        return logits
