"""Chooses the strongest of several candidates on one half of the scored rows and scores it on the other half.

The largest of several noisy scores overestimates the strongest attack: it is partly the luckiest. Rows that choose
are therefore never rows that score. The scorer splits the rows of each seed in two halves; the candidate with the
largest mean on one half is scored on the other, and the two scores are averaged.

What one attack alone gains by chance in a seed, by its own random draws, is common to both halves and is not removed:
it makes the headline larger, never smaller, and shrinks with the number of seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from vflsec.results.analysis.intervals import average
from vflsec.results.records.manifest import AttackEntry
from vflsec.results.records.schema import Block, Record

Candidate = tuple[str, str]
"""The name of an attack, and the rows that it guesses."""

Blocks = Mapping[int, Block]
"""By seed."""

Candidates = Mapping[Candidate, Blocks]

LESS = ("cross_entropy", "mse")
"""The metrics that are best where they are least."""


class Choice(NamedTuple):
    """The candidates chosen on the first half of the rows and on the second, each to be scored on the other half."""

    on_first: Candidate
    on_second: Candidate


def list_candidates(by_name: Mapping[str, Mapping[int, Record]]) -> dict[Candidate, Blocks]:
    """Return the blocks of each name on each split of rows."""
    splits = {
        name: dict.fromkeys(split for record in by_seed.values() for split in record.leak)
        for name, by_seed in by_name.items()
    }
    return {(name, split): select_rows(by_name[name], split) for name in splits for split in splits[name]}


def select_rows(by_seed: Mapping[int, Record], rows: str) -> dict[int, Block]:
    """Return the blocks on ``rows`` of the seeds that have them."""
    return {seed: record.leak[rows] for seed, record in by_seed.items() if rows in record.leak}


def select_metric(blocks: Blocks, metric: str) -> dict[int, float]:
    """Return a metric of the seeds that have it."""
    return {seed: block.metrics[metric] for seed, block in blocks.items() if metric in block.metrics}


def choose(candidates: Candidates) -> Choice:
    """Return the candidate with the largest mean over seeds, on each half of the rows.

    Candidates are compared on the seeds that all of them have.
    """
    return Choice(_choose_on(candidates, 0), _choose_on(candidates, 1))


def score_across(candidates: Candidates, choice: Choice) -> dict[int, Block]:
    """Return the block of each seed in which the choice of one half is scored on the other half.

    If both halves chose the same candidate, this is its block on all rows.
    """
    first, second = candidates[choice.on_first], candidates[choice.on_second]
    if choice.on_first == choice.on_second:
        return dict(first)
    return {seed: _join_halves(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())}


def _choose_on(candidates: Candidates, half: int) -> Candidate:
    seeds = _find_common_seeds(candidates)

    def size(name: Candidate) -> tuple[float, int]:
        """Return the sum over seeds; of equal ones, that of more rows counts, since the other may be luck."""
        blocks = [candidates[name][seed] for seed in seeds]
        return sum(_score_half(block, half) for block in blocks), sum(block.n for block in blocks)

    return max((name for name, by_seed in candidates.items() if seeds <= by_seed.keys()), key=size)


def _find_common_seeds(candidates: Candidates) -> set[int]:
    """Return the seeds that all candidates have; if there is none, those of the candidates with the most seeds."""
    seeds = sorted((set(by_seed) for by_seed in candidates.values()), key=len, reverse=True)
    while not (shared := set.intersection(*seeds)):
        seeds.pop()
    return shared


def _score_half(block: Block, half: int) -> float:
    """Return the headline on one half, or on all rows if they are too few to be split."""
    return block.halves[half] if block.halves else block.headline


def _join_halves(first: Block, second: Block) -> Block:
    """Join the second half's score of ``first`` with the first half's score of ``second``.

    The halves are disjoint, so their errors are independent. The interval of half the rows is sqrt(2) times as wide as
    that of all rows, and the mean of two halves is half their sum: hence the root mean square of the two intervals.
    Every other group of rows is of the rows that score ``first``.
    """
    value = (_score_half(first, 1) + _score_half(second, 0)) / 2
    chosen_on = (_score_half(first, 0) + _score_half(second, 1)) / 2
    others = {key: (first.metrics[key] + second.metrics[key]) / 2 for key in first.metrics if key in second.metrics}
    sides = [[abs(block.headline - end) for end in block.row_interval] for block in (first, second)]
    low, high = (math.sqrt((a**2 + b**2) / 2) for a, b in zip(*sides, strict=True))
    without = None
    if first.without is not None and second.without is not None:
        groups = enumerate(zip(first.without, second.without, strict=True))
        without = tuple(value + (b - second.headline if k % 2 else a - first.headline) for k, (a, b) in groups)
    return msgspec.structs.replace(
        first, metrics={**others, first.metric: value}, halves=(_score_half(second, 0), _score_half(first, 1)),
        ci95_rows=(value - low, value + high), chance=(first.chance + second.chance) / 2, n=(first.n + second.n) // 2,
        single_class=first.single_class or second.single_class, overfit=chosen_on - value, without=without,
        known=max(first.known, second.known),
    )  # fmt: skip


class Alone:
    """What one adversary reaches on one target without the federation: one value for each split of rows.

    The candidates are the baselines of all methods in the report, since an adversary alone could train any of them.
    The strongest is chosen on one half of the rows and scored on the other, as the headline is. Otherwise the largest
    of several noisy scores would be too large, and each advantage over it too small.
    """

    def __init__(self, records: Mapping[str, Mapping[int, Record]]) -> None:
        self.records = records
        self._candidates = list_candidates(records)
        self._others: dict[str, dict[str, float]] = {}
        self._choices = {
            split: choose({name: blocks for name, blocks in self._candidates.items() if name[1] == split})
            for split in dict.fromkeys(split for _, split in self._candidates)
        }

    def candidates(self, half: int) -> dict[Candidate, Blocks]:
        """Return, for each split, the candidate that one half of the rows chooses."""
        return {choice[half]: self._candidates[choice[half]] for choice in self._choices.values()}

    def select(self, rows: str) -> dict[int, Block]:
        """Return the block of each seed on ``rows``: a split, or ``first+second`` as for the headline."""
        first, second = rows.split("+")[0], rows.split("+")[-1]
        if not {first, second} <= self._choices.keys():
            return {}
        choice = Choice(self._choices[first].on_first, self._choices[second].on_second)
        return score_across(self._candidates, choice)

    def compute_other_metrics(self, rows: str) -> dict[str, float]:
        """Return the means over seeds of all metrics but the headline, each of the baseline that is best in it."""
        if rows not in self._others:
            blocks = [block for by_seed in self._candidates.values() for block in by_seed.values()]
            names = dict.fromkeys(name for block in blocks for name in block.metrics if name != block.metric)
            means = {name: average(self.best(name, rows).values()) for name in names}
            self._others[rows] = {name: mean for name, mean in means.items() if mean is not None}
        return self._others[rows]

    def best(self, metric: str, rows: str) -> dict[int, float]:
        """Return a metric by seed, of the baseline that is best in it by the mean over seeds; of two splits the mean.

        The rows that choose the baseline also score it, so that the metric is slightly too good, and what an attack
        gains over it slightly too small. How many known rows are right is of the baseline that knows most.
        """

        def size(blocks: Blocks) -> tuple[int, float]:
            values = select_metric(blocks, metric.replace("right", "known")).values()
            return len(values), (average(values) or 0.0) * (-1 if metric in LESS else 1)

        chosen = []
        for split in dict.fromkeys(rows.split("+")):
            on_split = [blocks for (_, guessed), blocks in self._candidates.items() if guessed == split]
            chosen.append(select_metric(max(on_split, key=size, default={}), metric))
        shared = set(chosen[0]).intersection(*chosen)
        return {seed: sum(values[seed] for values in chosen) / len(chosen) for seed in sorted(shared)}


def group_columns(attacks: Iterable[AttackEntry]) -> dict[str, dict[str, list[AttackEntry]]]:
    """Return the attacks on several columns of one party, by what they are on and by their name without the column."""
    pools: dict[str, dict[str, list[AttackEntry]]] = {}
    for attack in attacks:
        if attack.column:
            option = f"column={attack.column}"
            name = attack.label.replace(f":{option},", ":").replace(f":{option}", "").replace(f",{option}", "")
            pool = pools.setdefault(attack.target.removesuffix(f" {attack.column}"), {})
            pool.setdefault(name, []).append(attack)
    return {
        target: pool
        for target, pool in pools.items()
        if len({attack.column for members in pool.values() for attack in members}) > 1
    }


def choose_column(
    leaks: Candidates, alone: Candidates
) -> tuple[Sequence[Candidate], dict[int, Block], dict[int, Block]]:
    """Return the columns that either half of the rows chooses, their leak on the other half, and *alone* there.

    Columns differ in what is inferred of them without joining, and in their measure. So that column is the strongest
    whose attack gains the largest share of what *alone* has left, or chance where *alone* is not known. If the halves
    choose columns of different measures, which have no mean, that measure counts whose columns gain more.
    """
    gains = {name: _compute_gains(by_seed, alone[name]) for name, by_seed in leaks.items()}
    chosen = []
    for metric in dict.fromkeys(block.metric for by_seed in leaks.values() for block in by_seed.values()):
        same = {name: gains[name] for name, by_seed in leaks.items() if next(iter(by_seed.values())).metric == metric}
        choice = choose(same)
        gained = average(block.headline for block in score_across(same, choice).values()) or 0.0
        columns = list(dict.fromkeys(choice))
        chosen.append((gained, columns, score_across(leaks, choice), score_across(alone, choice)))
    return max(chosen, key=lambda candidate: candidate[0])[1:]


def _compute_gains(by_seed: Blocks, alone: Blocks) -> dict[int, Block]:
    """Return which share of what *alone* has left is gained, on all rows and on each half."""

    def gain(leak: float, base: float) -> float:
        return (leak - base) / (1 - base) if base < 1 else 0.0

    gains = {}
    for seed, block in by_seed.items():
        base = alone.get(seed)
        halves = base.halves if base and base.halves else (block.chance,) * 2
        gains[seed] = msgspec.structs.replace(
            block,
            metrics={"gain": gain(block.headline, base.headline if base else block.chance)},
            halves=tuple(map(gain, block.halves, halves)) if block.halves else None,
            without=None,
        )
    return gains
