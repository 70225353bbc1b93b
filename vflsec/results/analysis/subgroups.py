"""Leaks by subgroup: intervals over seeds, and Holm's correction over all tests of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vflsec.results.analysis.intervals import Seen, interval, of_number
from vflsec.results.analysis.paired import holm
from vflsec.results.analysis.results import GroupLeak, Measure
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.subgroups import Subgroup, Subgroups
from vflsec.results.statistics import SHARE, standard_error_of


def group_leaks(found: Sequence[Subgroups], manifest: Manifest) -> list[GroupLeak]:
    """Return one leak for each group, attack, strength and curve; what other settings gave is left out."""
    curves: dict[tuple[str, str, float, str], list[str]] = {}
    for row in manifest.rows:
        curves.setdefault((row.method, row.defense, row.strength, row.attack), []).append(row.key)
    own = [(place, one) for place, keys in curves.items() for one in found if set(one.keys) == set(keys)]
    tested = list({id(one): one for _, one in own if one.p is not None}.values())
    corrected = dict(zip(map(id, tested), holm([one.p or 0.0 for one in tested]), strict=True))
    return [
        GroupLeak(
            column=one.column, method=method, defense=defense, strength=strength, attack=attack, rows=one.rows,
            group=group.group, n=group.n, leak=_measure(group, one.metric, manifest.seeds), p=one.p,
            p_holm=corrected.get(id(one)),
        )
        for (method, defense, strength, attack), one in own
        for group in one.groups
    ]  # fmt: skip


def _measure(group: Subgroup, metric: str, seeds: int) -> Measure:
    values = list(group.by_seed.values())
    low, high = (math.nan if end is None else end for end in group.ci95_rows)
    of_rows = [Seen(first, standard_error_of(low, high) ** 2, group.n, ends=(low, high)) for first in values[:1]]
    return Measure(metric=metric, **interval([*of_rows, *map(of_number, values[1:])], seeds, SHARE))
