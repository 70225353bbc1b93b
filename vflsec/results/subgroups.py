"""Leaks of groups of rows, and a test of whether all groups leak the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from vflsec.results.metrics import Labels, Scores, score_positive

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
    place = rankdata(score_positive(scored.scores), method="dense").astype(int) - 1
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
