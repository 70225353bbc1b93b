"""Records with given numbers, for tests of the analysis."""

from __future__ import annotations

from typing import Any

from vflsec.results.records.schema import AttackRun, BaselineResult, Result

ATTACK = AttackRun(name="mc", options={}, repr="mc()")


def made_result(**fields: Any) -> Result:
    """Return a result of status ok, with these fields."""
    common = {"key": "k", "cell": "c", "method": "fedsplitnn", "defenses": [], "seed": 0, "adversary": "passive_1"}
    return Result(**{**common, "attack": ATTACK, "status": "ok", **fields})


def made_baseline(**fields: Any) -> BaselineResult:
    """Return a baseline of status ok, with these fields."""
    common = {"key": "k", "method": "fedsplitnn", "seed": 0, "adversary": "passive_1", "attack": ATTACK}
    return BaselineResult(**{**common, **fields})
