"""All attacks beside *alone*: a dot with its interval for each attack, a panel for each defense."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vflsec.report.curve import COLORS, GRAY, fix_style, get_margins
from vflsec.report.table import show_most
from vflsec.results.analysis.results import Point, Summary, name_defense

MAX_PANELS, MAX_ROWS = 6, 40
"""What is beyond is in the table."""


@fix_style()
def draw_attacks(summary: Summary) -> Figure | None:
    """Return a panel for each defense and strength, colored by target; None without a number."""
    panels = _group_points(summary)
    rows = _order_attacks(panels)
    if not rows:
        return None
    targets = list(dict.fromkeys(point.target for points in panels.values() for point in points))
    colors = {target: COLORS[k % len(COLORS)] for k, target in enumerate(targets)}
    width, height = 3.2 + 2.1 * len(panels), 1.5 + 0.24 * len(rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    every = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, points) in zip(every, panels.items(), strict=True):
        axes.set_title(title, fontsize=9)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        for point in points:
            if point.attack in rows:
                y, color = rows.index(point.attack), colors[point.target]
                fill = "white" if point.leak.rows == "train" else color
                axes.errorbar(
                    [point.leak.mean], [y], xerr=get_margins([point.leak]), fmt="o", markersize=5, color=color,
                    markerfacecolor=fill,
                )  # fmt: skip
                if point.leak.alone is not None:
                    axes.plot([point.leak.alone] * 2, [y - 0.4, y + 0.4], color=GRAY, linewidth=2, zorder=0)
    every[0].set_yticks(range(len(rows)), rows, fontsize=8)
    every[0].set_ylim(len(rows) - 0.4, -0.6)
    every[0].set_xlim(left=max(-0.05, every[0].get_xlim()[0]), right=min(1.05, every[0].get_xlim()[1]))
    figure.supxlabel("leak", fontsize=9)
    marks = [Line2D([], [], color=colors[target], marker="o", linestyle="", label=target) for target in targets]
    marks.append(
        Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="training rows")
    )
    marks.append(Line2D([], [], color=GRAY, marker="|", markersize=10, markeredgewidth=2, linestyle="", label="alone"))
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), fontsize=8, frameon=False)
    return figure


def _group_points(summary: Summary) -> dict[str, list[Point]]:
    """Return the points with a number by panel; the one without a defense is first, and once for each method.

    A point that gains most on training rows is drawn with its leak on these.
    """
    several = len({point.method for point in summary.points}) > 1
    panels: dict[str, dict[str, Point]] = {}
    for point in sorted(summary.points, key=lambda point: point.strength > 0):
        if point.leak.mean is not None:
            title = name_defense(point, summary.undefended)
            title = f"{point.method}\n{title}" if several else title
            panels.setdefault(title, {}).setdefault(point.attack, show_most(point))
    return {title: list(points.values()) for title, points in list(panels.items())[:MAX_PANELS]}


def _order_attacks(panels: dict[str, list[Point]]) -> list[str]:
    """Return the attacks, by falling leak of the panel where each leaks most."""
    most: dict[str, float] = {}
    for points in panels.values():
        for point in points:
            most[point.attack] = max(most.get(point.attack, -1.0), point.leak.mean or 0.0)
    return sorted(most, key=most.__getitem__, reverse=True)[:MAX_ROWS]
