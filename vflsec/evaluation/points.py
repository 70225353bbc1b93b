"""From records to points: statuses counted, means and intervals over seeds, each leak beside its priors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vflsec.core.metrics import VALUES
from vflsec.evaluation.plan import NO_ADVERSARY, Row, asked_of, priors
from vflsec.evaluation.results import Leak, Measure, Point
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.statistics import over_seeds
from vflsec.evaluation.store import Record

SEVERITY = ("error", "diverged", "collapsed", "missing", "unconverged", "ok")
USABLE = ("ok", "unconverged")


BySeed = Mapping[int, Record]


def priors_by_method(spec: EvalSpec, records: Mapping[str, Record]) -> dict[str, dict[str, BySeed]]:
    """Return, by method, each candidate for *alone*: attack label -> seed -> record."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for prior in priors(spec):
        record = records.get(prior.key)
        if record and record["leak"]:
            found.setdefault(prior.method, {}).setdefault(prior.label, {})[prior.seed] = record
    return {method: dict(candidates) for method, candidates in found.items()}


class Curve:
    """All records at one method, defence and strength: by attack, by seed."""

    def __init__(
        self, spec: EvalSpec, group: Sequence[Row], records: Mapping[str, Record], alone: Mapping[str, BySeed]
    ) -> None:
        first = group[0]
        self.method, self.defense, self.strength = first.method, first.defense, first.strength
        self.seeds = spec.seeds
        self.by_attack: dict[str, dict[int, Record]] = {}
        self.targets: dict[str, str] = {}
        for row in group:
            self.by_attack.setdefault(row.label, {})
            self.targets[row.label] = asked_of(row.attack) if row.attack else "labels"
            if row.key in records:
                self.by_attack[row.label][row.seed] = records[row.key]
        self._priors = alone

    def usable(self, attack: str) -> dict[int, Record]:
        """Records that hold numbers, by seed; those of a method without an adversary hold no leak."""
        found = self.by_attack[attack].items()
        return {seed: r for seed, r in found if r["status"] in USABLE and (r["leak"] or attack == NO_ADVERSARY)}

    def alone(self, attack: str) -> BySeed:
        """The better of the attack's own prior and, of labels, the logistic regression, by the adversary's folds."""
        common = "logistic" if self.targets[attack] == "labels" else attack
        own = [name for name in self._priors if name in (attack, common) or name.startswith(f"{attack} after ")]
        return _best_alone({name: self._priors[name] for name in own})

    def points(self) -> list[Point]:
        """One point per attack."""
        return [
            self._point(name, self.usable(name), self._statuses(name), self.alone(name), name, self.targets[name])
            for name in self.by_attack
        ]

    @property
    def attacked(self) -> bool:
        """Whether there is an adversary at all."""
        return NO_ADVERSARY not in self.by_attack

    def worst(self) -> list[Point]:
        """For each target the strongest of all attacks on it and of all priors.

        Chosen by the adversary's own folds, averaged over seeds. These folds favour the federated model, which was
        trained on the very labels that they hold out: where the choice turns out to infer less than *alone*, alone is
        taken; and so is an attack that folds could not test. Both err on the side of the adversary.
        """
        return [self._worst(target) for target in dict.fromkeys(self.targets.values())]

    def _worst(self, target: str) -> Point:
        attacks = {name: self.usable(name) for name in self.by_attack if self.targets[name] == target}
        statuses = Counter(
            min((self._status(name, seed) for name in attacks), key=SEVERITY.index) for seed in range(self.seeds)
        )
        alone = {name: by_seed for name, by_seed in self._priors.items() if self._target_of_prior(name) == target}
        priors_ = {f"alone:{name}": by_seed for name, by_seed in alone.items()}
        best_alone = _best_alone(alone)
        trained = {seed: record for by_seed in attacks.values() for seed, record in by_seed.items()}
        candidates = {name: by_seed for name, by_seed in {**attacks, **priors_}.items() if by_seed}
        if not trained:  # nothing to attack, and then no utility either: a status, never a number
            return self._point("worst", {}, statuses, best_alone, "", target)
        chosen_by_folds = strongest(candidates, otherwise=next(iter(candidates)))
        untested = [name for name, by_seed in candidates.items() if by_seed is best_alone or not _folded(by_seed)]
        choice = max([chosen_by_folds, *untested], key=lambda name: _mean_leak(candidates[name]))
        chosen = {
            seed: {**record, "leak": candidates[choice][seed]["leak"], "budget": candidates[choice][seed]["budget"]}
            for seed, record in sorted(trained.items())
            if seed in candidates[choice]
        }
        return self._point("worst", chosen, statuses, best_alone, choice, target)

    def _target_of_prior(self, name: str) -> str:
        """What a prior recovers: what its attack does, whose name its own begins with."""
        return self.targets.get(name.partition(" after ")[0], "labels")

    def _status(self, attack: str, seed: int) -> str:
        record = self.by_attack[attack].get(seed)
        return str(record["status"]) if record else "missing"

    def _statuses(self, attack: str) -> Counter[str]:
        return Counter(self._status(attack, seed) for seed in range(self.seeds))

    def _point(
        self, attack: str, usable: BySeed, statuses: Mapping[str, int], alone: BySeed, choice: str, target: str
    ) -> Point:
        found = list(usable.values())
        return Point(
            method=self.method,
            defense=self.defense,
            strength=self.strength,
            attack=attack,
            status=min(statuses, key=SEVERITY.index),
            statuses=dict(statuses),
            utility=_utility(found, self.seeds),
            leak=_leak(usable, alone, told_rows(found), self.seeds),
            leak_train=_leak(usable, alone, "train", self.seeds),
            nbytes=round(sum(r["nbytes"] for r in found) / len(found)) if found else None,
            seconds=sum(sum(r["seconds"].values()) for r in found) / len(found) if found else None,
            budget=found[0]["budget"] if found else {},
            choice=choice,
            target=target,
            reached=_reached(found, self.seeds),
            spent=_spent(found),
        )


def _best_alone(candidates: Mapping[str, BySeed]) -> BySeed:
    """The strongest prior; without folds the logistic regression, or where there is none the larger leak."""
    if not candidates:
        return {}
    largest = max(candidates, key=lambda name: _mean_leak(candidates[name]))
    return candidates[strongest(candidates, otherwise="logistic" if "logistic" in candidates else largest)]


def strongest(candidates: Mapping[str, BySeed], *, otherwise: str) -> str:
    """Return the name of the candidate whose fold score, averaged over seeds, is best; ``otherwise`` without folds."""
    folds = {name: [record["fold"] for record in by_seed.values()] for name, by_seed in candidates.items()}
    means = {name: sum(found) / len(found) for name, found in folds.items() if _folded(candidates[name])}
    return max(means, key=lambda name: means[name]) if means else otherwise


def _folded(by_seed: BySeed) -> bool:
    """Whether the adversary could test this candidate itself, with every seed."""
    return bool(by_seed) and all(record["fold"] is not None for record in by_seed.values())


def told_rows(records: Iterable[Record]) -> str:
    """Return the rows that a leak is told of: test rows, unless the attack guessed training rows, or others, alone."""
    guessed = {split for record in records for split in record["leak"] or {}}
    return next((split for split in ("test", "train", *sorted(guessed)) if split in guessed), "test")


def _mean_leak(by_seed: BySeed) -> float:
    """The mean headline over seeds."""
    rows = told_rows(by_seed.values())
    blocks = [record["leak"][rows] for record in by_seed.values() if rows in record["leak"]]
    return sum(headline(block)[1] for block in blocks) / len(blocks)


def headline(block: Record) -> tuple[str, float]:
    """Return name and value of a block's first metric, which is the dataset's headline."""
    name = next(iter(block["metrics"]))
    return name, float(block["metrics"][name])


def share(values: Sequence[float], rows_ci: Sequence[float], seeds: int) -> dict[str, Any]:
    """Return what ``interval`` does, for a metric that lies in [0, 1]: so does its interval."""
    found = interval(values, rows_ci, seeds)
    low, high = found["ci95"]
    return {**found, "ci95": (None if low is None else max(0.0, low), None if high is None else min(1.0, high))}


def interval(values: Sequence[float], rows_ci: Sequence[float], seeds: int) -> dict[str, Any]:
    """Mean and interval: t over seeds, or the bootstrap over rows if one seed was asked for.

    The only survivor of several seeds has none: its rows say nothing of the others.
    """
    if not values:
        return {"mean": None, "ci95": (None, None), "n": 0, "interval": "none"}
    mean, low, high, n = over_seeds(values)
    if n == 1 and seeds > 1:
        return {"mean": mean, "ci95": (None, None), "n": 1, "interval": "none"}
    if n == 1:
        return {"mean": mean, "ci95": (rows_ci[0], rows_ci[1]), "n": 1, "interval": "rows"}
    return {"mean": mean, "ci95": (low, high), "n": n, "interval": "seeds"}


def _utility(found: Sequence[Record], seeds: int) -> Measure:
    blocks = [record["utility"] for record in found]
    metric = headline(blocks[0])[0] if blocks else ""
    return Measure(metric=metric, **share([headline(b)[1] for b in blocks], _rows_ci(blocks), seeds))


def _leak(usable: BySeed, alone: BySeed, split: str, seeds: int) -> Leak:
    blocks = {seed: record["leak"][split] for seed, record in usable.items() if split in (record["leak"] or {})}
    priors_ = {seed: alone[seed]["leak"][split] for seed in blocks if seed in alone and split in alone[seed]["leak"]}
    values = {seed: headline(block)[1] for seed, block in blocks.items()}
    base = {seed: headline(block)[1] for seed, block in priors_.items()}
    advantage = [values[seed] - base[seed] for seed in values if seed in base]
    first = next(iter(blocks.values()), None)
    metric = headline(first)[0] if first else ""
    spread = interval if metric in VALUES else share  # an R2 may be negative
    alone_interval = spread(list(base.values()), _rows_ci(list(priors_.values())), seeds)
    advantage_interval = interval(advantage, (math.nan, math.nan), seeds)
    return Leak(
        metric=metric,
        chance=_mean(block["chance"] for block in blocks.values()),
        alone=alone_interval["mean"],
        alone_ci95=alone_interval["ci95"],
        advantage=advantage_interval["mean"],
        advantage_ci95=finite(advantage_interval["ci95"]),
        accuracy=_mean(block["metrics"]["accuracy"] for block in blocks.values() if "accuracy" in block["metrics"]),
        others=_others(list(blocks.values())),
        one_class=sum(bool(block.get("one_class")) for block in blocks.values()),
        rows=split,
        by_seed=values,
        alone_by_seed=base,
        **spread(list(values.values()), _rows_ci(list(blocks.values())), seeds),
    )


def _reached(found: Sequence[Record], seeds: int) -> dict[str, float] | None:
    """Epochs and bytes until ``train.target`` was met, in the mean; None if a seed missed it, or none was set."""
    met = [record["reached"] for record in found if record.get("reached")]
    if len(met) < seeds:
        return None
    return {key: sum(one[key] for one in met) / len(met) for key in met[0]}


def _spent(found: Sequence[Record]) -> list[dict[str, Any]]:
    """The privacy spent by each defence, of the seed that spent most."""
    most: dict[str, dict[str, Any]] = {}
    for one in (one for record in found for one in record.get("spent", ())):
        if one["defense"] not in most or one["epsilon"] > most[one["defense"]]["epsilon"]:
            most[one["defense"]] = one
    return list(most.values())


def _others(blocks: Sequence[Record]) -> dict[str, float]:
    """The mean over seeds of each metric but the headline."""
    names = list(blocks[0]["metrics"])[1:] if blocks else []
    return {name: sum(block["metrics"][name] for block in blocks) / len(blocks) for name in names}


def _rows_ci(blocks: Sequence[Record]) -> Sequence[float]:
    return blocks[0]["ci95_rows"] if blocks else (math.nan, math.nan)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def finite(ends: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Return the ends of an interval with None for NaN."""
    low, high = (None if end is None or math.isnan(end) else end for end in ends)
    return low, high
