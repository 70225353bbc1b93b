"""Intervals, over seeds and rows for claims about a defense, over rows for claims about one checkpoint, and tests."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from vflsec.results.metrics import METRICS, Labels, Scores, find_words_that_count, remove_wild, score_positive

LEVEL = 0.95
REPLICATES = 400

GROUPS = 50
"""Groups of rows that the jackknife leaves out in turn."""


class Interval(NamedTuple):
    """A mean with its 95 % interval and the number of values behind it."""

    mean: float
    low: float
    high: float
    n: int


def bound_over_seeds(values: Sequence[float]) -> Interval:
    """Return mean and t interval over seeds; with one seed there is no such interval and both ends are NaN."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, float("nan"), float("nan"), len(x))
    half = float(_get_quantile(len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half, len(x))


@lru_cache
def _get_quantile(freedom: float) -> Any:
    return stats.t.ppf((1 + LEVEL) / 2, freedom)  # slow, and the same for every pair of defenses


class StandardError(NamedTuple):
    """The standard error of a mean, and its degrees of freedom."""

    size: float
    freedom: float

    @property
    def margin(self) -> float:
        """Half the width of the 95 % t interval."""
        return float(_get_quantile(self.freedom) * self.size) if self.size else 0.0


def get_error(low: float, high: float) -> float:
    """Return the standard error behind a 95 % interval of many rows."""
    return (high - low) / (2 * float(_get_quantile(math.inf)))


TIE = 1e-12
"""Values of seeds that vary by less are equal by chance, where few rows allow for few values, or for having all rows
in common; what rows do not have in common is then known of the rows alone."""


def combine_errors(
    values: Sequence[float], without: Sequence[Sequence[float]], *, known: float = 0.0, most: float = 0.0
) -> StandardError:
    """Return the standard error of the mean over seeds that split one data set, for other data sets of that kind.

    Seeds share rows. This gives their values a common error, which the differences between seeds do not show. The mean
    of S values has the variance s^2 / S + C, where s^2 is their sample variance and C the covariance of two of them. If
    V is the jackknife's variance of one value over rows, and R that of the mean over seeds, without a group of rows in
    all seeds, then R = V / S + (1 - 1 / S) C, which gives C by the scored rows. Two draws of auxiliary samples have the
    share ``known`` of their rows in common, and so this share of the variance that rows do not explain,
    s^2 - (V - C). A row that is easy to infer is also good to learn from; the two errors are taken as fully correlated,
    which is the worst case: their deviations are added. The degrees of freedom are those of Welch and Satterthwaite.

    What joint models share by being trained on the same rows is not measured, since it would take other trainings.

    Source: Nadeau and Bengio 2003, "Inference for the generalization error", equation 7, with C measured in place of
    the constant correlation of their section 3.

    Args:
        values: by seed, at least two.
        without: (S, groups) by seed the values without each group of rows; empty if these were not measured.
        known: the share of all rows that is drawn as auxiliary samples.
        most: V, which takes the place of C if ``without`` is empty, since C is not larger.
    """
    n, variance = len(values), float(np.var(values, ddof=1))
    of_rows, within_seed, uncertain = most, most, 0.0
    if len(without):
        whole = n / (n - 1) * jackknife(np.mean(without, axis=0))
        within_seed = float(np.mean([jackknife(values) for values in without]))
        of_rows = max(0.0, whole - within_seed / (n - 1))
        uncertain = whole**2 / (len(without[0]) - 1)
    if variance < TIE:
        variance = max(0.0, within_seed - of_rows)
    of_draws = known * max(0.0, variance - (within_seed - of_rows))
    total = variance / n + (math.sqrt(of_rows) + math.sqrt(of_draws)) ** 2
    uncertain += (total - of_rows) ** 2 / (n - 1)
    freedom = total**2 / uncertain if uncertain else math.inf
    return StandardError(math.sqrt(total), max(n - 1, freedom))  # less than either part has only by the part of C < 0


Bounds = tuple[float | None, float | None]
"""The lowest and the highest possible value; None for none."""

SHARE: Bounds = (0.0, 1.0)
"""The bounds of a metric between 0 and 1."""


def bound_interval(mean: float, margin: float, bounds: Bounds, n: float = math.inf) -> tuple[float, float]:
    """Return the ends of an interval around ``mean`` that are inside ``bounds``.

    They solve (x - mean)^2 = margin^2 w(x) / w(mean), where w(x) is the product of the distances of x to the bounds:
    near a bound, a mean varies less. Without bounds this is mean ± margin; for a share, Wilson's score interval with
    the effective number of rows.

    Source: Wilson 1927, and for effective numbers Franco et al. 2019, "Comparative study of confidence intervals for
    proportions in complex sample surveys".

    Args:
        mean: within the bounds.
        margin: half the width of the interval far from any bound.
        bounds: of all possible values.
        n: the number of rows, from which the interval of a mean at a bound is, since it shows no variance.
    """
    lowest, highest = bounds
    weight = np.polynomial.Polynomial([1.0])
    weight *= np.polynomial.Polynomial([1.0] if lowest is None else [-lowest, 1.0])
    weight *= np.polynomial.Polynomial([1.0] if highest is None else [highest, -1.0])
    scale = margin**2 / weight(mean) if weight(mean) > 0 else _get_quantile(math.inf) ** 2 / n
    if not scale:
        return mean, mean
    ends = sorted((np.polynomial.Polynomial([-mean, 1.0]) ** 2 - scale * weight).roots().real)
    low, high = (float(np.clip(end, lowest, highest)) for end in ends)  # roots are subject to rounding
    return min(low, mean), max(mean, high)


def draw_groups(n: int) -> NDArray[np.integer]:
    """Return the group (n,) of each row of a data set: one of ``GROUPS``, drawn evenly, always the same for the same n.

    All seeds that split one data set leave out the same rows with a group, so that what the errors of two seeds have in
    common can be measured.
    """
    return np.random.default_rng(0).permutation(n) % GROUPS


def leave_out_groups(metric: str, scores: Scores, labels: Any, groups: NDArray[np.integer]) -> tuple[float, ...] | None:
    """Return a metric of (n, C) scores, or values, without each group (n,) of rows; None if some are of one class."""
    kept = [groups != k for k in range(GROUPS)]
    if labels.ndim == 1 and any(np.ptp(labels[rows]) == 0 for rows in kept):
        return None
    if metric == "auc" and scores.shape[1] == 2:
        values = _compute_weighted_auc(score_positive(scores), labels, kept)
    elif metric == "r2":
        guesses, truth = remove_wild(scores, labels)  # once, since it takes several times as long as the rest
        spread = np.array([((truth[rows] - truth[rows].mean(axis=0)) ** 2).sum() for rows in kept])
        errors = [((guesses[rows] - truth[rows]) ** 2).sum() for rows in kept]
        values = 1 - errors / np.where(spread > 0, spread, np.nan)
    else:
        values = np.array([METRICS[metric](scores[rows], labels[rows]) for rows in kept])
    return tuple(values.tolist()) if np.isfinite(values).all() else None


def jackknife(values: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the variance over rows of a measure, from its values without each group of rows.

    Source: Shao and Tu 1995, "The jackknife and bootstrap", section 2.3: the grouped jackknife.
    """
    return float((len(values) - 1) * np.var(values))


MANY = 50_000
"""Rows beyond which a bootstrap of R2 draws blocks of neighboring rows."""


def bound_over_rows(metric: str, scores: Scores, labels: Any, rng: np.random.Generator) -> tuple[float, float]:
    """Return the interval of ``auc`` or ``f1`` (binary), a share or ``r2`` over independent rows.

    DeLong's variance for ``auc``, Wilson's interval for a share, a bootstrap for the others.
    """
    if metric == "tokens":  # a ratio of sums over rows, by its linearization
        hits, count = METRICS[metric](scores, labels), find_words_that_count(labels)
        deviations = ((scores == labels) & count).sum(axis=1) - hits * count.sum(axis=1)
        return bound_interval(hits, _get_margin(float((deviations**2).sum() / count.sum() ** 2)), SHARE, len(labels))
    if metric in ("accuracy", "exact"):
        hits = METRICS[metric](scores, labels)
        return bound_interval(hits, _get_margin(hits * (1 - hits) / len(labels)), SHARE, len(labels))
    if metric == "f1":
        return _bound_f1(scores.argmax(axis=1), labels, rng)
    if metric == "r2":
        low, high = np.quantile(_bootstrap_r2(scores, labels, rng), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)
    return _bound_auc(score_positive(scores), labels)


def _get_margin(variance: float) -> float:
    return float(_get_quantile(math.inf)) * math.sqrt(variance)


def _bootstrap_r2(values: Scores, truth: Scores, rng: np.random.Generator) -> np.ndarray:
    """R2 of REPLICATES resamples; each weighs the rows' squared errors and squared distances to the mean."""
    values, truth = remove_wild(values, truth)
    errors = ((values - truth) ** 2).sum(axis=1)
    spread = ((truth - truth.mean(axis=0)) ** 2).sum(axis=1)
    if len(truth) > MANY:  # model parameters, for example: resample blocks of them
        starts = np.arange(0, len(truth), -(-len(truth) // MANY))
        errors, spread = np.add.reduceat(errors, starts), np.add.reduceat(spread, starts)
    weight = rng.multinomial(len(errors), np.full(len(errors), 1 / len(errors)), REPLICATES).astype(float)
    return np.asarray(1 - (weight @ errors) / (weight @ spread))


def _bound_f1(guessed: Labels, labels: Labels, rng: np.random.Generator) -> tuple[float, float]:
    """Return the interval by the variance of REPLICATES resamples, on the scale of a share of the rows that count.

    A resample is a draw of how many rows are of which class and guessed as which.
    """

    def f1(wrong: Any, missed: Any, hit: Any) -> Any:
        return 2 * hit / np.maximum(2 * hit + wrong + missed, 1)

    counts = np.bincount(2 * labels + guessed, minlength=4)
    drawn = f1(*rng.multinomial(len(labels), counts / len(labels), REPLICATES).T[1:])
    return bound_interval(float(f1(*counts[1:])), _get_margin(float(drawn.var())), SHARE, max(1, int(counts[1:].sum())))


def _bound_auc(score: Scores, labels: Labels) -> tuple[float, float]:
    """Return the interval by DeLong's variance, on the scale of a share.

    A class with a single row has the largest possible variance, since it shows none.

    Source: DeLong et al. 1988, "Comparing the areas under two or more correlated receiver operating characteristic
    curves", Biometrics 44, by the ranks of Sun and Xu 2014, IEEE Signal Processing Letters 21.
    """
    ranks, positive = stats.rankdata(score), labels == 1
    sides = [(ranks[rows] - stats.rankdata(score[rows])) / (~rows).sum() for rows in (positive, ~positive)]
    value = float(sides[0].mean())
    variances = [side.var(ddof=1) / len(side) if len(side) > 1 else value * (1 - value) for side in sides]
    return bound_interval(value, _get_margin(sum(variances)), SHARE, min(map(len, sides)))


def _compute_weighted_auc(score: Scores, labels: Labels, weights: Iterable[np.ndarray]) -> np.ndarray:
    """AUC with each weighting (n,) of the rows, 1/2 if a class has no weight. Rows are sorted once; ties count half."""
    order = np.argsort(score, kind="stable")
    positive = labels[order] == 1
    starts = np.flatnonzero(np.r_[True, np.diff(score[order]) > 0])  # first row of each group of equal scores
    values = []
    for unordered in weights:
        weight = unordered[order].astype(float)
        above = np.add.reduceat(weight * positive, starts)
        below = np.add.reduceat(weight * ~positive, starts)
        pairs = (above * (np.cumsum(below) - below / 2)).sum()
        values.append(pairs / (above.sum() * below.sum()) if above.sum() and below.sum() else 0.5)
    return np.array(values)


ALPHA = 1 - LEVEL
POWER = 0.8
MIN_SEEDS = 3
"""Seeds below which no test is made: two differences that are alike by chance would decide."""

NORMAL = 1e6
"""Degrees of freedom from which a t distribution is normal."""

EQUAL = 1e-9
"""Values that differ by less are equal: the rest is rounding."""


class Paired(NamedTuple):
    """The paired differences of two arms.

    Attributes:
        mean: of the differences.
        low: of the 95 % t interval of the mean, whose other end is ``high``; NaN with one seed.
        n: number of seeds.
        deviation: standard deviation of the differences; NaN with one seed.
        p_above: of the test that the mean exceeds the floor; 1 if there are too few seeds.
        p_below: of the test that it falls short of the margin.
    """

    mean: float
    low: float
    high: float
    n: int
    deviation: float
    p_above: float
    p_below: float


def compare_pairs(differences: Sequence[float], *, floor: float = 0.0, margin: float = 0.0) -> Paired:
    """Return mean, interval and both tests; differences without any deviation are taken as exact.

    >>> round(compare_pairs([0.01, 0.02, 0.03], margin=0.1).p_above, 4)
    0.0371
    """
    if not differences:
        return Paired(float("nan"), float("nan"), float("nan"), 0, float("nan"), 1.0, 1.0)
    mean, low, high, n = bound_over_seeds(differences)
    deviation = float(np.std(differences, ddof=1)) if n > 1 else float("nan")
    if n < MIN_SEEDS:
        return Paired(mean, low, high, n, deviation, 1.0, 1.0)
    if deviation <= EQUAL * max(1.0, abs(mean)):
        above, below = float(not mean > floor + EQUAL), float(not mean < margin - EQUAL)
        return Paired(mean, low, high, n, 0.0, above, below)
    error = deviation / n**0.5
    above = float(special.stdtr(n - 1, (floor - mean) / error))
    below = float(special.stdtr(n - 1, (mean - margin) / error))
    return Paired(mean, low, high, n, deviation, above, below)


def correct_holm(p: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction, in their order.

    Rejecting those below 0.05 rejects any true hypothesis with a probability of at most 0.05, whatever depends on what.

    >>> correct_holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def find_detectable(deviation: float, n: int, *, level: float = ALPHA, power: float = POWER) -> float:
    """Return the smallest true difference that a one-sided paired t test of n seeds finds with this power."""
    return deviation * solve_mean(n - 1, level, power) / n**0.5 if n >= MIN_SEEDS else float("inf")


@lru_cache
def solve_mean(freedom: float, level: float, power: float = POWER) -> float:
    """Return the true mean, in standard errors, that a one-sided t test finds with this power: its noncentrality."""
    freedom = min(freedom, NORMAL)
    critical = float(stats.t.isf(level, freedom))

    def lacking(noncentrality: float) -> float:
        return float(1 - special.nctdtr(freedom, noncentrality, critical) - power)

    high = critical + 1
    while lacking(high) < 0:  # not at once far beyond, where the distribution function can be no number
        high *= 2
    return float(optimize.brentq(lacking, 0.0, high))


MIN_CLASS_ROWS = 10
"""Rows of each class below which the leak of a group is not measured."""

DRAWS = 999


class Scored(NamedTuple):
    """The guess of one seed.

    Attributes:
        person: (n,) which person each row is, a number that is the same in all seeds.
        scores: (n, C).
        labels: (n,).
    """

    person: NDArray[np.integer]
    scores: Scores
    labels: Labels


def find_leaks(scored: Scored, group: NDArray[np.integer], n_groups: int) -> NDArray[np.float64]:
    """Return the leak of each group (G,), the AUC within it if C = 2, else its accuracy; NaN if that is not defined.

    ``group`` (P,) is that of each person, 0 to G - 1, or -1 for none.
    """
    return _find_aucs(_prepare(scored), group, n_groups)


def differ(seeds: Sequence[Scored], group: NDArray[np.integer], n_groups: int, rng: np.random.Generator) -> float:
    """Return the p value of the test that all groups leak the same.

    Persons of the same class exchange their groups, in all seeds at once, since a person is scored in several. The test
    is exact if, given the class, the guess does not depend on the group; groups may differ in their shares of classes.
    The statistic is the variance of the groups' mean leaks, weighted by their rows.

    Args:
        seeds: of one attack.
        group: (P,) the group of each person, 0 to G - 1, or -1 for none.
        n_groups: G.
        rng: draws the exchanges.
    """
    prepared = [_prepare(scored) for scored in seeds]
    label = np.full(len(group), -1)
    for scored in seeds:
        label[scored.person] = scored.labels
    classes = [np.flatnonzero((label == c) & (group >= 0)) for c in np.unique(label[label >= 0])]
    weight = np.bincount(group[(label >= 0) & (group >= 0)], minlength=n_groups).astype(float)

    def spread(by_person: NDArray[np.integer]) -> float:
        leaks = np.array([_find_aucs(scored, by_person, n_groups) for scored in prepared])
        known = ~np.isnan(leaks)
        mean, size = np.nansum(leaks, axis=0) / np.maximum(known.sum(axis=0), 1), weight * known.any(axis=0)
        return float(size @ (mean - size @ mean / size.sum()) ** 2)

    observed, exchanged, at_least = spread(group), group.copy(), 0
    for _ in range(DRAWS):
        for persons in classes:
            exchanged[persons] = rng.permutation(group[persons])
        at_least += spread(exchanged) >= observed * (1 - 1e-9)
    return (1 + at_least) / (1 + DRAWS)


class _Prepared(NamedTuple):
    """What is the same for all exchanges: for C = 2 the ``place`` of each score among T different ones, else hits."""

    person: NDArray[np.integer]
    positive: NDArray[np.bool_]
    place: NDArray[np.integer] | None


def _prepare(scored: Scored) -> _Prepared:
    if scored.scores.shape[1] > 2:
        return _Prepared(scored.person, scored.scores.argmax(axis=1) == scored.labels, None)
    place = stats.rankdata(score_positive(scored.scores), method="dense").astype(int) - 1
    return _Prepared(scored.person, scored.labels == 1, place)


def _find_aucs(scored: _Prepared, by_person: NDArray[np.integer], n_groups: int) -> NDArray[np.float64]:
    group, hit, place = by_person[scored.person], scored.positive, scored.place
    grouped = group >= 0
    group, hit = group[grouped], hit[grouped]
    hits, rows = (np.bincount(of, minlength=n_groups) for of in (group[hit], group))
    with np.errstate(invalid="ignore"):
        if place is None:
            return np.asarray(hits / rows)
        size = int(place.max()) + 1
        cell = group * size + place[grouped]
        negatives = np.bincount(cell[~hit], minlength=n_groups * size).reshape(n_groups, size)
        below = negatives.cumsum(axis=1) - negatives / 2
        won = np.bincount(group[hit], weights=below.ravel()[cell[hit]], minlength=n_groups)
        return np.asarray(won / (hits * (rows - hits)))
