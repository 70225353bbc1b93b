"""Limits that turn a result into an exit code: the far end of the interval is what cannot be ruled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vflsec.core.checks import one_of
from vflsec.evaluation.points import USABLE
from vflsec.evaluation.results import Gate, Leak, Measure, Point
from vflsec.evaluation.spec import EvalSpec

Limits = Mapping[str, float]


def check_limits(spec: EvalSpec, max_leak: Limits) -> None:
    """Raise UsageError if a limit is on an attack that ``spec`` does not run."""
    for name in max_leak:
        one_of([*spec.labels, "worst"], attack=name)


def gates(points: Sequence[Point], max_leak: Limits, min_utility: float | None) -> list[Gate]:
    """Compare limits with the far end of the interval: "cannot rule out more than", on test and on training rows."""
    defended = [p for p in points if p.strength > 0] or list(points)
    checked = []
    for attack, limit in max_leak.items():
        found = [p for p in defended if p.attack == attack]
        ends = [(_upper(leak), p) for p in found for leak in (p.leak, p.leak_train) if leak.mean is not None]
        worst = max(ends, key=lambda end: end[0], default=None)
        checked.append(_gate(f"max-leak {attack}", limit, worst, found, worst is not None and worst[0] <= limit))
    if min_utility is not None:
        found = [p for p in defended if p.attack != "worst"]
        ends = [(_lower(p.utility), p) for p in found if p.utility.mean is not None]
        worst = min(ends, key=lambda end: end[0], default=None)
        checked.append(_gate("min-utility", min_utility, worst, found, worst is not None and worst[0] >= min_utility))
    return checked


def _gate(name: str, limit: float, worst: tuple[float, Point] | None, found: Sequence[Point], kept: bool) -> Gate:
    """Return the gate; where some cell gave no number it cannot be said to hold."""
    if worst is None:
        return Gate(gate=name, limit=limit, worst=None, at="", holds=None)
    value, point = worst
    lost = any(set(p.statuses) - set(USABLE) for p in found)
    at = f"{point.method} {point.defense}:{point.strength:g}"
    return Gate(gate=name, limit=limit, worst=value, at=at, holds=None if kept and lost else kept)


def _upper(leak: Leak) -> float:
    return leak.ci95[1] if leak.ci95[1] is not None else (leak.mean or 0.0)


def _lower(utility: Measure) -> float:
    return utility.ci95[0] if utility.ci95[0] is not None else (utility.mean or 0.0)
