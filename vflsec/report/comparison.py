"""The table of a Comparison, for a terminal, as Markdown or as JSON."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from vflsec.base.errors import plain
from vflsec.report.table import NARROW, Cells, as_markdown, as_rich, number, signed, without
from vflsec.results.analysis.comparison import Comparison, Difference, Move

DETAILS = ("of", "leak before", "95 % interval")
"""The columns that are left out below ``NARROW`` columns."""

LONGEST = 34
"""The most characters of a setting that are shown."""


def tables(comparison: Comparison) -> list[Cells]:
    """Return the settings that differ, then how far each line has moved."""
    settings = [[one.name, _shown(one.before), _shown(one.after)] for one in comparison.settings]
    found = [Cells("Settings that differ", ["setting", "before", "after"], settings)] if settings else []
    several = len({(move.method, move.defense, move.strength) for move in comparison.moves}) > 1
    utility = any(move.utility.change is not None for move in comparison.moves)
    header = [*(["where"] if several else []), "attack", "of", "leak before", "leak after", "change", "95 % interval"]
    lines = [
        [
            *([_where(move)] if several else []),
            _name(move),
            move.target,
            number(move.leak.before),
            number(move.leak.after),
            *_change(move.leak),
            *([signed(move.utility.change)] if utility else []),
            _told(move),
        ]
        for move in comparison.moves
    ]
    lines = [list(line) for line in dict.fromkeys(map(tuple, lines))]  # curves share the row without a defense
    return [*found, Cells("What moved", [*header, *(["utility"] if utility else []), "status"], lines)]


def remarks(comparison: Comparison) -> list[str]:
    """Return the lines below the tables."""
    found = [] if comparison.settings else ["SAME settings, versions and data"]
    data = {setting.name: setting for setting in comparison.settings}.get("dataset")
    if data:
        found.append(
            f"WARNING different datasets, {data.before} and {data.after}: the changes are not those of a defense"
        )
    for title, lines in (("before", comparison.only_before), ("after", comparison.only_after)):
        found += [f"ONLY {title}: {', '.join(lines)}"] if lines else []
    return found


def rich(comparison: Comparison, width: int) -> RenderableType:
    """Return the tables for a terminal of ``width`` columns; in a narrow one, without what the others tell."""
    parts: list[RenderableType] = [Text(f"before: {comparison.before}"), Text(f"after:  {comparison.after}")]
    for cells in tables(comparison):
        parts += [Text(), as_rich(without(cells, DETAILS) if width < NARROW else cells, width)]
    return Group(*parts, Text(), *map(Text, remarks(comparison)))


def markdown(comparison: Comparison) -> str:
    """Return the tables as Markdown."""
    parts = [f"before: {comparison.before}", f"after: {comparison.after}"]
    parts += [f"{cells.title}\n\n{as_markdown(cells)}" for cells in tables(comparison)]
    return "\n\n".join([*parts, *remarks(comparison)]) + "\n"


def _where(move: Move) -> str:
    return f"{move.method}, {move.defense} {move.strength:g}" if move.strength else f"{move.method}, no defense"


def _name(move: Move) -> str:
    if move.attack != "worst":
        return move.attack
    before, after = move.choice
    return f"worst: {before}" if before == after else f"worst: {before}, then {after}"


def _change(found: Difference) -> tuple[str, str]:
    low, high = found.ci95
    return signed(found.change), "–" if low is None else f"{signed(low)} to {signed(high)}"


def _told(move: Move) -> str:
    """Return how the leak changed, in words."""
    if move.leak.change is None:
        return "no number to compare"
    rows = "" if move.rows[0] == move.rows[1] else f"; of {move.rows[0]}, then {move.rows[1]} rows"
    if not move.leak.told_apart:
        return f"not told apart{rows}"
    return f"{'more' if move.leak.change > 0 else 'less'} leak{rows}"


def _shown(value: str | None) -> str:
    text = "–" if value is None else plain(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
