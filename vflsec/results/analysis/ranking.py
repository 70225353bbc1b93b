"""Which defense is best: the front of utility and leak, and the order by each score; these may disagree.

Orders are by means. Two defenses differ by a score if a two-sided t test of its difference, paired by seed, says so
after Holm's correction for all pairs of defenses: with 95 % probability, no pair that a score tells apart is equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product

import msgspec

from vflsec.results.analysis.paired import ALPHA, holm, paired
from vflsec.results.analysis.results import Cap, Place, Point, Rank

SCORES = ("CAP", "calibrated CAP", "hypervolume", "strongest leak")

Pair = tuple[str, frozenset[str], str]
"""A target, two defenses by their labels, and a score."""

Scored = tuple[float, Mapping[int, float]]
"""A score in the mean, and by seed."""


def exposed(points: Sequence[Point], worst: Sequence[Point]) -> dict[tuple[str, str, str, float], Place]:
    """Return the leak to the strongest adversary and the utility of each target, method, defense and strength.

    The leak is the headline's, in which test rows, training rows and *alone* all compete: a model that memorized the
    labels of training rows must not rank as a private one. The utility is the lowest, since an attack that acts in
    training has a utility of its own. A strength at which some attack gave no number is left out.

    Args:
        points: of every attack.
        worst: the headlines.
    """
    groups: dict[tuple[str, str, str, float], list[Point]] = {}
    for p in points:
        groups.setdefault((p.target, p.method, p.defense, p.strength), []).append(p)
    places = {}
    for p in worst:
        key = (p.target, p.method, p.defense, p.strength)
        utilities = [one.utility.mean for one in groups[key] if one.utility.mean is not None]
        leaks = [one.leak.mean for one in groups[key] if one.leak.mean is not None]
        if p.leak.mean is not None and len(leaks) == len(groups[key]) == len(utilities):
            places[key] = Place(
                target=p.target, method=p.method, defense=p.defense, strength=p.strength,
                utility=min(utilities), leak=p.leak.mean, by_seed=p.leak.by_seed,
            )  # fmt: skip
    return places


def front(places: Sequence[Place]) -> list[Place]:
    """Return the Pareto front of utility and leak of each target."""

    def beaten(place: Place) -> bool:
        return any(
            other.target == place.target
            and other.utility >= place.utility
            and other.leak <= place.leak
            and (other.utility, other.leak) != (place.utility, place.leak)
            for other in places
        )

    return [place for place in places if not beaten(place)]


def ranks(caps: Sequence[Cap], places: Mapping[tuple[str, str, str, float], Place]) -> list[Rank]:
    """Return the rank of each target, method and defense by each score that it has; 1 is the best.

    All scores are against the strongest attack at each strength: CAP, calibrated CAP and hypervolume of the headline,
    and its mean leak over the strengths.
    """
    unranked = []
    for cap in caps:
        if cap.attack != "worst":
            continue
        key = (cap.target, cap.method, cap.defense)
        strengths = [p for name, p in places.items() if name[:3] == key and p.strength > 0]
        scored = {
            "CAP": _known(cap.value, cap.by_seed),
            "calibrated CAP": _known(cap.calibrated, cap.calibrated_by_seed),
            "hypervolume": _known(cap.hypervolume, cap.hypervolume_by_seed),
            "strongest leak": _mean([(place.leak, place.by_seed) for place in strengths]),
        }
        unranked.append(
            Rank(
                target=cap.target,
                method=cap.method,
                defense=cap.defense,
                values={score: one[0] if one else None for score, one in scored.items()},
                ranks={},
                by_seed={score: dict(one[1]) for score, one in scored.items() if one},
            )
        )
    ranked = [_ranked(one, [other for other in unranked if other.target == one.target]) for one in unranked]
    apart = told_apart(ranked)
    close = [(a, b, score) for a, b, score in _neighbors(ranked) if _pair(a, b, score) not in apart]
    return [
        msgspec.structs.replace(one, close=[s for s in SCORES if any(one in pair and s == by for *pair, by in close)])
        for one in ranked
    ]


def orders(ranked: Sequence[Rank]) -> list[str]:
    """Return a line for each target and score: the order, with ≈ between neighbors that do not differ."""
    lines, apart = [], told_apart(ranked)
    several_methods = len({rank.method for rank in ranked}) > 1
    targets = list(dict.fromkeys(rank.target for rank in ranked))
    for target, score in product(targets, SCORES):
        order = _order([rank for rank in ranked if rank.target == target], score)
        if len(order) < 2:
            continue
        names = [rank.label if several_methods else rank.defense for rank in order]
        signs = ["", *(" > " if _pair(a, b, score) in apart else " ≈ " for a, b in pairwise(order))]
        line = "".join(sign + name for sign, name in zip(signs, names, strict=True))
        seeds = min(len(rank.by_seed.get(score, ())) for rank in order)
        note = f" (≈: not told apart, paired over {seeds} seed{'s'[: seeds != 1]})" if " ≈ " in signs else ""
        lines.append(f"by {score}{f' of {target}' if len(targets) > 1 else ''}: {line}{note}")
    return lines


def disagreements(ranked: Sequence[Rank]) -> list[str]:
    """Return a sentence for each two scores by which two defenses differ in opposite directions."""
    sentences, apart = [], told_apart(ranked)
    for one, other in combinations(SCORES, 2):
        pairs = [
            f"{a.label} and {b.label}"
            for a, b in combinations(ranked, 2)
            if a.target == b.target
            and {one, other} <= a.ranks.keys() & b.ranks.keys()
            and (a.ranks[one] - b.ranks[one]) * (a.ranks[other] - b.ranks[other]) < 0
            and {_pair(a, b, one), _pair(a, b, other)} <= apart
        ]
        if pairs:
            sentences.append(f"{one} and {other} disagree on {'; '.join(pairs)}")
    return sentences


def told_apart(ranked: Sequence[Rank]) -> set[Pair]:
    """Return which two defenses differ by which score by more than noise, paired by seed, of all pairs on one target.

    With fewer than three seeds no pair does.
    """
    found: set[Pair] = set()
    for target, score in product(dict.fromkeys(rank.target for rank in ranked), SCORES):
        pairs = list(combinations((rank for rank in ranked if rank.target == target), 2))
        adjusted = holm([_p_value(a, b, score) for a, b in pairs])
        found |= {_pair(a, b, score) for (a, b), p in zip(pairs, adjusted, strict=True) if p < ALPHA}
    return found


def _pair(a: Rank, b: Rank, score: str) -> Pair:
    return a.target, frozenset([a.label, b.label]), score


def _p_value(a: Rank, b: Rank, score: str) -> float:
    first, second = a.by_seed.get(score, {}), b.by_seed.get(score, {})
    tests = paired([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])
    return min(1.0, 2 * min(tests.p_above, tests.p_below))


def _neighbors(ranked: Sequence[Rank]) -> Iterator[tuple[Rank, Rank, str]]:
    for target, score in product(dict.fromkeys(rank.target for rank in ranked), SCORES):
        for a, b in pairwise(_order([rank for rank in ranked if rank.target == target], score)):
            yield a, b, score


def _order(ranked: Sequence[Rank], score: str) -> list[Rank]:
    """Return the defenses that have the score, the best first."""
    return sorted((rank for rank in ranked if score in rank.ranks), key=lambda rank: rank.ranks[score])


def _ranked(one: Rank, among: Sequence[Rank]) -> Rank:
    own_ranks = {}
    for score in SCORES:
        own, sign = one.values[score], -1 if score == "strongest leak" else 1
        if own is not None:
            others = [other.values[score] for other in among]
            own_ranks[score] = 1 + sum(sign * value > sign * own for value in others if value is not None)
    return msgspec.structs.replace(one, ranks=own_ranks)


def _known(value: float | None, by_seed: Mapping[int, float]) -> Scored | None:
    return None if value is None else (value, by_seed)


def _mean(scored: Sequence[Scored]) -> Scored | None:
    """Return the mean of several scores, and by each seed that all of them have."""
    if not scored:
        return None
    seeds = set.intersection(*(set(by_seed) for _, by_seed in scored))
    by_seed = {seed: sum(one[seed] for _, one in scored) / len(scored) for seed in sorted(seeds)}
    return sum(value for value, _ in scored) / len(scored), by_seed
