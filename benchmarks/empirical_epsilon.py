"""How close the lower bounds of epsilon come, and how often they are wrong, on games whose epsilon is known.

    python benchmarks/empirical_epsilon.py

Each game has 1,750 trials of either neighbor, or 1,750 coins of a single run. A bound may exceed epsilon in 5 % of the
games; a binomial test says whether it does so more often, and the command then ends with 1. The last lines show why the
bound for Gaussian noise is for such noise alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from epsilon_bounds import epsilon_at_least, gaussian_epsilon
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import optimize, stats

from vflsec.results.canaries import CONFIDENCE, bound_epsilon, count_confident

GAMES = 1000
TRIALS = 1750
EPSILONS = (0.0, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
LEAK = 0.01
"""Delta of a mechanism that shows its secret with this probability."""

SHARE = 0.05

REFUTED = 1e-3
"""A share of wrong bounds that is so unlikely under their confidence refutes them, in one of about 50 lines."""

Scores = NDArray[np.floating]
Mechanism = Callable[[Scores, float, np.random.Generator], Scores]
"""From secrets (n,), 0 or 1, and epsilon to scores (n,)."""


def gaussian(secret: Scores, epsilon: float, rng: np.random.Generator) -> Scores:
    """Gaussian noise with this epsilon at ``DELTA``."""
    return distance(epsilon) * secret + rng.normal(size=len(secret))


@cache
def distance(epsilon: float) -> float:
    """Return mu with this epsilon at ``DELTA``."""
    return optimize.brentq(lambda mu: gaussian_epsilon(mu, DELTA) - epsilon, 0.0, 10.0) if epsilon else 0.0


def laplace(secret: Scores, epsilon: float, rng: np.random.Generator) -> Scores:
    """Laplace noise; the score has the order of the likelihood ratio."""
    return np.clip(epsilon * secret + rng.laplace(size=len(secret)), 0.0, epsilon)


def four_laplace(secret: Scores, epsilon: float, rng: np.random.Generator) -> Scores:
    """Four releases with Laplace noise."""
    return np.sum([laplace(secret, epsilon / 4, rng) for _ in range(4)], axis=0)


def response(secret: Scores, epsilon: float, rng: np.random.Generator) -> Scores:
    """Randomized response."""
    return np.where(rng.random(len(secret)) < 1 / (1 + np.exp(-epsilon)), secret, 1 - secret)


def leaky(secret: Scores, epsilon: float, rng: np.random.Generator) -> Scores:
    """Randomized response that shows the secret with probability ``LEAK``, and that it does."""
    return np.where(rng.random(len(secret)) < LEAK, 10 * (secret - 0.5), response(secret, epsilon, rng) - 0.5)


def leaky_at_once(secret: Scores, epsilon: float, rng: np.random.Generator) -> Scores:
    """Randomized response that shows ``SHARE`` of all secrets, together, with probability ``LEAK``."""
    shown = (rng.random(len(secret)) < SHARE) & (rng.random() < LEAK)
    return np.where(shown, secret, response(secret, epsilon, rng))


class Bound(NamedTuple):
    """One bound on one mechanism.

    Attributes:
        valid: whether it is offered for this mechanism.
    """

    name: str
    mechanism: Mechanism
    lower: Callable[[Mechanism, float, np.random.Generator], float]
    valid: bool = True

    def play(self, epsilon: float, games: int) -> Scores:
        """Return the bound of each game."""
        rng = np.random.default_rng([int(epsilon), *self.name.encode(), *self.mechanism.__name__.encode()])
        return np.array([self.lower(self.mechanism, epsilon, rng) for _ in range(games)])


def _of_trials(delta: float, **options: object) -> Callable[[Mechanism, float, np.random.Generator], float]:
    def lower(mechanism: Mechanism, epsilon: float, rng: np.random.Generator) -> float:
        absent, present = (mechanism(np.full(TRIALS, secret), epsilon, rng) for secret in (0.0, 1.0))
        return epsilon_at_least(absent, present, delta, **options)  # type: ignore[arg-type]

    return lower


def _of_coins(delta: float) -> Callable[[Mechanism, float, np.random.Generator], float]:
    def lower(mechanism: Mechanism, epsilon: float, rng: np.random.Generator) -> float:
        coins = rng.integers(2, size=TRIALS)
        return bound_epsilon(*count_confident(mechanism(coins.astype(float), epsilon, rng), coins), delta)

    return lower


BOUNDS = (
    Bound("Gaussian", gaussian, _of_trials(DELTA, tradeoff="gaussian")),
    Bound("any mechanism", gaussian, _of_trials(DELTA)),
    Bound("Laplace", laplace, _of_trials(0.0, tradeoff="laplace")),
    Bound("any mechanism", laplace, _of_trials(0.0)),
    Bound("Laplace", four_laplace, _of_trials(0.0, tradeoff="laplace", releases=4)),
    Bound("any mechanism", response, _of_trials(0.0)),
    Bound("any mechanism", leaky, _of_trials(LEAK)),
    Bound("one run", response, _of_coins(0.0)),
    Bound("one run", laplace, _of_coins(0.0)),
    Bound("one run", gaussian, _of_coins(DELTA)),
    Bound("one run", leaky_at_once, _of_coins(LEAK * SHARE)),
    Bound("Gaussian", laplace, _of_trials(DELTA, tradeoff="gaussian"), valid=False),
    Bound("Gaussian", response, _of_trials(DELTA, tradeoff="gaussian"), valid=False),
)


def refuted(bounds: Scores, epsilon: float) -> bool:
    """Whether more bounds exceed epsilon than their confidence allows."""
    wrong = int((bounds > epsilon + 1e-9).sum())
    return bool(stats.binomtest(wrong, len(bounds), 1 - CONFIDENCE, alternative="greater").pvalue < REFUTED)


def main() -> None:
    """Print a line for each bound, mechanism and epsilon."""
    table = Table("bound", "mechanism", "ε", "mean", "least of 95 %", "above ε")
    failed = False
    for bound in BOUNDS:
        for epsilon in EPSILONS:
            found = bound.play(epsilon, GAMES)
            above = f"{(found > epsilon + 1e-9).mean():.1%}" + ("" if bound.valid else " (not offered)")
            low = f"{np.quantile(found, 0.05):.2f}"
            table.add_row(bound.name, bound.mechanism.__name__, f"{epsilon:g}", f"{found.mean():.2f}", low, above)
            failed |= bound.valid and refuted(found, epsilon)
    Console(width=110).print(table)
    if failed:
        sys.exit("FAILED: a bound exceeds epsilon more often than its confidence allows")


if __name__ == "__main__":
    main()
