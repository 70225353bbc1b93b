"""The privacy-utility curve: utility on x, leak on y, one line per method and defense, strengths at the points.

A second picture has all attacks beside *alone*: a dot with its interval for each attack, a panel for each defense.
"""

import io
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.style import context
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from vflsec.base import files
from vflsec.base.checks import count, group
from vflsec.report.columns import drop_column
from vflsec.report.table import show_most
from vflsec.results.analysis.results import Measure, Place, Point, Summary, name_defense
from vflsec.results.analysis.verdict import MEASURES

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's colors, told apart by color-blind readers; markers and line styles differ too."""

MARKERS = ("o", "s", "^", "D", "v", "P")
INFERRED = {
    "labels": "of the inferred labels",
    "attribute": "of the inferred attribute",
    "features": "of the recovered columns",
    "text": "recovered",
    "membership": "of who was trained on",
    "parameters": "of one party's parameters",
    "exposure": "of what lies open without a guess",
}

MAX_TARGETS, MAX_CURVES = 6, 24
"""More diagrams, or more curves in one, are not drawn: nobody could read them, and drawing takes long."""

MAX_PANELS, MAX_ROWS, ACROSS = 25, 40, 5
"""Panels and rows of the picture of all attacks, what is beyond is in the table; and panels side by side."""

MAX_DIAGRAMS_IN_ROW, MAX_DIAGRAMS_IN_SHARED_ROW = 2, 3
"""Diagrams of one report, and of several, side by side; the others are below."""

MANY = 6
"""Beside the points of more curves than these nothing is written."""

MAX_NOTES = 2
"""So many notes are written above a diagram."""

NEAR = 0.01
"""Points whose utility and leak differ by less lie on each other."""

_PATH = re.compile(r"[^,]*\.py:")

GRAY = "#999999"

NARROW = 0.1
"""Leaks that lie closer than this are drawn on an axis as long as this, or noise would look like a difference."""

AROUND = [(x * far, y * far) for far in (1, 2) for x, y in ((8, -9), (-8, 9), (8, 9), (-8, -9), (0, -11), (0, 11))]
"""Where a label may stand from its point, in points; the first that covers least is taken."""

LABEL, MARKER, LINE = 100, 10, 1
"""How bad it is to cover one of these."""

SIZE = 3
"""Of half a marker, in dots."""


class Line(NamedTuple):
    """One curve as drawn, and what is written beside each point.

    Attributes:
        label: in the legend: the method, where there are several, the defense, and the attack, where there are several.
        points: by strength, each with a number.
        attacks: the strongest attack at each strength, where it is of several.
        written: whether anything is written beside the points.
    """

    label: str
    points: Sequence[Point]
    attacks: Sequence[str]
    written: bool = True

    @property
    def utility(self) -> list[float]:
        """The mean at each strength."""
        return [p.utility.mean or 0.0 for p in self.points]

    @property
    def leak(self) -> list[float]:
        """The mean at each strength."""
        return [p.leak.mean or 0.0 for p in self.points]

    @property
    def strengths(self) -> list[float]:
        """The strength of each point."""
        return [p.strength for p in self.points]

    @property
    def training(self) -> list[bool]:
        """Whether the leak is on training rows alone, at each strength."""
        return [p.leak.rows == "train" for p in self.points]

    @property
    def seeds(self) -> list[str]:
        """How many seeds gave a number (``3/5``), where not all did."""
        counts = [(p.leak.n, sum(p.statuses.values())) for p in self.points]
        return ["" if n == seeds else f"{n}/{seeds}" for n, seeds in counts]


def list_lines(points: Sequence[Point]) -> list[Line]:
    """Return the curve of each method, defense and attack; a point without a number is left out."""
    several = len({p.attack for p in points}) > 1
    curves = group(_select_measured(points), lambda p: _name(p, points) + (f", {p.attack}" if several else ""))
    return [Line(label, curve, [""] * len(curve)) for label, curve in curves.items()]


def list_headlines(worst: Sequence[Point]) -> list[Line]:
    """Return the curve of each method and defense: the headline, which at each strength is of some attack, or *alone*.

    A headline without a number is left out.
    """
    curves = group(_select_measured(worst), lambda p: _name(p, worst))
    return [Line(label, curve, [p.choice for p in curve]) for label, curve in curves.items()]


def _select_measured(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if p.utility.mean is not None and p.leak.mean is not None]


def _name(point: Point, among: Sequence[Point]) -> str:
    """The defense, and the method where it could be another; both where there is one curve, which needs a name."""
    methods, defenses = ({getattr(p, field) for p in among} for field in ("method", "defense"))
    method, defense = _shorten(point.method, methods), _shorten(point.defense, defenses)
    return defense if len(methods) == 1 < len(defenses) else f"{method}, {defense}"


def _shorten(name: str, among: Collection[str]) -> str:
    """The name without the path of a file, unless two of them would be called the same."""
    short = {full: _PATH.sub("", full) for full in among}
    return short[name] if len(set(short.values())) == len(short) else name


@contextmanager
def fix_style() -> Iterator[None]:
    """Ignore the user's matplotlibrc, and give the same summary the same bytes."""
    with context("default"), rc_context({"svg.hashsalt": "vflsec", "svg.fonttype": "none", "text.parse_math": False}):
        yield


class Curve(Figure):
    """A figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        return _to_bytes(self, format="png", dpi=110)


def _limit_curves(summary: Summary) -> Summary:
    """Return ``summary`` with as many targets and curves as a picture can show, and a note on how many it omits."""
    targets = list(dict.fromkeys(p.target for p in summary.points))
    curves = list(dict.fromkeys((p.method, p.defense) for p in summary.points))
    omitted = [
        f"{len(all_) - most} {what} of {len(all_)} are not drawn: see the table"
        for all_, most, what in ((targets, MAX_TARGETS, "targets"), (curves, MAX_CURVES, "curves"))
        if len(all_) > most
    ]
    if not omitted:
        return summary
    kept_targets, kept_curves = set(targets[:MAX_TARGETS]), set(curves[:MAX_CURVES])

    def select(points: Sequence[Point]) -> list[Point]:
        return [p for p in points if p.target in kept_targets and (p.method, p.defense) in kept_curves]

    return msgspec.structs.replace(
        summary, points=select(summary.points), worst=select(summary.worst), notes=[*omitted, *summary.notes]
    )


@fix_style()
def draw(*summaries: Summary) -> Curve:
    """Return the figure: one diagram for each summary and target, since leaks of different things differ in measure.

    Of many targets or curves only the first are drawn, and a note says how many are not; the Pareto front is of all.
    The diagrams of several summaries share a legend if it says the same of each.
    """
    panels: list[tuple[Summary, str, list[Point]]] = []
    for summary in map(_limit_curves, summaries):
        targets = group(map(show_most, summary.points), lambda p: p.target)
        panels += [(summary, target, points) for target, points in targets.items()]
    figure = Curve(layout="constrained")
    if not panels:
        figure.text(0.5, 0.5, "nothing is inferred: attacks on integrity have a table of their own", ha="center")
    widths = []
    across = min(len(panels), MAX_DIAGRAMS_IN_ROW if len(summaries) == 1 else MAX_DIAGRAMS_IN_SHARED_ROW)
    for number, (summary, target, points) in enumerate(panels, start=1):
        axes = figure.add_subplot(-(-len(panels) // across), across, number)
        several = _draw_target(axes, points, [p for p in summary.worst if p.target == target], summary.undefended)
        if summary.ranks:
            crowded = len({(p.method, p.defense) for p in points}) > MANY
            along = [place for place in summary.front if place.target == target]
            _draw_front(axes, along, summary.undefended, named=crowded)
        beside = several or len({p.attack for p in points}) > 1
        _draw_legend(axes, beside=several)
        widths.append(9.6 if beside else 7.0)
        measures = [p.leak.metric for p in points if p.leak.metric] or [summary.metric]
        utility, leak = (MEASURES.get(name, name) for name in (summary.metric, measures[0]))
        axes.set_xlabel(f"utility: {utility} on test rows (higher is better)")
        axes.set_ylabel(f"leak: {leak} {INFERRED[target.partition(' ')[0]]} (lower is better)")
        of_summary = [panel for panel in panels if panel[0] is summary]
        name = f": {target}" if len(of_summary) > 1 else ""
        others = f"{count(len(summary.not_run), 'attack')} that could be mounted did not run, and may infer far more"
        shown = [others] * bool(summary.not_run) + [*summary.alarms, *summary.notes]
        if (more := len(shown) - MAX_NOTES) > 0:
            shown[MAX_NOTES:] = [f"{count(more, 'more note')}: see the table"]
        lines = [line for note in shown for line in textwrap.wrap(note, 90)]
        title = target if name and len(summaries) == 1 else _write_title(summary) + name
        axes.set_title(title, loc="left", pad=6 + 10 * len(lines))
        if lines:  # above the diagram, where no error bar runs
            axes.annotate(
                "\n".join(lines), (0, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points",
                va="bottom", fontsize=7, color="#a34700",
            )  # fmt: skip
    widths = _share_legend(figure, widths, across) if len(panels) > 1 else widths
    if len(panels) > 1 == len(summaries):
        figure.suptitle(_write_title(summaries[0]))
    down = -(-len(panels) // max(1, across))
    figure.set_size_inches(sum(widths[:across]) or 7.0, max(1, down) * (5.6 if max(widths, default=0.0) > 7.4 else 4.6))
    renderer: RendererBase = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # which decides where the axes are
    for axes in figure.axes:
        _place_labels(axes, renderer)
    return figure


def _place_labels(axes: Axes, renderer: RendererBase) -> None:
    """Move each label where it covers no other one, is nearest to its point, and covers little; else drop it."""
    dots = axes.figure.dpi / 72
    labels = [text for text in axes.texts if isinstance(text, Annotation) and text.xycoords == "data"]
    placed = [text.get_window_extent(renderer) for text in axes.texts if text not in labels]
    paths = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    bars = [c for c in axes.collections if isinstance(c, LineCollection)]
    paths += [c.get_transform().transform_path(path) for c in bars for path in c.get_paths()]
    shown = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    markers = np.concatenate(
        [line.get_transform().transform(line.get_xydata()) for line in shown] or [np.empty((0, 2))]
    )

    def measure_cover(box: Bbox) -> int:
        outside = not axes.bbox.contains(box.x0, box.y0) or not axes.bbox.contains(box.x1, box.y1)
        covered = LABEL * (outside + sum(box.overlaps(other) for other in placed))
        near = abs(markers - (box.get_points().sum(0) / 2)) < [box.width / 2 + SIZE, box.height / 2 + SIZE]
        covered += MARKER * int(near.all(1).sum())
        return covered + LINE * sum(path.intersects_bbox(box, filled=False) for path in paths)

    def measure_gap(box: Bbox, point: Any) -> float:
        return float(np.linalg.norm(np.clip(point, box.min, box.max) - point))

    points = [axes.transData.transform(label.xy) for label in labels]
    for label, (x, y) in zip(labels, points, strict=True):
        size, boxes = label.get_window_extent(renderer).size, {}
        for right, up in AROUND:
            corner = x + right * dots - size[0] * (1 - np.sign(right)) / 2, y + up * dots - size[1] * (up < 0)
            boxes[right, up] = Bbox.from_bounds(*corner, *size)
        wrong = {o: min(measure_gap(box, p) for p in points) < measure_gap(box, (x, y)) for o, box in boxes.items()}
        covers = {offset: measure_cover(box) + MARKER * wrong[offset] for offset, box in boxes.items()}
        least = min(covers, key=covers.__getitem__)
        side = {-1: "right", 0: "center", 1: "left"}[int(np.sign(least[0]))]
        label.set(position=least, ha=side, va="bottom" if least[1] > 0 else "top", visible=covers[least] < LABEL)
        placed.append(boxes[least])


def _write_title(summary: Summary) -> str:
    every, left = summary.mountable, len(summary.not_run)
    part = f" with {every - left} of {count(every, 'attack')}" if left else ""
    return f"{summary.dataset}: what {summary.adversary} infers{part}"


def _draw_target(axes: Axes, points: Sequence[Point], worst: Sequence[Point], undefended: str) -> bool:
    """Draw the headlines on one target, each attack in gray, and what to hold them against.

    Return whether there are several headlines.
    """
    curves = list_headlines(worst)
    attacks = {p.attack for p in points}
    if len(attacks) > 1:
        _draw_attacks(axes, list_lines(points), joined=len(curves) == 1)
    else:  # of a single attack it goes without saying
        curves = [line._replace(attacks=["" if name in attacks else name for name in line.attacks]) for line in curves]
    if len(curves) > 1:  # names beside the points of several curves would cover each other
        curves = [line._replace(attacks=[""] * len(line.attacks)) for line in curves]
    if len(curves) > MANY:  # and so would numbers
        curves = [line._replace(written=False) for line in curves]
    for i, line in enumerate(curves):
        marker = MARKERS[(i + i // len(COLORS)) % len(MARKERS)]  # the seventh has the first's color, not its marker
        _draw_line(axes, line, COLORS[i % len(COLORS)], marker, i if len(curves) > 1 else None, undefended)
    _draw_baselines(axes, worst)
    if any(any(line.training) for line in curves):
        axes.plot([], [], "o", color=COLORS[0], markerfacecolor="white", label="open: on training rows only")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.12, y=0.12)
    low, high = axes.get_ylim()
    if high - low < NARROW:
        middle = (low + high) / 2
        axes.set_ylim(middle - NARROW / 2, middle + NARROW / 2)
    return len(curves) > 1


def _draw_attacks(axes: Axes, attacks: Sequence[Line], *, joined: bool) -> None:
    """Draw each attack in gray; of one defense as lines, else they would be a tangle."""
    for i, line in enumerate(attacks):
        label = None if i else "each attack"
        style = "-" if joined else "none"
        axes.plot(line.utility, line.leak, linestyle=style, color=GRAY, linewidth=0.8, zorder=1.5, label=label,
                  marker="o", ms=3)  # fmt: skip
        for x, y, training in zip(line.utility, line.leak, line.training, strict=True):
            axes.plot([x], [y], "o", color=GRAY, ms=3, markerfacecolor="white" if training else GRAY, zorder=1.6)


def _draw_front(axes: Axes, places: Sequence[Place], undefended: str, *, named: bool) -> None:
    """Draw the strengths that no other beats in both utility and leak, which is never below *alone*."""
    along = sorted(places, key=lambda place: place.utility)
    axes.plot(
        [place.utility for place in along], [place.leak for place in along], color="black", linestyle=":", marker="o",
        linewidth=1.2, markersize=14, markerfacecolor="none", markeredgewidth=1.3, label="Pareto front", zorder=50,
    )  # fmt: skip
    for p in {(place.utility, place.leak): place for place in along}.values() if named else ():
        name = f"{p.defense} {p.strength:.3g}" if p.strength else undefended
        label = axes.annotate(name, (p.utility, p.leak), xytext=AROUND[0], textcoords="offset points", fontsize=7)
        label.set(path_effects=[withStroke(linewidth=2.5, foreground="white")], zorder=60)


def _share_legend(figure: Figure, widths: Sequence[float], across: int) -> list[float]:
    """Leave one legend if one of them says all that the others say of lines that look so.

    It is beside the first row, or below the last diagram. Return the widths of the diagrams, which need less room.
    """
    said = [_list_entries(axes) for axes in figure.axes]
    fullest = max(range(len(said)), key=lambda i: len(said[i]))
    if any(not set(entries) <= set(said[fullest]) for entries in said) or not said[fullest]:
        return list(widths)
    beside = len(widths) > 1 and max(widths) > 7.4
    for axes in figure.axes:
        if legend := axes.get_legend():
            legend.remove()
    _draw_legend(figure.axes[across - 1 if beside else -1], beside=beside, like=figure.axes[fullest])
    return [4.8] * (across - 1) + [max(widths) - 2.2]


def _list_entries(axes: Axes) -> list[tuple[str, Any, Any]]:
    handles, texts = axes.get_legend_handles_labels()
    lines = [handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles]
    pairs = zip(lines, texts, strict=True)
    return [(text, line.get_color(), line.get_marker()) for line, text in pairs if isinstance(line, Line2D)]


def _draw_legend(axes: Axes, *, beside: bool, like: Axes | None = None) -> None:
    """Name what is drawn: of several curves beside the diagram, else below it, where no curve runs.

    With ``like``, the names are those of another diagram.
    """
    named = (like or axes).get_legend_handles_labels()
    if not named[0]:
        return
    size, gap = (9, 0.9) if len(named[0]) < MAX_CURVES // 2 else (8, 0.4)
    if beside:
        gray = any(line.get_color() == GRAY for line in axes.lines)
        title = ("strongest attack on each defense\n" if gray else "") + "number: strength λ"
        axes.legend(*named, frameon=False, fontsize=size, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0,
                    labelspacing=gap, alignment="left", title=title, title_fontsize=size)  # fmt: skip
    else:
        axes.legend(*named, frameon=False, fontsize=size, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=3)


def to_svg(figure: Figure) -> bytes:
    """Return a figure as SVG, whose text is text."""
    return _to_bytes(figure, format="svg", metadata={"Date": None})


def save(figure: Figure, folder: Path) -> list[Path]:
    """Write the figure as ``curve.svg`` and ``curve.png``: the same bytes each time."""
    svg, png = to_svg(figure), _to_bytes(figure, format="png", dpi=160, metadata={"Software": None})
    pictures = {folder / "curve.svg": svg, folder / "curve.png": png}
    for path, picture in pictures.items():
        files.replace(path, picture, mode=0o666)
    return list(pictures)


@fix_style()
def _to_bytes(figure: Figure, **how: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, **how)
    return out.getvalue()


def get_margins(measures: Sequence[Measure]) -> tuple[list[float], list[float]]:
    """Return the lengths of the error bars below and above each mean; none where there is no interval."""
    means = [(m, m.mean or 0.0) for m in measures]
    return [max(0.0, mean - m.lower) for m, mean in means], [max(0.0, m.upper - mean) for m, mean in means]


def _draw_line(axes: Axes, line: Line, color: str, marker: str, number: int | None, undefended: str) -> None:
    """Draw one curve, the strengths beside its points: of several at sides that differ, since curves come close.

    Points without a defense that lie near each other, as those of one method do, are named once.
    """
    size = 6 if number is None else 8
    axes.errorbar(
        line.utility, line.leak, xerr=get_margins([p.utility for p in line.points]),
        yerr=get_margins([p.leak for p in line.points]), color=color, ecolor=color if number is None else (color, 0.45),
        marker=marker, markersize=size, markeredgecolor=color if number is None else "white", linewidth=1.6,
        elinewidth=0.8, capsize=2.5, label=line.label, zorder=2 + (number or 0),
    )  # fmt: skip
    for x, y, trained in zip(line.utility, line.leak, line.training, strict=True):
        if trained:
            axes.plot([x], [y], marker, color=color, markersize=size, markerfacecolor="white", zorder=3 + (number or 0))
    if not line.written:
        return
    named = {tuple(text.xy) for text in axes.texts if isinstance(text, Annotation)}
    texts = zip(line.utility, line.leak, line.strengths, line.seeds, line.attacks, strict=True)
    for x, y, strength, seeds, attack in texts:
        if strength:
            words = [f"λ={strength:.3g}" if number is None else f"{strength:.3g}"]
        else:
            near = any(max(abs(x - a), abs(y - b)) < 2 * NEAR for a, b in named)
            words = [] if number is not None and near else [undefended]
        words += [attack, f"({seeds})" if seeds else ""]
        if any(words):
            label = axes.annotate(
                " ".join(filter(None, words)), (x, y), xytext=AROUND[0], textcoords="offset points",
                fontsize=8 if number is None else 7, color=color if number is None or strength else "black",
            )  # fmt: skip
            label.set(path_effects=[withStroke(linewidth=2.5, foreground="white")], zorder=60)


def _draw_baselines(axes: Axes, points: Sequence[Point]) -> None:
    shown = [p.leak for p in points if p.leak.alone is not None]
    if shown:
        leak = max(shown, key=lambda leak: leak.alone or 0.0)
        assert leak.alone is not None
        axes.axhline(leak.alone, color="#444444", linestyle="--", linewidth=1.2, label="adversary alone ± 95 %")
        low, high = leak.alone_ci95
        if low is not None and high is not None:
            axes.axhspan(low, high, color="#444444", alpha=0.08, linewidth=0)
    chances = [p.leak.chance for p in points if p.leak.chance is not None]
    if chances:
        axes.axhline(max(chances), color="#444444", linestyle=":", linewidth=1.2, label="chance")


@fix_style()
def draw_attacks(summary: Summary) -> Figure | None:
    """Return a panel for each measure, defense and strength, colored by target; None without a number."""
    panels = _group_points(summary)
    left_out = list(panels)[MAX_PANELS:]
    panels = {title: panels[title] for title in list(panels)[:MAX_PANELS]}
    shown = [point for points in panels.values() for point in points]
    if not shown:
        return None
    colors = {target: COLORS[k % len(COLORS)] for k, target in enumerate(dict.fromkeys(p.target for p in shown))}
    labels = {point.attack: drop_column(point.attack, point) for point in shown}
    across = min(ACROSS, len(panels))
    lines = []
    for measure, points in group(shown, lambda p: MEASURES.get(p.leak.metric, p.leak.metric)).items():
        most = {name: max(p.leak.mean or 0.0 for p in of) for name, of in group(points, lambda p: p.attack).items()}
        rows = sorted(most, key=most.__getitem__, reverse=True)[:MAX_ROWS]
        lines += [(measure, rows, list(panels)[k : k + across]) for k in range(0, len(panels), across)]
    heights = [1.0 + 0.24 * len(rows) for _, rows, _ in lines]
    figure = Figure(figsize=(3.0 + 2.2 * across, 0.8 + sum(heights)), layout="constrained")
    every = figure.subplots(len(lines), across, squeeze=False, gridspec_kw={"height_ratios": heights})
    first: dict[str, Axes] = {}
    for (measure, rows, titles), beside in zip(lines, every, strict=True):
        for axes, title in zip(beside, titles, strict=False):
            start = first.setdefault(measure, axes)
            axes.sharex(start)
            axes.set_title(title, fontsize=10)
            axes.tick_params(axis="x", labelsize=9)
            names = [labels[row] if axes is beside[0] else "" for row in rows]
            axes.set_yticks(range(len(rows)), names, fontsize=9)
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.grid(axis="x", color="#dddddd", linewidth=0.6)
            _draw_dots(axes, [p for p in panels[title] if p.attack in rows], rows, colors)
        beside[0].set_xlabel(f"leak: {measure}", fontsize=9)
        for axes in beside[len(titles) :]:
            axes.remove()
    for axes in first.values():
        axes.set_xlim(*np.clip(axes.get_xlim(), [-1.05, 0], 1.05))
    if left_out:
        figure.supxlabel(
            f"in the tables only: {', '.join(title.replace(chr(10), ' ') for title in left_out)}", fontsize=9
        )
    marks = [Line2D([], [], color=color, marker="o", linestyle="", label=target) for target, color in colors.items()]
    marks.append(
        Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="training rows")
    )
    marks.append(Line2D([], [], color=GRAY, marker="|", markersize=10, markeredgewidth=2, linestyle="", label="alone"))
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), fontsize=10, frameon=False)
    return figure


def _draw_dots(axes: Axes, points: Sequence[Point], rows: Sequence[str], colors: Mapping[str, str]) -> None:
    """Draw the leak of each attack with its interval, open on training rows, and a line at *alone*."""
    for point in points:
        y, color = rows.index(point.attack), colors[point.target]
        fill = "white" if point.leak.rows == "train" else color
        axes.errorbar([point.leak.mean or 0.0], [y], xerr=get_margins([point.leak]), fmt="o", markersize=5, color=color,
                      markerfacecolor=fill)  # fmt: skip
        if point.leak.alone is not None:
            axes.plot([point.leak.alone] * 2, [y - 0.4, y + 0.4], color=GRAY, linewidth=2, zorder=0)


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
    return {title: list(points.values()) for title, points in panels.items()}
