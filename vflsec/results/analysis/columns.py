"""The strongest of several columns of one party, chosen on one half of the rows and scored on the other half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from vflsec.results.analysis.choosing import Candidate, Candidates, choose, cross_scored
from vflsec.results.analysis.intervals import mean_of
from vflsec.results.records.manifest import AttackEntry
from vflsec.results.records.schema import Block


def pools(attacks: Iterable[AttackEntry]) -> dict[str, dict[str, list[AttackEntry]]]:
    """Return the attacks on several columns of one party, by what they are on and by their name without the column."""
    found: dict[str, dict[str, list[AttackEntry]]] = {}
    for attack in attacks:
        if attack.column:
            own = found.setdefault(attack.target.removesuffix(f" {attack.column}"), {})
            own.setdefault(_without_column(attack), []).append(attack)
    return {pool: own for pool, own in found.items() if len({one.column for some in own.values() for one in some}) > 1}


def _without_column(attack: AttackEntry) -> str:
    option = f"column={attack.column}"
    return attack.label.replace(f":{option},", ":").replace(f":{option}", "").replace(f",{option}", "")


def strongest(leaks: Candidates, alone: Candidates) -> tuple[Sequence[Candidate], dict[int, Block], dict[int, Block]]:
    """Return the columns that either half of the rows chooses, their leak on the other half, and *alone* there.

    Columns differ in what is inferred of them without joining, and in their measure. So that column is the strongest
    whose attack gains the largest share of what *alone* has left, or chance where *alone* is not known. If the halves
    choose columns of different measures, which have no mean, that measure counts whose columns gain more.

    Args:
        leaks: the blocks of each column by seed.
        alone: the same without the federation.
    """
    gains = {name: _gains(by_seed, alone[name]) for name, by_seed in leaks.items()}
    measures = dict.fromkeys(block.metric for by_seed in leaks.values() for block in by_seed.values())
    found = []
    for metric in measures:
        own = {name: gains[name] for name, by_seed in leaks.items() if next(iter(by_seed.values())).metric == metric}
        choice = choose(own)
        gained = mean_of(block.headline for block in cross_scored(own, choice).values()) or 0.0
        base = cross_scored(alone, choice)
        found.append((gained, list(dict.fromkeys(choice)), cross_scored(leaks, choice), base))
    return max(found, key=lambda one: one[0])[1:]


def _gains(by_seed: Mapping[int, Block], alone: Mapping[int, Block]) -> dict[int, Block]:
    """Return which share of what *alone* has left is gained, on all rows and on each half."""

    def gain(leak: float, base: float) -> float:
        return (leak - base) / (1 - base) if base < 1 else 0.0

    found = {}
    for seed, block in by_seed.items():
        base = alone.get(seed)
        halves = base.halves if base and base.halves else (block.chance,) * 2
        found[seed] = msgspec.structs.replace(
            block,
            metrics={"gain": gain(block.headline, base.headline if base else block.chance)},
            halves=tuple(map(gain, block.halves, halves)) if block.halves else None,
            without=None,
        )
    return found
