"""Limits that turn a result into an exit code. They are compared with the far end of its interval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from vflsec.base.checks import count, unknown
from vflsec.base.errors import UsageError
from vflsec.results.analysis.alarms import PlaceKey, Useless
from vflsec.results.analysis.results import Damage, Gate, Leak, Measure, Point
from vflsec.results.records.manifest import AUDITED, INTEGRITY, UNDEFENDED, Manifest

ALARMED = "see the NOTEs"
NO_DEFENSE = "no defense can change it"
ROWS = {"train": "training rows", "test": "test rows", "candidates": "candidate rows"}

Limits = Mapping[str, float]
Shown = TypeVar("Shown", Point, Damage)


def check_limits(manifest: Manifest, max_leak: Limits) -> None:
    """Raise UsageError if a limit is on an attack that was not run, or that has no leak."""
    targets = {attack.label: attack.target for attack in manifest.attacks}
    leaking = [label for label, target in targets.items() if target != INTEGRITY]
    for name in max_leak:
        if name not in leaking and (name in targets or not leaking):
            raise UsageError(
                f"expected an attack that recovers something with --max-leak, got {name}: "
                f"attacks on integrity leak nothing; bound the utility that they leave with --min-utility"
            )
        on_columns = {re.split("[:@]", attack.label)[0] for attack in manifest.attacks if attack.column}
        if name not in (*leaking, *on_columns, "worst"):
            raise UsageError(f"{unknown('attack', name, [*leaking, 'worst'])}; --attack adds another")


def gates(
    points: Sequence[Point],
    max_leak: Limits,
    min_utility: float | None,
    damages: Sequence[Damage] = (),
    *,
    max_undetected: float | None = None,
    alone_lost: bool = False,
    alarmed: bool = False,
    useless: Mapping[PlaceKey, Useless] | None = None,
    not_run: int = 0,
    undefended: str = UNDEFENDED,
) -> list[Gate]:
    """Compare limits with the far end of each interval, on test and on training rows.

    Where an alarm doubts what the numbers are about, a gate that would hold is undecided; one that fails still fails.

    A limit on ``worst`` is a limit on the headline and on every attack, so that it never holds if a limit on an attack
    fails. The limit on utility also bounds the utility under attacks on integrity.

    Args:
        points: of every attack, and the headlines.
        max_leak: limits by attack.
        min_utility: a limit, or None.
        damages: by attacks on integrity.
        max_undetected: a limit on the advantage of the headline that could have been overlooked, or None.
        alone_lost: whether an attack without the federation gave no number, so that ``worst`` may be too low.
        alarmed: whether there is an alarm, see ``vflsec.results.analysis.alarms``.
        useless: joint models that are of no use: with one that is shown to be, no gate holds.
        not_run: attacks that could be mounted and were not run, of which a gate on ``worst`` that holds tells.
        undefended: what strength 0 has.
    """
    defended = _defended(points)
    checked = []
    for attack, limit in max_leak.items():
        points_of_attack = [p for p in defended if _is_limited(p, attack)]
        covered = defended if attack == "worst" else points_of_attack
        ends = [
            (_upper(leak), p, leak.rows) for p in covered for leak in (p.leak, p.leak_train) if leak.mean is not None
        ]
        worst = max(ends, key=lambda end: (end[0], end[1].choice == "alone"), default=None)
        kept = worst is not None and worst[0] <= limit
        end, rows = (worst[:2], worst[2]) if worst else (None, "")
        gate = _gate(f"max-leak {attack}", limit, end, points_of_attack, kept, undefended, rows)
        if attack == "worst" and NO_DEFENSE not in gate.at and _alone_exceeds(covered, limit):
            at = f"{gate.at} (alone exceeds the limit without joining, too: {NO_DEFENSE})"
            gate = msgspec.structs.replace(gate, at=at)
        if attack == "worst" and alone_lost:  # *alone* competes for the headline
            gate = _undecided(gate, "an attack without the federation gave no number")
        if attack == "worst" and not_run and gate.holds:
            gate = msgspec.structs.replace(gate, why=f"{count(not_run, 'attack')} that could be mounted did not run")
        checked.append(gate)
    if min_utility is not None:
        honest = [p for p in defended if p.attack != "worst"]
        broken = _defended(damages)
        utilities: list[tuple[Measure, Point | Damage]] = [(p.utility, p) for p in honest]
        utilities += [(d.under_attack, d) for d in broken]
        lows = [(_lower(utility), where) for utility, where in utilities if utility.mean is not None]
        lowest = min(lows, key=lambda low: low[0], default=None)
        kept = lowest is not None and lowest[0] >= min_utility
        checked.append(_gate("min-utility", min_utility, lowest, [*honest, *broken], kept, undefended))
    if max_undetected is not None:
        headlines = [p for p in defended if p.attack == "worst"]
        seen = [(p.leak.detectable, p) for p in headlines if p.leak.detectable is not None]
        largest = max(seen, key=lambda pair: pair[0], default=None)
        kept = largest is not None and largest[0] <= max_undetected
        gate = _gate("max-undetected", max_undetected, largest, headlines, kept, undefended)
        checked.append(_undecided(gate) if len(seen) < len(headlines) else gate)
    spoiled = [(p, model) for p in defended if (model := (useless or {}).get(p.place)) and model.is_shown]
    if alarmed or not spoiled:
        return [_undecided(gate, ALARMED) for gate in checked] if alarmed else checked
    point, reason = spoiled[0]
    why = f"with {point.defense} {point.strength:g} the joint model is {reason.why}"
    return [_undecided(gate, why) for gate in checked]


def _undecided(gate: Gate, why: str = "") -> Gate:
    """Return ``gate``, undecided where it would hold."""
    return msgspec.structs.replace(gate, holds=None, why=why) if gate.holds else gate


def _alone_exceeds(points: Sequence[Point], limit: float) -> bool:
    """Whether the upper end of *alone* is beyond a limit, whatever attacks reach."""
    leaks = [leak for point in points for leak in (point.leak, point.leak_train)]
    ends = [leak.alone if leak.alone_ci95[1] is None else leak.alone_ci95[1] for leak in leaks]
    return any(end is not None and end > limit for end in ends)


def _is_limited(point: Point, name: str) -> bool:
    """Whether a limit on ``name`` covers a point: its attack, or one with ``name`` on any column."""
    return name == point.attack or (bool(point.column) and name == re.split("[:@]", point.attack)[0])


def _defended(points: Sequence[Shown]) -> list[Shown]:
    """Return the points with a defense, or all if none has any."""
    return [p for p in points if p.strength > 0] or list(points)


def _gate(
    name: str,
    limit: float,
    worst: tuple[float, Point | Damage] | None,
    among: Sequence[Point | Damage],
    kept: bool,
    undefended: str,
    rows: str = "",
) -> Gate:
    """Return the gate; it cannot hold if some cell gave no number."""
    if worst is None:
        return Gate(gate=name, limit=limit, worst=None, at="", holds=None)
    value, point = worst
    lost = any(set(p.statuses) - {"ok", "unconverged"} for p in among)
    defense = f"{point.defense} {point.strength:g}" if point.strength else undefended
    at = f"{point.method}, {defense}"
    if isinstance(point, Damage):
        at += f" under {point.attack}"
    elif name.startswith("max-leak"):
        at = (
            f"{point.choice or point.attack}" if point.method == AUDITED else f"{at}, by {point.choice or point.attack}"
        )
        at += f" on {' and '.join(ROWS.get(name, name) for name in rows.split('+'))}"
        at += f" (without joining: {NO_DEFENSE})" if point.choice == "alone" else ""
    return Gate(gate=name, limit=limit, worst=value, at=at, holds=None if kept and lost else kept)


def _upper(leak: Leak) -> float:
    return leak.ci95[1] if leak.ci95[1] is not None else (leak.mean or 0.0)


def _lower(utility: Measure) -> float:
    return utility.ci95[0] if utility.ci95[0] is not None else (utility.mean or 0.0)
