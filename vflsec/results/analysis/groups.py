"""From records to points: statuses counted, means and intervals over seeds, each leak beside its baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import sub
from typing import Any, NamedTuple

import msgspec

from vflsec.base.errors import StoreError
from vflsec.results.analysis.choosing import Candidate, Candidates, Choice, choose, cross_scored
from vflsec.results.analysis.columns import pools
from vflsec.results.analysis.columns import strongest as strongest_column
from vflsec.results.analysis.intervals import (
    ANY,
    DIFFERENCE,
    R2,
    detectable,
    headline,
    interval,
    mean_of,
    of_number,
    seen,
)
from vflsec.results.analysis.results import Empirical, Leak, Measure, Point
from vflsec.results.empirical_epsilon import CONFIDENCE, one_run
from vflsec.results.metrics import VALUES
from vflsec.results.records.manifest import NO_ADVERSARY, Manifest, RowEntry
from vflsec.results.records.schema import Block, Record, Result
from vflsec.results.statistics import SHARE

NO_ADVANTAGE: dict[str, Any] = {"advantage": 0.0, "advantage_ci95": (0.0, 0.0), "detectable": None}
"""The advantage of an attack that reads nothing of the federation."""

NO_BITS: dict[str, Any] = {"bits": 0.0, "bits_ci95": (0.0, 0.0)}
"""The bits that such an attack gains per row."""

SEVERITY = ("error", "diverged", "collapsed", "missing", "unmeasured", "unconverged", "ok")
USABLE = ("ok", "unconverged", "unmeasured")
ALONE = "alone"
"""The choice of the headline if the adversary does best without the federation."""

LESS = ("cross_entropy", "mse")
"""The metrics that are best where they are least."""

BySeed = Mapping[int, Record]
Results = Mapping[int, Result]


class Alone:
    """What one adversary reaches on one target without the federation: one value for each split of rows.

    The candidates are the baselines of all methods in the report, since an adversary alone could train any of them.
    The strongest is chosen on one half of the rows and scored on the other, as the headline is. Otherwise the largest
    of several noisy scores would be too large, and each advantage over it too small.

    Args:
        records: of the baselines, by name and seed.
    """

    def __init__(self, records: Mapping[str, BySeed]) -> None:
        self.records = records
        self._candidates = _candidates(records)
        self._others: dict[str, dict[str, float]] = {}
        self._choices = {
            split: choose({name: blocks for name, blocks in self._candidates.items() if name[1] == split})
            for split in dict.fromkeys(split for _, split in self._candidates)
        }

    def candidates(self, half: int) -> dict[Candidate, Mapping[int, Block]]:
        """Return, for each split, the candidate that one half of the rows chooses."""
        return {choice[half]: self._candidates[choice[half]] for choice in self._choices.values()}

    def on(self, rows: str) -> dict[int, Block]:
        """Return the block of each seed on ``rows``: a split, or ``first+second`` as for the headline."""
        first, second = rows.split("+")[0], rows.split("+")[-1]
        if not {first, second} <= self._choices.keys():
            return {}
        choice = Choice(self._choices[first].on_first, self._choices[second].on_second)
        return cross_scored(self._candidates, choice)

    def others(self, rows: str) -> dict[str, float]:
        """Return the means over seeds of all metrics but the headline, each of the baseline that is best in it."""
        if rows not in self._others:
            blocks = [block for by_seed in self._candidates.values() for block in by_seed.values()]
            names = dict.fromkeys(name for block in blocks for name in block.metrics if name != block.metric)
            means = {name: mean_of(self.best(name, rows).values()) for name in names}
            self._others[rows] = {name: mean for name, mean in means.items() if mean is not None}
        return self._others[rows]

    def best(self, metric: str, rows: str) -> dict[int, float]:
        """Return a metric by seed, of the baseline that is best in it by the mean over seeds; of two splits the mean.

        The rows that choose the baseline also score it, so that the metric is slightly too good, and what an attack
        gains over it slightly too small. How many known rows are right is of the baseline that knows most.
        """

        def size(blocks: Mapping[int, Block]) -> tuple[int, float]:
            values = _of(blocks, metric.replace("right", "known")).values()
            return len(values), (mean_of(values) or 0.0) * (-1 if metric in LESS else 1)

        chosen = []
        for split in dict.fromkeys(rows.split("+")):
            candidates = [blocks for (_, own), blocks in self._candidates.items() if own == split]
            chosen.append(_of(max(candidates, key=size, default={}), metric))
        shared = set(chosen[0]).intersection(*chosen)
        return {seed: sum(values[seed] for values in chosen) / len(chosen) for seed in sorted(shared)}


class Scored(NamedTuple):
    """An attack, or the headline, at one method, defense and strength.

    Attributes:
        name: of the attack, or ``worst`` or ``picked``.
        records: those that hold numbers, by seed.
        rows: the rows that ``leak`` is on.
        leak: the block of each seed, on training rows in ``leak_train``, and of the headline on test rows in
            ``leak_test``.
        statuses: the number of seeds with each status. The headline counts an attack that it does not name only if
            that gave no number, since it could have leaked more.
        target: what is recovered.
        choice: the attack that ``name`` stands for.
        alone: the block of each seed without the federation, of the same columns; None to look it up.
        columns: the targets that ``target`` stands for, if it is that of several columns.
    """

    name: str
    records: Results
    rows: str
    leak: Mapping[int, Block]
    leak_train: Mapping[int, Block]
    statuses: Mapping[str, int]
    target: str
    choice: str
    leak_test: Mapping[int, Block] = {}
    alone: Mapping[int, Block] | None = None
    columns: Sequence[str] = ()


def alone_by_target(manifest: Manifest, records: Mapping[str, Record]) -> dict[str, Alone]:
    """Return by target what the adversary reaches alone."""
    by_target: dict[str, dict[str, dict[int, Record]]] = {}
    for baseline in manifest.baselines:
        record = records.get(baseline.key)
        if record and record.leak:
            name = f"{baseline.method}: {baseline.label}"
            by_target.setdefault(baseline.target, {}).setdefault(name, {})[baseline.seed] = record
    return {target: Alone(by_name) for target, by_name in by_target.items()}


class CellGroup:
    """All records at one method, defense and strength, by attack and seed."""

    def __init__(
        self, manifest: Manifest, group: Sequence[RowEntry], records: Mapping[str, Record], alone: Mapping[str, Alone]
    ) -> None:
        first = group[0]
        self.method, self.defense, self.strength = first.method, first.defense, first.strength
        self.seeds = manifest.seeds
        self.trainings = manifest.settings.get("trainings", 1)
        self.audited = bool(manifest.audited)
        self._interval = partial(interval, seeds=manifest.seeds, one_model=self.audited)
        self.by_attack: dict[str, dict[int, Result]] = {row.attack: {} for row in group}
        targets = {NO_ADVERSARY: "labels"} | {attack.label: attack.target for attack in manifest.attacks}
        self.targets = {label: targets[label] for label in self.by_attack}
        self.baselines = {attack.label for attack in manifest.attacks if attack.baseline}
        for row in group:
            record = records.get(row.key)
            if isinstance(record, Result):
                if (record.method, record.seed, record.control) != (row.method, row.seed, row.control):
                    raise StoreError(f"the record {row.key} is of another cell than the manifest states")
                self.by_attack[row.attack][row.seed] = record
        self._alone = alone
        self._about = {attack.target: attack for attack in manifest.attacks}
        self._pools = {
            pool: {name: [attack.label for attack in some] for name, some in own.items()}
            for pool, own in pools(one for one in manifest.attacks if one.label in self.targets).items()
        }
        self._members = {name: some for own in self._pools.values() for name, some in own.items()}

    @property
    def names(self) -> list[str]:
        """The attacks, where those on several columns of one party are one."""
        single = {label for some in self._members.values() for label in some}
        return [*(name for name in self.by_attack if name not in single), *self._members]

    @property
    def attacked(self) -> bool:
        """Whether there is an adversary."""
        return NO_ADVERSARY not in self.by_attack

    def usable(self, attack: str) -> dict[int, Result]:
        """Return the records that hold numbers, by seed; without an adversary they hold no leak."""
        return {
            seed: record
            for seed, record in self.by_attack[self._members.get(attack, [attack])[0]].items()
            if record.status in USABLE and (record.leak or attack == NO_ADVERSARY)
        }

    def alone(self, target: str) -> Alone:
        """Return what the adversary reaches on ``target`` alone."""
        return self._alone.get(target) or Alone({})

    def points(self) -> list[Point]:
        """Return one point per attack."""
        return [self._point(self.scored(name)) for name in self.names]

    def columns(self) -> list[Point]:
        """Return the headline and the attacks of each column where several of one party are attacked."""
        targets = [target for own in self._pools.values() for target in self._targets(own)]
        single = [label for some in self._members.values() for label in some]
        return [self._point(one) for one in (*map(self._headline, targets), *map(self.scored, single))]

    def worst(self) -> list[Point]:
        """Return the headline of each target: the strongest of all attacks on it and of *alone*."""
        return [self._point(headline) for headline in self.headlines.values()]

    def picked(self) -> list[Point]:
        """Return the attack of each target that the adversary takes for the strongest, by folds of its own labels.

        As for the headline, its rows are those on which it leaks most. Without folds there is none.
        """
        return [self._point(picked) for target in self.headlines if (picked := self._picked(target))]

    def scored(self, attack: str, rows: str | None = None) -> Scored:
        """Return one attack on ``rows``, by default those that its leak is reported on."""
        if attack in self._members:
            pool = next(pool for pool, own in self._pools.items() if attack in own)
            return self._over_columns(attack, pool, [self.scored(one, rows) for one in self._members[attack]])
        records = self.usable(attack)
        rows = rows or reported_rows(records.values())
        leak, leak_train = _on(records, rows), _on(records, "train")
        return Scored(attack, records, rows, leak, leak_train, self._statuses([attack]), self.targets[attack], attack)

    @cached_property
    def headlines(self) -> dict[str, Scored]:
        """By target the strongest attack, chosen on the truth and scored on other rows.

        Each attack competes on each split that it guesses, and so does *alone*, since an adversary may always discard
        the model. The candidate that leaks most on one half of the rows, in the mean over seeds, is scored on the other
        half, and vice versa; the two scores are averaged. Of recovered columns the
        adversary's own pick takes its place if it leaks more.
        """
        several = {pool: self._targets(own) for pool, own in self._pools.items()}
        found = {target: self._headline(target) for target in dict.fromkeys(self.targets.values())}
        for pool, targets in several.items():
            found[pool] = self._over_columns("worst", pool, [found.pop(target) for target in targets])
        return found

    def _targets(self, attacks: Mapping[str, Sequence[str]]) -> list[str]:
        return list(dict.fromkeys(self.targets[label] for some in attacks.values() for label in some))

    def _over_columns(self, name: str, pool: str, columns: Sequence[Scored]) -> Scored:
        """Return the strongest of several columns."""
        labels = [label for label, target in self.targets.items() if target in {one.target for one in columns}]
        by_column = {(one.target, one.rows): one for one in columns if one.leak}
        if not by_column:
            return Scored(name, {}, "test", {}, {}, self._statuses(labels), pool, "")
        leaks = {key: one.leak for key, one in by_column.items()}
        alone = {key: self.alone(one.target).on(one.rows) for key, one in by_column.items()}
        choice, leak, base = strongest_column(leaks, alone)
        chosen = [by_column[key] for key in choice]
        first, both = chosen[0], len(chosen) > 1
        return first._replace(
            name=name,
            rows="+".join(dict.fromkeys(one.rows for one in chosen)),
            leak=leak,
            leak_train={} if both else first.leak_train,
            leak_test={} if both else first.leak_test,
            statuses=self._statuses(labels, ", ".join(one.choice for one in chosen).split(", ")),
            target=pool,
            choice=", ".join(dict.fromkeys(one.choice for one in chosen)),
            alone=base,
            columns=[one.target for one in chosen],
        )

    def _headline(self, target: str) -> Scored:
        attacks = self._usable_on(target)
        candidates = _candidates({name: records for name, records in attacks.items() if name not in self.baselines})
        if not any(attacks.values()):  # no number: a status takes its place, for the utility as well
            return Scored("worst", {}, "test", {}, {}, self._statuses(list(attacks)), target, "")
        choice, blocks = self._at_least_picked(*self._strongest(candidates, target), candidates, target)
        names = [name if (name, split) in candidates else ALONE for name, split in choice]
        records: dict[int, Result] = {}
        for by_seed in [attacks[name] for name in names if name != ALONE] or list(attacks.values()):
            for seed, record in by_seed.items():  # an attack that acts in training has a utility of its own
                if seed not in records or self._lower(record, records[seed]):
                    records[seed] = record
        if len(set(names)) > 1 or ALONE in names:  # their own rows state what each of them spent
            records = {seed: _without_details(record) for seed, record in records.items()}
        train, test = (self._on_rows(rows, candidates, target) for rows in ("train", "test"))
        seeds = sorted(records.keys() & blocks.keys())
        return Scored(
            name="worst",
            records={seed: records[seed] for seed in seeds},
            rows="+".join(dict.fromkeys(split for _, split in choice)),
            leak={seed: blocks[seed] for seed in seeds},
            leak_train={seed: train[seed] for seed in seeds if seed in train},
            statuses=self._statuses(list(attacks), names),
            target=target,
            choice=", ".join(dict.fromkeys(names)),
            leak_test={seed: test[seed] for seed in seeds if seed in test},
        )

    def _at_least_picked(
        self, choice: Choice, blocks: dict[int, Block], candidates: Candidates, target: str
    ) -> tuple[Choice, dict[int, Block]]:
        """Return the headline, or of recovered columns the adversary's own pick if that leaks more.

        Where two attacks are about equal, each half of the rows chooses the one that it favors, and the other half
        scores both too low. The pick is chosen by known rows, which score nothing.
        """
        if not any(block.metric in VALUES for block in blocks.values()):
            return choice, blocks
        picked = self._picked(target)
        own = candidates.get((picked.choice, picked.rows), {}) if picked else {}
        if picked is None or not own.keys() >= blocks.keys():
            return choice, blocks
        own = {seed: own[seed] for seed in blocks}
        if _mean_headline(own) <= _mean_headline(blocks):
            return choice, blocks
        return Choice(*[(picked.choice, picked.rows)] * 2), own

    def _on_rows(self, rows: str, candidates: Candidates, target: str) -> dict[int, Block]:
        """Return the headline on rows of one kind, chosen anew; empty if no attack guesses these."""
        own = {name: by_seed for name, by_seed in candidates.items() if name[1] == rows}
        on_alone = any(name[1] == rows for name in self.alone(target).candidates(0))
        return self._strongest(own, target, rows)[1] if own or (on_alone and not candidates) else {}

    def _usable_on(self, target: str) -> dict[str, dict[int, Result]]:
        return {name: self.usable(name) for name in self.by_attack if self.targets[name] == target}

    def _strongest(self, attacks: Candidates, target: str, only: str | None = None) -> tuple[Choice, dict[int, Block]]:
        """Choose among attacks and *alone* on one split or all: the choice and its cross-scored blocks."""
        by_half: list[dict[Candidate, Mapping[int, Block]]] = []
        for half in (0, 1):
            alone = self.alone(target).candidates(half).items()
            own = {name: by_seed for name, by_seed in alone if only in (None, name[1])}
            by_half.append({**own, **attacks})  # *alone* first: an attack that only equals it has no advantage
        choice = Choice(choose(by_half[0]).on_first, choose(by_half[1]).on_second)
        return choice, cross_scored(by_half[0] | by_half[1], choice)

    def _picked(self, target: str) -> Scored | None:
        attacks, alone = self._usable_on(target), self.alone(target)
        name = strongest({**{f"{ALONE}:{name}": records for name, records in alone.records.items()}, **attacks})
        trained = {seed: record for by_seed in attacks.values() for seed, record in by_seed.items()}
        if name is None or not trained:
            return None
        if name in attacks:
            on_splits = [self.scored(name, rows) for rows in _splits(attacks[name])]
            return max(on_splits, key=lambda one: _mean_headline(one.leak))._replace(name="picked")
        rows = reported_rows(trained.values())
        records = {seed: _without_details(record) for seed, record in trained.items()}
        leak, leak_train = (
            {seed: block for seed, block in alone.on(split).items() if seed in trained} for split in (rows, "train")
        )
        return Scored("picked", records, rows, leak, leak_train, self._statuses(list(attacks), [ALONE]), target, ALONE)

    def _statuses(self, attacks: Sequence[str], named: Sequence[str] | None = None) -> Counter[str]:
        """Count the worst status among ``attacks`` of each seed; those not ``named`` count only without a number."""

        def status(attack: str, seed: int) -> str:
            record = self.by_attack[attack].get(seed)
            own = str(record.status) if record else "missing"
            if record and own in ("ok", "unconverged") and not record.leak and attack != NO_ADVERSARY:
                own = "missing"  # it guessed no rows that can be scored
            return "ok" if named is not None and attack not in named and own in USABLE else own

        return Counter(min((status(name, seed) for name in attacks), key=SEVERITY.index) for seed in range(self.seeds))

    def _point(self, scored: Scored) -> Point:
        records, alone = list(scored.records.values()), self.alone(scored.target)
        of_rows = alone.on(scored.rows) if scored.alone is None else scored.alone
        best = self.alone(scored.columns[0]) if len(scored.columns) == 1 else alone
        leak = self._leak(scored.leak, of_rows, scored.rows, best)
        leak_train = self._leak(scored.leak_train, alone.on("train"), "train", best)
        leak_test = self._leak(scored.leak_test, alone.on("test"), "test", best) if scored.name == "worst" else None
        if scored.name in self.baselines:  # other rows choose the best baseline, this one or another
            leak, leak_train = (
                msgspec.structs.replace(one, **NO_ADVANTAGE, **(NO_BITS if one.bits is not None else {}))
                for one in (leak, leak_train)
            )
        if scored.choice == ALONE:  # in each metric the best baseline, as beside an attack
            own = {name: value for name, value in leak.others.items() if name == "accuracy"}
            bits = NO_BITS if leak.bits is not None else {}
            leak = msgspec.structs.replace(leak, others=leak.alone_others | own, **bits)
        blocks = [record.measured for record in records if record.utility or not self.audited]
        utility = self._interval([headline(block) for block in blocks], bounds=SHARE)
        if ALONE in scored.choice.split(", "):  # its advantage is 0, whatever an attack could have shown
            leak = msgspec.structs.replace(leak, detectable=self._detectable_by_attacks(scored.target))
        about = [self._about[target] for target in scored.columns or [scored.target] if target in self._about]
        return Point(
            victim=about[0].victim if about else "",
            column=", ".join(one.column for one in about),
            above=about[0].above if len(about) == 1 else None,
            among=len(self._targets(self._pools.get(scored.target, {}))),
            method=self.method,
            defense=self.defense,
            strength=self.strength,
            attack=scored.name,
            status=min(scored.statuses, key=SEVERITY.index),
            statuses=dict(scored.statuses),
            utility=Measure(metric=blocks[0].metric if blocks else "", **utility),
            leak=leak,
            leak_train=leak_train,
            leak_test=leak_test,
            nbytes=round(sum(r.nbytes for r in records) / len(records)) if records else None,
            seconds=mean_of(sum(r.seconds.values()) for r in records),
            budget=records[0].budget if records else {},
            choice=scored.choice,
            target=scored.target,
            reached=_reached(records, self.seeds),
            spent=_spent(records),
            sureness=mean_of(record.sureness for record in records if record.sureness is not None),
            empirical=self._empirical(scored),
            trainings=self.trainings if self.attacked else 1,
        )

    def _empirical(self, scored: Scored) -> Empirical | None:
        """Return the largest lower bound of epsilon of the attacks that compete; together they are wrong in 5 %."""
        names = list(self._usable_on(scored.target)) if scored.name == "worst" else [scored.choice]
        by_attack = {name: list(self.usable(name).values()) for name in names if name in self.by_attack}
        found = [
            empirical(name, records, confidence=1 - (1 - CONFIDENCE) / len(names))
            for name, records in by_attack.items()
            if any(record.guessed for record in records)
        ]
        return max(found, key=lambda one: one.epsilon, default=None)

    def _detectable_by_attacks(self, target: str) -> float | None:
        """Return the smallest advantage of the strongest attack that would have been seen."""
        attacks = self._usable_on(target).items()
        candidates = _candidates({name: records for name, records in attacks if name not in self.baselines})
        if not candidates:
            return None
        choice = choose(candidates)
        alone = self.alone(target).on("+".join(dict.fromkeys(split for _, split in choice)))
        return detectable(_pairs(cross_scored(candidates, choice), alone), self.seeds)

    def _lower(self, record: Result, other: Result) -> bool:
        """Whether ``record`` has a lower utility; that of an audited system may not be known."""
        if self.audited and not (record.utility and other.utility):
            return False
        return record.measured.headline < other.measured.headline

    def _leak(self, by_seed: Mapping[int, Block], alone_by_seed: Mapping[int, Block], rows: str, best: Alone) -> Leak:
        """Return the leak with *alone*, which is over all seeds and so one number; the advantage is paired by seed.

        ``best`` has the other metrics of *alone*; those of two columns are of the baselines of ``alone_by_seed``.
        """
        blocks, own = list(by_seed.values()), list(alone_by_seed.values()) if by_seed else []
        values = {seed: block.headline for seed, block in by_seed.items()}
        base = {seed: block.headline for seed, block in alone_by_seed.items()} if by_seed else {}
        paired = [seen(sub, *pair) for pair in _pairs(by_seed, alone_by_seed)]
        metric = blocks[0].metric if blocks else ""
        bounds, of_difference = (R2, ANY) if metric in VALUES else (SHARE, DIFFERENCE)
        overfit, own_overfit = (mean_of(block.overfit for block in chosen) or 0.0 for chosen in (blocks, own))
        alone = self._interval([headline(block) for block in own], bounds=bounds, extended=own_overfit)
        advantage = self._interval(paired, bounds=of_difference, extended=max(0.0, overfit - own_overfit))
        entropy = best.best("cross_entropy", rows) or _of(alone_by_seed, "cross_entropy")
        told = _of(by_seed, "cross_entropy")
        bits = self._interval([of_number(entropy[seed] - told[seed]) for seed in told if seed in entropy])
        return Leak(
            metric=metric,
            chance=mean_of(block.chance for block in blocks),
            alone=alone["mean"],
            alone_ci95=alone["ci95"],
            advantage=advantage["mean"],
            advantage_ci95=advantage["ci95"],
            detectable=detectable(_pairs(by_seed, alone_by_seed), self.seeds),
            accuracy=mean_of(block.metrics["accuracy"] for block in blocks if "accuracy" in block.metrics),
            others=_others(blocks),
            alone_others=(best.others(rows) if own else {}) or _others(own),
            bits=bits["mean"],
            bits_ci95=bits["ci95"],
            one_class=sum(block.one_class for block in blocks),
            rows=rows,
            by_seed=values,
            alone_by_seed=base,
            **self._interval([headline(block) for block in blocks], bounds=bounds, extended=overfit),
        )


def _others(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the means of all metrics but the headline, each over the seeds that have it."""
    names = dict.fromkeys(name for block in blocks for name in block.metrics if name != block.metric)
    found = {name: mean_of(block.metrics[name] for block in blocks if name in block.metrics) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _of(blocks: Mapping[int, Block], metric: str) -> dict[int, float]:
    """Return a metric by seed, of the seeds that have it."""
    return {seed: block.metrics[metric] for seed, block in blocks.items() if metric in block.metrics}


def _pairs(by_seed: Mapping[int, Block], alone: Mapping[int, Block]) -> list[tuple[Block, Block]]:
    return [(block, alone[seed]) for seed, block in by_seed.items() if seed in alone]


def _without_details(record: Result) -> Result:
    """Return ``record`` without the details of a single attack."""
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
    return {(name, split): _on(by_name[name], split) for name, own in splits.items() for split in own}


def _on(by_seed: BySeed, rows: str) -> dict[int, Block]:
    """Return the blocks on ``rows`` by seed."""
    return {seed: record.leak[rows] for seed, record in by_seed.items() if rows in record.leak}


def reported_rows(records: Iterable[Record]) -> str:
    """Return the rows that a leak is reported on: test rows, or else training rows, or else others."""
    guessed = {split for record in records for split in record.leak}
    return next((split for split in ("test", "train", *sorted(guessed)) if split in guessed), "test")


def _splits(by_seed: BySeed) -> list[str]:
    """Return the splits that an attack guesses with every seed, the one that its leak is reported on first."""
    shared = set.intersection(*(set(record.leak) for record in by_seed.values()))
    return sorted(shared, key=lambda rows: (rows != reported_rows(by_seed.values()), rows))


def _mean_headline(blocks: Mapping[int, Block]) -> float:
    return sum(block.headline for block in blocks.values()) / len(blocks)


def _reached(records: Sequence[Result], seeds: int) -> dict[str, float] | None:
    """Mean epochs and bytes until ``train.target`` was met; None if a seed missed it, or none was set."""
    met = [record.reached for record in records if record.reached]
    if len(met) < seeds:
        return None
    return {key: sum(one[key] for one in met) / len(met) for key in met[0]}


def empirical(attack: str, records: Sequence[Result], *, confidence: float = CONFIDENCE) -> Empirical:
    """Return the lower bound of epsilon by one attack's guesses of tossed labels, over all seeds.

    The coins of all seeds are independent, so that their guesses add up.
    """
    guessed = [record.guessed for record in records if record.guessed]
    right, made, tossed = (sum(getattr(one, name) for one in guessed) for name in ("right", "made", "tossed"))
    of_labels = [spent for spent in _spent(records) if "of" not in spent]
    promise = min(of_labels, key=lambda spent: spent["epsilon"], default=None)
    delta = promise["delta"] if promise else 0.0
    return Empirical(
        epsilon=one_run(right, made, tossed, delta, confidence),
        delta=delta,
        promised=promise["epsilon"] if promise else None,
        attack=attack,
        right=right,
        made=made,
        tossed=tossed,
    )


def _spent(records: Sequence[Result]) -> list[dict[str, Any]]:
    """The privacy spent by each defense, of the seed that spent most."""
    most: dict[str, dict[str, Any]] = {}
    for spent in (spent for record in records for spent in record.spent):
        if spent["defense"] not in most or spent["epsilon"] > most[spent["defense"]]["epsilon"]:
            most[spent["defense"]] = spent
    return list(most.values())
