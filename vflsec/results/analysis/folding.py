"""CAP, hypervolume and DCS of each curve, seed by seed; there is none if a cell of the curve has no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from vflsec.base.checks import count
from vflsec.results.analysis import cap as capping
from vflsec.results.analysis.groups import USABLE, CellGroup, Scored, reported_rows
from vflsec.results.analysis.intervals import Seen, interval, mean_of, seen
from vflsec.results.analysis.results import Cap
from vflsec.results.statistics import SHARE, over_seeds, within

TOO_FEW = "hypervolume not available: too few seeds to show what joining gains"

Reach = Mapping[int, tuple[float, float]]
"""By seed, the utility of the active party alone and of the best undefended model: what joining can gain."""


def by_defense(groups: Sequence[CellGroup]) -> list[list[CellGroup]]:
    """Group by method and defense: each group is one curve of the plot."""
    curves: dict[tuple[str, str], list[CellGroup]] = {}
    for group in groups:
        curves.setdefault((group.method, group.defense), []).append(group)
    return list(curves.values())


def reach(groups: Sequence[CellGroup]) -> Reach:
    """Return the reach of the method that has the largest utility without a defense; nothing if that is not known."""
    known: dict[str, dict[int, tuple[float, float]]] = {}
    for group in groups:
        for record in (record for name in group.by_attack for record in group.usable(name).values()):
            if record.active_alone is not None and record.utility and not group.strength:
                known.setdefault(group.method, {})[record.seed] = (record.active_alone, record.utility.headline)
    whole = [by_seed for by_seed in known.values() if len(by_seed) == groups[0].seeds]
    return max(whole, key=lambda by_seed: fmean(best for _, best in by_seed.values()), default={})


def caps(groups: Sequence[CellGroup], reached: Reach) -> list[Cap]:
    """Return the CAP of one method and defense over its positive strengths: of each headline, then of each attack."""
    defended = [group for group in groups if group.strength > 0 and group.attacked]
    if not defended:
        return []
    clean = next(group for group in groups if group.strength == 0)
    worst = [
        _cap([group.headlines[target] for group in (clean, *defended)], clean, defended, reached)
        for target in clean.headlines
    ]
    return worst + [_of_attack(attack, clean, defended, reached) for attack in clean.names]


def _of_attack(attack: str, clean: CellGroup, defended: Sequence[CellGroup], reached: Reach) -> Cap:
    groups = (clean, *defended)
    rows = reported_rows(record for group in groups for record in group.usable(attack).values())
    return _cap([group.scored(attack, rows) for group in groups], clean, defended, reached)


def _cap(cells: Sequence[Scored], clean: CellGroup, defended: Sequence[CellGroup], reached: Reach) -> Cap:
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
    alone_by_cell = [
        group.alone(target).on(cell.rows) if cell.alone is None else cell.alone
        for group, cell in zip(defended, cells[1:], strict=True)
    ]
    one_class = sum(block.one_class for cell in cells[1:] for block in cell.leak.values())
    k = len(defended)

    def cap(*values: float) -> float:
        return capping.cap(values[:k], _leaks(values[k:]))

    def calibrated(*values: float) -> float:
        return capping.calibrated_cap(values[:k], _leaks(values[k : 2 * k]), values[2 * k :])

    caps, calibrated_caps = dict[int, Seen](), dict[int, Seen]()
    accuracies: list[float] = []
    dcs: list[float] = []
    gains: list[list[float]] = []
    kept: list[list[float]] = []
    for seed in range(clean.seeds):
        ideal, *utility = (cell.records[seed].measured for cell in cells)
        blocks = [cell.leak[seed] for cell in cells[1:]]
        caps[seed] = seen(cap, *utility, *blocks)
        accuracy = [block.metrics["accuracy"] for block in blocks if "accuracy" in block.metrics]
        if len(accuracy) == len(blocks) and not one_class:
            accuracies.append(capping.cap([block.headline for block in utility], accuracy))
        if all(seed in by_seed for by_seed in alone_by_cell):
            alone = [by_seed[seed] for by_seed in alone_by_cell]
            calibrated_caps[seed] = seen(calibrated, *utility, *blocks, *alone)
        leak = _leaks([block.headline for block in blocks])
        if reached and seed in calibrated_caps:
            own, best = reached[seed]
            gains.append([best - own, *(u.headline - own for u in utility)])
            kept.append([capping.privacy_kept(a, b.headline) for a, b in zip(leak, alone, strict=True)])
        pairs = zip(utility, leak, strict=True)
        dcs.append(capping.t_dcs([capping.dcs(a, u.headline, ideal_utility=ideal.headline) for u, a in pairs]))
    plain, above = (interval(list(one.values()), clean.seeds, SHARE) for one in (caps, calibrated_caps))
    known = len(gains) == clean.seeds
    volume = capping.relative_hypervolume(gains, kept) if known else capping.Volume(None, [], 1.0)
    notes = [f"no CAP (accuracy): {count(one_class, 'cell')} {'guesses' if one_class == 1 else 'guess'} one class"]
    notes = notes * bool(one_class) + [TOO_FEW] * (known and volume.value is None)
    return Cap(
        **whole,
        value=plain["mean"],
        ci95=plain["ci95"],
        calibrated=above["mean"],
        calibrated_ci95=above["ci95"],
        accuracy_value=mean_of(accuracies),
        dcs=mean_of(dcs),
        n=clean.seeds,
        note="; ".join(notes),
        by_seed={seed: one.value for seed, one in caps.items()},
        calibrated_by_seed={seed: one.value for seed, one in calibrated_caps.items()},
        hypervolume=volume.value,
        hypervolume_ci95=_ends(volume),
        hypervolume_by_seed=dict(enumerate(volume.by_seed)),
    )


def _ends(volume: capping.Volume) -> tuple[float | None, float | None]:
    """Return the interval over seeds, up to what gains that are not shown may add."""
    if volume.value is None or len(volume.by_seed) < 2:
        return None, None
    spread = over_seeds(volume.by_seed)
    low, high = within(volume.value, spread.high - spread.mean, SHARE)
    return low, max(high, volume.most)


def _leaks(values: Sequence[float]) -> list[float]:
    return [max(0.0, value) for value in values]  # an R2 below 0 is no leak


def _usable(cell: Scored) -> int:
    """The number of seeds of a cell that gave a number; for the headline, those in which every attack did."""
    return sum(n for status, n in cell.statuses.items() if status in USABLE)


def c_dcs(caps: Sequence[Cap]) -> list[dict[str, Any]]:
    """Mean DCS of each method and defense over the attacks on each target, and over targets."""
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cap in caps:
        if cap.dcs is not None and cap.attack != "worst":
            curves.setdefault((cap.method, cap.defense), {}).setdefault(cap.target, []).append(cap.dcs)
    folded = []
    for (method, defense), targets in curves.items():
        types = {target: capping.t_dcs(scores) for target, scores in targets.items()}
        folded.append({"method": method, "defense": defense, "t_dcs": types, "c_dcs": capping.c_dcs(types)})
    return folded
