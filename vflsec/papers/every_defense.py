"""Rows of a recipe that are made from the registry: each defense of labels at two strengths."""

from __future__ import annotations

import math

from vflsec.core import hooks, registry
from vflsec.core.defense import Defense, touches
from vflsec.core.hooks import Runs
from vflsec.core.message import Kind
from vflsec.papers.grid import Table

UNDEFENDED = "no defense"


def of_labels() -> dict[str, type[Defense]]:
    """Return the built-in defenses of labels by name: the active party, which alone has them, carries these.

    They change the gradients that it sends, or how it learns from labels. Encryption of what it receives is no such
    defense.
    """
    known = {name: registry.load("defenses", name) for name in registry.entries("defenses")}
    return {
        name: kind
        for name, kind in known.items()
        if registry.origin("defenses", name) == "built in"
        and (kind.points[:1] == (Kind.GRADIENT,) or _in_learning(kind))
    }


def _in_learning(kind: type[Defense]) -> bool:
    return any(hook.run_by is Runs.ACTIVE for hook in touches(kind) - {hooks.PROTOCOL})


def strengths(kind: type[Defense]) -> tuple[float, ...]:
    """Return the first and the last of a defense's usual strengths."""
    return tuple(dict.fromkeys((kind.strengths[0], kind.strengths[-1])))


def swept() -> list[str]:
    """Return each defense of labels with its strengths, as settings name them."""
    return [f"{name}:lambda={','.join(map(repr, strengths(kind)))}" for name, kind in of_labels().items()]


def rows(columns: int) -> list[Table]:
    """Return the rows of a recipe: without a defense, then each defense at each of its strengths."""
    printed = [math.nan] * columns
    return [
        {"name": UNDEFENDED, "printed": printed},
        *(
            {"name": f"{name} {strength:.4g}", "printed": printed, "defense": name, "strength": strength}
            for name, kind in of_labels().items()
            for strength in strengths(kind)
        ),
    ]
