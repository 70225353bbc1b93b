"""What an attack on one party is about: the party, and the column whose values are inferred."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from vflsec.core import registry
from vflsec.core.federation import Federation
from vflsec.core.message import SERVER, SOURCE
from vflsec.data.encode import dense
from vflsec.data.partition import Partition, PartyData
from vflsec.run.adversary import adversary
from vflsec.run.plan import build_attack
from vflsec.run.questions import column_of, varying_columns, victim_of
from vflsec.run.spec import AttackSpec

EVERY = "all"
"""In place of a column: each one of the victim that is not the same for all training rows."""

QUICK, MOST = ("attribute",), 30
"""The attacks that ``all`` mounts on every column, if these are no more than so many."""


def takes(attack: AttackSpec, option: str) -> bool:
    """Whether an attack has an option of this name."""
    return option in inspect.signature(registry.load("attacks", attack.name)).parameters


def with_columns(
    attacks: Sequence[AttackSpec], party: str, federation: Federation, *, of_all: Sequence[AttackSpec] = ()
) -> list[AttackSpec]:
    """Return attacks on a column with its name, and one for each column in place of ``column=all``.

    An attack after a phase keeps its default, since the phase may be about other rows.

    Args:
        attacks: as they were named.
        party: the adversary.
        federation: the parties.
        of_all: those of ``attacks`` that nobody named, since ``all`` stands for them.

    Raises:
        UsageError: no such victim, or none of its columns varies.
    """
    found = []
    for attack in attacks:
        if not takes(attack, "column") or attack.after or party in (SERVER, SOURCE):
            found.append(attack)
            continue
        every = attack.options.get("column") == EVERY
        options = {name: value for name, value in attack.options.items() if name != "column" or not every}
        own = build_attack(msgspec.structs.replace(attack, options=options))
        victim = victim_of(own, federation, adversary(federation, party))
        columns = varying_columns(victim) if every or (attack in of_all and attack.name in QUICK) else []
        columns = columns if every or len(columns) <= MOST else []
        names = [column.name for column in columns or [column_of(own, victim)]]
        found += [msgspec.structs.replace(attack, options={**options, "column": name}) for name in names]
    return [one for k, one in enumerate(found) if one not in found[:k]]


def about(attack: AttackSpec, party: str, data: Partition) -> dict[str, Any]:
    """Return ``victim``, ``column`` and ``above`` of an attack, as far as it has them.

    ``above`` is the median of the column in training rows, in its own units: a number is inferred as above it or not.
    """
    if not takes(attack, "victim"):
        return {}
    others = [name for name in data.parties if name not in party.split("+")]
    victim = attack.options.get("victim") or next(iter(others), "")
    column = attack.options.get("column") or ""
    above = _median(data.parties[victim], column) if column and victim in data.parties else None
    return {"victim": victim, "column": column, "above": above}


def _median(party: PartyData, name: str) -> float | None:
    """Return the median that splits a number, in its own units; None for a category."""
    learned = party.encoder.get(name, {})
    place = next((column.start for column in party.layout.columns if column.name == name), None)
    if place is None or not learned.get("inverse"):
        return None
    values = np.sort(dense(party.features["train"][:, place : place + 1]).ravel().astype(float))
    median = learned["mean"] + values[(len(values) - 1) // 2] / learned["inverse"]
    if learned.get("signed_log"):
        return float(f"{np.sign(median) * np.expm1(abs(median)):.6g}")
    return float(round(median, 6 + math.floor(math.log10(learned["inverse"])))) + 0.0  # features have seven digits
