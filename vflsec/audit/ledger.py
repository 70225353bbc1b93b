"""The privacy that declared defenses have spent against the adversary, by the releases that a transcript shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from vflsec.audit.subject import Subject
from vflsec.audit.transcript import Sent
from vflsec.base.errors import UsageError
from vflsec.core import hooks
from vflsec.core.defense import touches
from vflsec.core.message import Kind, ReleaseCount
from vflsec.run.plan import resolve
from vflsec.run.score import most_per_row, spent_by
from vflsec.run.spec import parse_defense


def spent_on(defenses: Sequence[str], subject: Subject, parties: Iterable[str]) -> list[dict[str, Any]]:
    """Return the privacy that each defense has spent against the adversary, if it spends any: the most of all senders.

    The releases are those in the transcript: a transcript of a part of the training gives too small an epsilon.

    Args:
        defenses: as on the command line, with the strength that they had in the training.
        subject: with the messages that the adversary received.
        parties: the names of all parties.

    Raises:
        UsageError: a defense of updates, or no message on which it acts.
    """
    releases = released(subject.messages, subject.adversary)
    found = []
    for text in defenses:
        defense = resolve(parse_defense(text)).defense()
        if hooks.UPDATE in touches(defense):
            raise UsageError(f"expected a defense of messages, got {text}: its epsilon counts updates, not messages")
        acted_on = [one for one in releases if defense.acts(Kind(one.kind), one.phase)]
        if hooks.PLAN_RELEASES in touches(defense) and acted_on:
            defense.plan_releases(most_per_row(acted_on))
        senders = [name for name in parties if name != subject.adversary and (acted_on or not defense.at)]
        own = [one for name in senders if (one := spent_by(defense, name, releases)) is not None]
        sent = not subject.messages or not defense.at or any(one.kind in defense.at for one in subject.messages)
        if not own and not sent:
            kinds = " or ".join(sorted(defense.at)) or "labels"
            raise UsageError(f"expected a defense of what was sent, got {text}: {subject.name} shows no {kinds}")
        if own:
            found.append({"defense": repr(defense), **max(own, key=lambda one: float(one["epsilon"]))})
    return found


def released(messages: Iterable[Sent], receiver: str) -> list[ReleaseCount]:
    """Return how often ``receiver`` got a message about a row, by route and split."""
    counts: dict[tuple[str, str, Kind, str], Counter[str]] = {}
    for one in messages:
        if one.receiver == receiver and one.kind in (Kind.EMBEDDING, Kind.GRADIENT):
            counts.setdefault((one.phase, one.sender, Kind(one.kind), one.split), Counter()).update(one.rows.tolist())
    return [
        ReleaseCount(phase, sender, receiver, kind, split, max(rows.values()), rows.total())
        for (phase, sender, kind, split), rows in counts.items()
    ]
