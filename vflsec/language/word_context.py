"""The word at a position by the other words of its text and by own columns: word order, forests and a network."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.language.text_prior import FOLDS, WordShares

ENTRIES, POWERS, TINY = 4 * 10**6, (0.0, 0.25, 0.5, 0.75, 1.0), 1e-12
"""The most numbers in a table that grows with positions and words; powers of the ratios by columns and of the network;
and the smallest share of a word."""

OFFSETS, VECTOR, HIDDEN, DROPOUT = (-3, -2, -1, 1, 2, 3), 64, 160, 0.5
"""Of the network: positions that it reads one by one, numbers that stand for a word, hidden units, and share of them
that is left out in training."""

STEPS, BATCH, SHORT, RATE, DECAY, SMOOTHING = 400, 32, 24, 6e-3, 1e-2, 0.02
"""Of its training: batches, known texts of a batch, words of texts of which a batch has so many, learning rate, weight
decay, and label smoothing."""

CHOICES, SURE = 32, 0.9
"""The most choices of words that are likely together, and the share above which a word is chosen at once."""

MOST_HIDDEN, DRAWS, TABLE = 0.4, 4, 2 * 10**7
"""The largest share of hidden words of a text, draws of noise for held-out texts, most likelihoods of others."""

AGAIN, RARE = (0.0, 0.5, 1.0), 3.0
"""Powers of the ratios of repeated words, and how many words the mean rate of all of them stands for."""


class States(NamedTuple):
    """Hidden states of rows: values (n, T, r, d) of r releases, where words are (n, T), shares of words, and columns.

    The columns (n, c) are those of the active party, standardized, and the length of the text, which the mask tells;
    the shares are those of a forest on them. Decoders read values (n, T, k): releases side by side, which tells how the
    model changed, or their weighted mean, which noise changes least.
    """

    values: Tensor
    mask: Tensor
    shares: WordShares
    columns: Tensor

    def select(self, rows: Tensor) -> States:
        """Return those of some rows."""
        return States(self.values[rows], self.mask[rows], self.shares.select(rows), self.columns[rows])

    def thin(self, words: int) -> States:
        """Return evenly spaced rows with about so many positions."""
        n, length = self.mask.shape
        return self.select(torch.linspace(0, n - 1, min(n, max(1, words // length))).long())

    def join(self) -> States:
        """Return those with releases side by side, (n, T, r·d)."""
        return self._replace(values=self.values.flatten(2))

    def average(self, weights: Tensor) -> States:
        """Return those with the mean of releases by weights (r,), (n, T, d); one that is missing is zero."""
        if self.values.shape[2] == 1:
            return self.join()
        total = (self.values.any(dim=3) * weights).sum(dim=2).clamp_min(1e-30)
        return self._replace(values=(self.values * weights[:, None]).sum(dim=2) / total[..., None])


class WordOrder(NamedTuple):
    """Which words follow each other: a mixture, so that what known rows do not have stays possible.

    Attributes:
        first: (K,) shares of the first word.
        pairs: (K, K) of a word after another.
        places: (T - 1, K, K) of the same at each position; empty where it would be too large.
        shares: (T, K) of words at each position.
        weights: of pairs at a position, pairs anywhere, words at a position, and any word.
    """

    first: Tensor
    pairs: Tensor
    places: Tensor
    shares: Tensor
    weights: Tensor

    @classmethod
    def fit(cls, words: Tensor, size: int) -> WordOrder:
        """Return that of ``words`` (m, T) by number, negative at padding; a fifth of them gives the weights.

        As if one more word had been any word: no text is so unusual that its states cannot tell its words.
        """
        held, kept = words[::5], words[torch.arange(len(words)) % 5 != 0]
        parts = cls._count(kept, size)
        weights = torch.full((4,), 0.25, dtype=torch.double)
        before, after = held[:, :-1], held[:, 1:]
        at = (after >= 0).nonzero()
        i, j, t = before[at[:, 0], at[:, 1]], after[at[:, 0], at[:, 1]], at[:, 1]
        places = parts.places[t, i, j] if len(parts.places) else torch.zeros(len(t), dtype=torch.double)
        likely = torch.stack([places, parts.pairs[i, j], parts.shares[t + 1, j], torch.full_like(places, 1 / size)])
        for _ in range(50):  # EM (deleted interpolation)
            joint = weights[:, None] * likely
            weights = (joint / joint.sum(dim=0)).mean(dim=1) if len(t) else weights
        weights *= len(t) / (len(t) + 1)
        weights[-1] += 1 / (len(t) + 1)
        return cls._count(words, size)._replace(weights=weights)

    @classmethod
    def _count(cls, words: Tensor, size: int) -> WordOrder:
        length = words.shape[1]
        pairs, shares = torch.zeros(size, size, dtype=torch.double), torch.zeros(length, size, dtype=torch.double)
        is_small = length * size**2 <= ENTRIES
        places = torch.zeros((length - 1) * is_small, size, size, dtype=torch.double)
        for t in range(length):
            used = words[:, t] >= 0
            shares[t] = torch.bincount(words[used, t], minlength=size)
            if t:
                index, unit = (words[used, t - 1], words[used, t]), torch.ones(int(used.sum()), dtype=torch.double)
                pairs.index_put_(index, unit, accumulate=True)
                if is_small:
                    places[t - 1].index_put_(index, unit, accumulate=True)
        shares, pairs, places = (x / x.sum(dim=-1, keepdim=True).clamp_min(1) for x in (shares, pairs, places))
        return cls(shares[0], pairs, places, shares, torch.zeros(4))

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
        """Return the product of shares (n, K) and a table (K, K), which has numbers for words of known rows alone."""
        seen = self.shares.any(dim=0).nonzero()[:, 0]
        product = torch.zeros_like(shares)
        product[:, seen] = shares[:, seen] @ table[seen][:, seen]
        return product

    def _rest(self, t: int, share: Tensor, any_word: Tensor) -> Tensor:
        return share * self.shares[t] + any_word / len(self.first)

    def expect(self, likely: Tensor, mask: Tensor) -> Tensor:
        """Return the shares (n, T, K) of words by all others of their text, without what ``likely`` says of their own.

        The forward-backward algorithm, on likelihoods (n, T, K) up to a factor.
        """
        n, length, size = likely.shape
        prior, after = torch.empty_like(likely), likely.new_ones(n, size)
        before = (0.9 * self.first + 0.1 / size).expand(n, -1)
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


class Likelihoods(Protocol):
    """The likelihoods of words by states, up to a factor."""

    def draw(self, words: Tensor, rng: torch.Generator) -> Tensor:
        """Return those (n, T, K) by states of ``words`` (n, T), by number, which get fresh noise."""

    def read(self, x: Tensor) -> Tensor:
        """Return those (n, T, K) by states (n, T, k)."""


class Network(nn.Module):
    """Scores of the word at each position by shares of all other words of the text and by own columns.

    It has one hidden layer, which reads the three words before and behind one by one, the sums of all before and of all
    behind, all others by their positions, the position, the distance from the end, and columns.

    Args:
        usual: (T, K) shares of words at positions.
        columns: how many columns there are.
    """

    def __init__(self, usual: Tensor, columns: int) -> None:
        super().__init__()
        length, size = usual.shape
        self.usual = usual
        self.vectors = nn.Linear(size, VECTOR, bias=False)
        nn.init.normal_(self.vectors.weight)  # for shares, which sum to 1
        self.words, self.columns = nn.Linear(VECTOR * (len(OFFSETS) + 2), HIDDEN), nn.Linear(columns, HIDDEN)
        self.positions, self.ends = nn.Embedding(length, HIDDEN), nn.Embedding(length + 1, HIDDEN)
        self.at_places = nn.Parameter(0.1 / (8 * VECTOR) ** 0.5 * torch.randn(length, VECTOR, HIDDEN))
        self.outputs, self.at_position = nn.Linear(HIDDEN, size), nn.Parameter(torch.zeros(length, size))

    def forward(self, likely: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
        """Return the scores (n, T, K) of words by likelihoods (n, T, K) up to a factor."""
        length = mask.shape[1]
        x = self.vectors(F.normalize(likely * self.usual, p=1, dim=2).float() * mask[..., None])
        near = [F.pad(x, (0, 0, max(0, -k), max(0, k)))[:, max(0, k) : length + max(0, k)] for k in OFFSETS]
        so_far = x.cumsum(dim=1)
        words = self.words(torch.cat([*near, so_far - x, so_far[:, -1:] - so_far], dim=2))
        position = torch.arange(length).expand(mask.shape)
        to_end = (mask.sum(dim=1, keepdim=True) - position).clamp_min(0)
        hidden = words + self.positions(position) + self.ends(to_end) + self.columns(columns.float())[:, None]
        placed = torch.einsum("ntv,tvh->nth", x, self.at_places)
        hidden = hidden + placed.sum(dim=1, keepdim=True) - placed
        scores: Tensor = self.outputs(F.dropout(F.gelu(hidden), DROPOUT, self.training)) + self.at_position
        return scores

    @classmethod
    def fit(
        cls,
        words: Tensor,
        columns: Tensor,
        others: States,
        order: WordOrder,
        channel: Likelihoods,
        rng: torch.Generator,
    ) -> Network:
        """Return a network that is trained on known words (m, T), with fresh noise, and on states of other texts.

        The loss of a word that is not known is that of its state: the negative logarithm of the sum over all words of
        the share of the word times its likelihood.
        """
        usual = 0.98 * order.shares + 0.02 * order.shares.mean(dim=0) + 0.01 / order.shares.shape[1]
        network = cls(usual, columns.shape[1])
        optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
        others = others.thin(max(1, TABLE // order.shares.shape[1]))
        table = torch.empty(*others.mask.shape, order.shares.shape[1])
        for at in torch.arange(len(table)).split(BATCH):  # type: ignore[no-untyped-call]
            table[at] = channel.read(others.values[at]).float()

        def score(likely: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
            share = MOST_HIDDEN * torch.rand(len(mask), 1, generator=rng)
            is_hidden = torch.rand(mask.shape, generator=rng) < share
            scores: Tensor = network(torch.where(is_hidden[..., None], 1.0, likely), mask, columns)
            return scores

        size = max(1, min(BATCH, BATCH * SHORT // words.shape[1]))
        for _ in range(STEPS):  # with tensors of one size, padding included: others fragment the memory
            batch, rest = (torch.randint(len(x), (n,), generator=rng) for x, n in ((words, size), (table, 2 * size)))
            w, mask, likely = words[batch], others.mask[rest], table[rest]
            known = score(channel.draw(w, rng).float(), w >= 0, columns[batch])
            shares = score(likely, mask, others.columns[rest]).log_softmax(dim=2)
            fits = (shares + likely.log()).logsumexp(dim=2)
            loss = F.cross_entropy(known.flatten(0, 1), w.flatten(), ignore_index=-1, label_smoothing=SMOOTHING)
            loss = loss - (fits * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        return network.eval()


class Repeats(NamedTuple):
    """How much likelier a word is where its text has the same word elsewhere: a text has its own subject.

    Attributes:
        rates: (K,) how often a word is taken from the others of its text.
        usual: (K,) shares of words in all texts.
    """

    rates: Tensor
    usual: Tensor

    @classmethod
    def fit(cls, words: Tensor, size: int) -> Repeats:
        """Return those of texts (m, T) by number, negative at padding: how often words return, beyond chance."""
        counts = torch.zeros(len(words), size + 1, dtype=torch.double)
        counts.scatter_add_(1, torch.where(words < 0, size, words), torch.ones_like(words).double())
        counts = counts[:, :size]  # (m, K)
        total, lengths = counts.sum(dim=0), counts.sum(dim=1, keepdim=True)
        usual = (total + 0.5) / (total + 0.5).sum()
        beyond = (counts * (counts > 1) - counts * (1 - (1 - usual) ** (lengths - 1))).sum(dim=0)
        mean = beyond.clamp_min(0).sum() / total.sum().clamp_min(1)
        return cls(((beyond + RARE * mean) / (total + RARE)).clamp(0, 0.95), usual)

    def expect(self, shares: Tensor, mask: Tensor) -> Tensor:
        """Return the ratios (n, T, K) of each word by the shares (n, T, K) of the other words of its text."""
        shares = F.normalize(shares, p=1, dim=2) * mask[..., None]
        others = (shares.sum(dim=1, keepdim=True) - shares) / (mask.sum(dim=1) - 1).clamp_min(1)[:, None, None]
        ratios = 1 - self.rates + self.rates * others / self.usual
        return torch.where((mask.sum(dim=1) > 1)[:, None, None], ratios, 1.0)


class WordContext(NamedTuple):
    """What all but its own state says of a word: the order of words and own columns, and a network of both.

    The order learns pairs from few texts, the network knows words far from each other. As noise is drawn for each word,
    either gives shares by which the likelihoods of a state are multiplied; a weighted geometric mean joins them. Words
    that the text has elsewhere get more.

    Attributes:
        order: of the words.
        by_columns: ratios that go with the order.
        network: None before it is fitted, as are repeats.
        repeats: of the words.
        powers: of the network, which is its weight, and of the repeats.
    """

    order: WordOrder
    by_columns: ColumnRatios
    network: Network | None = None
    repeats: Repeats | None = None
    powers: tuple[float, float] = (0.0, 0.0)

    def expect(self, likely: Tensor, states: States) -> Tensor:
        """Return shares of words (n, T, K) by likelihoods (n, T, K) of all words; both are up to a factor."""
        by_order = self._expect_by_order(likely, states)
        return self._join(by_order, self._expect_by_network(likely, states) if self.powers[0] else None, likely, states)

    def _expect_by_order(self, likely: Tensor, states: States) -> Tensor:
        ratios = self.by_columns(states.shares)
        return self.order.expect(likely * ratios, states.mask) * ratios

    @torch.no_grad()
    def _expect_by_network(self, likely: Tensor, states: States) -> Tensor:
        assert self.network is not None
        scores: Tensor = self.network(likely, states.mask, states.columns)
        return scores.softmax(dim=2).double()

    def _join(self, by_order: Tensor, by_network: Tensor | None, likely: Tensor, states: States) -> Tensor:
        power, again = self.powers
        shares = by_order if by_network is None else by_network**power * by_order ** (1 - power)
        if not again:
            return shares
        assert self.repeats is not None
        return shares * self.repeats.expect(shares * likely, states.mask) ** again

    def decode(self, likely: Tensor, shares: Tensor, states: States) -> Tensor:
        """Return words (n, T) that are likely together, by number: the surest are chosen first, the others given them.

        Args:
            likely: (n, T, K) likelihoods, up to a factor.
            shares: (n, T, K) of words, ``likely`` times what ``expect`` returns, up to a factor.
            states: of the n texts.
        """
        words, hard = shares.argmax(dim=2), likely.clone()
        at, is_open, count = torch.arange(len(words)), states.mask, -(-words.shape[1] // CHOICES)
        while len(at):
            share, best = F.normalize(shares, p=1, dim=2).max(dim=2)
            share = torch.where(is_open, share, -1.0)
            is_first = torch.zeros_like(is_open).scatter_(1, share.topk(count, dim=1).indices, value=True)
            is_chosen = is_open & (is_first | (share > SURE))
            words[at] = torch.where(is_chosen, best, words[at])
            hard[is_chosen] = F.one_hot(best[is_chosen], hard.shape[2]).to(hard)
            is_open = is_open & ~is_chosen
            rest = is_open.any(dim=1).nonzero()[:, 0]
            at, is_open, hard, likely = at[rest], is_open[rest], hard[rest], likely[rest]
            states = states.select(rest)
            shares = self.expect(hard, states) * likely if len(rest) else shares
        return words

    def add_network(
        self, words: Tensor, known: States, others: States, channel: Likelihoods, rng: torch.Generator
    ) -> WordContext:
        """Return this context with a network and repeats.

        Known texts, of which a fifth is left out for it, choose the powers.

        Args:
            words: (m, T) of known texts, by number, negative at padding.
            known: their columns and shares.
            others: texts without words.
            channel: the likelihoods of words.
            rng: of the training and of fresh noise.
        """
        is_out = torch.arange(len(words)) % FOLDS == 0
        if is_out.all():
            return self
        fit, columns, size = words[~is_out], known.columns[~is_out], self.order.shares.shape[1]
        order, repeats = WordOrder.fit(fit, size), Repeats.fit(fit, size)
        trial = self._replace(order=order, repeats=repeats)
        trial = trial._replace(network=Network.fit(fit, columns, others, order, channel, rng))
        out = is_out.nonzero()[: max(1, ENTRIES // self.order.shares.numel()), 0]  # for memory
        w, states, fits = words[out], known.select(out), dict.fromkeys(product(POWERS, AGAIN), 0.0)
        for _ in range(DRAWS):
            likely = channel.draw(w, rng)
            both = trial._expect_by_order(likely, states), trial._expect_by_network(likely, states)
            for powers in fits:
                shares = trial._replace(powers=powers)._join(*both, likely, states) * likely
                right = F.normalize(shares, p=1, dim=2).gather(2, w.clamp_min(0)[..., None])[..., 0]
                fits[powers] += float(right[w >= 0].clamp_min(TINY).log().sum())
        powers = max(fits, key=fits.__getitem__)
        network = Network.fit(words, known.columns, others, self.order, channel, rng) if powers[0] else None
        return self._replace(network=network, repeats=Repeats.fit(words, size), powers=powers)
