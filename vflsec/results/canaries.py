"""Canaries: training rows whose labels are tossed, so that whoever guesses them bounds epsilon from below.

Steinke, Nasr and Jagielski 2023 (Privacy auditing with one (1) training run), algorithm 1, for labels: the coin of a
row decides between two labels, and a guess says which it was.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

Tradeoff = Literal["gaussian", "laplace"]
"""The mechanisms whose trade-off functions say more than their epsilon."""

CONFIDENCE = 0.95
CHOOSING = 4
"""One in so many trials chooses the threshold; the others are counted."""

QUANTILES = np.linspace(0.005, 0.995, 199)


def divide(scores: Floats) -> tuple[Floats, Floats]:
    """Return the scores that choose a threshold, and those that are counted."""
    chosen = np.arange(len(scores)) % CHOOSING == 0
    return scores[chosen], scores[~chosen]


def count_above(scores: Floats, thresholds: Floats) -> Floats:
    """Return how many scores are not below each threshold."""
    return len(scores) - np.searchsorted(np.sort(scores), thresholds).astype(float)


def bound_rate(hits: ArrayLike, n: ArrayLike, error: float) -> Floats:
    """Return the lower Clopper-Pearson bound of a rate, wrong with a probability of at most ``error``."""
    hits, n = np.asarray(hits, dtype=float), np.asarray(n, dtype=float)
    bound = stats.beta.ppf(error, np.maximum(hits, 1e-9), n - hits + 1)
    return np.asarray(np.where(hits > 0, bound, 0.0))


def bound_accuracy(epsilon: float, delta: float) -> float:
    """Return how often an adversary may be right, at most, who tells two equally likely values of a row apart.

    Kairouz, Oh and Viswanath 2015 (The composition theorem for differential privacy), theorem 2.1: the rates a and b of
    false positives and negatives satisfy a + e^epsilon b >= 1 - delta and b + e^epsilon a >= 1 - delta.
    """
    return 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))


def bound_epsilon(right: int, guesses: int, tossed: int, delta: float = 0.0, confidence: float = CONFIDENCE) -> float:
    """Return a lower confidence bound of epsilon from guesses of coins after a single run.

    The same source, theorem 5.2. The guesses may depend on each other and on everything that was observed.

    Args:
        right: how many guesses are.
        guesses: made; the other coins are left out.
        tossed: all coins, each fair and independent of all else.
        delta: at which epsilon is bounded.
        confidence: of the bound.
    """
    if not 0 <= right <= guesses <= tossed:
        raise ValueError(f"expected 0 <= right <= guesses <= tossed, got {right}, {guesses} and {tossed}")
    error = 1 - confidence

    def excess(epsilon: float) -> float:
        return bound_p_value(right, guesses, tossed, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    largest = 1.0
    while excess(largest) < 0:
        largest *= 2
    return float(optimize.brentq(excess, 0.0, largest, xtol=1e-6))


def bound_p_value(right: int, guesses: int, tossed: int, epsilon: float, delta: float) -> float:
    """Return a bound of the probability of so many right guesses under (epsilon, delta)-differential privacy.

    It is P(B >= v) + 2 m delta max over i of P(v > B >= v - i) / i, for B binomial of r guesses that are right with a
    probability of e^epsilon / (1 + e^epsilon).
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return min(1.0, tail)
    below = stats.binom.pmf(np.arange(right)[::-1], guesses, chance).cumsum() / np.arange(1, right + 1)
    return min(1.0, tail + 2 * tossed * delta * float(below.max()))


def count_confident(scores: ArrayLike, coins: ArrayLike, confidence: float = CONFIDENCE) -> tuple[int, int, int]:
    """Return how many guesses of coins are right, how many are made, and of how many coins, for ``bound_epsilon``.

    Scores (m,) above one threshold guess heads, those below another tails, and those between are no guess. A quarter of
    the coins (m,), whose order tells nothing, chooses both thresholds, by the lower bound of the share of right guesses
    at this confidence; the others are counted.
    """
    chosen, counted = divide(np.asarray(scores, dtype=float))
    known, answers = (shown > 0 for shown in divide(np.asarray(coins, dtype=float)))
    if not len(chosen):
        return 0, 0, 0
    thresholds = np.unique(np.quantile(chosen, QUANTILES))
    heads, wrong_heads = (count_above(chosen[coin], thresholds)[:, None] for coin in (known, ~known))
    wrong_tails, tails = (coin.sum() - count_above(chosen[coin], thresholds) for coin in (known, ~known))
    right = heads + tails
    share = bound_rate(right, right + wrong_heads + wrong_tails, 1 - confidence)
    ordered = np.where(np.tri(len(thresholds), dtype=bool), share, -1.0)
    high, low = (thresholds[k] for k in np.unravel_index(ordered.argmax(), ordered.shape))
    guessed = (counted >= high) | (counted < low)
    right_guesses = ((counted >= high) == answers) & guessed
    return int(right_guesses.sum()), int(guessed.sum()), len(counted)


class Canaries(NamedTuple):
    """The rows and what their coins decide between.

    Attributes:
        rows: (m,) positions among the training rows, in random order.
        pairs: (m, 2) two different labels of each, in ascending order: tails and heads.
    """

    rows: Integers
    pairs: Integers

    def count_guesses(self, scores: NDArray[np.floating], labels: Integers) -> tuple[int, int, int]:
        """Return how many guesses of coins are right, how many are made, and of how many coins.

        ``scores`` (n, C) of all training rows are larger for more likely labels; ``labels`` (n,) are as they were
        tossed.
        """
        tails, heads = self.pairs.T
        margins = scores[self.rows, heads] - scores[self.rows, tails]
        return count_confident(margins, labels[self.rows] == heads)


def toss(labels: Integers, n: int, n_classes: int, rng: np.random.Generator) -> tuple[Integers, Canaries]:
    """Return ``labels`` (N,) with those of ``n`` random rows tossed between their own and another one."""
    rows = rng.permutation(len(labels))[:n]
    others = (labels[rows] + rng.integers(1, n_classes, size=n)) % n_classes
    pairs = np.sort(np.stack([labels[rows], others], axis=1), axis=1)
    tossed = labels.copy()
    tossed[rows] = pairs[np.arange(n), rng.integers(2, size=n)]
    return tossed, Canaries(rows, pairs)
