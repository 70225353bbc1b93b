"""Decoding of text from noisy states: a Gaussian for each word, what a defense replaces, and the other words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.layout import PADDING
from vflsec.core.knowledge import Knowledge
from vflsec.core.method import Trained
from vflsec.language.copied_words import COPIED, replace_copies, restore_copies
from vflsec.language.word_context import WordContext
from vflsec.language.word_order import ColumnRatios, ReadTexts, States, WordOrder
from vflsec.language.word_privacy import WordPrivacy, WordReplacement

COMPONENTS, WIDTH, ROUNDS, MORE, EVIDENCE = 128, 1000, 6, 2, 30
"""Principal components of states, the most numbers that stand for a word without embeddings, rounds of EM before and
after a network, and rounds of penalties."""

AT_ONCE, POOL, SAMPLE, VOCABULARY, TINY = 10**6, 40_000, 6000, 4000, 1e-200
"""The most numbers in a table of rows that are decoded at once, words of other rows for EM, states for components, and
words that are all possible where embeddings are known; and the scale of states that are all the same."""


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


class Decoded(NamedTuple):
    """Words (n, T) of texts.

    Attributes:
        words: the likeliest of each position, or ``texts`` where held-out texts say that more of these are right.
        texts: those that are likely together.
        right: the probabilities (n, T) of ``words``; None if the decoder has none.
    """

    words: Tensor
    texts: Tensor
    right: Tensor | None = None


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


def fit_channel(
    known: States,
    y: Tensor,
    rows: States,
    mechanism: Mechanism | None,
    others: States | None = None,
    *,
    read: ReadTexts | None = None,
    has_network: bool = False,
) -> Decoded:
    """Return the words of ``rows`` that are likeliest by their states and by the other words of their text.

    A state is Gaussian around a linear function of the embedding of the word that was read, with one covariance for
    all words; without a mechanism, a unit vector stands for each word of known rows, or for each of more than 1,000
    words a random one. The defense tells which words were read for a word, known rows the order of words and what
    own columns say of them. A word that copies a column is one word to these, and has the likelihood of the number
    of the row. The likelihood is raised by EM on known and other rows.

    Args:
        known: m rows whose words are known, with shares by trees without the row.
        y: (m, T) their words.
        rows: n others.
        mechanism: the defense of words, or a public head, if there is one.
        others: rows for EM in place of ``rows``, if these are few.
        read: texts whose words are known in part.
        has_network: whether a network is fitted, too, which learns from words far away, and whole texts are decoded.
    """
    vocabulary, numbers = y[known.mask].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if mechanism and len(mechanism.embeddings) <= VOCABULARY:
        vocabulary = torch.arange(PADDING + 1, len(mechanism.embeddings))  # also words that no known row has
        numbers = y[known.mask] - PADDING - 1
    words = torch.full(y.shape, -1).masked_scatter(known.mask, numbers)
    count, rng = len(vocabulary), torch.Generator().manual_seed(0)
    every = torch.cat([vocabulary, COPIED + torch.arange(known.copies.shape[1])])  # words of texts, copies among them
    size, pool = len(every), (rows if others is None else others).thin(POOL)
    read = ReadTexts(rows.select(torch.arange(0)), y[:0], torch.zeros(y[:0].shape)) if read is None else read
    numbers, is_seen = _locate(every, replace_copies(read.words, read.states.copies))
    read = read._replace(words=numbers, right=read.right * is_seen)
    in_text = torch.where(known.mask, _locate(every, replace_copies(y, known.copies))[0], -1)
    is_copy = in_text >= count
    usual = torch.zeros(size - count, count, dtype=torch.double)
    usual.index_put_((in_text[is_copy] - count, words[is_copy]), usual.new_ones(()), accumulate=True)
    usual = F.normalize(usual, p=1, dim=1)
    replaced = None
    if mechanism is None:
        random = torch.randn(count, WIDTH, generator=rng, dtype=torch.double) / WIDTH**0.5
        table = torch.eye(count, dtype=torch.double) if count <= WIDTH else random
    else:
        embeddings = mechanism.embeddings.cpu().double()
        table = embeddings[PADDING + 1 :] if mechanism.replacing else embeddings[vocabulary]
        for defense in mechanism.replacing:  # of one after the other
            originals = vocabulary if replaced is None else torch.arange(len(table)) + PADDING + 1
            shares = torch.stack(list(defense.compute_shares(originals, embeddings)))
            replaced = shares if replaced is None else replaced @ shares
    order, index = WordOrder.fit(torch.cat([in_text, read.keep_sure()]), size), {int(w): k for k, w in enumerate(every)}
    of_place = [torch.tensor([index.get(int(word), -1) for word in w]) for w in known.shares.words]
    context = WordContext(order, ColumnRatios(known.shares, in_text, order, of_place))
    project = _find_components(*(torch.cat(both) for both in zip(known[:2], pool[:2], strict=True)))

    def prepare(states: States) -> States:
        numbers, is_seen = _locate(vocabulary, states.copies)
        return states._replace(values=project(states.values), copies=torch.where(is_seen, numbers, -1))

    known, pool, read = prepare(known), prepare(pool), read._replace(states=prepare(read.states))
    exact = F.one_hot(words.clamp_min(0), count).double()
    exact = exact if replaced is None else exact @ replaced
    n = max(1, AT_ONCE // (y.shape[1] * len(table)))  # rows at once

    def fit(shares: Tensor, pooled: Iterable[tuple[States, Tensor]]) -> _Gaussians:
        sums = _Moments(y.shape[1], COMPONENTS, table)
        sums.add(known.values, shares, known.mask.double())
        for part, of_part in pooled:
            sums.add(part.values, of_part, of_part.amax(dim=2).square() * part.mask)
        return sums.fit(replaced, usual)

    def assign(score: _Gaussians) -> Iterator[tuple[States, Tensor]]:
        for part in _split(pool, n):
            yield part, score.assign(part, partial(context.expect, states=part))
        for at in torch.arange(len(read.words)).split(n):  # type: ignore[no-untyped-call]
            texts = read.select(at)
            yield texts.states, score.assign(texts.states, lambda _, texts=texts: texts.compute_shares(size))  # type: ignore[misc]

    def refine(score: _Gaussians, rounds: int) -> _Gaussians:
        for _ in range(rounds):
            score = fit(F.normalize(score.score(known.values) * exact, p=1, dim=2), assign(score))
        return score

    score = refine(fit(exact, ()), ROUNDS)
    if has_network:
        context = context.add_network(in_text, known, pool, read, score, rng)
        score = refine(score, MORE)
    each, whole = torch.full((2, *rows.mask.shape), PADDING)  # at once: many small tensors fragment the memory
    right = torch.zeros(rows.mask.shape)
    for at in torch.arange(len(rows.mask)).split(n):  # type: ignore[no-untyped-call]
        part = prepare(rows.select(at))
        likely = score.read(part)
        shares = F.normalize(context.expect(likely, part) * likely, p=1, dim=2)
        merged = score.merge(shares, part.copies)
        merged[..., count:] *= (rows.copies[at] != PADDING)[:, None]  # a category without a word
        best = together = merged.argmax(dim=2)
        if has_network:
            together = context.decode(likely, shares, part)
            together = torch.where(restore_copies(every[together], rows.copies[at]) == PADDING, best, together)
        best = together if context.are_joint else best
        right[at] = merged.gather(2, best[..., None])[..., 0].float()
        for words, chosen in ((each, best), (whole, together)):
            words[at] = torch.where(part.mask, restore_copies(every[chosen], rows.copies[at]), PADDING)
    return Decoded(each, whole, right)


def _locate(vocabulary: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of words in an ascending vocabulary, and whether it has them."""
    numbers = torch.searchsorted(vocabulary, words).clamp_max(len(vocabulary) - 1)
    return numbers, vocabulary[numbers] == words


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
    """The likelihood of a word by a state, which is Gaussian around a center.

    Attributes:
        means: (T, k) of positions.
        centers: (V, k) of words that the model reads, whitened.
        whitening: (k, k).
        replaced: (K, V) shares of words that are read for a word; None if they are the same.
        usual: (J, K) shares of words that copies of a column are, which stand for copies that no known text has.
    """

    means: Tensor
    centers: Tensor
    whitening: Tensor
    replaced: Tensor | None
    usual: Tensor

    def score(self, x: Tensor) -> Tensor:
        """Return likelihoods (n, T, V) of words that were read, by states (n, T, k)."""
        return self._compare((x - self.means) @ self.whitening)

    def read(self, states: States) -> Tensor:
        """Return likelihoods (n, T, K + J) of words and of copies by states."""
        return self._to_words(self.score(states.values), states.copies)

    def draw(self, words: Tensor, copies: Tensor, rng: torch.Generator) -> Tensor:
        """Return likelihoods (n, T, K + J) by states of ``words`` (n, T), by number, which get fresh noise."""
        words = words.clamp_min(0)
        for column, usual in enumerate(self.usual):
            unseen = torch.multinomial(usual + 1e-12, len(words), replacement=True, generator=rng)
            number = torch.where(copies[:, column] < 0, unseen, copies[:, column])
            words = torch.where(words == len(usual) + column, number[:, None], words)
        if self.replaced is not None:
            words = torch.multinomial(self.replaced[words.flatten()], 1, generator=rng).view(words.shape)
        centers = self.centers[words]
        noise = torch.randn(centers.shape, generator=rng, dtype=torch.double)
        return self._to_words(self._compare(centers + noise), copies)

    def assign(self, states: States, shares: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the shares (n, T, V) of words that were read, by states and by ``shares`` (n, T, K + J) of words."""
        likely, size = self.score(states.values), self.usual.shape[1]
        expected = self.merge(shares(self._to_words(likely, states.copies)), states.copies)
        expected = expected[..., :size] + (expected[..., size:] * (states.copies < 0)[:, None]) @ self.usual
        expected = expected if self.replaced is None else expected @ self.replaced
        return F.normalize(likely * expected, p=1, dim=2)

    def merge(self, shares: Tensor, copies: Tensor) -> Tensor:
        """Return shares (n, T, K + J) of words and of copies (n, J) with the sum for a word and a copy of it."""
        if not copies.shape[1]:
            return shares
        words, of_copies = shares.tensor_split([self.usual.shape[1]], dim=2)
        is_seen, at = (copies >= 0)[:, None], copies.clamp_min(0)[:, None].expand(of_copies.shape)
        words = words.scatter_add(2, at, of_copies * is_seen)
        return torch.cat([words, torch.where(is_seen, words.gather(2, at), of_copies)], dim=2)

    def _to_words(self, likely: Tensor, copies: Tensor) -> Tensor:
        """Return likelihoods (n, T, K + J) of words and copies by those (n, T, V) of words that were read."""
        words = likely if self.replaced is None else likely @ self.replaced.T
        if not copies.shape[1]:
            return words
        unseen = (words @ self.usual.T).clamp_min(1e-12)
        of_copies = words.gather(2, copies.clamp_min(0)[:, None].expand(unseen.shape))
        return torch.cat([words, torch.where((copies < 0)[:, None], unseen, of_copies)], dim=2)

    def _compare(self, z: Tensor) -> Tensor:
        """Return likelihoods (n, T, V) over the largest of each position, by whitened states."""
        squares = torch.cdist(z.flatten(0, 1), self.centers).square()
        likely = (-0.5 * (squares - squares.amin(dim=1, keepdim=True))).exp().clamp_min(1e-12)
        return likely.reshape(*z.shape[:2], len(self.centers))


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
        self.at_places = torch.zeros(width, length, dtype=torch.double)
        self.is_unit = len(table) == table.shape[1] <= WIDTH and torch.equal(table, torch.eye(len(table)).to(table))
        self.both = torch.zeros(width, states, dtype=torch.double)
        self.states = torch.zeros(states, states, dtype=torch.double)
        self.counts, self.total = torch.zeros(len(table), dtype=torch.double), torch.zeros(())

    def add(self, x: Tensor, shares: Tensor, weight: Tensor) -> None:
        """Add rows whose words have ``shares`` (n, T, V) and places the weight (n, T)."""
        used = weight > 0
        places = self.places.expand(len(x), -1, -1)[used]
        words = shares[used] if self.is_unit else shares[used] @ self.table
        inputs, s, w = torch.cat([words, places], dim=1), x[used], weight[used][:, None]
        self.at_places += inputs.T @ (w * places)
        self.both += inputs.T @ (w * s)
        self.states += s.T @ (w * s)
        self.counts += (w * shares[used]).sum(dim=0)
        self.total = self.total + w.sum()

    def fit(self, replaced: Tensor | None, usual: Tensor) -> _Gaussians:
        """Return the Gaussians of largest likelihood, with a covariance that can be inverted.

        Args:
            usual: shares of words that copies of a column are.
            replaced: shares of words that are read for a word; None if they are the same. Then coefficients have a
                Gaussian prior, whose variance for each number of a state is that of the largest evidence (MacKay 1992,
                "Bayesian interpolation"). Few known rows make noise look like words without it; with replaced words it
                can find a maximum where none are told apart.
        """
        width = self.table.shape[1]
        words = self.table.T @ (self.counts[:, None] * self.table)  # of words, not of their means
        inputs = torch.cat([torch.cat([words, self.at_places[:width].T]), self.at_places], dim=1)
        places, by_place = inputs.diagonal()[width:].clamp_min(1e-9), self.both[width:]
        across = inputs[:width, width:] / places  # what positions explain is left out of words and of states
        values, axes = torch.linalg.eigh(inputs[:width, :width] - across @ inputs[width:, :width])
        values = values.clamp_min(0)[:, None]
        along = axes.T @ (self.both[:width] - across @ by_place)
        rest = self.states.diagonal() - (by_place.square() / places[:, None]).sum(dim=0)
        penalty = torch.ones_like(rest)
        for _ in range(EVIDENCE if replaced is None else 0):
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
        values, axes = torch.linalg.eigh(covariance + covariance.T)
        whitening = axes * (0.5 * values.clamp_min(0) + least).rsqrt()
        return _Gaussians(line[width:], self.table @ line[:width] @ whitening, whitening, replaced, usual)
