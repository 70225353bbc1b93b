"""From records to points of a curve: plain data, computed once, that every table, plot and file is made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from vflsec.core.checks import one_of
from vflsec.evaluation import cap as capping
from vflsec.evaluation.plan import Row, priors, rows
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.statistics import over_seeds
from vflsec.evaluation.store import Record

SEVERITY = ("error", "diverged", "collapsed", "missing", "unconverged", "ok")
USABLE = ("ok", "unconverged")


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A mean with its 95 % interval: over seeds, or over rows where there is one seed."""

    metric: str
    mean: float | None
    ci95: tuple[float | None, float | None]
    n: int
    interval: str = "seeds"


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """How much was recovered, beside what it takes no federation to recover.

    Attributes:
        advantage: leak minus *alone*, paired by seed, with its interval in ``advantage_ci95``.
        accuracy: label recovery accuracy, the papers' measure.
    """

    metric: str
    mean: float | None
    ci95: tuple[float | None, float | None]
    n: int
    chance: float | None
    alone: float | None
    alone_ci95: tuple[float | None, float | None]
    advantage: float | None
    advantage_ci95: tuple[float | None, float | None]
    accuracy: float | None
    interval: str = "seeds"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One method, defence, strength and attack, over all seeds. ``leak`` is on test rows."""

    method: str
    defense: str
    strength: float
    attack: str
    status: str
    statuses: dict[str, int]
    utility: Measure
    leak: Leak
    leak_train: Leak
    nbytes: int | None
    seconds: float | None
    budget: dict[str, float]
    choices: dict[str, int] = {}


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """A curve folded into one number; None where a cell of the curve gave no number."""

    method: str
    defense: str
    attack: str
    value: float | None
    ci95: tuple[float | None, float | None]
    calibrated: float | None
    calibrated_ci95: tuple[float | None, float | None]
    accuracy_value: float | None
    dcs: float | None
    n: int
    note: str = ""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """A limit and whether it holds; None where a status takes the place of the number."""

    gate: str
    limit: float
    worst: float | None
    at: str
    holds: bool | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is reported; ``msgspec.json.encode`` of it is the JSON output."""

    schema: int = 1
    dataset: str
    adversary: str
    metric: str
    seeds: int
    points: list[Point]
    worst: list[Point]
    cap: list[Cap]
    c_dcs: list[dict[str, Any]]
    gates: list[Gate]
    out: str


Limits = Mapping[str, float]


def summarize(
    spec: EvalSpec, records: Mapping[str, Record], *, out: str, max_leak: Limits, min_utility: float | None
) -> Summary:
    """Fold ``records`` into the points, scores and gates of ``spec``.

    Raises:
        UsageError: a limit on an attack that was not run.
    """
    check_limits(spec, max_leak)
    alone = _priors(spec, records)
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows(spec):
        groups.setdefault((row.method, row.defense, row.strength), []).append(row)
    curves = [_Curve(spec, group, records, alone) for group in groups.values()]
    points = [point for curve in curves for point in curve.points()]
    worst = [curve.worst() for curve in curves]
    metrics = [p.utility.metric for p in points if p.utility.mean is not None]
    caps = [cap for curve in _by_defense(curves) for cap in _caps(curve)]
    return Summary(
        dataset=spec.dataset,
        adversary=spec.adversary,
        metric=metrics[0] if metrics else "",
        seeds=spec.seeds,
        points=points,
        worst=worst,
        cap=caps,
        c_dcs=_c_dcs(caps),
        gates=_gates(points + worst, max_leak, min_utility),
        out=out,
    )


def check_limits(spec: EvalSpec, max_leak: Limits) -> None:
    """Raise UsageError if a limit is on an attack that ``spec`` does not run."""
    for name in max_leak:
        one_of([*(attack.name for attack in spec.attacks), "worst"], attack=name)


def _priors(spec: EvalSpec, records: Mapping[str, Record]) -> dict[tuple[str, int], dict[str, Record]]:
    """Return, by (method, seed), each candidate for *alone* by attack name."""
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for prior in priors(spec):
        record = records.get(prior.key)
        if record and record["leak"]:
            found.setdefault((prior.cell.method, prior.seed), {})[prior.attack.name] = record
    return found


class _Curve:
    """All records at one method, defence and strength: by attack, by seed."""

    def __init__(
        self,
        spec: EvalSpec,
        group: Sequence[Row],
        records: Mapping[str, Record],
        priors_by_seed: Mapping[tuple[str, int], Mapping[str, Record]],
    ) -> None:
        first = group[0]
        self.method, self.defense, self.strength = first.method, first.defense, first.strength
        self.seeds = spec.seeds
        self.by_attack: dict[str, dict[int, Record]] = {}
        for row in group:
            self.by_attack.setdefault(row.attack.name, {})
            if row.key in records:
                self.by_attack[row.attack.name][row.seed] = records[row.key]
        self._priors = {seed: priors_by_seed.get((first.method, seed), {}) for seed in range(spec.seeds)}

    def usable(self, attack: str) -> dict[int, Record]:
        """Records that hold numbers, by seed."""
        return {seed: r for seed, r in self.by_attack[attack].items() if r["status"] in USABLE and r["leak"]}

    def alone(self, attack: str, seed: int) -> Record | None:
        """The better of the attack's own prior and the logistic regression, by the adversary's folds."""
        own = self._priors[seed]
        candidates = [own[name] for name in dict.fromkeys((attack, "logistic")) if name in own]
        return _strongest(candidates)

    def points(self) -> list[Point]:
        """One point per attack."""
        return [
            self._point(name, self.usable(name), self._statuses(name), partial(self.alone, name))
            for name in self.by_attack
        ]

    def worst(self) -> Point:
        """The strongest of all attacks and all priors, chosen per seed by the adversary's own folds."""
        chosen, choices = {}, Counter[str]()
        statuses = Counter({"ok": 0})
        for seed in range(self.seeds):
            attacks = {name: self.usable(name)[seed] for name in self.by_attack if seed in self.usable(name)}
            if not attacks:  # no trained model to attack, and then no utility either: a status, never a number
                statuses[min((self._status(n, seed) for n in self.by_attack), key=SEVERITY.index)] += 1
                continue
            candidates = [*attacks.values(), *self._priors[seed].values()]
            best = _strongest(candidates)
            assert best is not None
            choices[best["attack"]["name"] if best["kind"] == "result" else f"alone:{best['attack']['name']}"] += 1
            statuses[best["status"]] += 1
            chosen[seed] = {**next(iter(attacks.values())), "leak": best["leak"], "budget": best.get("budget", {})}
        return self._point("worst", chosen, +statuses, self._best_alone, dict(choices))

    def _best_alone(self, seed: int) -> Record | None:
        return _strongest(list(self._priors[seed].values()))

    def _status(self, attack: str, seed: int) -> str:
        record = self.by_attack[attack].get(seed)
        return str(record["status"]) if record else "missing"

    def _statuses(self, attack: str) -> Counter[str]:
        return Counter(self._status(attack, seed) for seed in range(self.seeds))

    def _point(
        self,
        attack: str,
        usable: Mapping[int, Record],
        statuses: Mapping[str, int],
        alone: Callable[[int], Record | None],
        choices: dict[str, int] | None = None,
    ) -> Point:
        found = list(usable.values())
        return Point(
            method=self.method,
            defense=self.defense,
            strength=self.strength,
            attack=attack,
            status=min(statuses, key=SEVERITY.index),
            statuses=dict(statuses),
            utility=_utility(found),
            leak=_leak(usable, alone, "test"),
            leak_train=_leak(usable, alone, "train"),
            nbytes=round(sum(r["nbytes"] for r in found) / len(found)) if found else None,
            seconds=sum(sum(r["seconds"].values()) for r in found) / len(found) if found else None,
            budget=found[0].get("budget", {}) if found else {},
            choices=choices or {},
        )


def _strongest(candidates: Sequence[Record]) -> Record | None:
    """Return the record with the best fold score; without any folds, the logistic regression or the first."""
    scored = [record for record in candidates if record.get("fold") is not None]
    if scored:
        return max(scored, key=lambda record: float(record["fold"]))
    logistic = [record for record in candidates if record["attack"]["name"] == "logistic"]
    return next(iter(logistic or candidates), None)


def _headline(block: Record) -> tuple[str, float]:
    name = next(iter(block["metrics"]))
    return name, float(block["metrics"][name])


def _share(values: Sequence[float], rows_ci: Sequence[float]) -> dict[str, Any]:
    """Like ``_interval``, for a metric that lies in [0, 1]: so does its interval."""
    found = _interval(values, rows_ci)
    low, high = found["ci95"]
    return {**found, "ci95": (None if low is None else max(0.0, low), None if high is None else min(1.0, high))}


def _interval(values: Sequence[float], rows_ci: Sequence[float]) -> dict[str, Any]:
    """Mean and interval: t over seeds, or the bootstrap over rows of the only one."""
    if not values:
        return {"mean": None, "ci95": (None, None), "n": 0, "interval": "none"}
    mean, low, high, n = over_seeds(values)
    if n == 1:
        return {"mean": mean, "ci95": (rows_ci[0], rows_ci[1]), "n": 1, "interval": "rows"}
    return {"mean": mean, "ci95": (low, high), "n": n, "interval": "seeds"}


def _utility(found: Sequence[Record]) -> Measure:
    blocks = [record["utility"] for record in found]
    metric = _headline(blocks[0])[0] if blocks else ""
    return Measure(metric=metric, **_share([_headline(b)[1] for b in blocks], _rows_ci(blocks)))


def _leak(usable: Mapping[int, Record], alone: Callable[[int], Record | None], split: str) -> Leak:
    blocks = {seed: record["leak"][split] for seed, record in usable.items() if split in record["leak"]}
    priors_ = {seed: prior["leak"][split] for seed in blocks if (prior := alone(seed)) and split in prior["leak"]}
    values = {seed: _headline(block)[1] for seed, block in blocks.items()}
    base = {seed: _headline(block)[1] for seed, block in priors_.items()}
    advantage = [values[seed] - base[seed] for seed in values if seed in base]
    alone_interval = _share(list(base.values()), _rows_ci(list(priors_.values())))
    advantage_interval = _interval(advantage, (math.nan, math.nan))
    first = next(iter(blocks.values()), None)
    return Leak(
        metric=_headline(first)[0] if first else "",
        chance=_mean(block["chance"] for block in blocks.values()),
        alone=alone_interval["mean"],
        alone_ci95=alone_interval["ci95"],
        advantage=advantage_interval["mean"],
        advantage_ci95=_finite(advantage_interval["ci95"]),
        accuracy=_mean(block["metrics"]["accuracy"] for block in blocks.values()),
        **_share(list(values.values()), _rows_ci(list(blocks.values()))),
    )


def _rows_ci(blocks: Sequence[Record]) -> Sequence[float]:
    return blocks[0]["ci95_rows"] if blocks else (math.nan, math.nan)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _finite(ends: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    low, high = (None if end is None or math.isnan(end) else end for end in ends)
    return low, high


def _by_defense(curves: Sequence[_Curve]) -> list[list[_Curve]]:
    found: dict[tuple[str, str], list[_Curve]] = {}
    for curve in curves:
        found.setdefault((curve.method, curve.defense), []).append(curve)
    return list(found.values())


def _caps(curves: Sequence[_Curve]) -> list[Cap]:
    """Fold one method and defence over its positive strengths, for each attack, seed by seed."""
    defended = [curve for curve in curves if curve.strength > 0]
    if not defended:
        return []
    clean = next(curve for curve in curves if curve.strength == 0)
    return [_cap(attack, clean, defended) for attack in clean.by_attack]


def _cap(attack: str, clean: _Curve, defended: Sequence[_Curve]) -> Cap:
    whole = {"method": clean.method, "defense": clean.defense, "attack": attack}
    cells = [curve.usable(attack) for curve in (clean, *defended)]
    lost = sum(clean.seeds - len(by_seed) for by_seed in cells)
    if lost:
        none = (None, None)
        return Cap(
            **whole, value=None, ci95=none, calibrated=None, calibrated_ci95=none, accuracy_value=None, dcs=None, n=0,
            note=f"{lost} cells gave no number",
        )  # fmt: skip
    values: dict[str, list[float]] = {"cap": [], "calibrated": [], "accuracy": [], "dcs": []}
    for seed in range(clean.seeds):
        found = [by_seed[seed] for by_seed in cells[1:]]
        utility = [_headline(record["utility"])[1] for record in found]
        leak = [_headline(record["leak"]["test"])[1] for record in found]
        accuracy = [record["leak"]["test"]["metrics"]["accuracy"] for record in found]
        values["cap"].append(capping.cap(utility, leak))
        values["accuracy"].append(capping.cap(utility, accuracy))
        prior = clean.alone(attack, seed)
        if prior:
            alone = _headline(prior["leak"]["test"])[1]
            values["calibrated"].append(capping.calibrated_cap(utility, leak, [alone] * len(leak)))
        ideal = _headline(cells[0][seed]["utility"])[1]
        scores = [capping.dcs(a, u, ideal_utility=ideal) for u, a in zip(utility, leak, strict=True)]
        values["dcs"].append(capping.t_dcs(scores))
    nothing = (math.nan, math.nan)
    folded = {name: _interval(found, nothing) for name, found in values.items()}
    return Cap(
        **whole,
        value=folded["cap"]["mean"],
        ci95=_finite(folded["cap"]["ci95"]),
        calibrated=folded["calibrated"]["mean"],
        calibrated_ci95=_finite(folded["calibrated"]["ci95"]),
        accuracy_value=folded["accuracy"]["mean"],
        dcs=folded["dcs"]["mean"],
        n=clean.seeds,
    )


def _c_dcs(caps: Sequence[Cap]) -> list[dict[str, Any]]:
    """Mean DCS over the attacks of each method and defence; all attacks here are of one type, label inference."""
    found: dict[tuple[str, str], list[float]] = {}
    for cap in caps:
        if cap.dcs is not None:
            found.setdefault((cap.method, cap.defense), []).append(cap.dcs)
    return [
        {"method": method, "defense": defense, "t_dcs": {"labels": (t := capping.t_dcs(scores))}, "c_dcs": t}
        for (method, defense), scores in found.items()
    ]


def _gates(points: Sequence[Point], max_leak: Limits, min_utility: float | None) -> list[Gate]:
    """Compare limits with the far end of the interval: "cannot rule out more than", on test and on training rows."""
    defended = [p for p in points if p.strength > 0] or list(points)
    gates = []
    for attack, limit in max_leak.items():
        found = [p for p in defended if p.attack == attack]
        ends = [(max(_upper(p.leak), _upper(p.leak_train)), p) for p in found if p.leak.mean is not None]
        worst = max(ends, key=lambda end: end[0], default=None)
        gates.append(_gate(f"max-leak {attack}", limit, worst, found, worst is not None and worst[0] <= limit))
    if min_utility is not None:
        found = [p for p in defended if p.attack != "worst"]
        ends = [(_lower(p.utility), p) for p in found if p.utility.mean is not None]
        worst = min(ends, key=lambda end: end[0], default=None)
        gates.append(_gate("min-utility", min_utility, worst, found, worst is not None and worst[0] >= min_utility))
    return gates


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
