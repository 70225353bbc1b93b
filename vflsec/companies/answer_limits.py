"""How often a party answers a batch again: each further answer gives a dishonest peer new information."""

from __future__ import annotations

from vflsec.base.errors import PeerRefused
from vflsec.companies.snapshots import Journal, Snapshots


class AnswerLimits:
    """Counts the answers to each batch, on the disk and before they are sent.

    Args:
        role: of this party.
        journal: what has been counted until now.
        snapshots: where the journal is kept.
        each: limit of the repeats of one batch.
        in_all: limit of the repeats of all batches together.
    """

    def __init__(self, role: str, journal: Journal, snapshots: Snapshots, *, each: int, in_all: int) -> None:
        self.role, self.journal, self.each, self.in_all = role, journal, each, in_all
        self._snapshots = snapshots

    def count(self, step: int) -> int:
        """Count an answer to batch ``step``, and return how often it has been answered.

        Raises:
            PeerRefused: it has been answered too often.
        """
        journal = self.journal
        if step >= journal.answered:
            journal.answered = step + 1
        else:
            again, in_all = journal.repeats.get(step, 0) + 1, sum(journal.repeats.values()) + 1
            if again > self.each or in_all > self.in_all:
                raise PeerRefused(
                    f"batch {step} is not answered again: it was answered {again} times, and there were {in_all - 1} "
                    f"repeats of all batches (limits: {self.each} repeats of one, {self.in_all} of all); "
                    f"if the network is to blame, start {self.role} with more --repeats"
                )
            journal.repeats[step] = again
        self._snapshots.save_journal(journal)
        return self.times(step)

    def times(self, step: int) -> int:
        """Return how often batch ``step`` has been answered."""
        return (step < self.journal.answered) + self.journal.repeats.get(step, 0)

    def text(self, step: int) -> str:
        """Return the counts for a message, batch ``step`` being under way; empty before the first answer."""
        if not self.journal.answered:
            return ""
        repeats = self.journal.repeats
        return (
            f" (answers to batch {step}: {self.times(step)}; repeats: {repeats.get(step, 0)} of {self.each}"
            f", and {sum(repeats.values())} of {self.in_all} in all)"
        )
