"""From records to damages: what a malicious party costs, each seed held against the honest training of that seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from vflsec.analysis.groups import SEVERITY, finite, interval, share
from vflsec.analysis.results import Damage, Measure
from vflsec.records.manifest import INTEGRITY, Manifest, RowEntry
from vflsec.records.schema import Impact, Record, Result

_NO_ROWS = (math.nan, math.nan)


def on_integrity(manifest: Manifest) -> list[str]:
    """Return the labels of the attacks on integrity."""
    return [attack.label for attack in manifest.attacks if attack.target == INTEGRITY]


def damages(manifest: Manifest, records: Mapping[str, Record]) -> list[Damage]:
    """Return one damage for each method, defense, strength and attack on integrity."""
    groups: dict[tuple[str, str, float, str], list[RowEntry]] = {}
    labels = on_integrity(manifest)
    for row in manifest.rows:
        if row.attack in labels:
            groups.setdefault((row.method, row.defense, row.strength, row.attack), []).append(row)
    return [_damage(group, records, manifest.seeds) for group in groups.values()]


def _damage(group: Sequence[RowEntry], records: Mapping[str, Record], seeds: int) -> Damage:
    first = group[0]
    statuses = {seed: "ok" for seed in range(seeds)}
    honest: dict[int, Impact] = {}
    attacked: dict[int, Impact] = {}
    for row in group:
        record = records.get(row.key)
        status = str(record.status) if record else "missing"
        statuses[row.seed] = min(statuses[row.seed], status, key=SEVERITY.index)
        if isinstance(record, Result) and record.damage:
            (honest if row.control else attacked)[row.seed] = record.damage
    both = [(honest[seed].utility, attacked[seed].utility) for seed in sorted(attacked) if seed in honest]
    lost = [before.headline - after.headline for before, after in both]
    counts = Counter(statuses.values())
    by_chance = _success(honest, seeds)
    metric = next((block.utility.metric for block in (*honest.values(), *attacked.values())), "")
    paired = interval(lost, _NO_ROWS, seeds)
    return Damage(
        method=first.method,
        defense=first.defense,
        strength=first.strength,
        attack=first.attack,
        status=min(counts, key=SEVERITY.index),
        statuses=dict(counts),
        utility=_measure(metric, honest, seeds),
        under_attack=_measure(metric, attacked, seeds),
        lost=Measure(metric=metric, **{**paired, "ci95": finite(paired["ci95"])}),
        success=_success(attacked, seeds),
        chance=by_chance.mean,
    )


def _measure(metric: str, found: Mapping[int, Impact], seeds: int) -> Measure:
    blocks = [found[seed].utility for seed in sorted(found)]
    rows_ci = blocks[0].over_rows if blocks else _NO_ROWS
    return Measure(metric=metric, **share([block.headline for block in blocks], rows_ci, seeds))


def _success(found: Mapping[int, Impact], seeds: int) -> Measure:
    """How often the trigger led where it was to lead; without a mean for an attack that has none."""
    blocks = [success for seed in sorted(found) if (success := found[seed].success)]
    rows_ci = blocks[0].over_rows if blocks else _NO_ROWS
    return Measure(metric="share", **share([block.share for block in blocks], rows_ci, seeds))
