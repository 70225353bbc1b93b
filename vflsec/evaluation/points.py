"""From records to points: statuses counted, means and intervals over seeds, each leak beside its priors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vflsec.evaluation.plan import Row, priors
from vflsec.evaluation.results import Leak, Measure, Point
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.statistics import over_seeds
from vflsec.evaluation.store import Record

SEVERITY = ("error", "diverged", "collapsed", "missing", "unconverged", "ok")
USABLE = ("ok", "unconverged")


Priors = Mapping[tuple[str, int], Mapping[str, Record]]


def priors_by_seed(spec: EvalSpec, records: Mapping[str, Record]) -> dict[tuple[str, int], dict[str, Record]]:
    """Return, by (method, seed), each candidate for *alone* by attack name."""
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for prior in priors(spec):
        record = records.get(prior.key)
        if record and record["leak"]:
            found.setdefault((prior.cell.method, prior.seed), {})[prior.attack.name] = record
    return found


class Curve:
    """All records at one method, defence and strength: by attack, by seed."""

    def __init__(
        self,
        spec: EvalSpec,
        group: Sequence[Row],
        records: Mapping[str, Record],
        alone: Priors,
    ) -> None:
        first = group[0]
        self.method, self.defense, self.strength = first.method, first.defense, first.strength
        self.seeds = spec.seeds
        self.by_attack: dict[str, dict[int, Record]] = {}
        for row in group:
            self.by_attack.setdefault(row.attack.name, {})
            if row.key in records:
                self.by_attack[row.attack.name][row.seed] = records[row.key]
        self._priors = {seed: alone.get((first.method, seed), {}) for seed in range(spec.seeds)}

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


def headline(block: Record) -> tuple[str, float]:
    """Return name and value of a block's first metric, which is the dataset's headline."""
    name = next(iter(block["metrics"]))
    return name, float(block["metrics"][name])


def _share(values: Sequence[float], rows_ci: Sequence[float]) -> dict[str, Any]:
    """Like ``_interval``, for a metric that lies in [0, 1]: so does its interval."""
    found = interval(values, rows_ci)
    low, high = found["ci95"]
    return {**found, "ci95": (None if low is None else max(0.0, low), None if high is None else min(1.0, high))}


def interval(values: Sequence[float], rows_ci: Sequence[float]) -> dict[str, Any]:
    """Mean and interval: t over seeds, or the bootstrap over rows of the only one."""
    if not values:
        return {"mean": None, "ci95": (None, None), "n": 0, "interval": "none"}
    mean, low, high, n = over_seeds(values)
    if n == 1:
        return {"mean": mean, "ci95": (rows_ci[0], rows_ci[1]), "n": 1, "interval": "rows"}
    return {"mean": mean, "ci95": (low, high), "n": n, "interval": "seeds"}


def _utility(found: Sequence[Record]) -> Measure:
    blocks = [record["utility"] for record in found]
    metric = headline(blocks[0])[0] if blocks else ""
    return Measure(metric=metric, **_share([headline(b)[1] for b in blocks], _rows_ci(blocks)))


def _leak(usable: Mapping[int, Record], alone: Callable[[int], Record | None], split: str) -> Leak:
    blocks = {seed: record["leak"][split] for seed, record in usable.items() if split in record["leak"]}
    priors_ = {seed: prior["leak"][split] for seed in blocks if (prior := alone(seed)) and split in prior["leak"]}
    values = {seed: headline(block)[1] for seed, block in blocks.items()}
    base = {seed: headline(block)[1] for seed, block in priors_.items()}
    advantage = [values[seed] - base[seed] for seed in values if seed in base]
    alone_interval = _share(list(base.values()), _rows_ci(list(priors_.values())))
    advantage_interval = interval(advantage, (math.nan, math.nan))
    first = next(iter(blocks.values()), None)
    return Leak(
        metric=headline(first)[0] if first else "",
        chance=_mean(block["chance"] for block in blocks.values()),
        alone=alone_interval["mean"],
        alone_ci95=alone_interval["ci95"],
        advantage=advantage_interval["mean"],
        advantage_ci95=finite(advantage_interval["ci95"]),
        accuracy=_mean(block["metrics"]["accuracy"] for block in blocks.values()),
        **_share(list(values.values()), _rows_ci(list(blocks.values()))),
    )


def _rows_ci(blocks: Sequence[Record]) -> Sequence[float]:
    return blocks[0]["ci95_rows"] if blocks else (math.nan, math.nan)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def finite(ends: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Return the ends of an interval with None for NaN."""
    low, high = (None if end is None or math.isnan(end) else end for end in ends)
    return low, high
