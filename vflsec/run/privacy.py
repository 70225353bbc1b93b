"""The privacy that was spent against an adversary: epsilon, by the number of releases that it received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vflsec.core import hooks
from vflsec.core.defense import Defense, touches
from vflsec.core.message import AFTERWARDS, Kind, ReleaseCount
from vflsec.core.method import Trained


def spent(
    trained: Trained, releases: Sequence[ReleaseCount], adversary: str, trainings: int = 1
) -> list[dict[str, Any]]:
    """Return the privacy that each defense with a guarantee has spent against this adversary: the most of all senders.

    Args:
        trained: the federation whose parties carry the defenses.
        releases: from ``Channel.releases``.
        adversary: a party, or several joined by ``+`` that share all messages.
        trainings: on the same rows, with as many releases each, which add up where noise and answers are drawn anew.

    Returns:
        For each defense ``defense``, ``epsilon``, ``delta``. If releases are noised, also ``releases``, the largest
        number of releases of one row to the adversary, and ``epsilon_transcript``, over all releases of all rows: the
        bound if a row affects releases of others through the model. For a defense of updates, ``of`` is ``models`` and
        ``updates`` the number in which a row took part; its epsilon does not cover messages about the row itself.
    """
    method = trained.method
    method.prepare(trained.federation)
    adversaries = adversary.split("+")
    most: dict[str, dict[str, Any]] = {}
    for party in trained.federation.all_parties:
        for defense in party.defenses if party.name not in adversaries else ():
            if hooks.UPDATE in touches(defense):
                own = _spent_on_models(defense, trainings * method.updates(trained.federation))
            else:
                received = [r for r in releases if r.receiver in adversaries]
                own = spent_by(defense, party.name, received, trainings)
            if own and own["epsilon"] >= most.get(repr(defense), own)["epsilon"]:
                most[repr(defense)] = {"defense": repr(defense), **own}
    return list(most.values())


def spent_at_most(trained: Trained, releases: Sequence[ReleaseCount]) -> list[dict[str, Any]]:
    """Return ``spent`` against the ``adversary`` among the parties against which each defense has spent most."""
    most: dict[str, dict[str, Any]] = {}
    for name in trained.federation.parties:
        for own in spent(trained, releases, name):
            if own["epsilon"] > most.get(own["defense"], {"epsilon": -1.0})["epsilon"]:
                most[own["defense"]] = {**own, "adversary": name}
    return list(most.values())


def spent_by(
    defense: Defense, sender: str, received: Sequence[ReleaseCount], trainings: int = 1
) -> dict[str, Any] | None:
    """Return the privacy that a defense of ``sender`` has spent by the releases that an adversary received, or None.

    They are those of one of the trainings.
    """
    if not defense.at:  # it changes labels, which only the active party has, once in each training
        own = defense.spent(trainings) if sender == "active" else None
        return {**own, "fixed": True} if own and defense.fixed else own
    defended = [r for r in received if r.sender == sender and defense.acts(Kind(r.kind), r.phase)]
    once = defense.spent(1)
    if not defended or once is None:
        return None
    count = trainings * most_of_one_row(defended)
    whole = defense.spent(trainings * sum(r.total for r in defended))
    assert whole is not None
    return {**(defense.spent(count) or once), "releases": count, "epsilon_transcript": whole["epsilon"]}


def _spent_on_models(defense: Defense, updates: int) -> dict[str, Any] | None:
    spent = defense.spent(updates)
    return {**spent, "of": "models", "updates": updates} if spent else None


def most_of_one_row(releases: Sequence[ReleaseCount]) -> int:
    """Return the largest number of releases of one row; phases may know the same row by other positions."""
    training = [r for r in releases if r.phase not in AFTERWARDS]
    most: dict[tuple[str, str, str], int] = {}
    for r in training:
        route = (r.phase, r.receiver, r.kind)
        most[route] = max(most.get(route, 0), r.most)
    trained_on, splits = sum(most.values()), {r.split for r in training}
    later: dict[str, int] = {}
    for r in releases:
        if r.phase in AFTERWARDS:
            later[r.split] = later.get(r.split, trained_on if r.split in splits else 0) + r.most
    return max([trained_on, *later.values()])
