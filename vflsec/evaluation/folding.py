"""Folds each curve into CAP and the DCS family, seed by seed; a cell without a number withholds the fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vflsec.evaluation import cap as capping
from vflsec.evaluation.points import Curve, finite, headline, interval, told_rows
from vflsec.evaluation.results import Cap


def by_defense(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Group by method and defence: each group is one line of the plot."""
    found: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        found.setdefault((curve.method, curve.defense), []).append(curve)
    return list(found.values())


def caps(curves: Sequence[Curve]) -> list[Cap]:
    """Fold one method and defence over its positive strengths, for each attack, seed by seed."""
    defended = [curve for curve in curves if curve.strength > 0 and curve.attacked]
    if not defended:
        return []
    clean = next(curve for curve in curves if curve.strength == 0)
    return [_cap(attack, clean, defended) for attack in clean.by_attack]


def _cap(attack: str, clean: Curve, defended: Sequence[Curve]) -> Cap:
    whole: dict[str, Any] = {"method": clean.method, "defense": clean.defense, "attack": attack}
    cells = [curve.usable(attack) for curve in (clean, *defended)]
    rows = told_rows(record for by_seed in cells for record in by_seed.values())
    lost = sum(clean.seeds - sum(rows in record["leak"] for record in by_seed.values()) for by_seed in cells)
    if lost:
        none = (None, None)
        return Cap(
            **whole, value=None, ci95=none, calibrated=None, calibrated_ci95=none, accuracy_value=None, dcs=None, n=0,
            note=f"{lost} cells gave no number on {rows} rows",
        )  # fmt: skip
    prior = clean.alone(attack)
    blind = sum(bool(r["leak"][rows].get("one_class")) for by_seed in cells[1:] for r in by_seed.values())
    values: dict[str, dict[int, float]] = {"cap": {}, "calibrated": {}, "accuracy": {}, "dcs": {}}
    for seed in range(clean.seeds):
        found = [by_seed[seed] for by_seed in cells[1:]]
        utility = [headline(record["utility"])[1] for record in found]
        leak = [max(0.0, headline(record["leak"][rows])[1]) for record in found]  # worse than the mean tells nothing
        values["cap"][seed] = capping.cap(utility, leak)
        accuracy = [record["leak"][rows]["metrics"].get("accuracy") for record in found]
        if None not in accuracy and not blind:
            values["accuracy"][seed] = capping.cap(utility, accuracy)
        if seed in prior and rows in prior[seed]["leak"]:
            alone = headline(prior[seed]["leak"][rows])[1]
            values["calibrated"][seed] = capping.calibrated_cap(utility, leak, [alone] * len(leak))
        ideal = headline(cells[0][seed]["utility"])[1]
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
        note=f"no CAP (accuracy): {blind} cells guess one class" if blind else "",
        target=clean.targets[attack],
        by_seed=values["cap"],
        calibrated_by_seed=values["calibrated"],
    )


def c_dcs(caps: Sequence[Cap]) -> list[dict[str, Any]]:
    """Mean DCS of each method and defence over the attacks on each target, and over targets."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cap in caps:
        if cap.dcs is not None:
            found.setdefault((cap.method, cap.defense), {}).setdefault(cap.target, []).append(cap.dcs)
    by_type = {
        curve: {target: capping.t_dcs(scores) for target, scores in targets.items()} for curve, targets in found.items()
    }
    return [
        {"method": method, "defense": defense, "t_dcs": types, "c_dcs": capping.c_dcs(types)}
        for (method, defense), types in by_type.items()
    ]
