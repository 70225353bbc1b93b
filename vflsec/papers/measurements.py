"""The measurements of a study: a small JSON file, from which verdicts are made without training again."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vflsec.base import files
from vflsec.base.errors import StoreError, UsageError
from vflsec.papers.study import ArmMeasure
from vflsec.results.analysis.results import Summary
from vflsec.results.records.schema import Record, Result
from vflsec.run.plan import Trial

DIGITS = 7
"""Decimal places that are kept of a value."""

OF_NO_MODEL = ("predict", "validate")
"""Phases whose messages do not count as training."""

MAX_METRIC, MAX_BYTES, MAX_SECONDS = 1e6, 1e18, 1e9
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
    _expect("seconds", measurements.seconds, 0.0, MAX_SECONDS)
    for name, change in measurements.rounding.items():
        _expect(f"a change of {name}", change, 0.0, 2 * MAX_METRIC)
    for values in measurements.values:
        which = f"{values.measure} of {values.arm} on {values.data}"
        _expect(f"unconverged in {which}", values.unconverged, 0, measurements.seeds)
        ends = (0.0, MAX_BYTES) if values.measure.startswith("bytes") else (-MAX_METRIC, MAX_METRIC)
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


def measure_models(
    data: str, arm: str, measure: ArmMeasure, rows: Iterable[Trial], records: Mapping[str, Record]
) -> Values:
    """Return a measure that needs no attack, with the status of each seed that has none.

    Raises:
        UsageError: the utility has no such metric.
    """
    outcomes: dict[int, Outcome] = {}
    for row in rows:
        record = records.get(row.key)
        outcomes.setdefault(row.seed, "missing")
        if row.strength == measure.strength and isinstance(record, Result):
            outcomes[row.seed] = _read_outcome(measure, record)
    numbers = {seed: outcome for seed, outcome in outcomes.items() if not isinstance(outcome, str)}
    return Values(
        data=data,
        arm=arm,
        measure=measure.name,
        metric=next((metric for _, metric in numbers.values()), ""),
        by_seed=round_values({seed: value for seed, (value, _) in numbers.items()}),
        lost={seed: reason for seed, reason in outcomes.items() if isinstance(reason, str)},
    )


def _read_outcome(measure: ArmMeasure, record: Result) -> Outcome:
    if record.status not in ("ok", "unconverged") or record.utility is None:
        return record.status
    if measure.kind == "bytes":
        return float(sum(n for phase, *_, n in record.traffic if phase not in OF_NO_MODEL)), ""
    if measure.kind == "bytes to target":
        return (float(record.reached["true_bytes"]), "") if "true_bytes" in record.reached else "target not met"
    metrics, metric = record.utility.metrics, measure.metric or record.utility.metric
    if metric not in metrics:
        raise UsageError(f"expected a metric that the data have, got {metric}; known: {', '.join(metrics)}")
    return metrics[metric], metric


def measure_leaks(data: str, arm: str, measure: ArmMeasure, summary: Summary, seeds: int) -> Values:
    """Return a measure of attacks, with the status of each seed that has none."""
    if measure.kind in ("cap", "calibrated"):
        cap = next((cap for cap in summary.cap if cap.attack == measure.attack), None)
        by_seed = {} if cap is None else cap.by_seed if measure.kind == "cap" else cap.calibrated_by_seed
        reason = cap.note if cap and cap.note else "missing"
        lost = {seed: reason for seed in range(seeds) if seed not in by_seed}
        return Values(data=data, arm=arm, measure=measure.name, by_seed=round_values(by_seed), lost=lost)
    points = (point for point in (*summary.worst, *summary.points) if point.attack == measure.attack)
    point = next((point for point in points if point.strength == measure.strength), None)
    if point is None:
        lost = dict.fromkeys(range(seeds), "missing")
        return Values(data=data, arm=arm, measure=measure.name, lost=lost)
    failed = ", ".join(status for status in point.statuses if status not in ("ok", "unconverged")) or "missing"
    return Values(
        data=data,
        arm=arm,
        measure=measure.name,
        metric=point.leak.metric,
        by_seed=round_values(point.leak.by_seed),
        alone=round_values(point.leak.alone_by_seed),
        lost={seed: failed for seed in range(seeds) if seed not in point.leak.by_seed},
        unconverged=point.statuses.get("unconverged", 0),
    )
