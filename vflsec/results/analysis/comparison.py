"""Two results folders side by side: the settings that differ, and how far leak and utility have moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from vflsec.results.analysis.results import Leak, Measure, Point, Summary
from vflsec.results.records.manifest import Manifest

Ends = tuple[float | None, float | None]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The second mean minus the first, with its 95 % interval; None where a side has no number or no interval.

    The two intervals are added in quadrature, as of independent runs, which is too wide for runs that share rows.
    """

    before: float | None
    after: float | None
    change: float | None
    ci95: Ends

    @property
    def told_apart(self) -> bool:
        """Whether the interval excludes zero."""
        low, high = self.ci95
        return low is not None and high is not None and (low > 0 or high < 0)


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One line of both reports.

    Attributes:
        attack: its name, or ``worst`` for the headline.
        choice: what stands for the headline before and after; empty for other attacks.
        rows: those that the leak is of, in both reports.
    """

    method: str
    defense: str
    strength: float
    target: str
    attack: str
    choice: tuple[str, str]
    rows: tuple[str, str]
    leak: Difference
    utility: Difference


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, version or hash that differs; None where a side does not have it."""

    name: str
    before: str | None
    after: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one evaluation or audit to another.

    Attributes:
        settings: that differ.
        moves: the headlines, then the attacks, that both have.
        only_before: the lines that the second lacks.
        only_after: the lines that the first lacks.
    """

    before: str
    after: str
    settings: list[Setting]
    moves: list[Move]
    only_before: list[str]
    only_after: list[str]


def compare(before: tuple[Summary, Manifest], after: tuple[Summary, Manifest]) -> Comparison:
    """Return what changed."""
    first, second = (_by_line(summary) for summary, _ in (before, after))
    return Comparison(
        before=before[0].out,
        after=after[0].out,
        settings=list(_settings(_stated(before[1]), _stated(after[1]))),
        moves=[_move(first[line], second[line]) for line in first if line in second],
        only_before=[_named(point) for line, point in first.items() if line not in second],
        only_after=[_named(point) for line, point in second.items() if line not in first],
    )


def _by_line(summary: Summary) -> dict[tuple[str, ...], Point]:
    return {
        (point.method, point.defense, f"{point.strength:g}", point.target, point.attack): point
        for point in (*summary.worst, *summary.points)
    }


def _named(point: Point) -> str:
    where = "" if point.defense == "none" else f", {point.defense} {point.strength:g}"
    return f"{point.attack} ({point.method}{where}, {point.target})"


def _move(before: Point, after: Point) -> Move:
    return Move(
        method=before.method,
        defense=before.defense,
        strength=before.strength,
        target=before.target,
        attack=before.attack,
        choice=(before.choice, after.choice),
        rows=(before.leak.rows, after.leak.rows),
        leak=_difference(before.leak, after.leak),
        utility=_difference(before.utility, after.utility),
    )


def _difference(before: Measure | Leak, after: Measure | Leak) -> Difference:
    if before.mean is None or after.mean is None or before.metric != after.metric:
        return Difference(before=before.mean, after=after.mean, change=None, ci95=(None, None))
    change, ends = after.mean - before.mean, (*before.ci95, *after.ci95)
    ci95: Ends = (None, None)
    if None not in ends:
        low_before, high_before, low_after, high_after = (float(end or 0.0) for end in ends)
        below = math.hypot(high_before - before.mean, after.mean - low_after)
        above = math.hypot(before.mean - low_before, high_after - after.mean)
        ci95 = (change - below, change + above)
    return Difference(before=before.mean, after=after.mean, change=change, ci95=ci95)


def _stated(manifest: Manifest) -> dict[str, str]:
    """Return settings, adversary, seeds, versions and hashes by name, as text."""
    where = manifest.provenance
    named: dict[str, Any] = {
        "adversary": manifest.adversary,
        "seeds": manifest.seeds,
        **manifest.settings,
        "versions": where.versions,
        "commit": where.commit,
        "sources": where.sources,
    }
    return dict(_flat(named))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _settings(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Setting]:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield Setting(name=name, before=before.get(name), after=after.get(name))
