"""What an adversary was told, in the currency of differential privacy: epsilon, by the releases that it heard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vflsec.core import hooks
from vflsec.core.defense import Defense, touches
from vflsec.core.message import Kind, ReleaseCount
from vflsec.core.method import Trained
from vflsec.core.party import Party

AFTERWARDS = ("predict", "validate")
"""Phases of which the rows are others than those that training releases, unless they are of a split that it used."""


def spent(trained: Trained, releases: Sequence[ReleaseCount], adversary: str) -> list[dict[str, Any]]:
    """Return, for each defense with a guarantee, what it has spent against this adversary: of all senders the most.

    Args:
        trained: whose parties carry the defenses.
        releases: as ``Channel.releases`` counts them.
        adversary: a party, or several joined by ``+``, which hear what each of them does.

    Returns:
        By defense ``defense``, ``epsilon``, ``delta``; where releases are noised also ``releases``, how often the
        adversary heard of the row that it heard of most, and ``epsilon_transcript``, which counts every release of
        every row: the bound where a row acts on others' releases by way of the model. Of a defense of updates
        ``of`` is ``models``, and ``updates``, in how many a row took part: what is said about the row itself is not in
        its epsilon.
    """
    method = trained.method
    method.prepare(trained.federation)
    adversaries = adversary.split("+")
    most: dict[str, dict[str, Any]] = {}
    for party in trained.federation.all_parties:
        for defense in party.defenses if party.name not in adversaries else ():
            if hooks.UPDATE in touches(defense):
                found = _spent_on_models(defense, method.updates(trained.federation))
            else:
                found = _spent(defense, party, [r for r in releases if r.receiver in adversaries])
            if found and found["epsilon"] >= most.get(repr(defense), found)["epsilon"]:
                most[repr(defense)] = {"defense": repr(defense), **found}
    return list(most.values())


def spent_at_most(trained: Trained, releases: Sequence[ReleaseCount]) -> list[dict[str, Any]]:
    """Return what ``spent`` does of the party that each defense has told most, which stands in ``adversary``."""
    most: dict[str, dict[str, Any]] = {}
    for name in trained.federation.parties:
        for found in spent(trained, releases, name):
            if found["epsilon"] > most.get(found["defense"], {"epsilon": -1.0})["epsilon"]:
                most[found["defense"]] = {**found, "adversary": name}
    return list(most.values())


def _spent(defense: Defense, party: Party, told: Sequence[ReleaseCount]) -> dict[str, Any] | None:
    if not defense.at:  # it changes labels, which the active party alone has
        return defense.spent(1) if party.active else None
    heard = [r for r in told if r.sender == party.name and defense.acts(Kind(r.kind), r.phase)]
    once = defense.spent(1)
    if not heard or once is None:
        return None
    count = most_of_one_row(heard)
    whole = defense.spent(sum(r.total for r in heard))
    assert whole is not None
    return {**(defense.spent(count) or once), "releases": count, "epsilon_transcript": whole["epsilon"]}


def _spent_on_models(defense: Defense, updates: int) -> dict[str, Any] | None:
    found = defense.spent(updates)
    return {**found, "of": "models", "updates": updates} if found else None


def most_of_one_row(heard: Sequence[ReleaseCount]) -> int:
    """Return how often one row was released, at most: a row may be known to several phases by other positions."""
    training = [r for r in heard if r.phase not in AFTERWARDS]
    most: dict[tuple[str, str, str], int] = {}
    for r in training:
        route = (r.phase, r.receiver, r.kind)
        most[route] = max(most.get(route, 0), r.most)
    trained_on, splits = sum(most.values()), {r.split for r in training}
    later: dict[str, int] = {}
    for r in heard:
        if r.phase in AFTERWARDS:
            later[r.split] = later.get(r.split, trained_on if r.split in splits else 0) + r.most
    return max([trained_on, *later.values()])
