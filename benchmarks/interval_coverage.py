"""How often the intervals of a report hold the truth, and how often planted leaks are found, on worlds that are drawn.

python benchmarks/interval_coverage.py [--rows 500,20000] [--worlds 200] [--seeds 5] [--planted | --until]

A world is a data set of two parties. Each seed splits it anew; a logistic regression of all columns stands for the
joint model, and one of messages, on a few known labels, for the attack. The truth is the mean over all worlds of one
size. Intervals are those of reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from operator import sub
from typing import NamedTuple

import numpy as np
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from vflsec.results.analysis.intervals import (
    DIFFERENCE,
    SeedValue,
    find_detectable,
    get_headline,
    make_interval,
    measure,
)
from vflsec.results.analysis.trainings import MAX_SEEDS, list_stops
from vflsec.results.metrics import METRICS
from vflsec.results.records.schema import Block
from vflsec.results.statistics import (
    GROUPS,
    SHARE,
    bound_over_seeds,
    combine_errors,
    draw_groups,
    leave_out_groups,
)

COLUMNS = 6
"""Of each party."""

DEVIATIONS = (0.0, 0.3, 0.5, 0.7, 0.9, 1.1)
"""Sizes of planted leaks: between the means of the two classes, in deviations of the message."""

TEST, KNOWN, NOISE = 0.3, 80, 0.5
"""Share of test rows, auxiliary labels, and noise on the embedding, in deviations of it."""

WEIGHTS = np.tile(np.linspace(0.1, 0.6, COLUMNS), 2)


class World(NamedTuple):
    """The columns of both parties, the passive one's first, and the labels."""

    x: np.ndarray
    y: np.ndarray


def world(rows: int, rng: np.random.Generator) -> World:
    """Draw a data set of which a third of the rows are positive."""
    x = rng.normal(size=(rows, 2 * COLUMNS))
    return World(x, (rng.random(rows) < expit(x @ WEIGHTS - 1)).astype(int))


def block(score: np.ndarray, y: np.ndarray, groups: np.ndarray, known: float) -> Block:
    """Return a score's AUC on rows of these groups, for an adversary that knows this share of all labels."""
    scores = np.stack([-score, score], axis=1)
    without = leave_out_groups("auc", scores, y, groups)
    own = {"auc": METRICS["auc"](scores, y)}
    return Block(metrics=own, ci95_rows=(None, None), chance=0.5, n=len(y), without=without, known=known)


def split(one: World, seed: int, planted: float | None = None) -> dict[str, Block]:
    """Return utility, leak and *alone* of one seed.

    The passive party's embedding is of two numbers, each a noisy share of its logits. Where a leak is ``planted``, the
    messages are noise instead, with this many deviations between the classes, and the attack reads its columns, too.
    """
    rng, n = np.random.default_rng(seed), len(one.y)
    train, test = train_test_split(np.arange(n), test_size=TEST, stratify=one.y, random_state=seed)
    own, noise = one.x[:, :COLUMNS], rng.normal(size=(n, 2))
    scores = {}
    if planted is None:
        joint = LogisticRegression().fit(one.x[train], one.y[train])
        scores["utility"] = joint.decision_function(one.x[test])
        shares = (own * joint.coef_[0, :COLUMNS]).reshape(n, 2, -1).sum(axis=2)
        received = shares + NOISE * shares.std(axis=0) * noise
    else:
        received = np.column_stack([own, noise[:, 0] + planted * one.y])
    known = rng.choice(train, KNOWN, replace=False)
    attack, alone = (LogisticRegression(C=0.1).fit(x[known], one.y[known]) for x in (received, own))
    scores |= {"leak": attack.decision_function(received[test]), "alone": alone.decision_function(own[test])}
    groups = draw_groups(n)[test]
    return {name: block(score, one.y[test], groups, KNOWN / n * (name != "utility")) for name, score in scores.items()}


def measures(blocks: Sequence[dict[str, Block]]) -> dict[str, list[SeedValue]]:
    """Return what a report has of the seeds of one world."""
    return {
        "utility": [get_headline(own["utility"]) for own in blocks],
        "leak": [get_headline(own["leak"]) for own in blocks],
        "advantage": [measure(sub, own["leak"], own["alone"]) for own in blocks],
        "CAP": [measure(lambda u, a: u * (1 - a), own["utility"], own["leak"]) for own in blocks],
    }


def measured(rows: int, worlds: int, seeds: int) -> list[dict[str, list[SeedValue]]]:
    """Return the measures of each world."""
    rng = np.random.default_rng([rows, seeds])
    drawn = _worlds(rows, worlds, rng)
    return [measures([split(one, seed) for seed in rng.integers(2**31, size=seeds)]) for one in drawn]


def covered(found: Sequence[dict[str, list[SeedValue]]], name: str) -> tuple[float, float, float]:
    """Return how often the interval holds the truth, and that over seeds, and half the width of the first."""
    truth = np.mean([seed.value for one in found for seed in one[name]])
    ends = np.array(
        [
            make_interval(one[name], len(one[name]), DIFFERENCE if name == "advantage" else SHARE)["ci95"]
            for one in found
        ]
    )
    simple = np.array([bound_over_seeds([seed.value for seed in one[name]])[1:3] for one in found])
    new, old = (float(np.mean((each[:, 0] <= truth) & (truth <= each[:, 1]))) for each in (ends, simple))
    return new, old, float(np.mean(ends[:, 1] - ends[:, 0]) / 2)


class Planted(NamedTuple):
    """Leaks of one size in many worlds: how many deviations, the true advantage, how many were found, and from where.

    Attributes:
        stated: the mean of the smallest advantages that the runs state they would have seen.
    """

    deviations: float
    advantage: float
    found: float
    stated: float


def planted(rows: int, worlds: int, seeds: int, deviations: Sequence[float]) -> list[Planted]:
    """Plant leaks of growing size in the same worlds."""
    every = []
    for size in deviations:
        rng = np.random.default_rng([rows, seeds, 1])
        drawn = _worlds(rows, worlds, rng)
        pairs = [
            [(own["leak"], own["alone"]) for own in (split(one, s, size) for s in rng.integers(2**31, size=seeds))]
            for one in drawn
        ]
        advantages = [[measure(sub, *pair) for pair in one] for one in pairs]
        lows = [make_interval(one, seeds, DIFFERENCE)["ci95"][0] for one in advantages]
        true = float(np.mean([own.value for one in advantages for own in one]))
        stated = float(np.mean([find_detectable(one, seeds) or 0.0 for one in pairs]))
        every.append(Planted(size, true, float(np.mean(np.array(lows) > 0)), stated))
    return every


def power(found: Sequence[Planted]) -> float:
    """Return how often a leak is found whose advantage is what runs without one state that they would have seen."""
    first, *_ = found
    return float(np.interp(first.stated, [one.advantage for one in found], [one.found for one in found]))


def stopped(until: float, worlds: int) -> tuple[float, float]:
    """Return how often intervals hold the truth if seeds are added until they are narrow enough, and the mean number.

    Values of seeds are normal with deviation 1, of rows that vary little.
    """
    rng, held, numbers = np.random.default_rng(0), 0, []
    for _ in range(worlds):
        values = rng.normal(size=MAX_SEEDS)
        for n in list_stops(MAX_SEEDS):
            margin = combine_errors(values[:n].tolist(), np.zeros((n, GROUPS)).tolist()).margin
            if margin <= until:
                break
        held += abs(values[:n].mean()) <= margin
        numbers.append(n)
    return held / worlds, float(np.mean(numbers))


def _worlds(rows: int, worlds: int, rng: np.random.Generator) -> Iterator[World]:
    return (world(rows, rng) for _ in range(worlds))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="500,2000,20000")
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--planted", action="store_true", help="find planted leaks instead")
    parser.add_argument("--until", action="store_true", help="add seeds until intervals are narrow instead")
    given = parser.parse_args()
    if given.until:
        print("| until, deviations | covers | seeds |\n|---|---|---|")
        for until in (0.3, 0.4, 0.5, 0.7, 1.0):
            held, n = stopped(until, 10 * given.worlds)
            print(f"| {until:g} | {held:.3f} | {n:.1f} |")
        return
    if given.planted:
        print("| rows | deviations | advantage | found | seen from |\n|---|---|---|---|---|")
        for rows in map(int, given.rows.split(",")):
            leaks = planted(rows, given.worlds, given.seeds, DEVIATIONS)
            for one in leaks:
                print(f"| {rows} | {one.deviations:g} | {one.advantage:+.4f} | {one.found:.3f} | {one.stated:.4f} |")
            print(f"power at what runs without a leak state: {power(leaks):.3f}", flush=True)
        return
    print("| rows | measure | covers | over seeds alone | half width |\n|---|---|---|---|---|")
    for rows in map(int, given.rows.split(",")):
        found = measured(rows, given.worlds, given.seeds)
        for name in found[0]:
            new, old, half = covered(found, name)
            print(f"| {rows} | {name} | {new:.3f} | {old:.3f} | {half:.4f} |", flush=True)


if __name__ == "__main__":
    main()
