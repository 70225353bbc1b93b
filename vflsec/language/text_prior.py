"""What a party guesses of another party's text without a federation: words of known rows, by position and order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import KFold
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.layout import PADDING
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.opinion_pool import fit_out_of_bag
from vflsec.language.copied_words import find_copies, replace_copies, restore_copies

Words = NDArray[np.int64]
"""Words (n, T) by number."""

Columns = NDArray[np.floating]

TREES, LEAVES, MOST, FOLDS, TINY = 50, (1, 5), 64, 5, 1e-12
"""Of a forest: trees, the fewest known rows in a leaf, the most columns a node tries; folds; a share of no word."""


class TextPrior(Attack):
    """The best of three guesses from known rows: the commonest word of each position, the likeliest sentence, forests.

    The likeliest sentence is that of an n-gram model of two words, smoothed by the words of each position. A forest for
    each position predicts its word from own columns, and of training rows from labels, which the active party has.
    What known texts copy from a column is one word, and in each row that of its own: whole numbers and categories.
    Held-out known rows choose between the three. It reads no message and is *alone* beside every attack on text. It has
    a guess for each position, as if all texts were as long.

    Source: this project; n-grams as in Jurafsky and Martin, Speech and Language Processing, chapter 3.

    Args:
        victim: whose text; None for the first other party.
    """

    name = "text-prior"
    version = 6
    baseline = True
    side = "either"
    target = "text"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of attacks on text"
    differs = ("No source describes it.",)
    verified = "sentences with one word for each position; the predictions of scikit-learn's forest"
    costs = "counts of pairs of words, and two small forests for each position"
    fails = "if own columns say nothing of the text, and known rows have few words in common with the others"

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def alone(self) -> Attack | None:
        """Return the same attack, which is what an adversary can do alone."""
        return TextPrior(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return words (n, T) for every split."""
        return Guess(guess_alone(view, rng)[0])


def guess_alone(view: View, rng: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return by split words (n, T), and those (m, T) of known rows, each guessed without the row."""
    seed, copies = int(torch.randint(2**31, (), generator=rng)), find_copies(view)
    of_source = copies[view.aux_split][view.aux_rows.cpu()]
    y = replace_copies(view.aux_labels.cpu(), of_source).numpy()
    folds = list(KFold(min(FOLDS, len(y))).split(y)) if len(y) > 1 else []
    of_all: dict[str, Words] = {}
    of_known: dict[str, Words] = {}
    for kind, find in (("commonest", find_commonest), ("likeliest", find_likeliest)):
        of_all[kind], of_known[kind] = find(y), np.zeros_like(y)
        for fit, out in folds:
            of_known[kind][out] = find(y[fit])
    guess, held_out = {}, {}
    for split, rows in view.features.items():
        words, left_out = {kind: np.tile(w, (len(rows), 1)) for kind, w in of_all.items()}, dict(of_known)
        known, x = (columns.cpu().numpy() for columns in list_columns(view, split))
        if folds and x.shape[1]:
            shares, by_split = fit_forests(known[view.aux_rows.cpu().numpy()], y, {split: x}, seed)
            words["forests"], left_out["forests"] = by_split[split].guess(), shares.guess()
        best = max(left_out, key=lambda kind: _count_right(left_out[kind], y))
        guess[split] = restore_copies(torch.from_numpy(words[best]), copies[split]).double()
        held_out[split] = restore_copies(torch.from_numpy(left_out[best]), of_source)
    return guess, held_out


def list_columns(view: View, split: str) -> tuple[Tensor, Tensor]:
    """Return the columns (n, c) of the split with known rows and of another, with labels if both splits have them."""
    splits = (view.aux_split, split)
    known, rows = (view.features[name] for name in splits)
    if view.labels.keys() >= {*splits}:
        size = 1 + int(torch.cat([view.labels[name] for name in splits]).max())
        labels = (F.one_hot(view.labels[name], size) for name in splits)
        known, rows = (torch.cat([x, y.to(x)], dim=1) for x, y in zip((known, rows), labels, strict=True))
    return known, rows


def _count_right(guess: Words, y: Words) -> int:
    return int(((guess == y) & (y != PADDING)).sum())


def find_commonest(y: Words) -> Words:
    """Return the commonest word of each position (T,)."""
    unique, numbers = np.unique(y, return_inverse=True)
    counts = np.stack([np.bincount(of_place, minlength=len(unique)) for of_place in numbers.reshape(y.shape).T])
    return np.asarray(unique[(counts * (unique != PADDING)).argmax(axis=1)])


def find_likeliest(y: Words) -> Words:
    """Return the likeliest sentence (T,) of the n-gram model, by Viterbi's algorithm."""
    words, numbers = np.unique(y, return_inverse=True)  # a vocabulary may be far larger
    size, y = len(words), numbers.reshape(y.shape)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (y[:, :-1].ravel(), y[:, 1:].ravel()), 1)
    shares = np.stack([np.bincount(words, minlength=size) for words in y.T]) / len(y)  # (T, V)
    if words[0] == PADDING:  # a guess only where no known row has a word
        pairs[:, 0], shares[:, 0] = 0, shares[:, 0] == 1
    total, before = np.log(shares[0] + TINY), []
    for share in shares[1:]:
        following = np.log((pairs + share) / (pairs.sum(axis=1, keepdims=True) + 1) + TINY) + total[:, None]
        before.append(following.argmax(axis=0))
        total = following.max(axis=0)
    sentence = [int(total.argmax())]
    for came_from in reversed(before):
        sentence.append(int(came_from[sentence[-1]]))
    return np.asarray(words[sentence[::-1]])


class WordShares(NamedTuple):
    """Shares of words at each position of n texts.

    Attributes:
        words: (C,) of each of T positions, those that known rows have there, ascending.
        bytes: (n, C) of each position, shares in 255ths, for memory.
    """

    words: list[Words]
    bytes: list[NDArray[np.uint8]]

    def select(self, rows: Tensor) -> WordShares:
        """Return those of some rows."""
        return WordShares(self.words, [shares[rows.numpy()] for shares in self.bytes])

    def guess(self) -> Words:
        """Return the words (n, T) of the largest shares."""
        return np.stack([w[s.argmax(axis=1)] for w, s in zip(self.words, self.bytes, strict=True)], axis=1)


def fit_forests(
    known: Columns, y: Words, others: Mapping[str, Columns], seed: int
) -> tuple[WordShares, dict[str, WordShares]]:
    """Return the shares of words by a forest for each position, of known rows and of others.

    Args:
        known: (m, c) columns.
        y: (m, T) words; what is not known to be one is ``PADDING``.
        others: columns (n, c) of each split.
        seed: of the forests.

    Returns:
        Those of known rows are by trees, or by other known rows if these are few, without the row.
    """
    words = [np.unique(of_place[of_place != PADDING]) for of_place in y.T]
    words = [w if len(w) else np.array([PADDING]) for w in words]
    tables, most = {"known": known, **others}, min(1.0, MOST / max(1, known.shape[1]))
    fitted: list[dict[str, WordShares]] = []
    for leaf in LEAVES:
        fitted.append({name: WordShares(words, []) for name in tables})
        for t, w in enumerate(words):
            target = (y[:, t, None] == w).astype(float)
            shares = {name: np.tile(target.mean(axis=0), (len(x), 1)) for name, x in tables.items()}
            if len(w) > 1 and len(y) >= FOLDS:
                forest, shares["known"] = fit_out_of_bag(known, target, seed, share=most, trees=TREES, leaf=leaf)
                shares |= {name: forest.predict(x) for name, x in others.items() if len(x)}
            elif 1 < len(y) < FOLDS:
                shares["known"] = (target.sum(axis=0) - target) / (len(y) - 1)
            for name, values in shares.items():
                fitted[-1][name].bytes.append((255 * values).round().astype(np.uint8))
    best = max(fitted, key=lambda shares: _count_right(shares["known"].guess(), y))
    return best.pop("known"), best
