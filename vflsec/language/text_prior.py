"""What a party guesses of another party's text without a federation: words of known rows, by position and order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.model_selection import KFold
from torch import Tensor

from vflsec.base.layout import PADDING
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View

Words = NDArray[np.int64]
"""Words (n, T) by number."""

Columns = NDArray[np.floating]

GUESSES = ("commonest", "likeliest", "forest")
TREES, LEAF, MOST, WIDTH, FOLDS, TINY = 100, 1, 64, 64, 5, 1e-12
"""Of the forest: trees, the fewest known rows in a leaf, the most columns a node tries, and numbers that stand for a
text; folds; a share of no word."""

ROWS = 256
"""Rows whose words are predicted at once, for memory."""


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
    version = 3
    baseline = True
    side = "either"
    target = "text"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "none: the baseline 'alone' of attacks on text"
    differs = ("No source describes it.",)
    verified = "sentences with one word for each position; the predictions of scikit-learn's forest"
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


def fit_forest(known: Columns, y: Words, seed: int) -> Callable[[Columns], Columns]:
    """Return what turns own columns (n, c) into weights (n, m) of known rows, by how often they share a leaf.

    A forest predicts a random projection of one-hot words (m, T) of known rows: its prediction is the mean of known
    rows with these weights.
    """
    target, rng = np.zeros((len(y), WIDTH)), np.random.default_rng(seed)
    for of_place in y.T:
        words, numbers = np.unique(of_place, return_inverse=True)  # a vocabulary may be far larger
        target += rng.normal(size=(len(words), WIDTH))[numbers]
    forest = ExtraTreesRegressor(
        TREES, min_samples_leaf=LEAF, max_features=min(known.shape[1], MOST), random_state=seed, n_jobs=1
    ).fit(known, target)
    leaves = forest.apply(known)

    def weigh(x: Columns) -> Columns:
        weights = np.zeros((len(x), len(known)))
        for of_known, of_rows in zip(leaves.T, forest.apply(x).T, strict=True):
            together = of_rows[:, None] == of_known
            weights += together / together.sum(axis=1, keepdims=True)
        return weights / TREES

    return weigh


def _ask_forest(known: Columns, y: Words, x: Columns, seed: int) -> Words:
    """Return the words (n, T) that known rows near by own columns have most."""
    words = np.tile(find_commonest(y), (len(x), 1))
    if known.shape[1]:
        weigh = fit_forest(known, y, seed)
        for rows in np.split(np.arange(len(x)), range(ROWS, len(x), ROWS)):
            weights = weigh(x[rows])
            for t, of_place in enumerate(y.T):
                values, numbers = np.unique(of_place, return_inverse=True)
                words[rows, t] = values[(weights @ np.eye(len(values))[numbers]).argmax(axis=1)]
    return words
