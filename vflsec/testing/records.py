"""Records whose numbers are chosen by hand, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from vflsec.records.schema import AttackRun, BaselineResult, Result

ATTACK = AttackRun(name="mc", options={}, repr="mc()")


def made_result(**fields: Any) -> Result:
    """Return a result that ended well, with these fields."""
    common = {"key": "k", "cell": "c", "method": "fedsplitnn", "defenses": [], "seed": 0, "adversary": "passive_1"}
    return Result(**{**common, "attack": ATTACK, "status": "ok", **fields})


def made_baseline(**fields: Any) -> BaselineResult:
    """Return what an adversary reached alone, with these fields."""
    common = {"key": "k", "method": "fedsplitnn", "seed": 0, "adversary": "passive_1", "attack": ATTACK}
    return BaselineResult(**{**common, **fields})
