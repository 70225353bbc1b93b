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
    alone: dict[int, float] = {}
