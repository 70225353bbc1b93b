"""When enough seeds have been computed: as soon as the intervals of headlines and utilities are narrow enough."""

from __future__ import annotations

from collections.abc import Iterator

from vflsec.results.analysis.intervals import longer_side
from vflsec.results.analysis.results import Summary

BLOCK = 5
"""Seeds that are added at once."""

MOST = 50
"""Seeds at which to stop in any case, unless another number is asked for."""


def blocks(most: int) -> Iterator[int]:
    """Yield the numbers of seeds after which to look."""
    yield from range(BLOCK, most, BLOCK)
    yield most


def widest(summary: Summary) -> float | None:
    """Return the longest side of an interval of a headline's leak or of a utility; None if one is missing."""
    sides = [longer_side(point.leak.mean, point.leak.ci95) for point in summary.worst]
    sides += [longer_side(point.utility.mean, point.utility.ci95) for point in summary.points]
    known = [side for side in sides if side is not None]
    return max(known) if known and len(known) == len(sides) else None


def is_reached(summary: Summary, until: float) -> bool:
    """Whether each interval is at most ``until`` wide to one side."""
    half = widest(summary)
    return half is not None and half <= until


def stopped(summary: Summary, until: float) -> str:
    """Return the note on how many seeds there are, and why."""
    half = widest(summary)
    if half is None:
        return f"seeds were added until each interval is at most ±{until:g}: some result gave none"
    reached = "reached" if half <= until else "not reached"
    return f"seeds were added until each interval is at most ±{until:g}: {reached} with {summary.seeds}, ±{half:.4f}"
