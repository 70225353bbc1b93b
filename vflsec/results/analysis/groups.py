"""From records to points: statuses counted, means and intervals over seeds, each leak beside *alone*."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import sub
from statistics import median
from typing import Any, NamedTuple

import msgspec

from vflsec.base.errors import StoreError
from vflsec.results.analysis import choosing, intervals
from vflsec.results.analysis.choosing import Alone, Blocks, Candidates, Choice
from vflsec.results.analysis.intervals import ANY, DIFFERENCE, R2, SeedValue, average
from vflsec.results.analysis.results import Empirical, Leak, Measure, Point
from vflsec.results.canaries import CONFIDENCE, bound_epsilon
from vflsec.results.metrics import ALARM, QUIET, UNSEEN, VALUES
from vflsec.results.records.manifest import NO_ADVERSARY, Manifest, RowEntry
from vflsec.results.records.schema import Block, Record, Result
from vflsec.results.statistics import SHARE

NO_ADVANTAGE: dict[str, Any] = {"advantage": 0.0, "advantage_ci95": (0.0, 0.0), "detectable": None, "p": None}
"""The advantage of an attack that reads nothing of the federation."""

NO_BITS: dict[str, Any] = {"bits": 0.0, "bits_ci95": (0.0, 0.0)}
"""The bits that such an attack gains per row."""

SEVERITY = ("error", "diverged", "collapsed", "missing", "unmeasured", "unconverged", "ok", "unseen")
USABLE = ("ok", "unconverged", "unmeasured")
ALONE = "alone"
"""The choice of the headline if the adversary does best without the federation."""


class CellScore(NamedTuple):
    """An attack, or the headline, at one method, defense and strength.

    Attributes:
        name: of the attack, or ``worst`` or ``picked``.
        target: what is recovered.
        statuses: the number of seeds with each status. The headline counts an attack that it does not name only if
            that gave no number, since it could have leaked more.
        choice: the attack that ``name`` stands for.
        records: those that hold numbers, by seed.
        rows: the rows that ``leak`` is on.
        leak: the block of each seed, on training rows in ``leak_train``, and of the headline on test rows in
            ``leak_test``.
        alone: the block of each seed without the federation, of the same columns; None to look it up.
        columns: the targets that ``target`` stands for, if it is that of several columns.
    """

    name: str
    target: str
    statuses: Mapping[str, int]
    choice: str = ""
    records: Mapping[int, Result] = {}
    rows: str = "test"
    leak: Mapping[int, Block] = {}
    leak_train: Mapping[int, Block] = {}
    leak_test: Mapping[int, Block] = {}
    alone: Blocks | None = None
    columns: Sequence[str] = ()


def find_alone(manifest: Manifest, records: Mapping[str, Record]) -> dict[str, Alone]:
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
        self._interval = partial(intervals.make_interval, seeds=manifest.seeds, single_model=self.audited)
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
        self._entries = {attack.target: attack for attack in manifest.attacks}
        self._pools = choosing.group_columns(attack for attack in manifest.attacks if attack.label in self.targets)
        self._members = {
            name: [attack.label for attack in attacks]
            for pool in self._pools.values()
            for name, attacks in pool.items()
        }

    @property
    def names(self) -> list[str]:
        """The attacks, where those on several columns of one party are one."""
        single = {label for labels in self._members.values() for label in labels}
        return [*(name for name in self.by_attack if name not in single), *self._members]

    @property
    def has_adversary(self) -> bool:
        """Whether there is an adversary."""
        return NO_ADVERSARY not in self.by_attack

    def select_usable(self, attack: str) -> dict[int, Result]:
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
        return [self._make_point(self.score(name)) for name in self.names]

    def columns(self) -> list[Point]:
        """Return the headline and the attacks of each column where several of one party are attacked."""
        targets = [target for pool in self._pools for target in self._targets(pool)]
        single = [label for labels in self._members.values() for label in labels]
        return [self._make_point(scored) for scored in (*map(self._make_headline, targets), *map(self.score, single))]

    def worst(self) -> list[Point]:
        """Return the headline of each target: the strongest of all attacks on it and of *alone*."""
        return [self._make_point(scored) for scored in self.headlines.values()]

    def pick_strongest(self) -> list[Point]:
        """Return the attack of each target that the adversary takes for the strongest, by folds of its labels.

        As for the headline, its rows are those on which it leaks most. Without folds there is none.
        """
        return [self._make_point(picked) for target in self.headlines if (picked := self._pick(target))]

    def score(self, attack: str, rows: str | None = None) -> CellScore:
        """Return one attack on ``rows``, by default those that its leak is reported on."""
        if attack in self._members:
            target = next(target for target, pool in self._pools.items() if attack in pool)
            return self._score_columns(attack, target, [self.score(label, rows) for label in self._members[attack]])
        records = self.select_usable(attack)
        rows = rows or choose_rows(records.values())
        return CellScore(
            name=attack, target=self.targets[attack], statuses=self._count_statuses([attack]), choice=attack,
            records=records, rows=rows, leak=choosing.select_rows(records, rows),
            leak_train=choosing.select_rows(records, "train"),
        )  # fmt: skip

    @cached_property
    def headlines(self) -> dict[str, CellScore]:
        """By target the strongest attack, chosen on the truth and scored on other rows.

        Each attack competes on each split that it guesses, and so does *alone*, since an adversary may always discard
        the model. The candidate that leaks most on one half of the rows, in the mean over seeds, is scored on the other
        half, and vice versa; the two scores are averaged. Of recovered columns the
        adversary's own pick takes its place if it leaks more.
        """
        headlines = {target: self._make_headline(target) for target in dict.fromkeys(self.targets.values())}
        for pool in self._pools:
            columns = [headlines.pop(target) for target in self._targets(pool)]
            headlines[pool] = self._score_columns("worst", pool, columns)
        return headlines

    def _targets(self, pool: str) -> list[str]:
        return list(dict.fromkeys(a.target for attacks in self._pools.get(pool, {}).values() for a in attacks))

    def _score_columns(self, name: str, pool: str, columns: Sequence[CellScore]) -> CellScore:
        labels = [label for label, target in self.targets.items() if target in {column.target for column in columns}]
        by_column = {(column.target, column.rows): column for column in columns if column.leak}
        if not by_column:
            return CellScore(name, pool, self._count_statuses(labels))
        leaks = {key: column.leak for key, column in by_column.items()}
        alone = {key: self.alone(column.target).select(column.rows) for key, column in by_column.items()}
        choice, leak, base = choosing.choose_column(leaks, alone)
        chosen = [by_column[key] for key in choice]
        first, both = chosen[0], len(chosen) > 1
        return first._replace(
            name=name, target=pool, rows="+".join(dict.fromkeys(column.rows for column in chosen)), leak=leak,
            leak_train={} if both else first.leak_train, leak_test={} if both else first.leak_test, alone=base,
            statuses=self._count_statuses(labels, ", ".join(column.choice for column in chosen).split(", ")),
            choice=", ".join(dict.fromkeys(column.choice for column in chosen)),
            columns=[column.target for column in chosen],
        )  # fmt: skip

    def _make_headline(self, target: str) -> CellScore:
        attacks = self._select_on(target)
        candidates = self._candidates(target)
        if not any(attacks.values()):  # no number: a status takes its place, for the utility as well
            return CellScore("worst", target, self._count_statuses(attacks))
        choice, blocks = self._prefer_pick(*self._choose(candidates, target), candidates, target)
        names = [name if (name, split) in candidates else ALONE for name, split in choice]
        records: dict[int, Result] = {}
        for by_seed in [attacks[name] for name in names if name != ALONE] or list(attacks.values()):
            for seed, record in by_seed.items():  # an attack that acts in training has a utility of its own
                if seed not in records or self._is_lower(record, records[seed]):
                    records[seed] = record
        if len(set(names)) > 1 or ALONE in names:  # their own rows state what each of them spent
            records = {seed: _strip_details(record) for seed, record in records.items()}
        train, test = (self._score_rows(rows, candidates, target) for rows in ("train", "test"))
        seeds = sorted(records.keys() & blocks.keys())
        return CellScore(
            name="worst", target=target, statuses=self._count_statuses(attacks, names),
            choice=", ".join(dict.fromkeys(names)), records={seed: records[seed] for seed in seeds},
            rows="+".join(dict.fromkeys(split for _, split in choice)), leak={seed: blocks[seed] for seed in seeds},
            leak_train={seed: train[seed] for seed in seeds if seed in train},
            leak_test={seed: test[seed] for seed in seeds if seed in test},
        )  # fmt: skip

    def _prefer_pick(
        self, choice: Choice, blocks: dict[int, Block], candidates: Candidates, target: str
    ) -> tuple[Choice, dict[int, Block]]:
        """Return the headline, or of recovered columns the adversary's own pick if that leaks more.

        Where two attacks are about equal, each half of the rows chooses the one that it favors, and the other half
        scores both too low. The pick is chosen by known rows, which score nothing.
        """
        if not any(block.metric in VALUES for block in blocks.values()):
            return choice, blocks
        picked = self._pick(target)
        by_seed = candidates.get((picked.choice, picked.rows), {}) if picked else {}
        if picked is None or not by_seed.keys() >= blocks.keys():
            return choice, blocks
        of_pick = {seed: by_seed[seed] for seed in blocks}
        if _average(of_pick) <= _average(blocks):
            return choice, blocks
        return Choice(*[(picked.choice, picked.rows)] * 2), of_pick

    def _score_rows(self, rows: str, candidates: Candidates, target: str) -> dict[int, Block]:
        """Return the headline on rows of one kind, chosen anew; empty if no attack guesses these."""
        on_rows = {name: by_seed for name, by_seed in candidates.items() if name[1] == rows}
        on_alone = any(name[1] == rows for name in self.alone(target).candidates(0))
        return self._choose(on_rows, target, rows)[1] if on_rows or (on_alone and not candidates) else {}

    def _select_on(self, target: str) -> dict[str, dict[int, Result]]:
        return {name: self.select_usable(name) for name in self.by_attack if self.targets[name] == target}

    def _candidates(self, target: str) -> dict[tuple[str, str], Blocks]:
        attacks = self._select_on(target).items()
        return choosing.list_candidates({name: records for name, records in attacks if name not in self.baselines})

    def _choose(self, attacks: Candidates, target: str, only: str | None = None) -> tuple[Choice, dict[int, Block]]:
        """Choose among attacks and *alone* on one split or all: the choice and its cross-scored blocks."""
        by_half: list[dict[tuple[str, str], Blocks]] = []
        for half in (0, 1):
            alone = self.alone(target).candidates(half).items()
            kept = {name: by_seed for name, by_seed in alone if only in (None, name[1])}
            by_half.append({**kept, **attacks})  # *alone* first: an attack that only equals it has no advantage
        choice = Choice(choosing.choose(by_half[0]).on_first, choosing.choose(by_half[1]).on_second)
        return choice, choosing.score_across(by_half[0] | by_half[1], choice)

    def _pick(self, target: str) -> CellScore | None:
        attacks, alone = self._select_on(target), self.alone(target)
        name = _choose_by_folds({**{f"{ALONE}:{name}": records for name, records in alone.records.items()}, **attacks})
        trained = {seed: record for by_seed in attacks.values() for seed, record in by_seed.items()}
        if name is None or not trained:
            return None
        if name in attacks:
            splits = set.intersection(*(set(record.leak) for record in attacks[name].values()))
            reported = choose_rows(attacks[name].values())
            ordered = sorted(splits, key=lambda rows: (rows != reported, rows))
            on_splits = [self.score(name, rows) for rows in ordered]
            return max(on_splits, key=lambda scored: _average(scored.leak))._replace(name="picked")
        rows = choose_rows(trained.values())
        leak, leak_train = (
            {seed: block for seed, block in alone.select(split).items() if seed in trained} for split in (rows, "train")
        )
        return CellScore(
            name="picked", target=target, statuses=self._count_statuses(attacks, [ALONE]), choice=ALONE,
            records={seed: _strip_details(record) for seed, record in trained.items()},
            rows=rows, leak=leak, leak_train=leak_train,
        )  # fmt: skip

    def _count_statuses(self, attacks: Iterable[str], named: Sequence[str] | None = None) -> Counter[str]:
        """Count the worst status among ``attacks`` of each seed; those not ``named`` count only without a number."""

        def status(attack: str, seed: int) -> str:
            record = self.by_attack[attack].get(seed)
            state = str(record.status) if record else "missing"
            if record and state in ("ok", "unconverged") and not record.leak and attack != NO_ADVERSARY:
                state = "missing"  # it guessed no rows that can be scored
            return "ok" if named is not None and attack not in named and state in USABLE else state

        return Counter(min((status(name, seed) for name in attacks), key=SEVERITY.index) for seed in range(self.seeds))

    def _make_point(self, scored: CellScore) -> Point:
        records, alone = list(scored.records.values()), self.alone(scored.target)
        of_rows = alone.select(scored.rows) if scored.alone is None else scored.alone
        best = self.alone(scored.columns[0]) if len(scored.columns) == 1 else alone
        leak = self._rate(scored.leak, of_rows, scored.rows, best)
        leak_train = self._rate(scored.leak_train, alone.select("train"), "train", best)
        leak_test = self._rate(scored.leak_test, alone.select("test"), "test", best) if scored.name == "worst" else None
        if scored.name in self.baselines:  # other rows choose the best baseline, this one or another
            leak, leak_train = (
                msgspec.structs.replace(on, **NO_ADVANTAGE, **(NO_BITS if on.bits is not None else {}))
                for on in (leak, leak_train)
            )
        if scored.choice == ALONE:  # in each metric the best baseline, as beside an attack
            accuracy = {name: value for name, value in leak.others.items() if name == "accuracy"}
            bits = NO_BITS if leak.bits is not None else {}
            leak = msgspec.structs.replace(leak, others=leak.alone_others | accuracy, **bits)
        blocks = [record.usable_utility for record in records if record.utility or not self.audited]
        utility = self._interval([intervals.get_headline(block) for block in blocks], bounds=SHARE)
        if ALONE in scored.choice.split(", "):  # its advantage is 0, whatever an attack could have shown
            leak = self._add_detectable(leak, self._pair_strongest(scored.target))
        entries = [self._entries[name] for name in scored.columns or [scored.target] if name in self._entries]
        return Point(
            method=self.method, defense=self.defense, strength=self.strength, attack=scored.name, choice=scored.choice,
            target=scored.target, victim=entries[0].victim if entries else "",
            column=", ".join(entry.column for entry in entries),
            above=entries[0].above if len(entries) == 1 else None, among=len(self._targets(scored.target)),
            status=min(scored.statuses, key=SEVERITY.index), statuses=dict(scored.statuses),
            utility=Measure(metric=blocks[0].metric if blocks else "", **utility),
            leak=leak, leak_train=leak_train, leak_test=leak_test,
            nbytes=round(sum(r.nbytes for r in records) / len(records)) if records else None,
            seconds=average(sum(r.seconds.values()) for r in records),
            budget=summarize_budget([record.budget for record in records]),
            reached=_average_reached(records, self.seeds),
            spent=_find_most_spent(records), empirical=self._bound_empirically(scored),
            sureness=average(record.sureness for record in records if record.sureness is not None),
            trainings=self.trainings if self.has_adversary else 1,
            tuning={seed: record.tuning for seed, record in scored.records.items() if record.tuning},
        )  # fmt: skip

    def _bound_empirically(self, scored: CellScore) -> Empirical | None:
        """Return the largest lower bound of epsilon of the attacks that compete; together they are wrong in 5 %."""
        names = list(self._select_on(scored.target)) if scored.name == "worst" else [scored.choice]
        by_attack = {name: list(self.select_usable(name).values()) for name in names if name in self.by_attack}
        bounds = [
            bound_by_guesses(name, records, confidence=1 - (1 - CONFIDENCE) / len(names))
            for name, records in by_attack.items()
            if any(record.guessed for record in records)
        ]
        return max(bounds, key=lambda bound: bound.epsilon, default=None)

    def _pair_strongest(self, target: str) -> list[tuple[Block, Block]]:
        """Return the strongest attack and *alone* on its rows, by seed; nothing without an attack."""
        candidates = self._candidates(target)
        if not candidates:
            return []
        choice = choosing.choose(candidates)
        alone = self.alone(target).select("+".join(dict.fromkeys(split for _, split in choice)))
        return _pair_alone(choosing.score_across(candidates, choice), alone)

    def _add_detectable(self, leak: Leak, pairs: Sequence[tuple[Block, Block]]) -> Leak:
        leak = msgspec.structs.replace(leak, detectable=intervals.find_detectable(pairs, self.seeds))
        return msgspec.structs.replace(leak, few=intervals.find_few(pairs)) if leak.is_blind else leak

    def _is_lower(self, record: Result, other: Result) -> bool:
        if self.audited and not (record.utility and other.utility):
            return False
        return record.usable_utility.headline < other.usable_utility.headline

    def _rate(self, by_seed: Blocks, alone_by_seed: Blocks, rows: str, best: Alone) -> Leak:
        """Return the leak with *alone*, which is over all seeds and so one number; the advantage is paired by seed.

        ``best`` has the other metrics of *alone*; those of two columns are of the baselines of ``alone_by_seed``.
        """
        blocks, base = list(by_seed.values()), list(alone_by_seed.values()) if by_seed else []
        pairs = _pair_alone(by_seed, alone_by_seed)
        differences = [intervals.measure(sub, *pair) for pair in pairs]
        metric = blocks[0].metric if blocks else ""
        bounds, of_difference = (R2, ANY) if metric in VALUES else (SHARE, DIFFERENCE)
        overfit, base_overfit = (average(block.overfit for block in chosen) or 0.0 for chosen in (blocks, base))
        alone = self._interval([intervals.get_headline(block) for block in base], bounds=bounds, extended=base_overfit)
        advantage = self._interval(differences, bounds=of_difference, extended=max(0.0, overfit - base_overfit))
        entropy = choosing.select_metric(by_seed, "cross_entropy")
        without = best.best("cross_entropy", rows) or choosing.select_metric(alone_by_seed, "cross_entropy")
        bits = self._interval([SeedValue(without[seed] - entropy[seed]) for seed in entropy if seed in without])
        leak = Leak(
            metric=metric, chance=average(block.chance for block in blocks), rows=rows,
            alone=alone["mean"], alone_ci95=alone["ci95"],
            advantage=advantage["mean"], advantage_ci95=advantage["ci95"],
            p=intervals.compute_p(differences, self.seeds, of_difference), bits=bits["mean"], bits_ci95=bits["ci95"],
            accuracy=average(block.metrics["accuracy"] for block in blocks if "accuracy" in block.metrics),
            others=_average_other_metrics(blocks),
            alone_others=(best.compute_other_metrics(rows) if base else {}) or _average_other_metrics(base),
            single_class=sum(block.single_class for block in blocks),
            by_seed={seed: block.headline for seed, block in by_seed.items()},
            alone_by_seed={seed: block.headline for seed, block in alone_by_seed.items()} if by_seed else {},
            **self._interval([intervals.get_headline(block) for block in blocks], bounds=bounds, extended=overfit),
        )  # fmt: skip
        return self._add_detectable(leak, pairs)


def _average_other_metrics(blocks: Sequence[Block]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for block in blocks:
        for name, value in block.metrics.items():
            if name != block.metric:
                values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}


def _pair_alone(by_seed: Blocks, alone: Blocks) -> list[tuple[Block, Block]]:
    return [(block, alone[seed]) for seed, block in by_seed.items() if seed in alone]


def summarize_budget(budgets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the first seed's budget; of alarms, in how many of the seeds there was one, and the median batch.

    Where no seed has an alarm, the batches without are medians as well.
    """
    first = budgets[0] if budgets else {}
    noticed, quiet = ([budget for budget in budgets if name in budget] for name in (ALARM, QUIET))
    if not noticed + quiet:
        return dict(first)
    names = [ALARM] if noticed else [name for name in (QUIET, UNSEEN) if any(name in budget for budget in quiet)]
    return {
        **{name: value for name, value in first.items() if name not in (ALARM, QUIET, UNSEEN)},
        "seeds with an alarm": len(noticed),
        "seeds without": len(quiet),
        **{name: median(budget.get(name, 0) for budget in noticed or quiet) for name in names},
    }


def _strip_details(record: Result) -> Result:
    return msgspec.structs.replace(record, budget={}, sureness=None)


def _choose_by_folds(candidates: Mapping[str, Mapping[int, Record]]) -> str | None:
    """Return the name of the candidate whose fold score, averaged over seeds, is best; None without folds."""
    means = {}
    for name, by_seed in candidates.items():
        folds = [record.fold for record in by_seed.values() if record.fold is not None]
        if folds and len(folds) == len(by_seed):
            means[name] = sum(folds) / len(folds)
    return max(means, key=lambda name: means[name]) if means else None


def choose_rows(records: Iterable[Record]) -> str:
    """Return the rows that a leak is reported on: test rows, or else training rows, or else others."""
    guessed = {split for record in records for split in record.leak}
    return next((split for split in ("test", "train", *sorted(guessed)) if split in guessed), "test")


def _average(blocks: Blocks) -> float:
    return sum(block.headline for block in blocks.values()) / len(blocks)


def _average_reached(records: Sequence[Result], seeds: int) -> dict[str, float] | None:
    """Mean epochs and bytes until ``train.target`` was met; None if a seed missed it, or none was set."""
    met = [record.reached for record in records if record.reached]
    if len(met) < seeds:
        return None
    return {key: sum(reached[key] for reached in met) / len(met) for key in met[0]}


def bound_by_guesses(attack: str, records: Sequence[Result], *, confidence: float = CONFIDENCE) -> Empirical:
    """Return the lower bound of epsilon by one attack's guesses of tossed labels, over all seeds.

    The coins of all seeds are independent, so that their guesses add up.
    """
    guessed = [record.guessed for record in records if record.guessed]
    right, made, tossed = (sum(getattr(guesses, name) for guesses in guessed) for name in ("right", "made", "tossed"))
    of_labels = [spent for spent in _find_most_spent(records) if "of" not in spent]
    promise = min(of_labels, key=lambda spent: spent["epsilon"], default=None)
    delta = promise["delta"] if promise else 0.0
    return Empirical(
        epsilon=bound_epsilon(right, made, tossed, delta, confidence), delta=delta, attack=attack,
        promised=promise["epsilon"] if promise else None, right=right, made=made, tossed=tossed,
    )  # fmt: skip


def _find_most_spent(records: Sequence[Result]) -> list[dict[str, Any]]:
    """The privacy spent by each defense, of the seed that spent most."""
    most: dict[str, dict[str, Any]] = {}
    for spent in (spent for record in records for spent in record.spent):
        if spent["defense"] not in most or spent["epsilon"] > most[spent["defense"]]["epsilon"]:
            most[spent["defense"]] = spent
    return list(most.values())
