"""Folds each group into CAP and the DCS family, seed by seed; a cell without a number withholds the fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vflsec.analysis import cap as capping
from vflsec.analysis.groups import USABLE, CellGroup, Scored, finite, interval, told_rows
from vflsec.analysis.results import Cap
from vflsec.core.checks import count


def by_defense(groups: Sequence[CellGroup]) -> list[list[CellGroup]]:
    """Group by method and defense: each group is one line of the plot."""
    found: dict[tuple[str, str], list[CellGroup]] = {}
    for group in groups:
        found.setdefault((group.method, group.defense), []).append(group)
    return list(found.values())


def caps(groups: Sequence[CellGroup]) -> list[Cap]:
    """Fold one method and defense over its positive strengths, seed by seed: each headline, then each attack."""
    defended = [group for group in groups if group.strength > 0 and group.attacked]
    if not defended:
        return []
    clean = next(group for group in groups if group.strength == 0)
    worst = [
        _cap([group.headlines[target] for group in (clean, *defended)], clean, defended) for target in clean.headlines
    ]
    return worst + [_of_attack(attack, clean, defended) for attack in clean.by_attack]


def _of_attack(attack: str, clean: CellGroup, defended: Sequence[CellGroup]) -> Cap:
    groups = (clean, *defended)
    rows = told_rows(record for group in groups for record in group.usable(attack).values())
    return _cap([group.scored(attack, rows) for group in groups], clean, defended)


def _cap(cells: Sequence[Scored], clean: CellGroup, defended: Sequence[CellGroup]) -> Cap:
    """Fold the cells of all strengths, the undefended one first."""
    target = cells[0].target
    whole: dict[str, Any] = {
        "method": clean.method, "defense": clean.defense, "attack": cells[0].name, "target": target,
    }  # fmt: skip
    lost = sum(clean.seeds - min(len(cell.leak), _usable(cell)) for cell in cells)
    if lost:
        none = (None, None)
        return Cap(
            **whole, value=None, ci95=none, calibrated=None, calibrated_ci95=none, accuracy_value=None, dcs=None, n=0,
            note=f"{count(lost, 'run')} collapsed or failed, so there is no CAP",
        )  # fmt: skip
    baselines = [group.alone(target).on(cell.rows) for group, cell in zip(defended, cells[1:], strict=True)]
    blind = sum(block.one_class for cell in cells[1:] for block in cell.leak.values())
    values: dict[str, dict[int, float]] = {"cap": {}, "calibrated": {}, "accuracy": {}, "dcs": {}}
    for seed in range(clean.seeds):
        utility = [cell.found[seed].measured.headline for cell in cells[1:]]
        blocks = [cell.leak[seed] for cell in cells[1:]]
        leak = [max(0.0, block.headline) for block in blocks]  # worse than the mean tells nothing
        values["cap"][seed] = capping.cap(utility, leak)
        accuracy = [block.metrics["accuracy"] for block in blocks if "accuracy" in block.metrics]
        if len(accuracy) == len(blocks) and not blind:
            values["accuracy"][seed] = capping.cap(utility, accuracy)
        if all(seed in baseline for baseline in baselines):
            alone = [baseline[seed].headline for baseline in baselines]
            values["calibrated"][seed] = capping.calibrated_cap(utility, leak, alone)
        ideal = cells[0].found[seed].measured.headline
        scores = [capping.dcs(a, u, ideal_utility=ideal) for u, a in zip(utility, leak, strict=True)]
        values["dcs"][seed] = capping.t_dcs(scores)
    nothing = (math.nan, math.nan)
    folded = {name: interval(list(found.values()), nothing, clean.seeds) for name, found in values.items()}
    return Cap(
        **whole,
        value=folded["cap"]["mean"],
        ci95=finite(folded["cap"]["ci95"]),
        calibrated=folded["calibrated"]["mean"],
        calibrated_ci95=finite(folded["calibrated"]["ci95"]),
        accuracy_value=folded["accuracy"]["mean"],
        dcs=folded["dcs"]["mean"],
        n=clean.seeds,
        note=f"no CAP (accuracy): {count(blind, 'cell')} {'guesses' if blind == 1 else 'guess'} one class"
        * bool(blind),
        by_seed=values["cap"],
        calibrated_by_seed=values["calibrated"],
    )


def _usable(cell: Scored) -> int:
    """How many seeds of a cell ended well; of the headline those in which every attack did."""
    return sum(n for status, n in cell.statuses.items() if status in USABLE)


def c_dcs(caps: Sequence[Cap]) -> list[dict[str, Any]]:
    """Mean DCS of each method and defense over the attacks on each target, and over targets."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cap in caps:
        if cap.dcs is not None and cap.attack != "worst":
            found.setdefault((cap.method, cap.defense), {}).setdefault(cap.target, []).append(cap.dcs)
    by_type = {
        group: {target: capping.t_dcs(scores) for target, scores in targets.items()} for group, targets in found.items()
    }
    return [
        {"method": method, "defense": defense, "t_dcs": types, "c_dcs": capping.c_dcs(types)}
        for (method, defense), types in by_type.items()
    ]
