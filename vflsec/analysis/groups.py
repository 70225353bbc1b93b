"""From records to points: statuses counted, means and intervals over seeds, each leak beside its baselines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from vflsec.analysis.choosing import Candidate, Candidates, Choice, choose, cross_scored
from vflsec.analysis.results import Leak, Measure, Point
from vflsec.core.errors import StoreError
from vflsec.core.metrics import VALUES
from vflsec.core.statistics import over_seeds
from vflsec.records.manifest import NO_ADVERSARY, Manifest, RowEntry
from vflsec.records.schema import Block, Record, Result

NOT_JOINING: dict[str, Any] = {"advantage": 0.0, "advantage_ci95": (0.0, 0.0)}
"""What an attack that reads nothing of the federation gains by it."""

SEVERITY = ("error", "diverged", "collapsed", "missing", "unconverged", "ok")
USABLE = ("ok", "unconverged")
ALONE = "alone"
"""What the headline names where the adversary does best without the federation."""


BySeed = Mapping[int, Record]
Results = Mapping[int, Result]


class Alone:
    """What one adversary reaches on one target without the federation: one value for each split of rows.

    The candidates are the baselines of all methods in the report, since an adversary alone could train any of them. The
    strongest is chosen on one half of the rows and scored on the other, as the headline is. Otherwise the largest of
    several noisy scores would be too large, and each advantage over it too small.

    Args:
        records: of the baselines, by name and seed.
    """

    def __init__(self, records: Mapping[str, BySeed]) -> None:
        self.records = records
        self._candidates = _candidates(records)
        self._choices = {
            split: choose({name: found for name, found in self._candidates.items() if name[1] == split})
            for split in dict.fromkeys(split for _, split in self._candidates)
        }

    def candidates(self, half: int) -> dict[Candidate, Mapping[int, Block]]:
        """Return the one that one half of the rows chooses, of each split."""
        return {choice[half]: self._candidates[choice[half]] for choice in self._choices.values()}

    def on(self, rows: str) -> dict[int, Block]:
        """Return the block of each seed on ``rows``: a split, or ``first+second`` as the headline has it."""
        first, second = rows.split("+")[0], rows.split("+")[-1]
        if not {first, second} <= self._choices.keys():
            return {}
        choice = Choice(self._choices[first].on_first, self._choices[second].on_second)
        return cross_scored(self._candidates, choice)


class Scored(NamedTuple):
    """An attack, or the headline, at one method, defense and strength.

    Attributes:
        name: of the attack, or ``worst`` or ``picked``.
        found: the records that hold numbers, by seed.
        rows: the rows that ``leak`` is on.
        leak: the block of each seed, and on training rows in ``leak_train``.
        statuses: how many seeds ended in which way. The headline counts an attack that it does not name only where
            that gave no number, for it could have leaked more.
        target: what is recovered.
        choice: the attack that ``name`` stands for.
    """

    name: str
    found: Results
    rows: str
    leak: Mapping[int, Block]
    leak_train: Mapping[int, Block]
    statuses: Mapping[str, int]
    target: str
    choice: str


def alone_by_target(manifest: Manifest, records: Mapping[str, Record]) -> dict[str, Alone]:
    """Return by target what the adversary reaches alone."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for baseline in manifest.baselines:
        record = records.get(baseline.key)
        if record and record.leak:
            own = found.setdefault(baseline.target, {})
            own.setdefault(f"{baseline.method}: {baseline.label}", {})[baseline.seed] = record
    return {target: Alone(by_name) for target, by_name in found.items()}


class CellGroup:
    """All records at one method, defense and strength: by attack, by seed."""

    def __init__(
        self, manifest: Manifest, group: Sequence[RowEntry], records: Mapping[str, Record], alone: Mapping[str, Alone]
    ) -> None:
        first = group[0]
        self.method, self.defense, self.strength = first.method, first.defense, first.strength
        self.seeds = manifest.seeds
        self.by_attack: dict[str, dict[int, Result]] = {row.attack: {} for row in group}
        self.targets = {NO_ADVERSARY: "labels"} | {attack.label: attack.target for attack in manifest.attacks}
        self.targets = {label: self.targets[label] for label in self.by_attack}
        self.baselines = {attack.label for attack in manifest.attacks if attack.baseline}
        for row in group:
            record = records.get(row.key)
            if isinstance(record, Result):
                if (record.method, record.seed, record.control) != (row.method, row.seed, row.control):
                    raise StoreError(f"the record {row.key} is of another cell than the manifest says")
                self.by_attack[row.attack][row.seed] = record
        self._alone = alone

    def usable(self, attack: str) -> dict[int, Result]:
        """Records that hold numbers, by seed; those of a method without an adversary hold no leak."""
        found = self.by_attack[attack].items()
        return {seed: r for seed, r in found if r.status in USABLE and (r.leak or attack == NO_ADVERSARY)}

    def alone(self, target: str) -> Alone:
        """What the adversary reaches on ``target`` by itself."""
        return self._alone.get(target) or Alone({})

    def points(self) -> list[Point]:
        """One point per attack."""
        return [self._point(self.scored(name)) for name in self.by_attack]

    def worst(self) -> list[Point]:
        """The headline of each target: the strongest of all attacks on it and of *alone*."""
        return [self._point(found) for found in self.headlines.values()]

    def picked(self) -> list[Point]:
        """For each target what the adversary takes for the strongest, by folds of its own labels; none without.

        It is told of the rows on which it leaks most, as the headline is.
        """
        found = (self._picked(target) for target in self.headlines)
        return [self._point(one) for one in found if one]

    @property
    def attacked(self) -> bool:
        """Whether there is an adversary at all."""
        return NO_ADVERSARY not in self.by_attack

    def scored(self, attack: str, rows: str | None = None) -> Scored:
        """Return one attack, on ``rows`` or on those that it says most of."""
        found = self.usable(attack)
        rows = rows or told_rows(found.values())
        leak, leak_train = _on(found, rows), _on(found, "train")
        return Scored(attack, found, rows, leak, leak_train, self._statuses([attack]), self.targets[attack], attack)

    @cached_property
    def headlines(self) -> dict[str, Scored]:
        """By target the strongest attack, chosen on the truth and scored on other rows.

        Each attack competes on each split that it guesses, and so does *alone*, since an adversary may always throw the
        model away. What leaks most on one half of the rows, in the mean over seeds, is scored on the other half, and
        the other way round; the two scores are averaged.
        """
        return {target: self._headline(target) for target in dict.fromkeys(self.targets.values())}

    def _headline(self, target: str) -> Scored:
        attacks = {name: self.usable(name) for name in self.by_attack if self.targets[name] == target}
        candidates = _candidates({name: found for name, found in attacks.items() if name not in self.baselines})
        if not any(attacks.values()):  # nothing to attack, and then no utility either: a status, never a number
            return Scored("worst", {}, "test", {}, {}, self._statuses(list(attacks)), target, "")
        choice, blocks = self._strongest(candidates, target)
        names = [name if (name, split) in candidates else ALONE for name, split in choice]
        found: dict[int, Result] = {}
        for by_seed in [attacks[name] for name in names if name != ALONE] or list(attacks.values()):
            for seed, record in by_seed.items():  # an attack that acts in training has a utility of its own
                if seed not in found or record.measured.headline < found[seed].measured.headline:
                    found[seed] = record
        if len(set(names)) > 1 or ALONE in names:  # what they spent is told in their own rows
            found = {seed: _without_details(record) for seed, record in found.items()}
        on_train = {name: by_seed for name, by_seed in candidates.items() if name[1] == "train"}
        train = self._strongest(on_train, target, "train")[1] if on_train or not candidates else {}
        seeds = sorted(found.keys() & blocks.keys())
        return Scored(
            name="worst",
            found={seed: found[seed] for seed in seeds},
            rows="+".join(dict.fromkeys(split for _, split in choice)),
            leak={seed: blocks[seed] for seed in seeds},
            leak_train={seed: train[seed] for seed in seeds if seed in train},
            statuses=self._statuses(list(attacks), names),
            target=target,
            choice=", ".join(dict.fromkeys(names)),
        )

    def _strongest(self, attacks: Candidates, target: str, only: str | None = None) -> tuple[Choice, dict[int, Block]]:
        """Choose among attacks and *alone* on one split or all: the choice and its cross-scored blocks."""
        by_half: list[dict[Candidate, Mapping[int, Block]]] = []
        for half in (0, 1):
            alone = self.alone(target).candidates(half).items()
            own = {name: by_seed for name, by_seed in alone if only in (None, name[1])}
            by_half.append({**own, **attacks})  # alone first: where an attack only equals it, joining gave nothing away
        choice = Choice(choose(by_half[0]).on_first, choose(by_half[1]).on_second)
        return choice, cross_scored(by_half[0] | by_half[1], choice)

    def _picked(self, target: str) -> Scored | None:
        attacks = {name: self.usable(name) for name in self.by_attack if self.targets[name] == target}
        alone = self.alone(target)
        name = strongest({**{f"{ALONE}:{baseline}": found for baseline, found in alone.records.items()}, **attacks})
        trained = {seed: record for by_seed in attacks.values() for seed, record in by_seed.items()}
        if name is None or not trained:
            return None
        if name in attacks:
            told = [self.scored(name, rows) for rows in _splits(attacks[name])]
            return max(told, key=lambda one: _mean_headline(one.leak))._replace(name="picked")
        rows = told_rows(trained.values())
        found = {seed: _without_details(record) for seed, record in trained.items()}
        leak, leak_train = (
            {seed: block for seed, block in alone.on(split).items() if seed in trained} for split in (rows, "train")
        )
        return Scored("picked", found, rows, leak, leak_train, self._statuses(list(attacks), [ALONE]), target, ALONE)

    def _statuses(self, attacks: Sequence[str], named: Sequence[str] | None = None) -> Counter[str]:
        """Count the worst status among ``attacks`` of each seed; of those not ``named`` where they gave no number."""

        def told(name: str, seed: int) -> str:
            status = self._status(name, seed)
            return "ok" if named is not None and name not in named and status in USABLE else status

        return Counter(min((told(name, seed) for name in attacks), key=SEVERITY.index) for seed in range(self.seeds))

    def _status(self, attack: str, seed: int) -> str:
        record = self.by_attack[attack].get(seed)
        return str(record.status) if record else "missing"

    def _point(self, scored: Scored) -> Point:
        found, alone = list(scored.found.values()), self.alone(scored.target)
        leak = _leak(scored.leak, alone.on(scored.rows), scored.rows, self.seeds)
        leak_train = _leak(scored.leak_train, alone.on("train"), "train", self.seeds)
        if scored.name in self.baselines:  # which of the baselines is best is chosen on other rows, this one or another
            leak, leak_train = (msgspec.structs.replace(one, **NOT_JOINING) for one in (leak, leak_train))
        sureness = [record.sureness for record in found if record.sureness is not None]
        return Point(
            method=self.method,
            defense=self.defense,
            strength=self.strength,
            attack=scored.name,
            status=min(scored.statuses, key=SEVERITY.index),
            statuses=dict(scored.statuses),
            utility=_utility(found, self.seeds),
            leak=leak,
            leak_train=leak_train,
            nbytes=round(sum(r.nbytes for r in found) / len(found)) if found else None,
            seconds=sum(sum(r.seconds.values()) for r in found) / len(found) if found else None,
            budget=found[0].budget if found else {},
            choice=scored.choice,
            target=scored.target,
            reached=_reached(found, self.seeds),
            spent=_spent(found),
            sureness=_mean(sureness),
        )


def _without_details(record: Result) -> Result:
    """Return ``record`` without what is of one attack alone."""
    return msgspec.structs.replace(record, budget={}, sureness=None)


def strongest(candidates: Mapping[str, BySeed]) -> str | None:
    """Return the name of the candidate whose fold score, averaged over seeds, is best; None without folds."""
    means = {}
    for name, by_seed in candidates.items():
        folds = [record.fold for record in by_seed.values() if record.fold is not None]
        if folds and len(folds) == len(by_seed):
            means[name] = sum(folds) / len(folds)
    return max(means, key=lambda name: means[name]) if means else None


def _candidates(by_name: Mapping[str, BySeed]) -> dict[Candidate, Mapping[int, Block]]:
    """Return the blocks of each name on each split, by seed."""
    splits = {
        name: dict.fromkeys(split for record in by_seed.values() for split in record.leak)
        for name, by_seed in by_name.items()
    }
    return {(name, split): _on(by_name[name], split) for name, found in splits.items() for split in found}


def _on(found: BySeed, rows: str) -> dict[int, Block]:
    """Return the blocks on ``rows`` by seed."""
    return {seed: record.leak[rows] for seed, record in found.items() if rows in record.leak}


def told_rows(records: Iterable[Record]) -> str:
    """Return the rows that a leak is told of: test rows, unless the attack guessed training rows, or others, alone."""
    guessed = {split for record in records for split in record.leak}
    return next((split for split in ("test", "train", *sorted(guessed)) if split in guessed), "test")


def _splits(by_seed: BySeed) -> list[str]:
    """Return the rows that an attack guesses with every seed, those that its leak is told of first."""
    shared = set.intersection(*(set(record.leak) for record in by_seed.values()))
    return sorted(shared, key=lambda rows: (rows != told_rows(by_seed.values()), rows))


def _mean_headline(blocks: Mapping[int, Block]) -> float:
    return sum(block.headline for block in blocks.values()) / len(blocks)


def _of_values(values: Sequence[float], rows_ci: Sequence[float], seeds: int, extended: float = 0.0) -> dict[str, Any]:
    """Return what ``interval`` does, for an R2, which may be negative and is at most 1."""
    found = interval(values, rows_ci, seeds, extended)
    low, high = found["ci95"]
    return {**found, "ci95": (low, None if high is None else min(1.0, high))}


def share(values: Sequence[float], rows_ci: Sequence[float], seeds: int, extended: float = 0.0) -> dict[str, Any]:
    """Return what ``interval`` does, for a metric that lies in [0, 1]: so does its interval."""
    found = interval(values, rows_ci, seeds, extended)
    low, high = found["ci95"]
    return {**found, "ci95": (None if low is None else max(0.0, low), None if high is None else min(1.0, high))}


def interval(values: Sequence[float], rows_ci: Sequence[float], seeds: int, extended: float = 0.0) -> dict[str, Any]:
    """Mean and interval: t over seeds, or the bootstrap over rows if one seed was asked for.

    The only survivor of several seeds has none: its rows say nothing of the others.

    Noise may choose an attack that is not the strongest, so the mean of what was chosen can only be too small. Where
    the halves of the rows chose differently, the upper side is extended, in quadrature, by ``extended``: how much more
    the choices leak on the rows that chose them.
    """
    if not values:
        return {"mean": None, "ci95": (None, None), "n": 0, "interval": "none"}
    mean, low, high, n = over_seeds(values)
    if n == 1 and seeds > 1:
        return {"mean": mean, "ci95": (None, None), "n": 1, "interval": "none"}
    if n == 1:
        low, high = rows_ci
    if extended:
        high = mean + math.hypot(high - mean, extended)
    return {"mean": mean, "ci95": (low, high), "n": n, "interval": "seeds" if n > 1 else "rows"}


def _utility(found: Sequence[Result], seeds: int) -> Measure:
    blocks = [record.measured for record in found]
    metric = blocks[0].metric if blocks else ""
    return Measure(metric=metric, **share([b.headline for b in blocks], _rows_ci(blocks), seeds))


def _leak(blocks: Mapping[int, Block], alone: Mapping[int, Block], rows: str, seeds: int) -> Leak:
    paired = alone if blocks else {}  # all seeds, so that *alone* is one number; the advantage is paired by seed
    values = {seed: block.headline for seed, block in blocks.items()}
    base = {seed: block.headline for seed, block in paired.items()}
    advantage = [values[seed] - base[seed] for seed in values if seed in base]
    first = next(iter(blocks.values()), None)
    metric = first.metric if first else ""
    spread = _of_values if metric in VALUES else share
    found, own = list(blocks.values()), list(paired.values())
    of_choice, of_alone = (_mean(block.overfit for block in chosen) or 0.0 for chosen in (found, own))
    alone_interval = spread(list(base.values()), _rows_ci(own), seeds, of_alone)
    advantage_interval = interval(advantage, (math.nan, math.nan), seeds, max(0.0, of_choice - of_alone))
    return Leak(
        metric=metric,
        chance=_mean(block.chance for block in found),
        alone=alone_interval["mean"],
        alone_ci95=alone_interval["ci95"],
        advantage=advantage_interval["mean"],
        advantage_ci95=finite(advantage_interval["ci95"]),
        accuracy=_mean(block.metrics["accuracy"] for block in found if "accuracy" in block.metrics),
        others=_others(found),
        one_class=sum(block.one_class for block in found),
        rows=rows,
        by_seed=values,
        alone_by_seed=base,
        **spread(list(values.values()), _rows_ci(found), seeds, of_choice),
    )


def _reached(found: Sequence[Result], seeds: int) -> dict[str, float] | None:
    """Epochs and bytes until ``train.target`` was met, in the mean; None if a seed missed it, or none was set."""
    met = [record.reached for record in found if record.reached]
    if len(met) < seeds:
        return None
    return {key: sum(one[key] for one in met) / len(met) for key in met[0]}


def _spent(found: Sequence[Result]) -> list[dict[str, Any]]:
    """The privacy spent by each defense, of the seed that spent most."""
    most: dict[str, dict[str, Any]] = {}
    for one in (one for record in found for one in record.spent):
        if one["defense"] not in most or one["epsilon"] > most[one["defense"]]["epsilon"]:
            most[one["defense"]] = one
    return list(most.values())


def _others(blocks: Sequence[Block]) -> dict[str, float]:
    """The mean over seeds of each metric but the headline."""
    names = list(blocks[0].metrics)[1:] if blocks else []
    return {name: sum(block.metrics[name] for block in blocks) / len(blocks) for name in names}


def _rows_ci(blocks: Sequence[Block]) -> tuple[float, float]:
    return blocks[0].over_rows if blocks else (math.nan, math.nan)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def finite(ends: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Return the ends of an interval with None for NaN."""
    low, high = (None if end is None or math.isnan(end) else end for end in ends)
    return low, high
