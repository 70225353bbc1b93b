"""Means with their 95 % intervals, over seeds, rows or both, as plain data."""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import sub
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.special import ndtri, stdtr

from vflsec.results import statistics
from vflsec.results.analysis.results import Ends
from vflsec.results.records.schema import Block, Triggered
from vflsec.results.statistics import Bounds, StandardError, bound_interval, get_error

ANY: Bounds = (None, None)
DIFFERENCE: Bounds = (-1.0, 1.0)
"""The bounds of a difference of such metrics."""

R2: Bounds = (None, 1.0)
"""The bounds of an R2, which may be negative."""

SHARED = 0.5
"""The part of both variances that an advantage adds to that of the difference. The rest is luck that both guesses
share, since they know the same labels. Measured by benchmarks/interval_coverage.py --planted, and not derived."""

MIN_ADVANTAGE = 1e-9
"""The smallest advantage that is looked for."""


class SeedValue(NamedTuple):
    """The value of a measure with one seed, and what rows say of its error, by default nothing.

    Attributes:
        variance: over rows.
        n: number of rows.
        without: the value without each group of rows.
        known: the share of all rows that are auxiliary samples.
        ends: of the interval over rows, if it was not made from the variance.
    """

    value: float
    variance: float = math.nan
    n: int = 0
    without: tuple[float, ...] = ()
    known: float = 0.0
    ends: tuple[float, float] | None = None


def measure(function: Callable[..., float], *blocks: Block) -> SeedValue:
    """Return a function of the headlines of one seed's blocks, for example a difference, with its variance over rows.

    If all blocks were scored without groups of rows, that is the jackknife's, which knows that they share rows. If not,
    errors are taken as independent, which is too wide for a difference.
    """
    headlines = [block.headline for block in blocks]
    value, n, known = function(*headlines), min(block.n for block in blocks), max(block.known for block in blocks)
    groups = [block.without for block in blocks if block.without]
    if len(groups) == len(blocks):
        without = tuple(function(*column) for column in zip(*groups, strict=True))
        return SeedValue(value, statistics.jackknife(without), n, without, known)
    errors = [get_error(*block.row_interval) for block in blocks]
    moved = [[*headlines[:k], headlines[k] + error, *headlines[k + 1 :]] for k, error in enumerate(errors)]
    return SeedValue(value, sum((function(*values) - value) ** 2 for values in moved), n, known=known)


def get_headline(block: Block | Triggered) -> SeedValue:
    """Return the headline of one seed's block, or the share of a trigger."""
    if isinstance(block, Triggered):
        return SeedValue(block.share, get_error(*block.row_interval) ** 2, block.n, ends=block.row_interval)
    return measure(float, block)._replace(ends=block.row_interval)


def make_interval(
    by_seed: Sequence[SeedValue], seeds: int, bounds: Bounds = ANY, *, extended: float = 0.0, single_model: bool = False
) -> dict[str, Any]:
    """Return mean, ``ci95``, n and kind of the interval.

    With several seeds, the interval is over seeds and rows: all seeds split the same data, and what their rows have in
    common does not show in the differences between seeds. With one seed, it is over rows. If one of several seeds gave
    a number, there is none, since its rows say nothing about other seeds.

    Args:
        by_seed: the values.
        seeds: how many were asked for.
        bounds: of the measure.
        extended: how much more an attack leaks on the rows that chose it than on others. Noise may choose an attack
            that is not the strongest, so the mean can only be too small: the upper side is extended, in quadrature.
        single_model: whether the seeds are draws of auxiliary samples for one trained model, whose rows they share.
    """
    mean, n = average(seed.value for seed in by_seed), len(by_seed)
    if mean is None or (n == 1 and seeds > 1):
        return {"mean": mean, "ci95": (None, None), "n": n, "interval": "none"}
    ends = by_seed[0].ends
    if n == 1 and ends and not math.isnan(ends[0]):
        low, high = min(ends[0], mean), max(ends[1], mean)  # the score of all rows is subject to rounding
        if extended:
            high = min(mean + math.hypot(high - mean, extended), math.inf if bounds[1] is None else bounds[1])
        return {"mean": mean, "ci95": (low, high), "n": n, "interval": "rows"}
    error = estimate_error(by_seed)
    if math.isnan(error.size):
        return {"mean": mean, "ci95": (None, None), "n": n, "interval": "none"}
    rows = sum(seed.n for seed in by_seed) or math.inf
    low, _ = bound_interval(mean, error.margin, bounds, rows)
    _, high = bound_interval(mean, math.hypot(error.margin, extended), bounds, rows)
    kind = "seeds" if any(math.isnan(seed.variance) for seed in by_seed) else "seeds and rows"
    kind = "rows" if n == 1 else "draws and rows" if single_model else kind
    return {"mean": mean, "ci95": (low, high), "n": n, "interval": kind}


def compute_p(differences: Sequence[SeedValue], seeds: int, bounds: Bounds) -> float | None:
    """Return the p value of the test that a mean difference is 0, below 0.05 where the interval does not hold 0."""
    mean = average(seed.value for seed in differences)
    if mean is None or (len(differences) == 1 and seeds > 1) or math.isnan((error := estimate_error(differences)).size):
        return None
    if not error.size or not mean:
        return float(not mean)
    weight = 1.0 if bounds == ANY else 1.0 - mean**2  # as near the ends of an interval
    size = abs(mean) * math.sqrt(weight) / error.size
    return float(2 * stdtr(min(error.freedom, statistics.NORMAL), -size))


def estimate_error(by_seed: Sequence[SeedValue]) -> StandardError:
    """Return the standard error of the mean over seeds and rows; NaN for one seed whose rows were not measured."""
    first = by_seed[0]
    if len(by_seed) == 1:
        return StandardError(math.sqrt(first.variance), len(first.without) - 1 if first.without else math.inf)
    without = [seed.without for seed in by_seed] if all(seed.without for seed in by_seed) else []
    most = average(seed.variance for seed in by_seed if not math.isnan(seed.variance)) or 0.0
    return statistics.combine_errors([seed.value for seed in by_seed], without, known=first.known, most=most)


def find_detectable(pairs: Sequence[tuple[Block, Block]], seeds: int) -> float | None:
    """Return an advantage whose interval would exclude 0 in about four of five runs like this one.

    An attack that has gained nothing guesses almost as the adversary alone does: their difference has a small standard
    error e. With an advantage d it would vary more: if it came from information of its own, the two guesses would have
    the correlation z(alone) / z(alone + d), where z is the normal quantile of the share between chance and 1, and so
    the difference the variance v = e^2 + (1 - z(alone) / z(alone + d)) T, where T is the sum of both variances, and
    ``SHARED`` of it with several seeds. Then d solves d^2 = k^2 v, with k of ``noncentrality``. It is all that is left
    to be gained if there is no smaller solution. It is not known, and None, where no value varies over seeds or rows,
    and where *alone* is 1, so that nothing was left to be seen. ``pairs`` are by seed the blocks of the attack and of
    the adversary alone; ``seeds`` is how many were asked for.
    """
    if not pairs or (len(pairs) == 1 and seeds > 1):
        return None
    error = estimate_error([measure(sub, *pair) for pair in pairs])
    parts = [estimate_error([get_headline(block) for block in blocks]) for blocks in zip(*pairs, strict=True)]
    total = sum(part.size**2 for part in parts)
    if math.isnan(error.size + total):
        return None
    k2 = statistics.solve_mean(min(part.freedom for part in (error, *parts)), (1 - statistics.LEVEL) / 2) ** 2
    chance = sum(block.chance for _, block in pairs) / len(pairs)
    alone = max(chance, sum(block.headline for _, block in pairs) / len(pairs))
    growing, most = total * (SHARED if len(pairs) > 1 else 1.0), 1.0 - alone

    def z(value: float) -> float:
        return float(ndtri(0.5 + min(1.0, (value - chance) / (1 - chance)) / 2))

    def exceeds(d: float) -> float:
        return d**2 - k2 * (error.size**2 + (1 - z(alone) / z(alone + d)) * growing)

    if most < MIN_ADVANTAGE or total < MIN_ADVANTAGE**2:
        return None
    return float(brentq(exceeds, MIN_ADVANTAGE, most)) if exceeds(MIN_ADVANTAGE) < 0 < exceeds(most) else most


def find_few(pairs: Sequence[tuple[Block, Block]]) -> str:
    """Return what is too few for any advantage to be seen: ``seeds``, if the rows of one would have shown one."""
    by_rows = [(find_detectable([pair], 1), 1 - max(pair[1].chance, pair[1].headline)) for pair in pairs]
    is_seen = any(least is None or least < most - MIN_ADVANTAGE for least, most in by_rows)
    return "seeds" if is_seen and len(pairs) > 1 else "rows"


def get_longer_side(mean: float | None, ends: Ends) -> float | None:
    """Return the longer of the two sides of an interval; None without one."""
    low, high = ends
    return None if mean is None or low is None or high is None else max(high - mean, mean - low)


def average(values: Iterable[float]) -> float | None:
    """Return the mean; None without values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
