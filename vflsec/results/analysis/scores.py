"""Scores that fold a privacy-utility curve into one number, and the order of defenses by each; these may disagree."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, product
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from vflsec.base.checks import count, group
from vflsec.results.analysis.groups import USABLE, CellGroup, CellScore, choose_rows
from vflsec.results.analysis.intervals import SeedValue, average, make_interval, measure
from vflsec.results.analysis.results import Cap, Place, Point, Rank
from vflsec.results.statistics import ALPHA, SHARE, bound_interval, bound_over_seeds, compare_pairs, correct_holm

SCORES = ("CAP", "calibrated CAP", "hypervolume", "strongest leak")
TOO_FEW = "hypervolume not available: too few seeds to show what joining gains"

Pair = tuple[str, frozenset[str], str]
"""A target, two defenses by their labels, and a score."""


def cap(utility: Sequence[float], leak: Sequence[float]) -> float:
    """Return the calibrated averaged performance, mean over strengths of U · (1 - A), each in [0, 1].

    Source: FedHSSL (arXiv 2208.08934), definition 1; the paper leaves the distance undefined, and 1 - A reproduces its
    tables VII and XII from its table XI. CAP rewards a destroyed model: on a binary task one that predicts a constant
    scores about 0.25. Read it beside ``compute_calibrated_cap``.
    """
    return sum(u * (1 - a) for u, a in zip(utility, leak, strict=True)) / len(utility)


def compute_calibrated_cap(utility: Sequence[float], leak: Sequence[float], alone: Sequence[float]) -> float:
    """Return CAP with the leak replaced by its advantage over the adversary alone, clipped to [0, 1].

    What the adversary could have inferred without joining is not the federation's leak.
    """
    return cap(utility, [min(1.0, max(0.0, a - b)) for a, b in zip(leak, alone, strict=True)])


def hypervolume(gain: Sequence[float] | NDArray[np.floating], kept: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the area of the union of the rectangles from (0, 0) to each (g, k), both at least 0.

    By strength g is the utility that joining adds, and k the privacy that is kept (``score_privacy``).

    Source: Zitzler and Thiele 1998, "Multiobjective optimization using evolutionary algorithms", section 3 (size of the
    space covered). A point that another one dominates adds nothing, and a point without gain has no area.
    """
    order = np.argsort(gain)[::-1]
    width, height = np.asarray(gain, dtype=float)[order], np.maximum.accumulate(np.asarray(kept, dtype=float)[order])
    return float(-np.diff(width, append=0.0) @ height)


def score_privacy(leak: float, alone: float) -> float:
    """Return (1 - A) / (1 - alone) in [0, 1]: 1 if nothing is inferred beyond *alone*, 0 if everything is."""
    alone = max(0.0, alone)  # an R2 below 0 is no leak
    return 1.0 if leak <= alone else max(0.0, (1 - leak) / (1 - alone))


class Volume(NamedTuple):
    """A hypervolume as a share of what joining gains.

    Attributes:
        value: None if the seeds do not show whether anything is gained.
        by_seed: its jackknife pseudo-values.
        most: what it would be if each gain that is not shown were at the upper end of its interval.
    """

    value: float | None
    by_seed: list[float]
    most: float


def compare_area(gains: Sequence[Sequence[float]], kept: Sequence[Sequence[float]]) -> Volume:
    """Return the hypervolume of mean gains, as a share of what joining gains.

    Gains are averaged over seeds before negative ones are cut off, and a gain whose 95 % interval over seeds includes 0
    counts as none. Otherwise a model that has learned nothing from the other parties would win by noise. If such an
    interval also reaches all that joining gains, the seeds are too few to tell: where that leaves nothing, or is so of
    the gain without a defense, there is no value.

    Source: Tukey 1958 for pseudo-values, whose deviation is that of the ratio (Shao and Tu 1995, section 1.2).

    Args:
        gains: (S, 1 + K) by seed the utility that joining adds, first without a defense and then at each strength.
        kept: (S, K) by seed, see ``score_privacy``.
    """
    gain, privacy = np.asarray(gains), np.asarray(kept)
    n, mean = len(gain), gain.mean(axis=0)
    ends = np.array([bound_over_seeds(column)[1:3] if n > 1 else (column[0],) * 2 for column in gain.T])
    shown = ends[:, 0] > 0
    unclear = ~shown & (ends[:, 1] > 0) & (ends[:, 1] >= mean[0])

    def volume(rows: NDArray[np.bool_], otherwise: Any = 0.0) -> float:
        whole, *widths = np.where(shown, gain[rows].mean(axis=0), otherwise).tolist()
        return hypervolume(np.clip(widths, 0.0, whole), privacy[rows].mean(axis=0)) / whole if whole > 0 else 0.0

    value, every = volume(np.ones(n, dtype=bool)), np.arange(n)
    if unclear[0] or (unclear.any() and value == 0):
        return Volume(None, [], 1.0)
    by_seed = [n * value - (n - 1) * volume(every != seed) for seed in every] if n > 1 else [value]
    return Volume(value, by_seed, volume(every >= 0, np.clip(ends[:, 1], 0.0, None)))


def dcs(leak: float, utility: float, *, ideal_utility: float, ideal_leak: float = 0.0, beta: float = 0.5) -> float:
    """Return the defense capability score, 1 / (1 + distance to the ideal point).

    Source: Zou et al. 2024 (VFLAIR), section 3.5: sqrt((1-b)(A-A*)^2 + b(U-U*)^2). One-sided as in its released code:
    only a leak above A* and a utility below U* count. It lies in [0.5, 1] for A* = 0, and, unlike CAP, takes the
    undefended model's utility for the ideal one.
    """
    lost = max(0.0, ideal_utility - utility)
    leaked = max(0.0, leak - ideal_leak)
    return 1 / (1 + sqrt((1 - beta) * leaked**2 + beta * lost**2))


def average_dcs(caps: Sequence[Cap]) -> list[dict[str, Any]]:
    """Return T-DCS and C-DCS of each method and defense: the mean over attacks on each target, and over targets."""
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cap in caps:
        if cap.dcs is not None and cap.attack != "worst":
            curves.setdefault((cap.method, cap.defense), {}).setdefault(cap.target, []).append(cap.dcs)
    averages = []
    for (method, defense), targets in curves.items():
        types = {target: sum(scores) / len(scores) for target, scores in targets.items()}
        weight = 1 / len(types)
        mean = sum(weight * value for value in types.values()) / sum(weight for _ in types)
        averages.append({"method": method, "defense": defense, "t_dcs": types, "c_dcs": mean})
    return averages


Reach = Mapping[int, tuple[float, float]]
"""By seed, the utility of the active party alone and of the best undefended model: what joining can gain."""


def reach(groups: Sequence[CellGroup]) -> Reach:
    """Return the reach of the method that has the largest utility without a defense; nothing if that is not known."""
    known: dict[str, dict[int, tuple[float, float]]] = {}
    for at in groups:
        for record in (record for name in at.by_attack for record in at.select_usable(name).values()):
            if record.active_alone is not None and record.utility and not at.strength:
                known.setdefault(at.method, {})[record.seed] = (record.active_alone, record.utility.headline)
    whole = [by_seed for by_seed in known.values() if len(by_seed) == groups[0].seeds]
    return max(whole, key=lambda by_seed: fmean(best for _, best in by_seed.values()), default={})


def fold(groups: Sequence[CellGroup]) -> list[Cap]:
    """Return CAP, hypervolume and DCS of each method and defense over its positive strengths.

    There is one of each headline, then one of each attack, without a value if a cell of the curve has no number.
    """
    reached = reach(groups)
    caps = []
    for curve in group(groups, lambda at: (at.method, at.defense)).values():
        defended = [at for at in curve if at.strength > 0 and at.has_adversary]
        if defended:
            clean = next(at for at in curve if at.strength == 0)
            compared = (clean, *defended)
            cells = [[at.headlines[target] for at in compared] for target in clean.headlines]
            for attack in clean.names:
                rows = choose_rows(record for at in compared for record in at.select_usable(attack).values())
                cells.append([at.score(attack, rows) for at in compared])
            caps += [_fold(scored, clean, defended, reached) for scored in cells]
    return caps


def _fold(cells: Sequence[CellScore], clean: CellGroup, defended: Sequence[CellGroup], reached: Reach) -> Cap:
    target, k = cells[0].target, len(defended)
    curve = Cap(method=clean.method, defense=clean.defense, attack=cells[0].name, target=target, n=0)
    usable = [sum(n for status, n in cell.statuses.items() if status in USABLE) for cell in cells]
    lost = sum(clean.seeds - min(len(cell.leak), n) for cell, n in zip(cells, usable, strict=True))
    if lost:
        unseen = any("unseen" in cell.statuses for cell in cells)
        why = "saw nothing that it reads" if unseen else "collapsed or failed"
        note = f"{count(lost, 'run')} {why}, so there is no CAP"
        return msgspec.structs.replace(curve, note=note)
    alone_by_cell = [
        at.alone(target).select(cell.rows) if cell.alone is None else cell.alone
        for at, cell in zip(defended, cells[1:], strict=True)
    ]
    single_class = sum(block.single_class for cell in cells[1:] for block in cell.leak.values())
    caps, calibrated_caps = dict[int, SeedValue](), dict[int, SeedValue]()
    accuracies: list[float] = []
    scores: list[float] = []
    gains: list[list[float]] = []
    kept: list[list[float]] = []
    for seed in range(clean.seeds):
        ideal, *utility = (cell.records[seed].usable_utility for cell in cells)
        blocks = [cell.leak[seed] for cell in cells[1:]]
        caps[seed] = measure(lambda *v: cap(v[:k], _clip(v[k:])), *utility, *blocks)
        accuracy = [block.metrics["accuracy"] for block in blocks if "accuracy" in block.metrics]
        if len(accuracy) == len(blocks) and not single_class:
            accuracies.append(cap([block.headline for block in utility], accuracy))
        leak = _clip([block.headline for block in blocks])
        if all(seed in by_seed for by_seed in alone_by_cell):
            alone = [by_seed[seed] for by_seed in alone_by_cell]
            calibrated_caps[seed] = measure(
                lambda *v: compute_calibrated_cap(v[:k], _clip(v[k : 2 * k]), v[2 * k :]), *utility, *blocks, *alone
            )
            if reached:
                active, best = reached[seed]
                gains.append([best - active, *(u.headline - active for u in utility)])
                kept.append([score_privacy(a, b.headline) for a, b in zip(leak, alone, strict=True)])
        by_strength = [dcs(a, u.headline, ideal_utility=ideal.headline) for u, a in zip(utility, leak, strict=True)]
        scores.append(sum(by_strength) / k)
    plain, above = (make_interval(list(values.values()), clean.seeds, SHARE) for values in (caps, calibrated_caps))
    known = len(gains) == clean.seeds
    volume = compare_area(gains, kept) if known else Volume(None, [], 1.0)
    notes = [
        f"no CAP (accuracy): {count(single_class, 'cell')} {'guesses' if single_class == 1 else 'guess'} one class"
    ]
    notes = notes * bool(single_class) + [TOO_FEW] * (known and volume.value is None)
    return msgspec.structs.replace(
        curve, value=plain["mean"], ci95=plain["ci95"], calibrated=above["mean"], calibrated_ci95=above["ci95"],
        accuracy_value=average(accuracies), dcs=average(scores), n=clean.seeds, note="; ".join(notes),
        by_seed={seed: value.value for seed, value in caps.items()},
        calibrated_by_seed={seed: value.value for seed, value in calibrated_caps.items()}, hypervolume=volume.value,
        hypervolume_ci95=_bound_volume(volume), hypervolume_by_seed=dict(enumerate(volume.by_seed)),
    )  # fmt: skip


def _bound_volume(volume: Volume) -> tuple[float | None, float | None]:
    """Return the interval over seeds, up to what gains that are not shown may add."""
    if volume.value is None or len(volume.by_seed) < 2:
        return None, None
    spread = bound_over_seeds(volume.by_seed)
    low, high = bound_interval(volume.value, spread.high - spread.mean, SHARE)
    return low, max(high, volume.most)


def _clip(values: Sequence[float]) -> list[float]:
    return [max(0.0, value) for value in values]  # an R2 below 0 is no leak


def place_headlines(points: Sequence[Point], worst: Sequence[Point]) -> dict[tuple[str, str, str, float], Place]:
    """Return the leak to the strongest adversary and the utility of each target, method, defense and strength.

    The leak is the headline's, in which test rows, training rows and *alone* all compete: a model that memorized the
    labels of training rows must not rank as a private one. The utility is the lowest, since an attack that acts in
    training has a utility of its own. A strength is left out at which some attack gave no number, or whose joint model
    is of no use: it would rank by leaking little.
    """
    groups, places = group(points, lambda p: (p.target, *p.place)), {}
    for p in worst:
        key = (p.target, *p.place)
        utilities = [point.utility.mean for point in groups[key] if point.utility.mean is not None]
        leaks = [point.leak.mean for point in groups[key] if point.leak.mean is not None]
        if not p.useless and p.leak.mean is not None and len(leaks) == len(groups[key]) == len(utilities):
            places[key] = Place(
                target=p.target, method=p.method, defense=p.defense, strength=p.strength,
                utility=min(utilities), leak=p.leak.mean, by_seed=p.leak.by_seed,
            )  # fmt: skip
    return places


def find_front(places: Sequence[Place]) -> list[Place]:
    """Return the Pareto front of utility and leak of each target; what is printed alike is equal."""
    printed = [(place.target, round(place.utility, 3), round(place.leak, 3)) for place in places]
    return [
        place
        for place, (target, utility, leak) in zip(places, printed, strict=True)
        if not any(of == target and u >= utility and a <= leak and (u, a) != (utility, leak) for of, u, a in printed)
    ]


def rank(caps: Sequence[Cap], places: Mapping[tuple[str, str, str, float], Place]) -> list[Rank]:
    """Return the rank of each target, method and defense by each score that it has; 1 is the best.

    All scores are against the strongest attack at each strength: CAP, calibrated CAP and hypervolume of the headline,
    and its mean leak over the strengths. Orders are by means. Two defenses differ by a score if a two-sided t test of
    its difference, paired by seed, says so after Holm's correction for all pairs of defenses: with 95 % probability, no
    pair that a score tells apart is equal.
    """
    ranked = [_score_curve(cap, places) for cap in caps if cap.attack == "worst"]
    ranked = [msgspec.structs.replace(rank, ranks=_rank_among(rank, ranked)) for rank in ranked]
    apart = find_differences(ranked)
    close = {
        (rank.target, rank.label, score)
        for target, score in product(dict.fromkeys(rank.target for rank in ranked), SCORES)
        for pair in pairwise(_order(ranked, target, score))
        if _make_pair(*pair, score) not in apart
        for rank in pair
    }
    return [
        msgspec.structs.replace(rank, close=[score for score in SCORES if (rank.target, rank.label, score) in close])
        for rank in ranked
    ]


def _score_curve(cap: Cap, places: Mapping[tuple[str, str, str, float], Place]) -> Rank:
    curve = (cap.target, cap.method, cap.defense)
    strengths = [place for key, place in places.items() if key[:3] == curve and place.strength > 0]
    seeds = sorted(set.intersection(*(set(place.by_seed) for place in strengths))) if strengths else []
    by_seed = {
        "CAP": cap.by_seed,
        "calibrated CAP": cap.calibrated_by_seed,
        "hypervolume": cap.hypervolume_by_seed,
        "strongest leak": {seed: sum(p.by_seed[seed] for p in strengths) / len(strengths) for seed in seeds},
    }
    means = (cap.value, cap.calibrated, cap.hypervolume, average(place.leak for place in strengths))
    values = dict(zip(SCORES, means, strict=True))
    known = {score: by_seed[score] for score in SCORES if values[score] is not None}
    return Rank(target=cap.target, method=cap.method, defense=cap.defense, values=values, ranks={}, by_seed=known)


def _rank_among(rank: Rank, among: Sequence[Rank]) -> dict[str, int]:
    ranks = {}
    for score in SCORES:
        sign = 1 if score == "strongest leak" else -1
        values = [other.values[score] for other in among if other.target == rank.target]
        if (value := rank.values[score]) is not None:
            ranks[score] = 1 + sum(sign * other < sign * value for other in values if other is not None)
    return ranks


def find_differences(ranked: Sequence[Rank]) -> set[Pair]:
    """Return which two defenses differ by which score by more than noise, paired by seed, of all pairs on one target.

    With fewer than three seeds no pair does.
    """
    apart: set[Pair] = set()
    for target, score in product(dict.fromkeys(rank.target for rank in ranked), SCORES):
        pairs = list(combinations((rank for rank in ranked if rank.target == target), 2))
        adjusted = correct_holm([_get_p_value(a, b, score) for a, b in pairs])
        apart |= {_make_pair(a, b, score) for (a, b), p in zip(pairs, adjusted, strict=True) if p < ALPHA}
    return apart


def _make_pair(a: Rank, b: Rank, score: str) -> Pair:
    return a.target, frozenset([a.label, b.label]), score


def _get_p_value(a: Rank, b: Rank, score: str) -> float:
    first, second = a.by_seed.get(score, {}), b.by_seed.get(score, {})
    tests = compare_pairs([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])
    return min(1.0, 2 * min(tests.p_above, tests.p_below))


def _order(ranked: Sequence[Rank], target: str, score: str) -> list[Rank]:
    having = [rank for rank in ranked if rank.target == target and score in rank.ranks]
    return sorted(having, key=lambda rank: rank.ranks[score])
