"""The order of words in known texts, and what own columns say of a word beyond its position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.language.text_prior import FOLDS, WordShares

ENTRIES, POWERS = 4 * 10**6, (0.0, 0.25, 0.5, 0.75, 1.0)
"""The most numbers in a table that grows with positions and words, and powers of the ratios by columns."""

KNOWN = 0.7
"""The probability above which a word that was read counts as known."""


class States(NamedTuple):
    """Hidden states of rows: values (n, T, r, d) of r releases, where words are (n, T), and what columns tell of words.

    The columns (n, c) are those of the active party, standardized, and the length of the text, which the mask
    tells; the shares are those of a forest on them, and the copies (n, J) words where a text copies a column.
    Decoders read values (n, T, k): releases side by side, which tells how the model changed, or their weighted
    mean, which noise changes least.
    """

    values: Tensor
    mask: Tensor
    shares: WordShares
    columns: Tensor
    copies: Tensor

    def select(self, rows: Tensor) -> States:
        """Return those of some rows."""
        of_columns = self.shares.select(rows), self.columns[rows], self.copies[rows]
        return States(self.values[rows], self.mask[rows], *of_columns)

    def thin(self, words: int) -> States:
        """Return evenly spaced rows with about so many positions."""
        return self if self.mask.numel() <= words else self.select(list_evenly(self.mask, words))

    def join(self) -> States:
        """Return those with releases side by side, (n, T, r·d)."""
        return self._replace(values=self.values.flatten(2))

    def average(self, weights: Tensor) -> States:
        """Return those with the mean of releases by weights (r,), (n, T, d); one that is missing is zero."""
        if self.values.shape[2] == 1:
            return self.join()
        total = (self.values.any(dim=3) * weights).sum(dim=2).clamp_min(1e-30)
        return self._replace(values=(self.values * weights[:, None]).sum(dim=2) / total[..., None])


class ReadTexts(NamedTuple):
    """Texts that were read from other states before: n texts, and their words.

    Attributes:
        states: of the texts.
        words: (n, T).
        right: (n, T) probabilities that they are right.
    """

    states: States
    words: Tensor
    right: Tensor

    def select(self, rows: Tensor) -> ReadTexts:
        """Return that of some texts."""
        return ReadTexts(self.states.select(rows), self.words[rows], self.right[rows])

    def thin(self, words: int) -> ReadTexts:
        """Return evenly spaced texts with about so many positions."""
        return self if self.words.numel() <= words else self.select(list_evenly(self.words, words))

    def compute_shares(self, size: int) -> Tensor:
        """Return the shares (n, T, K) of words, which are by number here; what is not right may be any word."""
        right = self.right[..., None].double()
        return F.one_hot(self.words.clamp_min(0), size) * right + (1 - right) / size

    def keep_sure(self) -> Tensor:
        """Return the words (n, T) that count as known, and -1 elsewhere."""
        return torch.where(self.right > KNOWN, self.words, -1)


def list_evenly(mask: Tensor, words: int) -> Tensor:
    """Return evenly spaced rows of a mask (n, T) with about so many positions."""
    n, length = mask.shape
    return torch.linspace(0, n - 1, min(n, max(1, words // length))).long()


class WordOrder(NamedTuple):
    """Which words follow each other: a mixture, so that what known rows do not have stays possible.

    Attributes:
        seen: (S,) the words of known texts.
        pairs: (S, S) shares of one of them after another.
        places: (T - 1, S, S) of the same at each position; empty where it would be too large.
        shares: (T, K) of words at each position.
        weights: of pairs at a position, pairs anywhere, words at a position, and any word.
    """

    seen: Tensor
    pairs: Tensor
    places: Tensor
    shares: Tensor
    weights: Tensor

    @classmethod
    def fit(cls, words: Tensor, size: int) -> WordOrder:
        """Return that of ``words`` (m, T) by number, negative where unknown; a fifth of the texts gives the weights.

        One more word counts as any word, so that states can tell an order that no known text has.
        """
        seen = words[words >= 0].unique()  # type: ignore[no-untyped-call]
        number = torch.full((size + 1,), -1)
        number[seen] = torch.arange(len(seen))
        words = number[words]  # the last one stands for -1
        held, kept = words[::5], words[torch.arange(len(words)) % 5 != 0]
        is_small = words.shape[1] * size**2 <= ENTRIES
        shares, pairs, places = cls._count(kept, len(seen), is_small=is_small)
        weights = torch.full((4,), 0.25, dtype=torch.double)
        before, after = held[:, :-1], held[:, 1:]
        at = ((before >= 0) & (after >= 0)).nonzero()
        i, j, t = before[at[:, 0], at[:, 1]], after[at[:, 0], at[:, 1]], at[:, 1]
        at_place = places[t, i, j] if is_small else torch.zeros(len(t), dtype=torch.double)
        likely = torch.stack([at_place, pairs[i, j], shares[t + 1, j], torch.full_like(at_place, 1 / size)])
        for _ in range(50):  # EM (deleted interpolation)
            joint = weights[:, None] * likely
            weights = (joint / joint.sum(dim=0)).mean(dim=1) if len(t) else weights
        weights *= len(t) / (len(t) + 1)
        weights[-1] += 1 / (len(t) + 1)
        shares, pairs, places = cls._count(words, len(seen), is_small=is_small)
        every = torch.zeros(len(shares), size, dtype=torch.double).index_copy(1, seen, shares)
        return cls(seen, pairs, places, every, weights)

    @staticmethod
    def _count(words: Tensor, size: int, *, is_small: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return shares at each position, after another word, and both, for small tables."""
        length = words.shape[1]
        pairs, shares = torch.zeros(size, size, dtype=torch.double), torch.zeros(length, size, dtype=torch.double)
        places = torch.zeros((length - 1) * is_small, size, size, dtype=torch.double)
        for t in range(length):
            shares[t] = torch.bincount(words[words[:, t] >= 0, t], minlength=size)
            if t:
                both = words[(words[:, t - 1 : t + 1] >= 0).all(dim=1), t - 1 : t + 1]
                index, unit = both.unbind(dim=1), torch.ones(len(both), dtype=torch.double)
                pairs.index_put_(index, unit, accumulate=True)
                if is_small:
                    places[t - 1].index_put_(index, unit, accumulate=True)
        shares, pairs, places = (x / x.sum(dim=-1, keepdim=True).clamp_min(1) for x in (shares, pairs, places))
        return shares, pairs, places

    def follow(self, before: Tensor, t: int) -> Tensor:
        """Return the shares (n, K) of words at position ``t`` by those (n, K) of the word before."""
        at_place, anywhere, share, any_word = self.weights
        after: Tensor = anywhere * self._move(before, self.pairs)
        if len(self.places):
            after += at_place * self._move(before, self.places[t - 1])
        after += before.sum(dim=1, keepdim=True) * self._rest(t, share, any_word)
        return after

    def precede(self, after: Tensor, t: int) -> Tensor:
        """Return how likely what comes from position ``t`` on (n, K) is for each word before it (n, K)."""
        at_place, anywhere, share, any_word = self.weights
        before: Tensor = anywhere * self._move(after, self.pairs.T)
        if len(self.places):
            before += at_place * self._move(after, self.places[t - 1].T)
        before += after @ self._rest(t, share, any_word)[:, None]
        return before

    def _move(self, shares: Tensor, table: Tensor) -> Tensor:
        """Return the product of shares (n, K) and a table (S, S)."""
        return torch.zeros_like(shares).index_copy(1, self.seen, shares[:, self.seen] @ table)

    def _rest(self, t: int, share: Tensor, any_word: Tensor) -> Tensor:
        return share * self.shares[t] + any_word / self.shares.shape[1]

    def expect(self, likely: Tensor, mask: Tensor) -> Tensor:
        """Return the shares (n, T, K) of words by all others of their text, without what ``likely`` says of their own.

        The forward-backward algorithm, on likelihoods (n, T, K) up to a factor.
        """
        n, length, size = likely.shape
        prior, after = torch.empty_like(likely), likely.new_ones(n, size)
        before = (0.9 * self.shares[0] + 0.1 / size).expand(n, -1)
        for t in range(length):
            prior[:, t] = before if not t else self.follow(before, t)
            before = F.normalize(prior[:, t] * likely[:, t], p=1, dim=1)
        for t in range(length - 1, -1, -1):
            prior[:, t] *= after
            after = self.precede(after * likely[:, t], t) if t else after
            after = torch.where(mask[:, t, None], F.normalize(after, p=1, dim=1), 1.0)
        return F.normalize(prior, p=1, dim=2)


class ColumnRatios:
    """How much likelier words are by the columns of the active party than by their position.

    On held-out known rows, EM estimates how often shares by columns are right at a position. The ratio is raised to the
    power that fits these rows best, since all words of a text depend on the same columns.

    Args:
        shares: of words of m known rows by columns, each without the row.
        words: (m, T) of them by number, negative at padding.
        order: of the words.
        numbers: of each position, (C,) those of the words that have shares, negative for others.
    """

    def __init__(self, shares: WordShares, words: Tensor, order: WordOrder, numbers: list[Tensor]) -> None:
        self.order, self.numbers, self.power = order, numbers, 0.0
        if len(words) < FOLDS:
            return
        most = max(FOLDS, min(len(words), ENTRIES // order.shares.numel()))  # for memory
        judging = torch.linspace(0, len(words) - 1, most).long()
        used, at = words[judging] >= 0, words[judging].clamp_min(0)[..., None]
        ratios = self._compare(shares.select(judging))
        right = ratios.gather(2, at)[..., 0]
        trust = torch.full_like(right[0], 0.5)
        for _ in range(50):  # one more row, where they are wrong: they never exclude a word
            trust = (used * trust * right / (1 - trust + trust * right)).sum(dim=0) / (used.sum(dim=0) + 1)
        self.trust = trust[:, None]
        prior = order.expect(torch.zeros_like(ratios).scatter(2, at, 1.0), used)
        fits = {
            power: F.normalize(prior * self._believe(ratios) ** power, p=1, dim=2).gather(2, at) for power in POWERS
        }
        self.power = max(POWERS, key=lambda power: float(fits[power][used].clamp_min(1e-12).log().sum()))

    def __call__(self, shares: WordShares) -> Tensor:
        """Return the ratios (n, T, K), or a single 1 if known rows say that columns tell nothing."""
        if not self.power:
            return torch.ones((), dtype=torch.double)
        return self._believe(self._compare(shares)) ** self.power

    def _believe(self, ratios: Tensor) -> Tensor:
        return 1 - self.trust + self.trust * ratios

    def _compare(self, shares: WordShares) -> Tensor:
        """Return the share of each word over its share at the position."""
        table = self.order.shares.new_zeros(len(shares.bytes[0]), *self.order.shares.shape)
        for t, (numbers, values) in enumerate(zip(self.numbers, shares.bytes, strict=True)):
            table[:, t, numbers[numbers >= 0]] = torch.from_numpy(values[:, (numbers >= 0).numpy()]).double()
        total = table.sum(dim=2, keepdim=True)
        return torch.where((self.order.shares > 0) & (total > 0), table / total / self.order.shares, 1.0)
