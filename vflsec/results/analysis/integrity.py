"""From records to damages: the cost of a malicious party, each seed compared to the honest training of that seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import sub

from vflsec.results.analysis.groups import SEVERITY
from vflsec.results.analysis.intervals import DIFFERENCE, headline, interval, seen
from vflsec.results.analysis.results import Damage, Measure
from vflsec.results.records.manifest import INTEGRITY, Manifest, RowEntry
from vflsec.results.records.schema import Impact, Record, Result
from vflsec.results.statistics import SHARE


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
    lost = [seen(sub, before, after) for before, after in both]
    counts = Counter(statuses.values())
    metric = next((block.utility.metric for block in (*honest.values(), *attacked.values())), "")
    return Damage(
        method=first.method,
        defense=first.defense,
        strength=first.strength,
        attack=first.attack,
        status=min(counts, key=SEVERITY.index),
        statuses=dict(counts),
        utility=_measure(metric, honest, seeds),
        under_attack=_measure(metric, attacked, seeds),
        lost=Measure(metric=metric, **interval(lost, seeds, DIFFERENCE)),
        success=_success(attacked, seeds),
        chance=_success(honest, seeds).mean,
        success_by_seed=_by_seed(attacked),
        chance_by_seed=_by_seed(honest),
    )


def _measure(metric: str, impacts: Mapping[int, Impact], seeds: int) -> Measure:
    blocks = [impacts[seed].utility for seed in sorted(impacts)]
    return Measure(metric=metric, **interval([headline(block) for block in blocks], seeds, SHARE))


def _success(impacts: Mapping[int, Impact], seeds: int) -> Measure:
    """The success rate of the trigger; without a mean for an attack that has none."""
    blocks = [success for seed in sorted(impacts) if (success := impacts[seed].success)]
    return Measure(metric="share", **interval([headline(block) for block in blocks], seeds, SHARE))


def _by_seed(impacts: Mapping[int, Impact]) -> dict[int, float]:
    successes = {seed: impacts[seed].success for seed in sorted(impacts)}
    return {seed: success.share for seed, success in successes.items() if success}
