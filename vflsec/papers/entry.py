"""One cell of a reproduced table."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the table.

    Attributes:
        printed: in the paper; None where it has no value.
        measured: the mean over seeds; None where no seed gave a number. Its interval, from ``low`` to ``high``, ends at
            0 and 1.
        difference: measured less printed; None on data that stand in for the paper's, and for hours, which are of
            another machine.
        against: the row whose values were taken away, paired by seed; empty if ``measured`` is the value itself.
        by_seed: the value of each seed itself.
        alone: of a leak, what the adversary reaches without joining, by seed.
    """

    group: str
    row: str
    column: str
    printed: float | None
    measured: float | None
    low: float | None
    high: float | None
    difference: float | None
    seeds: int
    metric: str
    by_seed: dict[int, float]
    measure: str = "utility"
    against: str = ""
    alone: dict[int, float] = {}

    @property
    def worse(self) -> bool | None:
        """Whether a change is for the worse, a larger leak or a smaller utility; None if it is not told from 0."""
        if not self.against or self.low is None or self.high is None or self.low <= 0 <= self.high:
            return None
        return (self.low > 0) == (self.measure == "leak")
