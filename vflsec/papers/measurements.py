"""The measurements of a study: a small JSON file, from which verdicts are made without training again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vflsec.base import files
from vflsec.base.errors import StoreError, UsageError
from vflsec.papers.study import ATTACKED, ArmMeasure
from vflsec.results.analysis.results import Cap, Point, Summary
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Block, Record, Result

DIGITS = 7
"""Decimal places that are kept of a value."""

OF_NO_MODEL = ("predict", "validate")
"""Phases whose messages do not count as training."""

LARGEST, MOST_BYTES, MOST_SECONDS = 1e6, 1e18, 1e9
"""The largest value that a metric, a number of bytes and the time of a study may have."""

Outcome = tuple[float, str] | str
"""A value and its metric, or why there is none."""


class Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measure of one arm on one of the data.

    Attributes:
        measure: its name.
        metric: of a utility or a leak.
        by_seed: the value of each seed that gave one.
        alone: of a leak: the same without the federation.
        lost: the status of each seed that gave none.
        unconverged: the number of seeds in which an attack had not converged.
    """

    data: str
    arm: str
    measure: str
    metric: str = ""
    by_seed: dict[int, float] = {}
    alone: dict[int, float] = {}
    lost: dict[int, str] = {}
    unconverged: int = 0


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All measures of a study, and where they come from.

    Attributes:
        experiment: a hash of the settings that gave them.
        registration: a hash of the claims at that time.
        seeds: how many were run.
        seconds: of all trainings and attacks together.
        rounding: by measure, the largest change of a value under other rounding; empty if that was not measured.
    """

    study: str
    experiment: str
    registration: str
    seeds: int
    time: str
    commit: str | None
    versions: dict[str, str]
    seconds: float
    values: list[Values]
    rounding: dict[str, float] = {}


def read_outcome(
    measure: ArmMeasure,
    status: str,
    utility: Block | None,
    traffic: Sequence[tuple[str, str, str, str, int]],
    reached: Mapping[str, float],
) -> Outcome:
    """Return a measure that needs no attack, of one training.

    Raises:
        UsageError: the utility has no such metric.
    """
    if status not in ("ok", "unconverged") or utility is None:
        return status
    if measure.kind == "bytes":
        return float(sum(n for phase, *_, n in traffic if phase not in OF_NO_MODEL)), ""
    if measure.kind == "bytes to target":
        return (float(reached["true_bytes"]), "") if "true_bytes" in reached else "target not met"
    metric = measure.metric or utility.metric
    if metric not in utility.metrics:
        raise UsageError(f"expected a metric that the data have, got {metric}; known: {', '.join(utility.metrics)}")
    return utility.metrics[metric], metric


def collect(data: str, arm: str, measure: ArmMeasure, outcomes: Mapping[int, Outcome]) -> Values:
    """Return the outcomes of all seeds together."""
    numbers = {seed: number for seed, number in outcomes.items() if not isinstance(number, str)}
    return Values(
        data=data,
        arm=arm,
        measure=measure.name,
        metric=next((metric for _, metric in numbers.values()), ""),
        by_seed=round_values({seed: value for seed, (value, _) in numbers.items()}),
        lost={seed: reason for seed, reason in outcomes.items() if isinstance(reason, str)},
    )


def round_values(by_seed: Mapping[int, float]) -> dict[int, float]:
    """Return values as they are kept."""
    return {seed: round(value, DIGITS) for seed, value in sorted(by_seed.items())}


def read_measurements(path: Path) -> Measurements:
    """Return the measurements in a file.

    Raises:
        StoreError: it cannot be read, is that of another study, or has a value that no run gives.
    """
    try:
        content = files.read(path)
        measurements = msgspec.json.decode(content, type=Measurements)
        json.loads(content, object_pairs_hook=_expect_each_once)
        _check(measurements, path.stem)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read measurements from {path}: {error}; run vflsec judge") from None
    return measurements


def _expect_each_once(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if two pairs of one object have the same key, of which decoding keeps the last."""
    twice = next((key for key, n in Counter(key for key, _ in pairs).items() if n > 1), None)
    if twice is not None:
        raise ValueError(f"expected {twice!r} once in an object, found it twice")


def _check(measurements: Measurements, study: str) -> None:
    """Raise ValueError unless the measurements are of ``study``, and every number is one that a run can give."""
    if measurements.study != study:
        raise ValueError(
            f"expected measurements of {study}, as the file is called, found those of {measurements.study}"
        )
    _expect("seconds", measurements.seconds, 0.0, MOST_SECONDS)
    for name, change in measurements.rounding.items():
        _expect(f"a change of {name}", change, 0.0, 2 * LARGEST)
    for values in measurements.values:
        which = f"{values.measure} of {values.arm} on {values.data}"
        _expect(f"unconverged in {which}", values.unconverged, 0, measurements.seeds)
        ends = (0.0, MOST_BYTES) if values.measure.startswith("bytes") else (-LARGEST, LARGEST)
        for value in (*values.by_seed.values(), *values.alone.values()):
            _expect(f"values in {which}", value, *ends)


def _expect(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # nor not a number
        raise ValueError(f"expected {what} from {low:g} to {high:g}, found {value}")


def write_measurements(path: Path, measurements: Measurements) -> None:
    """Write the measurements, one line for each measure, so that changes can be read."""
    body = msgspec.to_builtins(measurements, str_keys=True)
    lines = b",\n  ".join(msgspec.json.encode(values) for values in body.pop("values"))
    head = msgspec.json.format(msgspec.json.encode(body), indent=1).removesuffix(b"\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, head + b',\n "values": [\n  ' + lines + b"\n ]\n}\n", mode=0o666)


def measure_evaluation(
    data: str, arm: str, measure: ArmMeasure, summary: Summary, manifest: Manifest, records: Mapping[str, Record]
) -> Values:
    """Return one measure of an arm, with the status of each seed that has none."""
    if measure.kind not in ATTACKED:
        return collect(data, arm, measure, _measure_models(measure, manifest, records))
    if measure.kind in ("cap", "calibrated"):
        cap = next((cap for cap in summary.cap if cap.attack == measure.attack), None)
        return _measure_cap(data, arm, measure, cap, manifest.seeds)
    points = (point for point in (*summary.worst, *summary.points) if point.attack == measure.attack)
    point = next((point for point in points if point.strength == measure.strength), None)
    return _measure_leak(data, arm, measure, point, manifest.seeds)


def _measure_models(measure: ArmMeasure, manifest: Manifest, records: Mapping[str, Record]) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = dict.fromkeys(range(manifest.seeds), "missing")
    for row in manifest.rows:
        record = records.get(row.key)
        if row.strength == measure.strength and isinstance(record, Result):
            outcomes[row.seed] = read_outcome(measure, record.status, record.utility, record.traffic, record.reached)
    return outcomes


def _measure_cap(data: str, arm: str, measure: ArmMeasure, cap: Cap | None, seeds: int) -> Values:
    by_seed = {} if cap is None else cap.by_seed if measure.kind == "cap" else cap.calibrated_by_seed
    why = cap.note if cap and cap.note else "missing"
    lost = {seed: why for seed in range(seeds) if seed not in by_seed}
    return Values(data=data, arm=arm, measure=measure.name, by_seed=round_values(by_seed), lost=lost)


def _measure_leak(data: str, arm: str, measure: ArmMeasure, point: Point | None, seeds: int) -> Values:
    by_seed = point.leak.by_seed if point else {}
    failed = [status for status in (point.statuses if point else ()) if status not in ("ok", "unconverged")]
    lost = {seed: ", ".join(failed) or "missing" for seed in range(seeds) if seed not in by_seed}
    return Values(
        data=data,
        arm=arm,
        measure=measure.name,
        metric=point.leak.metric if point else "",
        by_seed=round_values(by_seed),
        alone=round_values(point.leak.alone_by_seed) if point else {},
        lost=lost,
        unconverged=point.statuses.get("unconverged", 0) if point else 0,
    )
