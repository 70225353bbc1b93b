"""Decoding of text from noisy states: a Gaussian for each word, what a defense replaces, word order and own columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.layout import PADDING
from vflsec.core.knowledge import Knowledge
from vflsec.core.method import Trained
from vflsec.language.text_prior import FOLDS, WordShares
from vflsec.language.word_privacy import WordPrivacy, WordReplacement

COMPONENTS, WIDTH, ROUNDS, EVIDENCE, POWERS = 128, 256, 6, 30, (0.0, 0.25, 0.5, 0.75, 1.0)
"""Principal components of states, numbers that stand for a word without embeddings, rounds of EM and of penalties, and
powers of the ratios by columns."""

ENTRIES, AT_ONCE, POOL, SAMPLE, TINY = 4 * 10**6, 10**6, 40_000, 6000, 1e-200
"""The most numbers in a table that grows with positions and words, and in one of rows that are decoded at once; words
of other rows for EM, and states for components; and the scale of states that are all the same."""


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


class States(NamedTuple):
    """Hidden states of rows: values (n, T, r, d) of r releases, where words are (n, T), and shares of words.

    The shares are by own columns and by the length of the text, which the mask tells. Decoders read values (n, T, k):
    releases side by side, which tells how the model changed, or their weighted mean, which noise changes least.
    """

    values: Tensor
    mask: Tensor
    shares: WordShares

    def select(self, rows: Tensor) -> States:
        """Return those of some rows."""
        return States(self.values[rows], self.mask[rows], self.shares.select(rows))

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


def weigh_releases(known: States, y: Tensor) -> Tensor:
    """Return the weights (r,) of releases that give their mean the least noise: the signal over the variance of noise.

    Noise that follows the size of states grows while a model trains. The words ``y`` (m, T) of known rows tell both:
    noise is what differs between states of one word, the signal the deviation of the means of words.
    """
    words, numbers = y[known.mask].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    x, counts = known.values[known.mask].double(), torch.bincount(numbers)[:, None, None]
    means = x.new_zeros(len(words), *x.shape[1:]).index_add_(0, numbers, x) / counts
    within = (x - means[numbers]).square().sum(dim=(0, 2)) / max(1, len(x) - len(words))
    between = (counts * (means - x.mean(dim=0)).square()).sum(dim=(0, 2)) - (len(words) - 1) * within
    weights = (between.clamp_min(0) / len(x)).sqrt() / within.clamp_min(1e-12 * x.square().mean(dim=(0, 2)) + TINY)
    weights = weights / weights.sum() if weights.any() else torch.full_like(weights, 1 / len(weights))
    return weights.to(known.values.dtype)


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


def fit_channel(
    known: States,
    y: Tensor,
    rows: States,
    mechanism: Mechanism | None,
    others: States | None = None,
) -> Tensor:
    """Return the words (n, T) of ``rows`` that are likeliest by their states and by the other words of their text.

    A state is Gaussian around a linear function of the embedding of the word that was read, with one covariance for
    all words; without a mechanism, a random vector stands for each word of known rows. The defense tells which words
    were read for a word, known rows the order of words and what own columns say of them. The likelihood is raised by EM
    on known and other rows.

    Args:
        known: m rows whose words are known, with shares by trees without the row.
        y: (m, T) their words.
        rows: n others.
        mechanism: the defense of words, or a public head, if there is one.
        others: rows for EM in place of ``rows``, if these are few.
    """
    vocabulary, numbers = y[known.mask].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if mechanism and len(mechanism.embeddings) ** 2 <= ENTRIES:
        vocabulary = torch.arange(PADDING + 1, len(mechanism.embeddings))  # also words that no known row has
        numbers = y[known.mask] - PADDING - 1
    words = torch.full(y.shape, -1).masked_scatter(known.mask, numbers)
    size, rng = len(vocabulary), torch.Generator().manual_seed(0)
    channel = None
    if mechanism is None:
        random = torch.randn(size, WIDTH, generator=rng, dtype=torch.double) / WIDTH**0.5
        table = torch.eye(size, dtype=torch.double) if size <= WIDTH else random
    else:
        embeddings = mechanism.embeddings.cpu().double()
        table = embeddings[PADDING + 1 :] if mechanism.replacing else embeddings[vocabulary]
        for defense in mechanism.replacing:  # (K, V), of one after the other
            replaced = vocabulary if channel is None else torch.arange(len(table)) + PADDING + 1
            shares = torch.stack(list(defense.compute_shares(replaced, embeddings)))
            channel = shares if channel is None else channel @ shares
    order, index = WordOrder.fit(words, size), {int(word): k for k, word in enumerate(vocabulary)}
    of_place = [torch.tensor([index.get(int(word), -1) for word in w]) for w in known.shares.words]
    by_columns = ColumnRatios(known.shares, words, order, of_place)

    def to_words(likely: Tensor, ratios: Tensor) -> Tensor:
        return ratios * (likely if channel is None else likely @ channel.T)

    def to_read(shares: Tensor) -> Tensor:
        return shares if channel is None else shares @ channel

    pool = rows if others is None else others
    pool = pool.thin(POOL)
    project = _find_components(*(torch.cat(both) for both in zip(known[:2], pool[:2], strict=True)))
    known, pool = (group._replace(values=project(group.values)) for group in (known, pool))
    sums = _Moments(y.shape[1], COMPONENTS, table)
    exact, is_word = to_read(F.one_hot(words.clamp_min(0), size).double()), (words >= 0).double()
    sums.add(known.values, exact, is_word)
    n = max(1, AT_ONCE // (y.shape[1] * len(table)))  # rows at once
    for _ in range(ROUNDS):
        score, sums = sums.fit(shrinks=channel is None), _Moments(y.shape[1], COMPONENTS, table)
        sums.add(known.values, F.normalize(score(known.values) * exact, p=1, dim=2), is_word)
        for part in _split(pool, n):
            likely, ratios = score(part.values), by_columns(part.shares)  # (n, T, V), (n, T, K)
            expected = to_read(order.expect(to_words(likely, ratios), part.mask) * ratios)
            shares = F.normalize(likely * expected, p=1, dim=2)
            sums.add(part.values, shares, shares.amax(dim=2).square() * part.mask)
    score, guess = sums.fit(shrinks=channel is None), []
    for part in _split(rows, n):
        likely = to_words(score(project(part.values)), by_columns(part.shares))
        guess.append((order.expect(likely, part.mask) * likely).argmax(dim=2))
    return torch.where(rows.mask, vocabulary[torch.cat(guess)], PADDING)


def _split(states: States, n: int) -> Iterator[States]:
    yield from map(states.select, torch.arange(len(states.mask)).split(n))  # type: ignore[no-untyped-call]


def _find_components(values: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what turns states (n, T, k) into principal components (n, T, COMPONENTS), zero beyond their rank.

    They are in units of the deviation of states.
    """
    used = mask.nonzero()[:: max(1, int(mask.sum()) // SAMPLE)]
    sample = values[used[:, 0], used[:, 1]].double()
    axes = torch.linalg.svd(sample - (center := sample.mean(dim=0)), full_matrices=False).Vh[:COMPONENTS].T
    axes = axes / (sample - center).std().clamp_min(TINY)
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

    def fit(self, *, shrinks: bool) -> _Gaussians:
        """Return the Gaussians of largest likelihood, with a covariance that can be inverted.

        Args:
            shrinks: whether coefficients have a Gaussian prior, whose variance for each number of a state is that of
                the largest evidence (MacKay 1992, "Bayesian interpolation"). Few known rows make noise look like
                words without it; with words that a defense replaces it can find a maximum where none are told apart.
        """
        width, inputs = self.table.shape[1], self.inputs.clone()
        inputs[:width, :width] = self.table.T @ (self.counts[:, None] * self.table)  # of words, not of their means
        places, by_place = inputs.diagonal()[width:].clamp_min(1e-9), self.both[width:]
        across = inputs[:width, width:] / places  # what positions explain is left out of words and of states
        values, axes = torch.linalg.eigh(inputs[:width, :width] - across @ inputs[width:, :width])
        values = values.clamp_min(0)[:, None]
        along = axes.T @ (self.both[:width] - across @ by_place)
        rest = self.states.diagonal() - (by_place.square() / places[:, None]).sum(dim=0)
        penalty = torch.ones_like(rest)
        for _ in range(EVIDENCE * shrinks):
            line = along / (values + penalty)
            fitted = (values / (values + penalty)).sum(dim=0)  # degrees of freedom
            noise = (rest - 2 * (line * along).sum(dim=0) + (values * line.square()).sum(dim=0)).clamp_min(1e-12)
            noise = noise / (self.total - fitted).clamp_min(1)
            penalty = (noise * fitted / line.square().sum(dim=0).clamp_min(1e-12)).clamp(1e-6, 1e9)
        line = axes @ (along / (values + penalty))
        line = torch.cat([line, (by_place - inputs[width:, :width] @ line) / places[:, None]])
        shared = line.T @ self.both
        covariance = (self.states - shared - shared.T + line.T @ inputs @ line) / self.total
        least = 0.02 * covariance.diagonal().mean().clamp_min(1e-12)
        covariance += least * torch.eye(len(covariance), dtype=torch.double)
        whitening = torch.linalg.cholesky(torch.linalg.inv(covariance))
        return _Gaussians(line[width:], self.table @ line[:width], whitening)
