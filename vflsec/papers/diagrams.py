"""Diagrams of a reproduction: values over the columns, and utility against leak."""

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from vflsec.papers.recipe import Recipe
from vflsec.papers.recipe_grid import TableEntry
from vflsec.papers.verdicts import EQUAL, FAILS, HOLDS, OPEN, Verdict
from vflsec.report.curve import COLORS, MARKERS, Curve, fix_style
from vflsec.results.analysis.verdict import MEASURES
from vflsec.results.statistics import bound_over_seeds

STYLES = ("-", "--", "-.", ":")
VERDICT_COLORS = {HOLDS: "#1f5fa8", EQUAL: "#b9d3ee", FAILS: "#f0a04b", OPEN: "#eeeeee"}
"""Told apart by their lightness as well."""

WIDTH, HEIGHT = 3.9, 3.1
"""Of one diagram, in inches."""


@fix_style()
def draw_curves(recipe: Recipe, entries: Sequence[TableEntry]) -> Curve:
    """Return the values over the columns, one diagram for each group and panel, one line for each row.

    Bars are 95 % intervals over seeds; printed values are open points without a line.
    """
    panels: dict[tuple[str, str], dict[str, list[TableEntry]]] = {}
    for row in recipe.rows:
        of_row = [entry for entry in entries if (entry.group, entry.row) == (row.group, row.name)]
        panels.setdefault((row.group, row.panel), {})[row.curve or row.name] = of_row
    figure, grid = _draw_grid(len(panels), most=3 if len(panels) > 4 else 2)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    places, ticks = _place_columns([column.name for column in recipe.columns])
    step = min((b - a for a, b in pairwise(places)), default=1.0)
    for axes, ((group, panel), lines) in zip(grid, panels.items(), strict=True):
        for name, points in lines.items():
            k = names.index(name)
            aside = (k - (len(names) - 1) / 2) * min(0.03, 0.25 / len(names)) * step
            x = [place + aside for place in places]
            _draw_line(axes, x, points, k, within=step)
        metric = next((e.metric for points in lines.values() for e in points if e.metric), "")
        axes.set_ylabel(MEASURES.get(metric, metric))
        axes.set_xticks(places, ticks)
        axes.set_xlabel(recipe.axis)
        _finish(axes, _write_title(recipe, group, panel))
    handles = [_handle(k, name) for k, name in enumerate(names)]
    if any(entry.printed is not None for entry in entries):
        handles.append(Line2D([], [], color="#666666", marker="o", markerfacecolor="white", ls="none", label="printed"))
    return _add_legend(figure, handles, _title_all(recipe))


@fix_style()
def draw_tradeoff(recipe: Recipe, entries: Sequence[TableEntry]) -> Curve:
    """Return utility against leak: one diagram for each group and column of leaks, one line for each curve.

    Colors are curves and markers are strengths. Crosses are 95 % intervals over seeds; printed values are open.
    """
    leaks = [column.name for column in recipe.columns if recipe.get_question(recipe.rows[0], column).measure == "leak"]
    groups = list(dict.fromkeys(row.group for row in recipe.rows))
    names = list(dict.fromkeys(row.curve or row.name for row in recipe.rows))
    strengths = sorted({recipe.get_question(row, recipe.columns[0]).strength for row in recipe.rows})
    figure, grid = _draw_grid(len(groups) * len(leaks), most=len(leaks) if len(leaks) > 1 else 2)
    for axes, (group, leak) in zip(grid, ((group, leak) for group in groups for leak in leaks), strict=True):
        measures: dict[str, str] = {}
        alone = []
        for k, name in enumerate(names):
            measured, printed = [], []
            for row in recipe.rows:
                if row.group != group or (row.curve or row.name) != name:
                    continue
                by_column = {e.column: e for e in entries if (e.group, e.row) == (group, row.name)}
                utility, at = next(e for e in by_column.values() if e.measure == "utility"), by_column[leak]
                marker = MARKERS[strengths.index(recipe.get_question(row, recipe.columns[0]).strength) % len(MARKERS)]
                if utility.measured is not None and at.measured is not None:
                    measured.append((utility, at, marker))
                    measures |= {"x": utility.metric, "y": at.metric}
                if utility.printed is not None and at.printed is not None:
                    printed.append((utility.printed, at.printed, marker))
                if at.alone:
                    alone.append(bound_over_seeds(list(at.alone.values())).mean)
            _draw_curve(axes, measured, printed, k)
        if alone:
            axes.axhline(max(alone), color="#444444", linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
        axes.set_xlabel(f"utility: {MEASURES.get(measures.get('x', ''), measures.get('x', ''))} of the joint model")
        axes.set_ylabel(f"leak: {MEASURES.get(measures.get('y', ''), measures.get('y', ''))} of inferred labels")
        _finish(axes, _write_title(recipe, group, leak))
    _share_scales(grid, len(leaks))
    handles = [Line2D([], [], color=COLORS[k % 6], ls=STYLES[k // 6], label=name) for k, name in enumerate(names)]
    signs = [
        Line2D([], [], color="#555555", marker=MARKERS[k % len(MARKERS)], ls="none", ms=6, label=f"λ = {strength:g}")
        for k, strength in enumerate(strengths)
    ]
    if any(entry.alone for entry in entries):
        signs.append(Line2D([], [], color="#444444", ls=(0, (4, 3)), lw=1.1, label="adversary alone"))
    if any(entry.printed is not None for entry in entries):
        signs.append(Line2D([], [], color="#666666", marker="o", markerfacecolor="white", ls="none", label="printed"))
    figure.legend(handles=signs, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return _add_legend(figure, handles, _title_all(recipe), loc="outside lower left", ncols=3 if len(names) > 3 else 2)


@fix_style()
def draw_changes(recipe: Recipe, entries: Sequence[TableEntry]) -> Curve:
    """Return a heat map of the changes against one row: rows by columns of leaks.

    Those that are told from 0 have a color, red for the worse and blue for the better, which is full at the largest
    change of the column: columns differ in their measure.
    """
    columns = [c.name for c in recipe.columns if any(e.column == c.name and e.measure == "leak" for e in entries)]
    cells = {(e.row, e.column): e for e in entries if e.against and e.column in columns}
    rows = list(dict.fromkeys(row for row, _ in cells))
    most = {c: max((abs(e.measured or 0.0) for (_, at), e in cells.items() if at == c), default=0.0) for c in columns}
    shades = np.zeros((len(rows), len(columns)))
    figure = Curve(figsize=(2.2 + 1.0 * len(columns), 1.2 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for (row, column), entry in cells.items():
        i, j = rows.index(row), columns.index(column)
        if entry.measured is not None and entry.worse is not None:
            shades[i, j] = entry.measured / (most[column] or 1.0)
        color = "white" if abs(shades[i, j]) > 0.6 else "black"
        text = "–" if entry.measured is None else f"{entry.measured:+.3f}"
        axes.text(j, i, text, ha="center", va="center", color=color, fontsize=7)
    axes.imshow(shades, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    title = f"{_title_all(recipe)}: change of the advantage against {recipe.against}"
    figure.suptitle("\n".join(textwrap.wrap(title, 13 * len(columns))), x=0.01, ha="left", fontsize=10)
    return figure


@fix_style()
def draw_verdicts(verdicts: Sequence[Verdict]) -> Curve:
    """Return a map of claims by data: a color for each decision, and the claim's least favorable mean difference."""
    rows = list(dict.fromkeys((v.study, v.number, v.primary) for v in verdicts))
    columns = list(dict.fromkeys(v.data for v in sorted(verdicts, key=lambda v: v.data)))
    figure = Curve(figsize=(3.0 + 0.85 * len(columns), 1.6 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for v in verdicts:
        i, j = rows.index((v.study, v.number, v.primary)), columns.index(v.data)
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=VERDICT_COLORS[v.decision], edgecolor="white"))
        mean = min(link.mean for link in v.comparisons)
        text = f"{mean:+.3f}" if math.isfinite(mean) else "–"
        color = "white" if v.decision == HOLDS else "black"
        axes.text(j, i, text.replace("-", "−"), ha="center", va="center", fontsize=7, color=color)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), ["\n".join(textwrap.wrap(name, 12)) for name in columns], fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{study} {n}{'*' * first}" for study, n, first in rows], fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, label=name) for name, color in VERDICT_COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


@fix_style()
def draw_cells(recipe: Recipe, entries: Sequence[TableEntry]) -> Curve:
    """Return printed and measured values with their intervals, a diagram for each group."""
    groups = list(dict.fromkeys(entry.group for entry in entries))
    columns = [column.name for column in recipe.columns]
    longest = max(len({e.row for e in entries if e.group == group}) for group in groups)
    figure = Curve(
        figsize=(max(7.0, 1.5 + 3.2 * len(groups)), 2.2 + 0.22 * longest * min(len(columns), 4)), layout="constrained"
    )
    grid = figure.subplots(1, len(groups), squeeze=False)
    for axes, group in zip(grid[0], groups, strict=True):
        of_group = [entry for entry in entries if entry.group == group]
        rows = list(dict.fromkeys(entry.row for entry in of_group))
        for entry in of_group:
            k = columns.index(entry.column)
            y = rows.index(entry.row) + (k - (len(columns) - 1) / 2) * 0.7 / len(columns)
            color = COLORS[k % len(COLORS)]
            if entry.printed is not None:
                axes.plot([entry.printed], [y], "o", color=color, markerfacecolor="white", ms=4)
            if entry.measured is not None:
                low = entry.measured if entry.low is None else entry.low
                high = entry.measured if entry.high is None else entry.high
                axes.plot([low, high], [y, y], color=color, linewidth=1)
                axes.plot([entry.measured], [y], "o", color=color, ms=4)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_title(group, loc="left", fontsize=9)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for k, column in enumerate(columns):
        grid[0][0].plot([], [], "o", color=COLORS[k % len(COLORS)], label=column)
    grid[0][0].plot([], [], "o", color="#666666", markerfacecolor="white", label="open: printed")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle("\n".join(textwrap.wrap(recipe.title, 90)), x=0.01, ha="left", fontsize=10)
    return figure


def _draw_curve(
    axes: Axes,
    measured: Sequence[tuple[TableEntry, TableEntry, str]],
    printed: Sequence[tuple[float, float, str]],
    k: int,
) -> None:
    color, style = COLORS[k % len(COLORS)], STYLES[k // len(COLORS)]
    for x, y, marker in printed:
        axes.plot([x], [y], marker, color=color, markerfacecolor="white", ms=5, zorder=2 + k)
    if not measured:
        return
    path = [(utility.measured or 0.0, leak.measured or 0.0) for utility, leak, _ in measured]
    axes.plot(*zip(*path, strict=True), style, color=color, linewidth=1.2, alpha=0.8, zorder=2 + k)
    for utility, leak, marker in measured:
        a, b = utility.measured or 0.0, leak.measured or 0.0
        axes.plot(_get_ends(utility), [b, b], color=color, linewidth=0.8, alpha=0.35, zorder=1.5)
        axes.plot([a, a], _get_ends(leak), color=color, linewidth=0.8, alpha=0.35, zorder=1.5)
        axes.plot([a], [b], marker, color=color, ms=6.5, markeredgecolor="white", markeredgewidth=0.7, zorder=20 + k)


def _draw_line(axes: Axes, x: Sequence[float], entries: Sequence[TableEntry], k: int, within: float) -> None:
    color, marker = COLORS[k % len(COLORS)], _get_marker(k)
    there = [(place, entry) for place, entry in zip(x, entries, strict=True) if entry.measured is not None]
    for place, entry in there:
        axes.plot([place, place], _get_ends(entry), color=color, linewidth=0.9, alpha=0.5, zorder=1.5)
    axes.plot(
        [place for place, _ in there],
        [entry.measured or 0.0 for _, entry in there],
        STYLES[k // len(COLORS)],
        color=color,
        marker=marker,
        ms=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linewidth=1.3,
        zorder=3 + k,
    )
    for place, entry in zip(x, entries, strict=True):
        if entry.printed is not None:
            axes.plot([place + 0.02 * within], [entry.printed], marker, color=color, markerfacecolor="white", ms=3.5)


def _get_ends(entry: TableEntry) -> list[float]:
    """Return the ends of the interval; the mean twice where there is none."""
    mean = entry.measured or 0.0
    return [mean if entry.low is None else entry.low, mean if entry.high is None else entry.high]


def _get_marker(k: int) -> str:
    return MARKERS[(k + k // len(COLORS)) % len(MARKERS)]


def _handle(k: int, name: str) -> Line2D:
    return Line2D([], [], color=COLORS[k % len(COLORS)], ls=STYLES[k // len(COLORS)], marker=_get_marker(k), label=name)


def _place_columns(names: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return where columns stand on the x axis: at their numbers, or else evenly."""
    try:
        return [float(name.removesuffix("%").strip()) for name in names], list(names)
    except ValueError:
        return [float(k) for k in range(len(names))], list(names)


def _draw_grid(panels: int, most: int) -> tuple[Curve, list[Axes]]:
    across = min(panels, most)
    down = -(-panels // across)
    figure = Curve(figsize=(WIDTH * across + 0.3, HEIGHT * down + 0.9), layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in grid[panels:]:
        axes.set_visible(False)
    return figure, grid[:panels]


def _share_scales(grid: Sequence[Axes], across: int) -> None:
    """Give the diagrams of one group, which are side by side, the same scales."""
    for line in (grid[k : k + across] for k in range(0, len(grid), across)):
        low, high = np.min([axes.get_ylim() for axes in line]), np.max([axes.get_ylim() for axes in line])
        for axes in line:
            axes.set_ylim(low, high)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.1)


def _write_title(recipe: Recipe, group: str, panel: str) -> str:
    """Return the title of one diagram: the group, unless it is the only one, and what else tells diagrams apart."""
    several = len({row.group for row in recipe.rows}) > 1
    return ", ".join(filter(None, (_name_group(recipe, group) if several else "", panel)))


def _title_all(recipe: Recipe) -> str:
    """Return the title of a picture, with the data if all of it is of one group."""
    groups = {row.group for row in recipe.rows}
    return f"{recipe.title} ({_name_group(recipe, *groups)})" if len(groups) == 1 and any(groups) else recipe.title


def _name_group(recipe: Recipe, group: str) -> str:
    """Return the name of a group, after that of the data that stand in for it."""
    part = next((part for part in recipe.groups if part.name == group), None)
    return f"{part.settings.get('dataset')} for {group}" if part and part.original else group


def _add_legend(
    figure: Curve,
    handles: Sequence[Line2D],
    title: str,
    loc: Literal["outside lower center", "outside lower left"] = "outside lower center",
    ncols: int = 0,
) -> Curve:
    columns = ncols or max(2, min(5, int(figure.get_size_inches()[0] / 1.55)))
    figure.legend(handles=list(handles), loc=loc, ncols=columns, frameon=False, fontsize=9)
    wide = int(figure.get_size_inches()[0] * 11)
    figure.suptitle("\n".join(textwrap.wrap(title, wide)), x=0.01, ha="left", fontsize=11)
    return figure
