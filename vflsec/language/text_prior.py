"""What a party guesses of another party's text without a federation: words of known rows, by position and order."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.model_selection import KFold
from torch import Tensor

from vflsec.base.layout import PADDING
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View

Words = NDArray[np.int64]
"""Words (n, T) by number."""

Columns = NDArray[np.floating]

GUESSES = ("commonest", "likeliest", "forest")
TREES, FOLDS, TINY = 100, 5, 1e-12

SHARES, ROWS = 2048, 256
"""The most shares of words in a node of a tree, and rows whose words are predicted at once: both fill the memory."""


class TextPrior(Attack):
    """The best of three guesses from known rows: the commonest word of each position, the likeliest sentence, a forest.

    The likeliest sentence is that of an n-gram model of two words, smoothed by the words of each position. The forest
    predicts the word of each position from own columns. Cross-validation on the known rows chooses. It reads no message
    and is *alone* beside every attack on text.

    Source: this project; n-grams as in Jurafsky and Martin, Speech and Language Processing, chapter 3.

    Args:
        victim: whose text; None for the first other party.
    """

    name = "text-prior"
    baseline = True
    side = "either"
    target = "text"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of attacks on text"
    differs = ("No source describes it.",)
    verified = "sentences with one word for each position; scikit-learn's own forest"
    costs = "counts of pairs of words, and a small forest"
    fails = "if own columns say nothing of the text, and known rows have few words in common with the others"

    def __init__(self, *, victim: str | None = None) -> None:
        self.victim = victim

    def alone(self) -> Attack | None:
        """Return the same attack, which is what an adversary can do alone."""
        return TextPrior(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return words (n, T) for every split."""
        return Guess(guess_alone(view, rng)[0])


def guess_alone(view: View, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return words (n, T) for every split, and those (m, T) of known rows by the others of cross-validation."""
    x = {split: columns.cpu().numpy() for split, columns in view.features.items()}
    known, y = x[view.aux_split][view.aux_rows.cpu().numpy()], view.aux_labels.cpu().numpy()
    seed = int(torch.randint(2**31, (), generator=rng))
    held_out = {kind: np.empty_like(y) for kind in GUESSES}
    for fit, out in KFold(min(FOLDS, len(y))).split(y) if len(y) > 1 else ():
        for kind, guess in held_out.items():
            guess[out] = _guess(kind, known[fit], y[fit], known[out], seed)
    best = max(GUESSES, key=lambda kind: ((held_out[kind] == y) & (y != PADDING)).sum()) if len(y) > 1 else GUESSES[0]
    words = {split: torch.from_numpy(_guess(best, known, y, rows, seed)).double() for split, rows in x.items()}
    return words, torch.from_numpy(held_out[best])


def _guess(kind: str, known: Columns, y: Words, x: Columns, seed: int) -> Words:
    """Return the words of rows ``x`` by the words ``y`` of known rows."""
    if kind == "forest":
        return _ask_forest(known, y, x, seed)
    return np.tile(find_likeliest(y) if kind == "likeliest" else find_commonest(y), (len(x), 1))


def find_commonest(y: Words) -> Words:
    """Return the commonest word of each position (T,)."""
    return np.array([np.bincount(words).argmax() for words in y.T])


def find_likeliest(y: Words) -> Words:
    """Return the likeliest sentence (T,) of the n-gram model, by Viterbi's algorithm."""
    words, numbers = np.unique(y, return_inverse=True)  # a vocabulary may be far larger
    size, y = len(words), numbers.reshape(y.shape)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (y[:, :-1].ravel(), y[:, 1:].ravel()), 1)
    shares = np.stack([np.bincount(words, minlength=size) for words in y.T]) / len(y)  # (T, V)
    total, before = np.log(shares[0] + TINY), []
    for share in shares[1:]:
        following = np.log((pairs + share) / (pairs.sum(axis=1, keepdims=True) + 1) + TINY) + total[:, None]
        before.append(following.argmax(axis=0))
        total = following.max(axis=0)
    sentence = [int(total.argmax())]
    for came_from in reversed(before):
        sentence.append(int(came_from[sentence[-1]]))
    return np.asarray(words[sentence[::-1]])


def _ask_forest(known: Columns, y: Words, x: Columns, seed: int) -> Words:
    """Return the words (n, T) that a forest predicts from own columns."""
    words, varying = np.tile(find_commonest(y), (len(x), 1)), np.flatnonzero(np.ptp(y, axis=0))
    if len(varying) and known.shape[1]:
        most = max(len(np.unique(column)) for column in y.T)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that many words are few rows
            for at in np.split(varying, range(0, len(varying), max(1, SHARES // most))[1:]):
                forest = ExtraTreesClassifier(TREES, min_samples_leaf=5, random_state=seed, n_jobs=1)
                forest.fit(known, y[:, at])
                for rows in np.split(np.arange(len(x)), range(ROWS, len(x), ROWS)):
                    words[rows[:, None], at] = forest.predict(x[rows]).reshape(len(rows), -1)
    return words
