"""The facts of a trained cell or stage, stored beside its models in ``cell.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from vflsec.core.message import ReleaseCount
from vflsec.results.records.schema import Block, Maybe, Number, Status


class StageDone(msgspec.Struct, frozen=True, kw_only=True):
    """States that a stage was run; it has no record."""

    method: str
    seed: int
    stage: str
    status: Status


class StageFacts(msgspec.Struct, kw_only=True, tag_field="kind", tag="stage", forbid_unknown_fields=True):
    """The facts of a stage."""

    stage: str
    status: Status = "ok"
    error: str | None = None
    history: Sequence[Maybe] = ()
    spread: Mapping[str, Maybe] = {}
    traffic: list[tuple[str, str, str, str, int]] = []
    releases: list[ReleaseCount] = []
    seconds: float = 0.0


class CellFacts(msgspec.Struct, kw_only=True, tag_field="kind", tag="cell", forbid_unknown_fields=True):
    """The facts of a cell.

    Attributes:
        history: the loss of each epoch, by phase.
        active_alone: the utility of a quick model of the active party's columns; None under defenses.
        quick_joint: the same of all columns, of seed 0.
        validation: the headline metric on validation rows, where a choice between trainings needs it.
        phase_seconds: of training, by phase; a phase that was loaded counts with the seconds that it took.
    """

    status: Status = "ok"
    error: str | None = None
    utility: Block | None = None
    history: Mapping[str, Sequence[Maybe]] = {}
    spread: dict[str, Mapping[str, Maybe]] = {}
    notes: list[str] = []
    active_alone: Maybe = None
    quick_joint: Maybe = None
    validation: Maybe = None
    reached: dict[str, Number] = {}
    traffic: list[tuple[str, str, str, str, int]] = []
    releases: list[ReleaseCount] = []
    seconds: float = 0.0
    phase_seconds: dict[str, float] = {}
