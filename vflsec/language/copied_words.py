"""What texts copy from columns of another party, as ``a loan of 400`` beside a column of amounts, or a city."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.layout import PADDING, UNKNOWN
from vflsec.core.view import View

COPIED = 2**60
"""The number of the word that stands for the first kind of copies; those of others follow."""

ROWS, LINES, AT_ONCE, VALUES, ENDINGS = 300, (200, 3000, 10**5), 50, 4, 3
"""Known texts that are tried; the fewest and most lines for a column, lines for all columns, and lines at once; the
fewest values of a column, and the most endings of numbers."""

SHUFFLES, SURE, FAR = 8, 5.0, 1.5
"""Orders of rows by chance, the standard errors by which more texts must have the number of their row than another, and
how many times as many as with any line on shuffled rows."""

MOST, PURE = 2000, 0.5
"""Known texts that tell words of categories, and the least share of a word of a category that its texts have."""


def find_copies(view: View) -> dict[str, Tensor]:
    """Return by split the words (n, J) that rows have where their texts copy own columns in J ways.

    Columns are encoded, and may be in another unit than texts, or on a logarithmic scale. Thus the line from column to
    number is found by pairs of known rows (RANSAC: Fischler and Bolles 1981). It counts if clearly more known texts
    have the number of their row than have that of another row. So do sums and differences of two of these numbers, and
    rounded ones. Numbers may end in letters, as in ``12k``. Columns tell numbers of seven digits, as they are float32.
    Of a category, the word is copied that known texts of the category have more often than others.
    """
    rng = torch.Generator().manual_seed(0)
    return view.memoize(f"copies in the text of {view.victim}", rng, lambda: _find_copies(view, rng))


def _find_copies(view: View, rng: torch.Generator) -> dict[str, Tensor]:
    splits, vocabulary, words = sorted(view.features), view.layout.vocabulary if view.layout else (), []
    sizes = [len(view.features[split]) for split in splits]
    at = view.aux_rows.cpu() + sum(sizes[: splits.index(view.aux_split)])
    columns = torch.cat([view.features[split].cpu() for split in splits]).T
    lines = max(LINES[0], min(LINES[1], LINES[2] // max(1, len(columns))))
    numbers = [re.fullmatch("([0-9]{1,15})([a-z]*)", word) for word in vocabulary]
    counts = torch.bincount(view.aux_labels.cpu().flatten(), minlength=len(vocabulary))
    for ending, _ in Counter(number[2] for number in numbers if number).most_common(ENDINGS):
        values = torch.tensor([float(n[1]) if n and n[2] == ending else torch.nan for n in numbers], dtype=torch.double)
        spelled = sorted(range(len(values)), key=lambda word: (int(counts[word]), -len(vocabulary[word])))
        word_of = {float(values[word]): word for word in spelled if values[word].isfinite()}  # the commonest spelling
        in_texts = values[view.aux_labels.cpu()].sort(dim=1).values  # those that are none are last
        in_texts = in_texts[:, : int(in_texts.isfinite().sum(dim=1).max())]
        copies: list[Tensor] = []
        for column in columns:
            copies += (copy := _expect_numbers(column.double(), in_texts, at, lines, rng))
            in_texts = _leave_out(in_texts, *copy, at=at)
        pairs = [x for a, b in combinations(copies, 2) for x in ((a - b).abs(), a + b)]
        for x in (*pairs, *((a / unit).round() * unit for a in tuple(copies) for unit in (10, 100, 1000))):
            if _measure_excess(x[at], in_texts, rng) > SURE:
                copies.append(x)
                in_texts = _leave_out(in_texts, x, at=at)
        words += [torch.tensor([word_of.get(value, UNKNOWN) for value in x.tolist()]) for x in copies]
    words += _expect_words(columns, at, view.aux_labels.cpu())
    table = torch.stack(words, dim=1) if words else torch.zeros(sum(sizes), 0, dtype=torch.long)
    return dict(zip(splits, table.split(sizes), strict=True))  # type: ignore[no-untyped-call]


def replace_copies(words: Tensor, copies: Tensor) -> Tensor:
    """Return words (n, T) with those that copy a column replaced by the word that stands for the column."""
    for column, word in enumerate(copies.T):
        words = torch.where((words == word[:, None]) & (word[:, None] > UNKNOWN), COPIED + column, words)
    return words


def restore_copies(words: Tensor, copies: Tensor) -> Tensor:
    """Return words (n, T) with those that stand for a column replaced by the copy in the row."""
    for column, word in enumerate(copies.T):
        words = torch.where(words == COPIED + column, word[:, None], words)
    return words


def _expect_numbers(column: Tensor, numbers: Tensor, at: Tensor, lines: int, rng: torch.Generator) -> list[Tensor]:
    """Return the numbers (n,) by a column (n,), if texts of known rows ``at`` copy it, whose numbers are (m, T)."""
    rows = numbers.isfinite().any(dim=1).nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=rng)[:ROWS]]
    x, numbers = column[at[rows]], numbers[rows]
    if len(x.unique()) < VALUES:  # type: ignore[no-untyped-call]
        return []
    tried = [(is_log, *_find_line(x, numbers, lines, rng, is_log=is_log)) for is_log in (False, True)]
    is_log, line, excess = max(tried, key=lambda each: each[2])
    if excess > SURE:
        shuffled = x[torch.randperm(len(x), generator=rng)]
        if excess > FAR * _find_line(shuffled, numbers, lines, rng, is_log=is_log)[1]:
            return [_to_numbers(line, column, is_log=is_log).round()]
    return []


def _find_line(x: Tensor, numbers: Tensor, lines: int, rng: torch.Generator, *, is_log: bool) -> tuple[Tensor, float]:
    """Return the line through two numbers (m, T) by a column (m,) that most exceeds chance, and by how much."""
    pairs = torch.randint(len(x), (2, lines), generator=rng)
    place = (torch.rand(*pairs.shape, numbers.shape[1], generator=rng) * numbers[pairs].isfinite()).argmax(dim=2)
    (first, second), (a, b) = x[pairs], numbers[pairs, place].log1p() if is_log else numbers[pairs, place]
    slope = (a - b) / (first - second)
    of_lines = torch.stack([slope, a - slope * first], dim=1)[(slope != 0) & slope.isfinite()]
    of_lines = torch.cat([of_lines, of_lines.new_zeros(1, 2)])  # at least one
    parts = of_lines.split(AT_ONCE)  # type: ignore[no-untyped-call]
    excess = torch.cat([_measure_excess(_to_numbers(part, x, is_log=is_log), numbers, rng) for part in parts])
    return of_lines[excess.argmax()], float(excess.max())


def _expect_words(columns: Tensor, at: Tensor, y: Tensor) -> list[Tensor]:
    """Return the words (n,) of each category that known texts (m, T) of rows ``at`` copy, ``PADDING`` if unknown."""
    some = torch.linspace(0, len(y) - 1, min(len(y), MOST)).long()  # for memory
    at, y = at[some], y[some]
    has = torch.zeros(len(y), int(y.max()) + 1).scatter(1, y, 1.0)
    has[:, [PADDING, UNKNOWN]] = 0

    def match(category: Tensor, left_out: Tensor) -> Tensor:
        """Return the word (m,) that texts of the category of a row have more often than others, without the row."""
        unit, total = F.one_hot(category).to(has), has.sum(dim=0) - left_out[:, None] * has
        both = (unit.T @ has)[category] - left_out[:, None] * has
        expected = (unit.sum(dim=0)[category] - left_out)[:, None] * has.mean(dim=0)
        score = (both - expected) / (expected + 1).sqrt()
        best, word = torch.where((both > 1) & (both > PURE * total), score, 0).max(dim=1)
        return torch.where(best > 1, word, PADDING)

    words = []
    for category in _list_categories(columns):
        of_known = category[at]
        while True:
            word = match(of_known, torch.ones(len(at)))
            hit, usual = has.gather(1, word[:, None])[:, 0], has.mean(dim=0)[word]
            if (hit - usual).sum() <= SURE * ((usual * (1 - usual)).sum() + 1).sqrt():
                break
            of_category = torch.full((int(category.max()) + 1,), PADDING)
            of_category[of_known] = match(of_known, torch.zeros(len(at)))
            words.append(of_category[category])
            has.scatter_(1, words[-1][at][:, None], 0.0)
    return words


def _list_categories(columns: Tensor) -> Iterator[Tensor]:
    """Yield the numbers (n,) of categories by columns (c, n) that are side by side and one-hot."""
    category, size = torch.zeros(columns.shape[1], dtype=torch.long), 0
    for column in (*columns, torch.full(columns.shape[1:], torch.nan)):
        is_binary = bool(((column == 0) | (column == 1)).all())
        if not is_binary or bool(((category > 0) & (column > 0)).any()):
            if size > 1:
                yield category
            category, size = torch.zeros_like(category), 0
        if is_binary:
            size += 1
            category = torch.where(column > 0, size, category)


def _to_numbers(line: Tensor, x: Tensor, *, is_log: bool) -> Tensor:
    """Return numbers (..., n) by lines (..., 2) and values (n,)."""
    numbers = line[..., :1] * x + line[..., 1:]
    return numbers.expm1() if is_log else numbers


def _leave_out(numbers: Tensor, *copies: Tensor, at: Tensor) -> Tensor:
    """Return numbers (m, T) without copies, so that each is explained once."""
    for copy in copies:
        numbers = numbers.masked_fill(numbers == copy[at][:, None], torch.nan)
    return numbers


def _measure_excess(expected: Tensor, numbers: Tensor, rng: torch.Generator) -> Tensor:
    """Return by how many standard errors more texts (m, T) have the number (..., m) of their row than of another."""
    orders = torch.rand(SHUFFLES, expected.shape[-1], generator=rng).argsort(dim=1)
    count, *others = (_count_copies(expected[..., order], numbers) for order in (slice(None), *orders))
    by_chance = torch.stack(others).double().mean(dim=0)
    return (count - by_chance) / (by_chance + 1).sqrt()


def _count_copies(expected: Tensor, numbers: Tensor) -> Tensor:
    """Return how many texts (m, T) have the numbers (..., m) up to rounding."""
    return (numbers - expected[..., None]).abs().lt(0.5).any(dim=-1).sum(dim=-1)
