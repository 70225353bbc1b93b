"""Defenses of each word of a text by metric differential privacy: replaced words, and noise on their embeddings."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.base.layout import PADDING
from vflsec.core.defense import Defense
from vflsec.language.transformer import Text

ROWS = 1024
"""Words of the vocabulary whose distances to all others are in memory at once."""

GUARANTEE = (
    "metric differential privacy of each word, against everybody but the party with the text, in all messages of one "
    "training and its predictions: replacing a word by another changes them by at most epsilon d, where d in [0, 1] is "
    "the distance of their embeddings over the largest in the vocabulary; so by at most epsilon. A text of n words "
    "spends n epsilon, and K trainings on it K times as much. Lengths of texts and the vocabulary are public: that a "
    "word occurs at all is not covered"
)

WITHIN_SETS = (
    "differential privacy of each word among the words of its set, against everybody but the party with the text, in "
    "all messages of one training and its predictions: replacing a word by another of its set changes them by at most "
    "epsilon. Between sets there is none: what a word becomes tells for certain which set it is of. A text of n words "
    "spends n epsilon, and K trainings on it K times as much. Lengths of texts, the vocabulary and the sets are public"
)


class WordPrivacy(Defense):
    """Base of all: what the models read is drawn once for each text, so that its releases cannot be averaged.

    Attributes:
        fixes: whether embeddings must not learn, since each state of them would be another release of the same noise.
    """

    strength_name = "1/epsilon"
    strengths = (0.0625, 0.125, 0.25)
    points = ()
    by_epsilon: ClassVar[dict[str, Any]] = {}
    version = 3
    guarantee = GUARANTEE
    fixes: ClassVar[bool] = False
    _length = 0
    _embeddings: Tensor | None = None

    @property
    def embeddings(self) -> Tensor | None:
        """Return those (V, d) before training, which both parties know; None before ``read_words``."""
        return self._embeddings

    def read_words(self, words: nn.Embedding, length: int) -> None:
        """Take the embeddings before training, which both parties know, and the words of the longest text, T.

        Only the party with a text does so; elsewhere no epsilon is spent.
        """
        self._embeddings, self._length = words.weight.detach().double().clone(), length
        words.weight.requires_grad_(words.weight.requires_grad and not self.fixes)

    def privacy_spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon of the longest text, which adds up over trainings that draw anew, whatever they release."""
        words = releases * self._length
        return {"epsilon": words / self.strength, "delta": 0.0} if words and self.strength else None

    def on_text(self, text: Text, *, rng: torch.Generator) -> Text:
        """Return the text that the models read in place of ``text``; padding stays."""
        assert self._embeddings is not None, "read_words comes first"
        return self.draw(text, self._embeddings, rng) if self.strength else text

    @abstractmethod
    def draw(self, text: Text, embeddings: Tensor, rng: torch.Generator) -> Text:
        """Return ``text`` with fresh noise.

        Args:
            text: as the defense before left it.
            embeddings: (V, d) of the vocabulary.
            rng: the party's own.
        """


class WordReplacement(WordPrivacy):
    """Base of those that put a random word in the place of each, with probabilities that both parties know."""

    @abstractmethod
    def compute_shares(self, words: Tensor, embeddings: Tensor) -> Iterator[Tensor]:
        """Yield the probabilities (V - 1,) of what each of ``words`` (n,) becomes, from the word after padding on."""

    def draw(self, text: Text, embeddings: Tensor, rng: torch.Generator) -> Text:
        """Return other words."""
        words = text.words.clone()
        used = text.words[text.words != PADDING].unique()  # type: ignore[no-untyped-call]
        for word, shares in zip(used, self.compute_shares(used, embeddings), strict=True):
            places = text.words == word
            drawn = torch.multinomial(shares, int(places.sum()), replacement=True, generator=rng)
            words[places] = drawn + PADDING + 1
        return Text(words, text.noise)


def find_diameter(embeddings: Tensor) -> float:
    """Return the largest distance between two embeddings (V, d) of words."""
    used = embeddings[PADDING + 1 :]
    return max(float(torch.cdist(part, used).max()) for part in used.split(ROWS))  # type: ignore[no-untyped-call]


class SanText(WordReplacement):
    """Each word becomes a random word of the vocabulary, the more likely the nearer their embeddings are.

    P(y | x) is proportional to exp(-epsilon d(x, y) / 2), where d is the Euclidean distance between embeddings over the
    largest one in the vocabulary, in [0, 1]. The strength is 1/epsilon, so that 0 is off; write ``santext:epsilon=16``,
    or ``--epsilon``. Everything after it works on the new words, also the embeddings that learn. Padding stays;
    ``[unknown]`` and ``[start]`` are replaced like any word.

    Source: Yue et al. 2021 (SanText), arXiv 2106.01221, algorithm 1.
    """

    name = "santext"
    reference = "Yue et al. 2021 (SanText), arXiv 2106.01221, algorithm 1"
    hides = "from the receiver of hidden states: each word, within epsilon of the words near it"
    costs = "utility: with V words of equal distance, a share of 1 / (1 + (V - 1) exp(-epsilon / 2)) stays as it is"
    fails = (
        "with an epsilon above twice the logarithm of the vocabulary's size, where most words stay; for what other "
        "words of the text, or columns, tell of a word; and for the labels, which it does not hide"
    )

    def compute_shares(self, words: Tensor, embeddings: Tensor) -> Iterator[Tensor]:
        """Yield the probabilities of what each word becomes."""
        used, diameter = embeddings[PADDING + 1 :], max(find_diameter(embeddings), 1e-12)
        for word in words:
            distance = torch.linalg.vector_norm(used - embeddings[word], dim=1) / diameter
            yield torch.softmax(-distance / (2 * self.strength), dim=0)


@dataclass(eq=False, repr=False)
class CusText(WordReplacement):
    """Each word becomes a random word of its set of ``top_k`` words, the more likely the nearer their embeddings are.

    The sets share no word: the first word that is in none yet and those nearest to it are one, and so on. P(y | x) is
    proportional to exp(epsilon u(x, y) / 2), where u is 1 less the distance of x and y over the largest one of x and a
    word of its set, in [0, 1]. The strength is 1/epsilon, so that 0 is off; write ``custext:epsilon=8``, or
    ``--epsilon``.

    Source: Chen et al. 2023 (CusText), arXiv 2207.01193; its code's conservative mapping and Euclidean distances. It
    differs in two points: the source begins with the commonest words of the private texts, here the first ones of the
    vocabulary, which tells nothing; and the words that are left at the end are in the last set, which so has ``top_k``
    to 2 ``top_k`` - 1 words, where the source may leave a word alone, which would stay as it is.

    Args:
        top_k: words in a set.
    """

    top_k: int = field(default=20, kw_only=True)

    name = "custext"
    strengths = (0.125, 0.25, 0.5)
    reference = "Chen et al. 2023 (CusText), arXiv 2207.01193, and its code with conservative mapping"
    guarantee = WITHIN_SETS
    hides = "from the receiver of hidden states: which word of its set each word is, within epsilon"
    costs = "utility: with an epsilon near 0 a share of 1 / top_k stays as it is"
    fails = (
        "to hide which set a word is of, so that the order of words may tell the word; with an epsilon above twice the "
        "logarithm of top_k, where most words stay; for what columns tell of a word; and for the labels, which it does "
        "not hide"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.top_k < 2:
            raise UsageError(f"expected top_k >= 2 for custext, got {self.top_k}: a set of a word hides nothing")

    def privacy_spent(self, releases: int) -> dict[str, Any] | None:
        """Return epsilon of the longest text, and that it is only between words of the same sets."""
        account = super().privacy_spent(releases)
        return account and {**account, "of": "within sets"}

    def compute_shares(self, words: Tensor, embeddings: Tensor) -> Iterator[Tensor]:
        """Yield the probabilities of what each word becomes, 0 outside its set."""
        sets = find_sets(embeddings, self.top_k)
        for word in words:
            members = (sets == sets[word]).nonzero()[:, 0]
            distance = torch.linalg.vector_norm(embeddings[members] - embeddings[word], dim=1)
            near = 1 - distance / distance.max().clamp_min(1e-12)
            shares = torch.zeros(len(embeddings) - PADDING - 1, dtype=embeddings.dtype, device=embeddings.device)
            shares[members - PADDING - 1] = torch.softmax(near / (2 * self.strength), dim=0)
            yield shares


def find_sets(embeddings: Tensor, top_k: int) -> Tensor:
    """Return the set of each word (V,), named by its first word, whose nearest words are in it; 0 of padding."""
    sets = torch.zeros(len(embeddings), dtype=torch.long, device=embeddings.device)
    while len(rest := (sets[PADDING + 1 :] == 0).nonzero()[:, 0] + PADDING + 1):
        distance = torch.linalg.vector_norm(embeddings[rest] - embeddings[rest[0]], dim=1)
        sets[rest[distance.argsort(stable=True)[:top_k]] if len(rest) >= 2 * top_k else rest] = rest[0]
    return sets


class SnD(WordPrivacy):
    """Noise on the embedding of each word before the first block, with a density that falls with its length.

    The density of the noise z (d,) is proportional to exp(-epsilon |z| / D), where D is the largest distance between
    two embeddings of the vocabulary: a length from a Gamma distribution of shape d and scale D / epsilon, in a uniform
    direction. The strength is 1/epsilon, so that 0 is off; write ``snd:epsilon=32``, or ``--epsilon``. The embeddings
    of words stay as they are before training.

    Source: Mai et al. 2023, Split-and-Denoise, arXiv 2310.09130, section 3. The denoiser is left out: there the party
    with the text gets the output of the last block back and denoises it; here it gets nothing that a denoiser could
    improve.
    """

    name = "snd"
    strengths = (0.015625, 0.03125, 0.0625)
    reference = "Mai et al. 2023 (SnD), arXiv 2310.09130, without its denoiser, which needs the last states at the text"
    hides = "from the receiver of hidden states: each word, within epsilon of the words near it"
    costs = "utility: at epsilon = d the noise is as long as the largest distance between two words of width d"
    fails = (
        "with an epsilon of several times the square root of d, where the nearest embedding is that of the word; and "
        "for the labels, which it does not hide"
    )
    fixes = True

    def draw(self, text: Text, embeddings: Tensor, rng: torch.Generator) -> Text:
        """Return the same words with noise (n, T, d)."""
        shape = (*text.words.shape, embeddings.shape[1])
        direction = torch.randn(shape, generator=rng, device=rng.device)
        direction /= torch.linalg.vector_norm(direction, dim=2, keepdim=True)
        length = torch.empty(shape, device=rng.device).exponential_(generator=rng).sum(dim=2, keepdim=True)  # Gamma
        noise = direction * length * (find_diameter(embeddings) * self.strength)
        return Text(text.words, noise if text.noise is None else text.noise + noise)
