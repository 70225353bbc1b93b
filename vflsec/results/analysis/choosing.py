"""Chooses the strongest of several candidates on one half of the scored rows and scores it on the other half.

The largest of several noisy scores overestimates the strongest attack: it is partly the luckiest. Rows that choose
are therefore never rows that score. The scorer splits the rows of each seed in two halves; the candidate with the
largest mean on one half is scored on the other, and the two scores are averaged.

What one attack alone gains by chance in a seed, by its own random draws, is common to both halves and is not removed:
it makes the headline larger, never smaller, and shrinks with the number of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from vflsec.results.records.schema import Block

Candidate = tuple[str, str]
"""The name of an attack, and the rows that it guesses."""

Candidates = Mapping[Candidate, Mapping[int, Block]]
"""The blocks of each candidate by seed."""


class Choice(NamedTuple):
    """The candidates chosen on the first half of the rows and on the second, each to be scored on the other half."""

    on_first: Candidate
    on_second: Candidate


def choose(candidates: Candidates) -> Choice:
    """Return the candidate with the largest mean over seeds, on each half of the rows.

    Candidates are compared on the seeds that all of them have.
    """
    return Choice(_largest(candidates, 0), _largest(candidates, 1))


def cross_scored(candidates: Candidates, choice: Choice) -> dict[int, Block]:
    """Return the block of each seed in which the choice of one half is scored on the other half.

    If both halves chose the same candidate, this is its block on all rows.
    """
    first, second = candidates[choice.on_first], candidates[choice.on_second]
    if choice.on_first == choice.on_second:
        return dict(first)
    return {seed: _crossed(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())}


def _largest(candidates: Candidates, half: int) -> Candidate:
    seeds = _shared_seeds(candidates)
    compared = {name: by_seed for name, by_seed in candidates.items() if seeds <= by_seed.keys()}

    def size(name: Candidate) -> tuple[float, int]:
        """Return the sum over seeds; of equal ones, that of more rows counts, since the other may be luck."""
        own = [compared[name][seed] for seed in seeds]
        return sum(_on_half(block, half) for block in own), sum(block.n for block in own)

    return max(compared, key=size)


def _shared_seeds(candidates: Candidates) -> set[int]:
    """Return the seeds that all candidates have; if there is none, those of the candidates with the most seeds."""
    seeds = sorted((set(by_seed) for by_seed in candidates.values()), key=len, reverse=True)
    while not (shared := set.intersection(*seeds)):
        seeds.pop()
    return shared


def _on_half(block: Block, half: int) -> float:
    """Return the headline on one half, or on all rows if they are too few to be split."""
    return block.halves[half] if block.halves else block.headline


def _crossed(first: Block, second: Block) -> Block:
    """Join the second half's score of ``first`` with the first half's score of ``second``.

    The halves are disjoint, so their errors are independent. The interval of half the rows is sqrt(2) times as wide as
    that of all rows, and the mean of two halves is half their sum: hence the root mean square of the two intervals.
    """
    value = (_on_half(first, 1) + _on_half(second, 0)) / 2
    chosen_on = (_on_half(first, 0) + _on_half(second, 1)) / 2
    others = {key: (first.metrics[key] + second.metrics[key]) / 2 for key in first.metrics if key in second.metrics}
    sides = [[abs(one.headline - end) for end in one.over_rows] for one in (first, second)]
    low, high = (math.sqrt((a**2 + b**2) / 2) for a, b in zip(*sides, strict=True))
    return msgspec.structs.replace(
        first,
        metrics={**others, first.metric: value},
        halves=(_on_half(second, 0), _on_half(first, 1)),
        ci95_rows=(value - low, value + high),
        chance=(first.chance + second.chance) / 2,
        n=(first.n + second.n) // 2,
        one_class=first.one_class or second.one_class,
        overfit=chosen_on - value,
        without=_alternating(first, second, value),
        known=max(first.known, second.known),
    )


def _alternating(first: Block, second: Block, value: float) -> tuple[float, ...] | None:
    """Return ``value`` without groups of rows, of which every other one is of the rows that score ``first``."""
    if first.without is None or second.without is None:
        return None
    pairs = enumerate(zip(first.without, second.without, strict=True))
    return tuple(value + (b - second.headline if k % 2 else a - first.headline) for k, (a, b) in pairs)
