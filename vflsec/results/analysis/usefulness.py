"""Whether a joint model is of use: better than chance, and no worse than the active party alone."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from vflsec.results.analysis.intervals import DIFFERENCE, interval, seen
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Block, Record, Result

SAME = 0.0005
"""Utilities that differ by less look equal in a table."""

Place = tuple[str, str, float]
"""Method, defense and strength."""


class Useless(NamedTuple):
    """Why a joint model is of no use.

    Attributes:
        why: ``worse than bank alone`` or ``no better than chance``.
        values: the utilities that are compared.
        is_shown: whether the interval shows it, and not the mean alone.
    """

    why: str
    values: str
    is_shown: bool


def useless_models(manifest: Manifest, records: Mapping[str, Record]) -> dict[Place, Useless]:
    """Return the joint models that are of no use, by method, defense and strength.

    Of several trainings with one seed the best counts: an attack that acts in training may harm the model.
    """
    blocks: dict[Place, dict[int, Block]] = {}
    alone: dict[str, dict[int, float]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if isinstance(record, Result) and record.utility is not None and not record.control:
            by_seed = blocks.setdefault((row.method, row.defense, row.strength), {})
            both = (by_seed.get(row.seed, record.utility), record.utility)
            by_seed[row.seed] = max(both, key=lambda block: block.headline)
            if record.active_alone is not None:  # it is measured without a defense
                alone.setdefault(row.method, {})[row.seed] = record.active_alone
    active = manifest.names.get("active", "the active party")
    judged = {place: _judged(some, alone.get(place[0], {}), active, manifest.seeds) for place, some in blocks.items()}
    return {place: useless for place, useless in judged.items() if useless}


def sentences(useless: Mapping[Place, Useless], *, is_shown: bool) -> list[str]:
    """Return a sentence for each method whose joint model is of no use without a defense."""
    of_methods = [(place[0], one) for place, one in useless.items() if place[2] == 0 and one.is_shown is is_shown]
    return list(dict.fromkeys(f"{method}: the joint model is {one.why}: {one.values}" for method, one in of_methods))


def _judged(blocks: Mapping[int, Block], alone: Mapping[int, float], active: str, seeds: int) -> Useless | None:
    """Compare utilities with those of the active party alone, paired by seed, and with chance."""
    joint, chance = fmean(b.headline for b in blocks.values()), fmean(b.chance for b in blocks.values())
    metric = next(iter(blocks.values())).metric
    by_chance = f", {chance:.3f} by chance" * (joint <= chance)
    shared = [seed for seed in blocks if seed in alone]
    if shared:
        gain = interval([seen(lambda u, own=alone[s]: u - own, blocks[s]) for s in shared], seeds, DIFFERENCE)
        own, high = fmean(alone[s] for s in shared), gain["ci95"][1]
        if gain["mean"] < -SAME:
            values = f"{metric} {own + gain['mean']:.3f}, and {own:.3f} by a quick model of its own columns{by_chance}"
            return Useless(f"worse than {active} alone", values, bool(by_chance) or (high is not None and high < 0))
    return Useless("no better than chance", f"{metric} {joint:.3f}{by_chance}", True) if by_chance else None
