"""The word at a position by the other words of its text and by own columns: word order, a network and repeats."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.language.text_prior import FOLDS
from vflsec.language.word_order import ENTRIES, POWERS, ColumnRatios, ReadTexts, States, WordOrder, list_evenly

TINY = 1e-12
"""The smallest share of a word."""

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

BARS, CHANGED, SHIFTS, MOST_TEXTS, SAME = (float("inf"), 0.0, 2.0, 5.0), 0.15, (0, -2, -1, 1, 2), 1000, 0.9
"""Of similar known texts: logarithms of how much likelier they must be to weigh half, the share of words that differ,
by how many positions they may be shifted, the most of them with shifts, and their largest weight."""


class Likelihoods(Protocol):
    """The likelihoods of words by states, up to a factor."""

    def draw(self, words: Tensor, copies: Tensor, rng: torch.Generator) -> Tensor:
        """Return those (n, T, K) by states of ``words`` (n, T), by number, which get fresh noise."""

    def read(self, states: States) -> Tensor:
        """Return those (n, T, K) by states."""


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
        known: States,
        others: States,
        read: ReadTexts,
        order: WordOrder,
        channel: Likelihoods,
        rng: torch.Generator,
    ) -> Network:
        """Return a network that is trained on words (m, T), negative where unknown, and on states of other texts.

        Known words get fresh noise. The loss of a word that is not known is that of its state: the negative logarithm
        of the sum over all words of the share of the word times its likelihood. Where a text was read before, its words
        give the likelihood.
        """
        size, words = order.shares.shape[1], torch.cat([words, read.keep_sure()])
        is_known, parts = (words >= 0).any(dim=1), ((s.mask, s.columns, s.copies) for s in (known, read.states))
        words, mask, columns, copies = (x[is_known] for x in (words, *map(torch.cat, zip(*parts, strict=True))))
        usual = 0.98 * order.shares + 0.02 * order.shares.mean(dim=0) + 0.01 / size
        network = cls(usual, columns.shape[1])
        optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
        others, read = others.thin(max(1, TABLE // size)), read.thin(max(1, TABLE // size))
        of_rest = torch.cat([others.mask, read.states.mask])
        rest_columns = torch.cat([others.columns, read.states.columns])
        table = torch.empty(*of_rest.shape, size)
        parts = table.split([len(others.mask), len(read.words)])  # type: ignore[no-untyped-call]
        for states, part in zip((others, read.states), parts, strict=True):
            for at in torch.arange(len(part)).split(BATCH):  # type: ignore[no-untyped-call]
                part[at] = channel.read(states.select(at)).float()

        def score(likely: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
            share = MOST_HIDDEN * torch.rand(len(mask), 1, generator=rng)
            is_hidden = torch.rand(mask.shape, generator=rng) < share
            return network(torch.where(is_hidden[..., None], 1.0, likely), mask, columns)  # type: ignore[no-any-return]

        count = max(1, min(BATCH, BATCH * SHORT // words.shape[1]))
        for _ in range(STEPS):  # with tensors of one size, padding included: others fragment the memory
            batch, rest = (torch.randint(len(x), (n,), generator=rng) for x, n in ((words, count), (table, 2 * count)))
            w, used, likely = words[batch], of_rest[rest], table[rest]
            drawn = torch.where(w[..., None] < 0, 1.0, channel.draw(w, copies[batch], rng).float())
            scores = score(drawn, mask[batch], columns[batch])
            shares = score(likely, used, rest_columns[rest]).log_softmax(dim=2)
            is_read = rest >= len(others.mask)
            likely[is_read] = read.select(rest[is_read] - len(others.mask)).compute_shares(size).float()
            fits = (shares + likely.log()).logsumexp(dim=2)
            loss = F.cross_entropy(scores.flatten(0, 1), w.flatten(), ignore_index=-1, label_smoothing=SMOOTHING)
            loss = loss - (fits * used).sum() / used.sum()
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


class SimilarTexts(NamedTuple):
    """Which words known texts have that fit all other states of a text: many texts are copies with a few changes.

    Attributes:
        words: (m, T) of known texts by number, also shifted by a few positions; negative where there is none.
        usual: (T, K) shares of words at positions.
    """

    words: Tensor
    usual: Tensor

    @classmethod
    def fit(cls, words: Tensor, order: WordOrder) -> SimilarTexts:
        """Return those of known texts (m, T), or of evenly spaced ones."""
        most, length = MOST_TEXTS // len(SHIFTS), words.shape[1]
        words = words[list_evenly(words, most * length)]
        wide = F.pad(words, (length, length), value=-1)
        shifted = torch.cat([wide[:, length - k : 2 * length - k] for k in SHIFTS if abs(k) < length])
        return cls(shifted, (0.9 * order.shares + 0.1 / order.shares.shape[1]).float())

    def expect(self, likely: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares (n, T, K) of words by all other likelihoods (n, T, K) of their text, and how texts fit.

        The second is the logarithm (n, T) of how much likelier the others are by similar texts than by usual words.
        """
        likely = likely.float()
        base, shares, fits = (likely * self.usual).sum(dim=2), torch.empty_like(likely), torch.empty(mask.shape)
        total = torch.zeros(len(likely), len(self.words))
        for t in range(mask.shape[1]):
            total += self._compare(likely, mask, base, t)
        for t, words in enumerate(self.words.T):  # once more, for memory
            others = total - self._compare(likely, mask, base, t)
            weights = others.softmax(dim=1) * (words >= 0)
            shares[:, t] = weights @ F.one_hot(words.clamp_min(0), likely.shape[2]).float() + TINY * self.usual[t]
            fits[:, t] = others.logsumexp(dim=1) - torch.tensor(len(words)).log()
        return F.normalize(shares, p=1, dim=2).double(), fits.double()

    def _compare(self, likely: Tensor, mask: Tensor, base: Tensor, t: int) -> Tensor:
        """Return logarithms (n, m) of how much likelier position ``t`` is by each text than by usual words."""
        words = self.words[:, t]
        ratios = likely[:, t, words.clamp_min(0)] / base[:, t, None] * mask[:, t, None]
        return ((1 - CHANGED) * torch.where(words < 0, 1.0, ratios) + CHANGED).log()


class WordContext(NamedTuple):
    """Shares of a word by all but its own state: word order, own columns, a network, repeats and similar texts.

    The order learns pairs from few texts, the network knows words far from each other. As noise is drawn for each word,
    either gives shares by which the likelihoods of a state are multiplied; a weighted geometric mean joins them. It is
    multiplied by the ratios of repeated words, and mixed with the words of similar texts.

    Attributes:
        order: of the words.
        by_columns: ratios that go with the order.
        network: None before it is fitted, as are the two others.
        repeats: of the words.
        similar: known texts.
        powers: of the network, which is its weight, and of the repeats.
        bar: of similar texts.
        are_joint: whether words that are likely together are right more often than the likeliest ones.
    """

    order: WordOrder
    by_columns: ColumnRatios
    network: Network | None = None
    repeats: Repeats | None = None
    similar: SimilarTexts | None = None
    powers: tuple[float, float] = (0.0, 0.0)
    bar: float = BARS[0]
    are_joint: bool = False

    def expect(self, likely: Tensor, states: States) -> Tensor:
        """Return shares of words (n, T, K) by likelihoods (n, T, K) of all words; both are up to a factor."""
        by_network = self._expect_by_network(likely, states) if self.powers[0] else None
        shares = self._join(self._expect_by_order(likely, states), by_network)
        if self.similar and self.bar < BARS[0]:
            shares = self._mix(shares, *self.similar.expect(likely, states.mask))
        return self._repeat(shares, likely, states)

    def _expect_by_order(self, likely: Tensor, states: States) -> Tensor:
        ratios = self.by_columns(states.shares)
        return self.order.expect(likely * ratios, states.mask) * ratios

    @torch.no_grad()
    def _expect_by_network(self, likely: Tensor, states: States) -> Tensor:
        assert self.network is not None
        scores: Tensor = self.network(likely, states.mask, states.columns)
        return scores.softmax(dim=2).double()

    def _join(self, by_order: Tensor, by_network: Tensor | None) -> Tensor:
        power = self.powers[0]
        return by_order if by_network is None else by_network**power * by_order ** (1 - power)

    def _mix(self, shares: Tensor, by_texts: Tensor, fits: Tensor) -> Tensor:
        weight = SAME * (fits - self.bar).sigmoid()[..., None]
        return (1 - weight) * F.normalize(shares, p=1, dim=2) + weight * by_texts

    def _repeat(self, shares: Tensor, likely: Tensor, states: States) -> Tensor:
        if not self.powers[1]:
            return shares
        assert self.repeats is not None
        return shares * self.repeats.expect(shares * likely, states.mask) ** self.powers[1]

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
        self, words: Tensor, known: States, others: States, read: ReadTexts, channel: Likelihoods, rng: torch.Generator
    ) -> WordContext:
        """Return this context with all parts, and the powers and bar that fit a held-out fifth of known texts best.

        Args:
            words: (m, T) of known texts, by number, negative at padding.
            known: their columns and shares.
            others: texts without words.
            read: texts whose words are known in part.
            channel: the likelihoods of words.
            rng: of the training and of fresh noise.
        """
        is_out, texts = torch.arange(len(words)) % FOLDS == 0, read.keep_sure()
        if is_out.all():
            return self
        size = self.order.shares.shape[1]

        part = torch.cat([words[~is_out], texts])
        order, repeats = WordOrder.fit(part, size), Repeats.fit(part, size)
        network = Network.fit(words[~is_out], known.select(~is_out), others, read, order, channel, rng)
        similar = SimilarTexts.fit(words[~is_out], order)
        trial = self._replace(order=order, repeats=repeats, network=network)
        out = is_out.nonzero()[: max(1, ENTRIES // self.order.shares.numel()), 0]  # for memory
        w, states, fits = words[out], known.select(out), dict.fromkeys(product(POWERS, AGAIN, BARS), 0.0)
        for _ in range(DRAWS):
            likely = channel.draw(w, states.copies, rng)
            parts = trial._expect_by_order(likely, states), trial._expect_by_network(likely, states)
            by_texts = similar.expect(likely, states.mask)
            for power, again, bar in fits:
                tried = trial._replace(powers=(power, again), bar=bar)
                shares = tried._repeat(tried._mix(tried._join(*parts), *by_texts), likely, states) * likely
                right = F.normalize(shares, p=1, dim=2).gather(2, w.clamp_min(0)[..., None])[..., 0]
                fits[power, again, bar] += float(right[w >= 0].clamp_min(TINY).log().sum())
        power, again, bar = max(fits, key=fits.__getitem__)
        trial, likely = trial._replace(similar=similar, powers=(power, again), bar=bar), channel.read(states)
        shares = trial.expect(likely, states) * likely
        more = (trial.decode(likely, shares, states) == w).sum() - (shares.argmax(dim=2) == w).sum()
        every = torch.cat([words, texts])
        return trial._replace(
            order=self.order,
            network=Network.fit(words, known, others, read, self.order, channel, rng) if power else None,
            repeats=Repeats.fit(every, size),
            similar=SimilarTexts.fit(words, self.order),
            are_joint=bool(more > 0),
        )
