"""Whether more means of the adversary would leak more: how far the leak grew with the last step of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vflsec.results.analysis.groups import ALONE
from vflsec.results.analysis.paired import paired
from vflsec.results.analysis.results import Point, Summary

VISIBLE = 0.0005
"""A smaller rise is none."""


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """By how much a leak exceeds that of the same attack with fewer means, or labels, paired by seed.

    Attributes:
        attack: its name, or ``worst`` for the headline.
        where: the values of the other settings that differ between the points of a sweep.
        before: the mean leak with fewer means; ``after`` is that with more.
        rise: the mean difference over ``n`` seeds, with its 95 % interval; its ends are None with one seed.
    """

    method: str
    defense: str
    strength: float
    target: str
    attack: str
    where: dict[str, str] = {}
    before: float
    after: float
    rise: float
    ci95: tuple[float | None, float | None]
    n: int

    @property
    def still_rising(self) -> bool | None:
        """Whether the interval is above 0, by what three digits show; None without an interval."""
        return None if self.ci95[0] is None else self.ci95[0] >= VISIBLE


def rises(before: Summary, after: Summary, where: Mapping[str, str]) -> list[Rise]:
    """Return the rise of each headline and attack; none if the evaluations have other attacks.

    The undefended row, which all defenses share, comes once. A headline that is *alone* is left out: it rises with what
    the adversary knows without the federation.
    """
    first, second = _by_place(before), _by_place(after)
    if first.keys() != second.keys():
        return []
    pairs = [(one, second[place]) for place, one in first.items()]
    return [
        _rise(one, other, where)
        for one, other in pairs
        if one.leak.by_seed.keys() & other.leak.by_seed.keys() and other.choice != ALONE
    ]


def _by_place(summary: Summary) -> dict[tuple[str, str, float, str, str], Point]:
    found: dict[tuple[str, str, float, str, str], Point] = {}
    for point in (*summary.worst, *summary.points):
        defense = point.defense if point.strength else "none"
        found.setdefault((point.method, defense, point.strength, point.target, point.attack), point)
    return found


def _rise(one: Point, other: Point, where: Mapping[str, str]) -> Rise:
    a, b = one.leak.by_seed, other.leak.by_seed
    seeds = sorted(a.keys() & b.keys())
    found = paired([b[seed] - a[seed] for seed in seeds])
    return Rise(
        method=one.method,
        defense=one.defense if one.strength else "none",
        strength=one.strength,
        target=one.target,
        attack=one.attack,
        where=dict(where),
        before=sum(a[seed] for seed in seeds) / len(seeds),
        after=sum(b[seed] for seed in seeds) / len(seeds),
        rise=found.mean,
        ci95=(found.low, found.high) if found.n > 1 else (None, None),
        n=found.n,
    )
