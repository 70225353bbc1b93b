"""Whole numbers that texts copy from columns of another party, as ``a loan of 400`` beside a column of amounts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vflsec.base.layout import UNKNOWN
from vflsec.core.view import View

COPIED = 2**60
"""The number of the word that stands for a copy of the first copied column; those of others follow."""

ROWS, LINES, VALUES, SURE = 300, 1000, 10, 3.0
"""Known texts and lines that are tried for each column, the fewest values of a column, and the standard errors by which
more texts must have the number of their own row than that of another."""


def find_copies(view: View) -> dict[str, Tensor]:
    """Return by split the words (n, J) that rows have where their texts copy J own columns.

    Columns are encoded, and may be in another unit than texts. Thus the line from column to number is found by pairs of
    known rows (RANSAC: Fischler and Bolles 1981). It counts if clearly more known texts have the number of their row
    than have one of any line on another row's value.
    """
    vocabulary = view.layout.vocabulary if view.layout else ()
    of_words = [float(word) if word.isascii() and word.isdigit() else torch.nan for word in vocabulary]
    numbers = torch.tensor(of_words, dtype=torch.double)
    known, rng = view.features[view.aux_split][view.aux_rows].cpu().double(), torch.Generator().manual_seed(0)
    in_texts = numbers[view.aux_labels.cpu()] if len(numbers) else torch.full(view.aux_labels.shape, torch.nan)
    lines = list(_find_lines(known, in_texts, rng))
    words = torch.arange(len(numbers))[numbers.isfinite()]
    values, order = numbers[words].sort()
    words = torch.cat([words[order], torch.tensor([UNKNOWN])])

    def locate(x: Tensor) -> Tensor:
        at = torch.searchsorted(values, x)
        return words[torch.where(values[at.clamp_max(len(values) - 1)] == x, at, len(values))]

    copies = {}
    for split, x in view.features.items():
        of_columns = [locate((slope * x[:, k].cpu().double() + shift).round()) for k, (slope, shift) in lines]
        copies[split] = torch.stack(of_columns, dim=1) if lines else torch.zeros(len(x), 0, dtype=torch.long)
    return copies


def replace_copies(words: Tensor, copies: Tensor) -> Tensor:
    """Return words (n, T) with those that copy a column replaced by the word that stands for the column."""
    for column, word in enumerate(copies.T):
        words = torch.where((words == word[:, None]) & (word[:, None] != UNKNOWN), COPIED + column, words)
    return words


def restore_copies(words: Tensor, copies: Tensor) -> Tensor:
    """Return words (n, T) with those that stand for a column replaced by the copy in the row."""
    for column, word in enumerate(copies.T):
        words = torch.where(words == COPIED + column, word[:, None], words)
    return words


def _find_lines(x: Tensor, numbers: Tensor, rng: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """Yield the columns of ``x`` (m, c) that texts copy, with their lines, by numbers (m, T), NaN for other words."""
    has_number = numbers.isfinite().any(dim=1)
    x, numbers = x[has_number], numbers[has_number]
    for column, values in enumerate(x.T if len(x) else ()):
        if len(values.unique()) >= VALUES:
            shuffled = values[torch.randperm(len(values), generator=rng)]
            (line, count), (_, by_chance) = (_find_line(x, numbers, rng) for x in (values, shuffled))
            if count - by_chance > SURE * (count + by_chance) ** 0.5:
                yield column, line


def _find_line(x: Tensor, numbers: Tensor, rng: torch.Generator) -> tuple[Tensor, int]:
    """Return the slope and shift (2,) that give a number (m, T) of most texts by a column (m,), and of how many."""
    some = torch.randperm(len(x), generator=rng)[:ROWS]
    pairs = some[torch.randint(len(some), (2, LINES), generator=rng)]
    place = (torch.rand(*pairs.shape, numbers.shape[1], generator=rng) * numbers[pairs].isfinite()).argmax(dim=2)
    (first, second), (a, b) = x[pairs], numbers[pairs, place]
    slope = (a - b) / (first - second)
    lines = torch.stack([slope, a - slope * first], dim=1)[(slope != 0) & slope.isfinite()]
    best, most = x.new_zeros(2), 0
    for line in lines:
        count = int((numbers[some] - (line[0] * x[some, None] + line[1])).abs().lt(0.5).any(dim=1).sum())
        best, most = (line, count) if count > most else (best, most)
    return best, most
