"""A paper's table beside what was measured, in the paper's arrangement."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from vflsec.base.checks import count
from vflsec.papers import diagrams
from vflsec.papers.model_pictures import draw_models
from vflsec.papers.recipe import Recipe
from vflsec.papers.recipe_grid import CellValues, RecipeGrid, TableEntry
from vflsec.report import formats
from vflsec.report.curve import Curve, save
from vflsec.report.formats import NARROW, Cells
from vflsec.results.analysis.intervals import get_longer_side
from vflsec.results.statistics import Interval, bound_over_seeds

WORSE, BETTER = "▲", "▽"

NAMES = {"auc": "AUC", "accuracy": "accuracy", "f1": "F1", "ks": "KS"}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """How the pairs that the paper compares are ordered here.

    Attributes:
        same: pairs that differ as printed, told apart by their paired differences over seeds.
        other: pairs that differ the other way round, told apart.
        open: pairs that are not told apart.
    """

    group: str
    same: int
    other: int
    open: int


class Reproduction:
    """The result of a recipe.

    Args:
        name: of the recipe.
        recipe: as it was run.
        cells: what was measured at each.
        job: whose trained models a picture shows; None where there are none.
    """

    def __init__(self, name: str, recipe: Recipe, cells: Sequence[CellValues], job: RecipeGrid | None = None) -> None:
        self.name, self.recipe, self.job = name, recipe, job
        rows = recipe.rows
        base = {
            (rows[cell.row].group, cell.column): cell.by_seed for cell in cells if rows[cell.row].name == recipe.against
        }
        self.entries = [_make_entry(recipe, cell, base.get((rows[cell.row].group, cell.column))) for cell in cells]

    def orders(self) -> list[Order]:
        """Return for each group how many pairs differ as printed; of changes none, which are compared with a row."""
        if self.recipe.against:
            return []
        pairs = [
            (a, b)
            for a, b in combinations(self.entries, 2)
            if a.group == b.group and (a.column == b.column if self.recipe.compared == "rows" else a.row == b.row)
        ]
        by_group: dict[str, list[int]] = {}
        for a, b in pairs:
            if a.printed is None or b.printed is None or a.printed == b.printed:
                continue
            counts = by_group.setdefault(a.group, [0, 0, 0])
            counts[_compare(a, b)] += 1
        return [Order(group=g, same=c[0], other=c[1], open=c[2]) for g, c in by_group.items()]

    def cells(self, *, narrow: bool = False) -> Cells:
        """Return the table: measured, its 95 % interval, and in brackets what is printed and the difference.

        Without intervals if ``narrow`` and all is measured against one row.
        """
        several = any(entry.group for entry in self.entries)
        bare = narrow and bool(self.recipe.against)
        rows: dict[tuple[str, str], list[str]] = {}
        for entry in self.entries:
            names = [entry.group, entry.row] if several else [entry.row]
            rows.setdefault((entry.group, entry.row), names).append(_format_entry(entry, bare=bare))
        header = [*(["data"] if several else []), "", *(column.name for column in self.recipe.columns)]
        difference = ", difference" if any(entry.difference is not None for entry in self.entries) else ""
        title = f"{self.recipe.title}: measured ± 95 % (printed{difference})"
        if self.recipe.against:
            title = f"{self.recipe.title}: change against {self.recipe.against}{'' if narrow else ' ± 95 %'}"
        return Cells.from_texts(title, header, list(rows.values()))

    def remarks(self) -> list[str]:
        """Return what stands below the table: stand-ins, orders, and what else differs from the paper."""
        shown = {entry.group for entry in self.entries}
        lines = [
            f"STAND-IN {group.name}: measured on {group.settings.get('dataset')}, for want of {group.original}; only "
            f"orders can be compared"
            for group in self.recipe.groups
            if group.original and group.name in shown
        ]
        for order in self.orders():
            where = f" of {order.group}" if order.group else ""
            total = order.same + order.other + order.open
            lines.append(
                f"ORDER{where}: of {total} pairs that differ in print, {order.same} differ so here, {order.other} the "
                f"other way round, {order.open} are not told apart (95 %, paired over seeds)"
            )
        lines += _format_alone(self.entries)
        lines += self._count_worse()
        has_phase = [entry for entry in self.entries if entry.seeds or entry.measure != "hours"]
        lost = [entry for entry in has_phase if entry.seeds < self.recipe.seeds]
        if lost:
            cells = ", ".join(f"{entry.row} at {entry.column}" for entry in lost[:5])
            reason = (
                "they diverged or collapsed, or missed the target"
                if any(entry.measure == "megabytes" for entry in lost)
                else "they diverged or collapsed"
            )
            lines.append(f"LOST seeds at {len(lost)} cells, for example {cells}: {reason}")
        return [*lines, *(f"NOTE {note}" for note in self.recipe.notes)]

    def _count_worse(self) -> list[str]:
        """Return which risks some defense makes worse, and how many marks are to be expected by chance."""
        changes = [entry for entry in self.entries if entry.against and entry.low is not None]
        marks = f"MARKS {WORSE} worse, {BETTER} better: the 95 % interval over seeds of the paired change excludes 0"
        if not changes or not self.recipe.has_attacks:
            return [marks] * bool(changes)
        by_column: dict[str, list[str]] = {}
        for entry in changes:
            if entry.worse and entry.measure == "leak":
                by_column.setdefault(entry.column, []).append(entry.row)
        lines = [f"WORSE {column} ({WORSE}): {', '.join(rows)}" for column, rows in by_column.items()]
        wide = f"a change of less than its ± is not seen with {count(self.recipe.seeds, 'seed')}"
        lines = lines or [f"WORSE nowhere beyond noise, compared with {self.recipe.against}; {wide}"]
        chance = 0.025 * sum(entry.measure == "leak" for entry in changes)
        return [
            *lines,
            f"{marks}; of the columns of risks, about {chance:.1f} of each are to be expected by chance",
        ]

    @property
    def heading(self) -> str:
        """The source, what is measured, and the number of seeds."""
        recipe = self.recipe
        asked = [recipe.get_question(row, column) for row in recipe.rows for column in recipe.columns]
        metrics = dict.fromkeys(
            NAMES.get(entry.metric, entry.metric)
            for entry in self.entries
            if entry.metric and entry.measure == "utility"
        )
        of = f" ({', '.join(metrics)})" if metrics else ""
        what = {
            "utility": f"utility{of}",
            "leak": "leak by {}",
            "alone": "what is inferred alone",
            "cap": "CAP against {}",
            "hours": "hours of training",
            "megabytes": "megabytes until the target is reached",
        }
        if recipe.against and recipe.has_attacks:
            shown = {"what each adversary gains over itself alone, chance or honest training": None}
        else:
            shown = dict.fromkeys(what[entry.measure].format(entry.attack) for entry in asked)
        return f"{recipe.source} · {', '.join(shown)} · {count(recipe.seeds, 'seed')}"

    def rich(self, width: int) -> RenderableType:
        """Return the table for a terminal of ``width`` columns."""
        narrow = width < NARROW
        shown = formats.as_rich(self.cells(narrow=narrow), width if narrow else None)
        remarks = self.remarks()
        if narrow and self.recipe.against:
            remarks.append(f"NOT SHOWN intervals: widen the terminal to {NARROW} columns, or add --format markdown")
        return Group(Text(self.heading), Text(), shown, Text(), *map(Text, remarks))

    def table(self, width: int = 140) -> str:
        """Return the table as text of at most ``width`` columns."""
        return formats.as_text(self.rich(width), width)

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        cells = self.cells()
        return "\n\n".join([self.heading, f"{cells.title}\n\n{formats.as_markdown(cells)}", *self.remarks()]) + "\n"

    def to_latex(self) -> str:
        r"""Return the table as LaTeX, for ``\usepackage{booktabs}``."""
        comments = "\n".join(f"% {line}" for line in [self.heading, *self.remarks()])
        return f"{comments}\n\n{formats.as_latex(self.cells())}\n"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per cell of the table."""
        return pd.DataFrame([msgspec.to_builtins(entry) for entry in self.entries]).drop(columns=["by_seed", "alone"])

    def to_csv(self) -> str:
        """Return the rows of ``to_frame``."""
        return str(self.to_frame().to_csv(index=False, lineterminator="\n"))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe's name and source, its cells and orders."""
        return {
            "recipe": self.name,
            "source": self.recipe.source,
            "measure": self.recipe.measure,
            "cells": [{**msgspec.to_builtins(entry, str_keys=True), "worse": entry.worse} for entry in self.entries],
            "orders": msgspec.to_builtins(self.orders()),
            "notes": self.remarks(),
        }

    def to_json(self) -> str:
        """Return one JSON object."""
        return msgspec.json.encode(self.to_dict()).decode()

    def plot(self) -> Curve:
        """Return the recipe's picture; by default printed and measured values, a diagram for each group."""
        picture = self.recipe.picture
        if picture == "curves":
            return diagrams.draw_curves(self.recipe, self.entries)
        if picture == "tradeoff":
            return diagrams.draw_tradeoff(self.recipe, self.entries)
        if picture == "changes":
            return diagrams.draw_changes(self.recipe, self.entries)
        return draw_models(self.job) if picture and self.job else diagrams.draw_cells(self.recipe, self.entries)

    def save_curve(self, folder: Path | str) -> list[Path]:
        """Write ``curve.svg`` and ``curve.png`` into ``folder``."""
        return save(self.plot(), Path(folder))

    def __repr__(self) -> str:
        """Show the table."""
        return self.table()


def _make_entry(recipe: Recipe, cell: CellValues, base: Mapping[int, float] | None = None) -> TableEntry:
    """Return what was measured, or the change against ``base`` for another row."""
    row, column = recipe.rows[cell.row], recipe.columns[cell.column]
    values, against = cell.by_seed, ""
    if base is not None and row.name != recipe.against:
        values = {seed: value - base[seed] for seed, value in cell.by_seed.items() if seed in base}
        against = recipe.against
    interval = bound_over_seeds(list(values.values())) if values else None
    printed = None if math.isnan(row.printed[cell.column]) else row.printed[cell.column]
    measure = recipe.get_question(row, column).measure
    least, most = 0.0, math.inf if measure in ("hours", "megabytes") else 1.0
    if recipe.against:
        least, most = -math.inf, math.inf
    alone = interval is None or interval.n < 2
    group = recipe.group_of(row)
    stands_in = bool(group and group.original) or measure == "hours"  # of another machine
    return TableEntry(
        group=row.group,
        row=row.name,
        column=column.name,
        printed=printed,
        measured=interval.mean if interval else None,
        low=None if alone or interval is None else max(least, interval.low),
        high=None if alone or interval is None else min(most, interval.high),
        difference=interval.mean - printed if interval and printed is not None and not stands_in else None,
        seeds=len(cell.by_seed),
        metric=cell.metric,
        by_seed=cell.by_seed,
        measure=measure,
        against=against,
        alone=cell.alone,
    )


def _format_alone(entries: Sequence[TableEntry]) -> list[str]:
    """Return for each group and column of leaks what the adversary reaches alone, by the best of all rows."""
    best: dict[tuple[str, str], Interval] = {}
    for entry in entries:
        place = entry.group, entry.column
        if entry.alone:
            mean = bound_over_seeds(list(entry.alone.values()))
            best[place] = max(best.get(place, mean), mean, key=lambda interval: interval.mean)
    return [
        f"ALONE in {column}{f' of {group}' if group else ''}: {formats.write_number(interval.mean)} without joining"
        for (group, column), interval in best.items()
    ]


def _compare(a: TableEntry, b: TableEntry) -> int:
    """Return 0 if two cells differ as printed, 1 if the other way round, 2 if they are not told apart."""
    both = a.by_seed.keys() & b.by_seed.keys()
    if len(both) < 2:
        return 2
    difference: Interval = bound_over_seeds([a.by_seed[seed] - b.by_seed[seed] for seed in both])
    if difference.low <= 0 <= difference.high:
        return 2
    return 0 if (difference.mean > 0) == ((a.printed or 0.0) > (b.printed or 0.0)) else 1


def _format_entry(entry: TableEntry, *, bare: bool = False) -> str:
    if entry.against:
        mark = {True: f" {WORSE}", False: f" {BETTER}", None: ""}[entry.worse]
        spread = "" if bare else formats.spread(entry.measured, (entry.low, entry.high))
        expected = "" if entry.printed is None else f" (expected {formats.format_signed(entry.printed)})"
        return f"{formats.format_signed(entry.measured)}{spread}{mark}{expected}"
    number = _format_hours if entry.measure == "hours" else formats.write_number
    margin = None if bare else get_longer_side(entry.measured, (entry.low, entry.high))
    spread = "" if margin is None else f" ±{number(margin)}"
    difference = "" if entry.difference is None else f", {formats.format_signed(entry.difference)}"
    printed = "" if entry.printed is None else f" ({number(entry.printed)}{difference})"
    return f"{number(entry.measured)}{spread}{printed}"


def _format_hours(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"
