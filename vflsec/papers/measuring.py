"""From the records of an evaluation to the measures that claims are judged by."""

from __future__ import annotations

from collections.abc import Mapping

from vflsec.papers.measurements import Outcome, Values, outcome, rounded, values_of
from vflsec.papers.study import ATTACKED, Measure
from vflsec.results.analysis.results import Cap, Point, Summary
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Record, Result


def measured(
    data: str, arm: str, measure: Measure, summary: Summary, manifest: Manifest, records: Mapping[str, Record]
) -> Values:
    """Return one measure of an arm, with the status of each seed that has none."""
    if measure.kind not in ATTACKED:
        return values_of(data, arm, measure, _of_models(measure, manifest, records))
    if measure.kind in ("cap", "calibrated"):
        cap = next((one for one in summary.cap if one.attack == measure.attack), None)
        return _of_cap(data, arm, measure, cap, manifest.seeds)
    named = (one for one in (*summary.worst, *summary.points) if one.attack == measure.attack)
    at = next((one for one in named if one.strength == measure.strength), None)
    return _of_leak(data, arm, measure, at, manifest.seeds)


def _of_models(measure: Measure, manifest: Manifest, records: Mapping[str, Record]) -> dict[int, Outcome]:
    found: dict[int, Outcome] = dict.fromkeys(range(manifest.seeds), "missing")
    for row in manifest.rows:
        record = records.get(row.key)
        if row.strength == measure.strength and isinstance(record, Result):
            found[row.seed] = outcome(measure, record.status, record.utility, record.traffic, record.reached)
    return found


def _of_cap(data: str, arm: str, measure: Measure, cap: Cap | None, seeds: int) -> Values:
    by_seed = {} if cap is None else cap.by_seed if measure.kind == "cap" else cap.calibrated_by_seed
    why = cap.note if cap and cap.note else "missing"
    lost = {seed: why for seed in range(seeds) if seed not in by_seed}
    return Values(data=data, arm=arm, measure=measure.name, by_seed=rounded(by_seed), lost=lost)


def _of_leak(data: str, arm: str, measure: Measure, at: Point | None, seeds: int) -> Values:
    by_seed = at.leak.by_seed if at else {}
    failed = [status for status in (at.statuses if at else ()) if status not in ("ok", "unconverged")]
    lost = {seed: ", ".join(failed) or "missing" for seed in range(seeds) if seed not in by_seed}
    return Values(
        data=data,
        arm=arm,
        measure=measure.name,
        metric=at.leak.metric if at else "",
        by_seed=rounded(by_seed),
        alone=rounded(at.leak.alone_by_seed) if at else {},
        lost=lost,
        unconverged=at.statuses.get("unconverged", 0) if at else 0,
    )
