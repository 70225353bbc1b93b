"""Which defence is best: on the front of utility and leak, and in the order of each score, which may disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from vflsec.evaluation.results import Cap, Place, Point, Rank

SCORES = ("CAP", "calibrated CAP", "strongest leak")


def exposed(points: Sequence[Point]) -> dict[tuple[str, str, str, float], Place]:
    """Return what each target, method, defence and strength leaves to the strongest adversary, and at what utility.

    That is the largest leak of any attack, or what the adversary reaches alone if that is more: it may throw the model
    away. ``worst_rows`` is the largest on test or on training rows, as the gates have it: a model that learned the
    labels of training rows by heart must not rank as a private one. The utility is the least: an attack that acts in
    training has one of its own. A strength at which some attack gave no number is left out.
    """
    groups: dict[tuple[str, str, str, float], list[Point]] = {}
    for p in points:
        groups.setdefault((p.target, p.method, p.defense, p.strength), []).append(p)
    found = {}
    for key, group in groups.items():
        leaks = [p.leak.mean for p in group if p.leak.mean is not None]
        utilities = [p.utility.mean for p in group if p.utility.mean is not None]
        if len(leaks) == len(group) == len(utilities):
            alone = max(p.leak.alone or 0.0 for p in group)
            on_train = [p.leak_train.mean for p in group if p.leak_train.mean is not None]
            found[key] = Place(
                target=key[0], method=key[1], defense=key[2], strength=key[3],
                utility=min(utilities), leak=max(*leaks, alone), worst_rows=max(*leaks, *on_train, alone),
            )  # fmt: skip
    return found


def front(places: Sequence[Place]) -> list[Place]:
    """Return the places of each target that no other is better than: Pareto's front of utility and leak."""

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
    """Return one line for each target, method and defence, with its place in the order of each score; 1 is the best.

    A defence is as good as it is against the attack that it does worst against: CAP and calibrated CAP are the least
    over the attacks. The leak is the mean over its strengths of the strongest, on the worse rows. Without a score it
    has no place by it.
    """
    groups: dict[tuple[str, str, str], list[Cap]] = {}
    for cap in caps:
        groups.setdefault((cap.target, cap.method, cap.defense), []).append(cap)
    found = []
    for (target, method, defense), own in groups.items():
        leaks = [p.worst_rows for key, p in places.items() if key[:3] == (target, method, defense) and p.strength > 0]
        values = {
            "CAP": _least([cap.value for cap in own]),
            "calibrated CAP": _least([cap.calibrated for cap in own]),
            "strongest leak": sum(leaks) / len(leaks) if leaks else None,
        }
        found.append(Rank(target=target, method=method, defense=defense, values=values, ranks={}))
    return [_ranked(one, [other for other in found if other.target == one.target]) for one in found]


def disagreements(ranked: Sequence[Rank]) -> list[str]:
    """Return a sentence for each pair of scores that put two defences in opposite orders."""
    found = []
    for one, other in combinations(SCORES, 2):
        pairs = [
            f"{a.label} and {b.label}"
            for a, b in combinations(ranked, 2)
            if a.target == b.target
            and {one, other} <= a.ranks.keys() & b.ranks.keys()
            and (a.ranks[one] - b.ranks[one]) * (a.ranks[other] - b.ranks[other]) < 0
        ]
        if pairs:
            found.append(f"{one} and {other} disagree on {'; '.join(pairs)}")
    return found


def _ranked(one: Rank, among: Sequence[Rank]) -> Rank:
    found = {}
    for score in SCORES:
        own, sign = one.values[score], -1 if score == "strongest leak" else 1
        if own is not None:
            others = [other.values[score] for other in among]
            found[score] = 1 + sum(sign * value > sign * own for value in others if value is not None)
    return Rank(target=one.target, method=one.method, defense=one.defense, values=one.values, ranks=found)


def _least(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None
