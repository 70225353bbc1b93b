"""Decoding of text from noisy states: a Gaussian for each word, what a defense replaces, word order and own columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.layout import PADDING
from vflsec.core.knowledge import Knowledge
from vflsec.core.method import Trained
from vflsec.language.text_prior import FOLDS, Columns, fit_forest
from vflsec.language.word_privacy import WordPrivacy, WordReplacement

COMPONENTS, WIDTH, ROUNDS, POWERS = 128, 256, 6, (0.0, 0.25, 0.5, 0.75, 1.0)
"""Principal components of states, numbers that stand for a word without embeddings, rounds of EM, and powers of the
ratios by columns."""

ENTRIES, POOL, SAMPLE = 4 * 10**6, 2000, 6000
"""The most numbers in a table that grows with rows, positions and words; rows for EM, and states for components."""


class Mechanism(NamedTuple):
    """What both parties know of words: vectors (V, d), of embeddings before training or a public head, and defenses."""

    embeddings: Tensor
    replacing: tuple[WordReplacement, ...] = ()


def read_mechanism(trained: Trained, _: Sequence[str]) -> Mechanism | None:
    """Return the defense of words of the party with the text, or None without it."""
    defenses = [d for party in trained.federation.parties.values() if party.holds_text for d in party.defenses]
    words = [d for d in defenses if isinstance(d, WordPrivacy) and d.strength and d.embeddings is not None]
    if not words:
        return None
    replacing = tuple(d for d in words if isinstance(d, WordReplacement))
    return Mechanism(words[0].embeddings, replacing)  # type: ignore[arg-type]


MECHANISM = Knowledge(
    "the defense of words",
    "evaluate the job with vflsec eval, where parties agree on it",
    read=read_mechanism,
    sides=("active",),
    at_end=True,
)


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
        """Return that of ``words`` (m, T) by number, negative at padding; a fifth of them gives the weights."""
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

    A forest on these columns weights known rows, which gives the share of each word at each position. On held-out known
    rows, EM estimates how often these shares are right at a position. The ratio is raised to the power that fits these
    rows best, since all words of a text depend on the same columns.

    Args:
        columns: (m, c) of known rows; c may be 0.
        words: (m, T) of them by number, negative at padding.
        order: of the words.
    """

    def __init__(self, columns: Tensor, words: Tensor, order: WordOrder) -> None:
        self.words, self.order, self.power = words, order, 0.0
        if len(words) < FOLDS or not columns.shape[1]:
            return
        x, y, self.trust = columns.cpu().numpy(), words.numpy(), torch.ones(words.shape[1], 1, dtype=torch.double)
        most = max(FOLDS, min(len(y), ENTRIES // order.shares.numel()))  # for memory
        judging = np.linspace(0, len(y) - 1, most).astype(int)
        weights, self.weigh, self.power = np.zeros((most, len(y))), fit_forest(x, y, 0), 1.0
        for fit, out in KFold(FOLDS, shuffle=True, random_state=0).split(y):
            rows = np.flatnonzero(np.isin(judging, out))
            weights[np.ix_(rows, fit)] = fit_forest(x[fit], y[fit], 0)(x[judging[rows]])
        used, at = words[judging] >= 0, words[judging].clamp_min(0)[..., None]
        ratios = self._compare(weights)
        right = ratios.gather(2, at)[..., 0]
        trust = torch.full_like(right[0], 0.5)
        for _ in range(50):
            trust = (used * trust * right / (1 - trust + trust * right)).sum(dim=0) / used.sum(dim=0).clamp_min(1)
        self.trust = trust[:, None]
        prior = order.expect(torch.zeros_like(ratios).scatter(2, at, 1.0), used)
        fits = {
            power: F.normalize(prior * self._believe(ratios) ** power, p=1, dim=2).gather(2, at) for power in POWERS
        }
        self.power = max(POWERS, key=lambda power: float(fits[power][used].clamp_min(1e-12).log().sum()))

    def __call__(self, columns: Tensor) -> Tensor:
        """Return the ratios (n, T, K), or a single 1 if known rows say that columns tell nothing."""
        if not self.power:
            return torch.ones((), dtype=torch.double)
        return self._believe(self._compare(self.weigh(columns.cpu().numpy()))) ** self.power

    def _believe(self, ratios: Tensor) -> Tensor:
        return 1 - self.trust + self.trust * ratios

    def _compare(self, weights: Columns) -> Tensor:
        """Return the share of each word by weights (n, m) of known rows over its share at the position."""
        near = torch.from_numpy(weights)
        shares = near.new_zeros(len(near), *self.order.shares.shape)
        for t, words in enumerate(self.words.T):
            shares[:, t].index_add_(1, words[words >= 0], near[:, words >= 0])
        total = shares.sum(dim=2, keepdim=True)
        return torch.where((self.order.shares > 0) & (total > 0), shares / total / self.order.shares, 1.0)


def fit_channel(
    known: Sequence[Tensor],
    y: Tensor,
    rows: Sequence[Tensor],
    mechanism: Mechanism | None,
    others: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the words (n, T) of ``rows`` that are likeliest by their states and by the other words of their text.

    A state is Gaussian around a linear function of the embedding of the word that was read, with one covariance for
    all words; without a mechanism, a random vector stands for each word of known rows. The defense tells which words
    were read for a word, known rows the order of words and what own columns say of them. The likelihood is raised by EM
    on known and other rows.

    Args:
        known: states (m, T, k) of known rows, where words are (m, T), and own columns (m, c).
        y: (m, T) their words.
        rows: states (n, T, k) of others, where words are, and own columns.
        mechanism: the defense of words, or a public head, if there is one.
        others: rows for EM in place of ``rows``, if these are few.
    """
    vocabulary, numbers = y[known[1]].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if mechanism and len(mechanism.embeddings) ** 2 <= ENTRIES:
        vocabulary = torch.arange(PADDING + 1, len(mechanism.embeddings))  # also words that no known row has
        numbers = y[known[1]] - PADDING - 1
    known_words = torch.full(y.shape, -1).masked_scatter(known[1], numbers)
    size, rng = len(vocabulary), torch.Generator().manual_seed(0)
    channel = None
    if mechanism is None:
        random = torch.randn(size, WIDTH, generator=rng, dtype=torch.double) / WIDTH**0.5
        table = torch.eye(size, dtype=torch.double) if size <= WIDTH else random
    else:
        embeddings = mechanism.embeddings.cpu().double()
        table = embeddings[PADDING + 1 :] if mechanism.replacing else embeddings[vocabulary]
        for defense in mechanism.replacing:  # (K, V), of one after the other
            words = vocabulary if channel is None else torch.arange(len(table)) + PADDING + 1
            shares = torch.stack(list(defense.compute_shares(words, embeddings)))
            channel = shares if channel is None else channel @ shares
    order = WordOrder.fit(known_words, size)
    by_columns = ColumnRatios(known[2], known_words, order)

    def to_words(likely: Tensor, ratios: Tensor) -> Tensor:
        return ratios * (likely if channel is None else likely @ channel.T)

    def to_read(shares: Tensor) -> Tensor:
        return shares if channel is None else shares @ channel

    pool = rows if others is None else others
    pool = [values[torch.linspace(0, len(values) - 1, min(len(values), POOL)).long()] for values in pool]
    states, mask, columns = (torch.cat(both) for both in zip(known, pool, strict=True))
    labels, project = F.pad(known_words, (0, 0, 0, len(pool[0])), value=-1), _find_components(states, mask)
    x, sums = project(states), _Moments(mask.shape[1], COMPONENTS, table)
    is_word = known_words >= 0
    exact = F.one_hot(known_words.clamp_min(0), size).double()
    sums.add(x[: len(known[1])], to_read(exact), is_word.double())
    n = max(1, ENTRIES // (mask.shape[1] * len(table)))  # rows at once
    for _ in range(ROUNDS):
        score, sums = sums.fit(), _Moments(mask.shape[1], COMPONENTS, table)
        parts = (values.split(n) for values in (x, mask, labels, columns))  # type: ignore[no-untyped-call]
        for part, used, label, beside in zip(*parts, strict=True):
            likely, ratios = score(part), by_columns(beside)  # (n, T, V), (n, T, K)
            expected = order.expect(to_words(likely, ratios), used) * ratios
            expected[label >= 0] = F.one_hot(label[label >= 0], size).double()
            shares = F.normalize(likely * to_read(expected), p=1, dim=2)
            sums.add(part, shares, shares.amax(dim=2).square() * used)
    score, words = sums.fit(), []
    for values, used, beside in zip(*(x.split(n) for x in rows), strict=True):  # type: ignore[no-untyped-call]
        likely = to_words(score(project(values)), by_columns(beside))
        words.append((order.expect(likely, used) * likely).argmax(dim=2))
    return torch.where(rows[1], vocabulary[torch.cat(words)], PADDING)


def _find_components(values: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what turns states (n, T, k) into principal components (n, T, COMPONENTS), zero beyond their rank."""
    used = mask.nonzero()[:: max(1, int(mask.sum()) // SAMPLE)]
    sample = values[used[:, 0], used[:, 1]].double()
    axes = torch.linalg.svd(sample - (center := sample.mean(dim=0)), full_matrices=False).Vh[:COMPONENTS].T
    return lambda x: (x - center) @ F.pad(axes, (0, COMPONENTS - axes.shape[1]))


class _Gaussians(NamedTuple):
    """The likelihood of a word by a state, which is Gaussian around a center, and a mean of each position (T, k)."""

    means: Tensor
    centers: Tensor
    whitening: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return likelihoods (n, T, V) over the largest of each position."""
        z = ((x - self.means) @ self.whitening).flatten(0, 1)
        squares = torch.cdist(z, self.centers @ self.whitening).square()
        likely = (-0.5 * (squares - squares.amin(dim=1, keepdim=True))).exp().clamp_min(1e-12)
        return likely.reshape(*x.shape[:2], -1)


class _Moments:
    """What a weighted regression of states on embeddings and positions needs of all rows.

    Args:
        length: positions, T.
        states: numbers of a state, k.
        table: embeddings (V, d).
    """

    def __init__(self, length: int, states: int, table: Tensor) -> None:
        self.places, self.table = torch.eye(length, dtype=torch.double), table
        width = length + table.shape[1]
        self.inputs = torch.zeros(width, width, dtype=torch.double)
        self.both = torch.zeros(width, states, dtype=torch.double)
        self.states = torch.zeros(states, states, dtype=torch.double)
        self.counts, self.total = torch.zeros(len(table), dtype=torch.double), torch.zeros(())

    def add(self, x: Tensor, shares: Tensor, weight: Tensor) -> None:
        """Add rows whose words have ``shares`` (n, T, V) and places the weight (n, T)."""
        used = weight > 0
        places = self.places.expand(len(x), -1, -1)[used]
        inputs, s, w = torch.cat([shares[used] @ self.table, places], dim=1), x[used], weight[used][:, None]
        self.inputs += inputs.T @ (w * inputs)
        self.both += inputs.T @ (w * s)
        self.states += s.T @ (w * s)
        self.counts += (w * shares[used]).sum(dim=0)
        self.total = self.total + w.sum()

    def fit(self) -> _Gaussians:
        """Return the Gaussians of largest likelihood, with a covariance that can be inverted."""
        width, inputs = self.table.shape[1], self.inputs.clone()
        inputs[:width, :width] = self.table.T @ (self.counts[:, None] * self.table)  # of words, not of their means
        line = torch.linalg.solve(inputs + torch.eye(len(inputs), dtype=torch.double), self.both)
        shared = line.T @ self.both
        covariance = (self.states - shared - shared.T + line.T @ inputs @ line) / self.total
        least = 0.02 * covariance.diagonal().mean().clamp_min(1e-12)
        covariance += least * torch.eye(len(covariance), dtype=torch.double)
        whitening = torch.linalg.cholesky(torch.linalg.inv(covariance))
        return _Gaussians(line[width:], self.table @ line[:width], whitening)
