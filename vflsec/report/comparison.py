"""The table of a Comparison, for a terminal, as Markdown or as JSON."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from vflsec.base.errors import plain
from vflsec.report.formats import NARROW, Cells, Column, as_markdown, as_rich, number, signed
from vflsec.report.table import TARGET
from vflsec.results.analysis.comparison import Comparison, Move

LONGEST = 34
"""The most characters of a setting that are shown."""

SETTINGS = (
    Column("", lambda setting: setting.name, "setting"),
    Column("", title="before", cell=lambda setting: _cut(setting.before), kind="prose"),
    Column("", title="after", cell=lambda setting: _cut(setting.after), kind="prose"),
)


def _name(move: Move) -> str:
    if move.attack != "worst":
        return move.attack
    before, after = move.choice
    return f"worst: {before}" if before == after else f"worst: {before}, then {after}"


def _place(move: Move) -> str:
    return f"{move.method}, {move.defense} {move.strength:g}" if move.strength else f"{move.method}, no defense"


def _interval(move: Move) -> str:
    low, high = move.leak.ci95
    return "–" if low is None else f"{signed(low)} to {signed(high)}"


def _status(move: Move) -> str:
    """Return how the leak changed, in words."""
    if move.leak.change is None:
        return "no number to compare"
    rows = "" if move.rows[0] == move.rows[1] else f"; of {move.rows[0]}, then {move.rows[1]} rows"
    if not move.leak.told_apart:
        return f"not told apart{rows}"
    return f"{'more' if move.leak.change > 0 else 'less'} leak{rows}"


PLACE = Column("", title="where", cell=_place)
UTILITY = Column("", title="utility", cell=lambda move: signed(move.utility.change))
MOVES = (
    PLACE,
    Column("", title="attack", cell=_name, kind="prose"),
    TARGET._replace(detail=1),
    Column("", title="leak before", cell=lambda move: number(move.leak.before), detail=1),
    Column("", title="leak after", cell=lambda move: number(move.leak.after)),
    Column("", title="change", cell=lambda move: signed(move.leak.change)),
    Column("", title="95 % interval", cell=_interval, detail=1),
    UTILITY,
    Column("", title="status", cell=_status, kind="prose"),
)


def tables(comparison: Comparison) -> list[Cells]:
    """Return the settings that differ, then how far each line has moved."""
    hidden = []
    if len({(move.method, move.defense, move.strength) for move in comparison.moves}) <= 1:
        hidden.append(PLACE)
    if all(move.utility.change is None for move in comparison.moves):
        hidden.append(UTILITY)
    moved = Cells.fill("What moved", [column for column in MOVES if column not in hidden], comparison.moves)
    moved = moved._replace(rows=list(dict.fromkeys(map(tuple, moved.rows))))  # curves share the row without a defense
    changed = Cells.fill("Settings that differ", SETTINGS, comparison.settings)
    return [changed, moved] if comparison.settings else [moved]


def remarks(comparison: Comparison) -> list[str]:
    """Return the lines below the tables."""
    lines = [] if comparison.settings else ["SAME settings, versions and data"]
    data = next((setting for setting in comparison.settings if setting.name == "dataset"), None)
    if data:
        lines.append(
            f"WARNING different datasets, {data.before} and {data.after}: the changes are not those of a defense"
        )
    for title, names in (("before", comparison.only_before), ("after", comparison.only_after)):
        lines += [f"ONLY {title}: {', '.join(names)}"] if names else []
    return lines


def rich(comparison: Comparison, width: int) -> RenderableType:
    """Return the tables for a terminal of ``width`` columns; in a narrow one, without what the others tell."""
    parts: list[RenderableType] = [Text(f"before: {comparison.before}"), Text(f"after:  {comparison.after}")]
    for cells in tables(comparison):
        parts += [Text(), as_rich(cells.narrowed() if width < NARROW else cells, width)]
    return Group(*parts, Text(), *map(Text, remarks(comparison)))


def markdown(comparison: Comparison) -> str:
    """Return the tables as Markdown."""
    parts = [f"before: {comparison.before}", f"after: {comparison.after}"]
    parts += [f"{cells.title}\n\n{as_markdown(cells)}" for cells in tables(comparison)]
    return "\n\n".join([*parts, *remarks(comparison)]) + "\n"


def _cut(value: str | None) -> str:
    text = "–" if value is None else plain(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
