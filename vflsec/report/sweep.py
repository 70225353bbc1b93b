"""A finished sweep that shows itself: leak, utility and CAP against the settings that differ."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd
from matplotlib.axes import Axes
from rich.console import Group, RenderableType
from rich.text import Text

from vflsec.base.checks import count
from vflsec.report import table
from vflsec.report.curve import COLORS, GRAY, MARKERS, Curve, own_style, saved
from vflsec.report.report import Report
from vflsec.report.table import NARROW, Cells
from vflsec.results.analysis.results import Cap, Point
from vflsec.results.analysis.saturation import Rise, rises
from vflsec.results.analysis.trainings import notes_on_spending, notes_on_trainings, together
from vflsec.results.records.sweep import POINTS, Sweep, exact, read_sweep

HIDDEN = ("rows", "status")
"""The columns that are left out in narrow terminals."""

LOGARITHMIC = 10
"""Positive values that differ by this factor or more are drawn on a logarithmic axis."""


NAMES = {"utility": "utility of the joint model", "leak": "leak by the strongest attack", "CAP": "CAP"}


class Place(NamedTuple):
    """A headline of one point of the sweep, with the values of the settings there."""

    values: tuple[str, ...]
    point: Point
    undefended: str


class SweepReport:
    """The result of a sweep.

    Args:
        sweep: what differs between its points.
        reports: of each point, in its order.
    """

    def __init__(self, sweep: Sweep, reports: Sequence[Report]) -> None:
        self.sweep = sweep
        self.reports = list(reports)

    @classmethod
    def read(
        cls,
        folder: Path | str,
        *,
        max_leak: Mapping[str, float] | None = None,
        min_utility: float | None = None,
        max_undetected: float | None = None,
    ) -> SweepReport:
        """Return the report of a results folder.

        Args:
            folder: of a sweep.
            max_leak: limits on the leak at every point, by attack.
            min_utility: a limit on the utility at every point.
            max_undetected: a limit on the advantage that could have been overlooked at any point.

        Raises:
            StoreError: the folder holds no sweep, or a damaged one.
        """
        folder = Path(folder)
        sweep = read_sweep(folder)
        places = [folder / POINTS / point.name for point in sweep.points]
        limits: dict[str, Any] = {
            "max_leak": max_leak, "min_utility": min_utility, "max_undetected": max_undetected,
        }  # fmt: skip
        return cls(sweep, [Report.read(place, **limits) for place in places])

    def to_frame(self) -> pd.DataFrame:
        """Return the rows of ``Report.to_frame`` of every point, with a column for each setting that differs."""
        frames = []
        for point, report in zip(self.sweep.points, self.reports, strict=True):
            frame = report.to_frame()
            for k, (path, value) in enumerate(point.values.items()):
                frame.insert(k, path, [value] * len(frame), allow_duplicates=True)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ, for each point their values and its summary, ``alarms`` and ``rises``."""
        found: dict[str, Any] = msgspec.to_builtins(self.sweep)
        for point, report in zip(found["points"], self.reports, strict=True):
            point["summary"] = report.to_dict()
        found["alarms"] = self.alarms()
        found["rises"] = [{**msgspec.to_builtins(one), "still_rising": one.still_rising} for one in self.rises()]
        return found

    def to_json(self) -> str:
        """Return one JSON object."""
        return msgspec.json.encode(self.to_dict()).decode()

    def to_csv(self) -> str:
        """Return the rows of ``to_frame``."""
        return str(self.to_frame().to_csv(index=False, lineterminator="\n"))

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        parts = [self.heading, *(f"{cells.title}\n\n{table.as_markdown(cells)}" for cells in self.tables())]
        return "\n\n".join([*parts, *self.remarks()]) + "\n"

    def to_latex(self) -> str:
        r"""Return the tables as LaTeX, for ``\usepackage{booktabs}``."""
        return "\n\n".join(map(table.as_latex, self.tables())) + "\n"

    def table(self, width: int = 140) -> str:
        """Return the tables as text of at most ``width`` columns."""
        return table.as_text(self.rich(width), width)

    def rich(self, width: int) -> RenderableType:
        """Return the tables for a terminal of ``width`` columns."""
        narrow = width < NARROW or not all(table.fits(cells, width, narrow=False) for cells in self.tables())
        parts: list[RenderableType] = [Text(self.heading)]
        for cells in self.tables():
            kept = self._narrowed(cells) if narrow else cells
            parts += [Text(), table.as_rich(kept, width if narrow else None)]
        told = f"NOT SHOWN {', '.join(HIDDEN)}: widen the terminal, or add --format markdown"
        return Group(*parts, Text(), *map(Text, [*self.remarks(), *([told] if narrow else [])]))

    def _narrowed(self, cells: Cells) -> Cells:
        """Leave out details, but no setting that is swept, whatever its name is."""
        swept = set(self._names())
        first = len(list(takewhile(swept.__contains__, cells.header)))
        own, others = (
            [line[part] for line in (cells.header, *cells.rows)] for part in (slice(first), slice(first, None))
        )
        kept = table.without(table.without_details(Cells(cells.title, others[0], others[1:])), HIDDEN)
        rows = [[*values, *row] for values, row in zip(own[1:], kept.rows, strict=True)]
        return Cells(kept.title, [*own[0], *kept.header], rows)

    @property
    def heading(self) -> str:
        """What is swept, on which data, and by how many points."""
        axes = " x ".join(f"{path} ({len(values)})" for path, values in self.sweep.axes.items())
        how = "in pairs" if self.sweep.paired else "every combination"
        how = f", {how}" if len(self.sweep.axes) > 1 else ""
        above = dict.fromkeys(table.heading(report.summary) for report in self.reports)
        return f"{chr(10).join(above)}\nswept: {axes}{how}, {count(len(self.reports), 'point')}"

    def _names(self) -> list[str]:
        """Return the titles of the swept settings; ``alone`` is also the title of another column."""
        names = {path: path.rpartition(".")[2] for path in self.sweep.axes}
        return [path.removeprefix("method.") if name == "alone" else name for path, name in names.items()]

    def tables(self) -> list[Cells]:
        """Return the headlines, then CAP where a defense has several strengths."""
        several = len(self._targets()) > 1
        private = any(table.is_private(report.summary) for report in self.reports)
        of = ["of"] if several else []
        header = [
            "method",
            "defense",
            "λ",
            *(["ε"] if private else []),
            *of,
            "strongest",
            "utility ↑",
            "leak ↓",
            "rows",
            "alone",
            "advantage",
        ]
        names = self._names()
        header = [*names, *header]
        found = [
            Cells(
                "The strongest attack at each point",
                [*header, "status"],
                [_row(p, several=several, private=private) for p in self.places()],
            )
        ]
        caps = [[*values, *_cap(cap, several=several)] for values, cap in self.caps()]
        if caps:
            cap_header = [*names, "method", "defense", *of, "CAP ↑", "calibrated ↑", "hypervolume ↑"]
            found.append(Cells("CAP over the defended strengths, by the strongest attack", cap_header, caps))
        shown = [one for one in self.rises() if one.attack == "worst" or one.still_rising]
        if shown:
            before, after = self._last_two()
            rise_header = [*names[1:], "method", "defense", "λ", *of, "attack", before, after, "rise", "still rising"]
            width = len(names) - 1
            rows = [[*[*one.where.values(), *[""] * width][:width], *_rise(one, several=several)] for one in shown]
            found.append(Cells(f"The leak with the last step of {self._first_axis}", rise_header, rows))
        return found

    def places(self) -> list[Place]:
        """Return the headlines of each point; what points without a defense share comes once."""
        found: dict[tuple[Any, ...], Place] = {}
        for values, report in zip(self._values(), self.reports, strict=True):
            for point in report.worst:
                defense = point.defense if point.strength else ""
                place = Place(values, point, report.summary.undefended)
                found.setdefault((values, point.method, defense, point.strength, point.target), place)
        return list(found.values())

    def caps(self) -> list[tuple[tuple[str, ...], Cap]]:
        """Return CAP by the headlines of each point."""
        pairs = zip(self._values(), self.reports, strict=True)
        return [(values, cap) for values, report in pairs for cap in report.cap if cap.attack == "worst"]

    def rises(self) -> list[Rise]:
        """Return how much more leaks at the last value of the first setting than at the one before.

        Only for settings of the adversary, such as its budget; otherwise there are none.
        """
        axes = list(self.sweep.axes)
        own = [path for path in axes if path in ("attacks", "trainings") or path.startswith("aux.")]
        if own[:1] != axes[:1] or len(self.sweep.axes[axes[0]]) < 2 or (self.sweep.paired and own != axes):
            return []
        groups: dict[tuple[str, ...], list[Report]] = {}
        for values, report in zip(self._values(), self.reports, strict=True):
            groups.setdefault(() if self.sweep.paired else values[1:], []).append(report)
        return [
            rise
            for fixed, reports in groups.items()
            for rise in rises(reports[-2].summary, reports[-1].summary, dict(zip(axes[1:], fixed, strict=False)))
        ]

    @property
    def _first_axis(self) -> str:
        return next(iter(self.sweep.axes))

    def _last_two(self) -> tuple[str, str]:
        before, after = self.sweep.axes[self._first_axis][-2:]
        return _shown(before), _shown(after)

    def _saturation(self) -> list[str]:
        """Return a line that says whether the leak still rises with the last step of the adversary's means."""
        found = [one for one in self.rises() if one.still_rising is not None]
        if not found:
            return []
        before, after = self._last_two()
        step = f"from {self._first_axis}={before} to {after}"
        rising = [one for one in found if one.still_rising]
        headlines = [one for one in found if one.attack == "worst"]
        if rising:
            of = f"{sum(one.attack == 'worst' for one in rising)} of {count(len(headlines), 'headline')}"
            attacks = list(dict.fromkeys(one.attack for one in rising if one.attack != "worst"))
            single = f" and the leak by {', '.join(attacks)}" if attacks else ""
            return [f"STILL RISING {step}: {of}{single}; more may leak more, so add larger values"]
        most = max(float(one.ci95[1] or 0.0) for one in headlines or found)
        return [f"NOT RISING {step}, beyond noise; a rise of the headline by up to {most:.3f} may be overlooked"]

    def remarks(self) -> list[str]:
        """Return saturation, gates and errors of every point, after the values there."""
        found = self._saturation()
        for where, report in zip(self._where(), self.reports, strict=True):
            found += [f"{table.gate_line(gate)} ({where})" for gate in report.summary.gates]
            found += [f"ERROR {line} ({where})" for line in report.summary.failures]
            found += [f"{line} ({where})" for line in table.lost(report.summary)]
            own = {*notes_on_spending(report.summary.spending, report.points), *notes_on_trainings(report.points)}
            found += [f"NOTE {note} ({where})" for note in report.summary.notes if note not in own]
        spending = together(report.summary.spending for report in self.reports)
        every = [point for report in self.reports for point in report.points]
        found += [f"NOTE {note}" for note in (*notes_on_spending(spending, every), *self.alarms())]
        others = self._targets()[1:]
        found += [f"NOT DRAWN {', '.join(others)}: in the table only"] if others else []
        found += [f"VERDICT ({places}) {sentence}" for sentence, places in self._said("verdict")]
        return [*found, *dict.fromkeys(line for report in self.reports for line in table.not_run(report.summary))]

    def alarms(self) -> list[str]:
        """Return each alarm, with the points where it is raised: no number there is to be relied on."""
        return [f"{alarm} ({places})" for alarm, places in self._said("alarms")]

    def _said(self, name: str) -> list[tuple[str, str]]:
        """Return each alarm, or each sentence of a verdict, with the points where it is said."""
        said: dict[str, list[str]] = {}
        for where, report in zip(self._where(), self.reports, strict=True):
            for sentence in getattr(report.summary, name):
                said.setdefault(sentence, []).append(where)
        return [(sentence, "; ".join(places)) for sentence, places in said.items()]

    def _where(self) -> list[str]:
        """Return the settings of each point, in words."""
        names = [path.rpartition(".")[2] for path in self.sweep.axes]
        return [", ".join(f"{name}={v}" for name, v in zip(names, values, strict=True)) for values in self._values()]

    def plot(self) -> Curve:
        """Return utility, leak and CAP against the first setting; a row of diagrams for each value of the others."""
        return _draw(self)

    def save_curve(self, folder: Path | str) -> list[Path]:
        """Write ``curve.svg`` and ``curve.png`` into ``folder``."""
        return saved(self.plot, Path(folder))

    def _targets(self) -> list[str]:
        """Return what is recovered, labels first."""
        found = dict.fromkeys(point.target for report in self.reports for point in report.worst)
        return sorted(found, key=lambda target: target != "labels")

    def _values(self) -> list[tuple[str, ...]]:
        return [tuple(map(_shown, point.values.values())) for point in self.sweep.points]

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{cells.title}</h4>{self._html(cells)}" for cells in self.tables())

    def _html(self, cells: Cells) -> str:
        return str(pd.DataFrame(cells.rows, columns=list(cells.header)).to_html(index=False, border=0))

    def __repr__(self) -> str:
        """Show the tables."""
        return self.table()


def _row(place: Place, *, several: bool, private: bool) -> list[str]:
    p = place.point
    return [
        *place.values,
        p.method,
        p.defense if p.strength else place.undefended,
        f"{p.strength:.4g}",
        *([table.epsilon(p)] if private else []),
        *([p.target] if several else []),
        p.choice or p.attack,
        table.with_margin(p.utility),
        table.with_margin(p.leak),
        "–" if p.leak.mean is None else p.leak.rows,
        table.number(p.leak.alone),
        table.signed(p.leak.advantage),
        table.status(p),
    ]


def _cap(cap: Cap, *, several: bool) -> list[str]:
    of = [cap.target] if several else []
    folded = (
        (cap.value, cap.ci95), (cap.calibrated, cap.calibrated_ci95), (cap.hypervolume, cap.hypervolume_ci95),
    )  # fmt: skip
    return [
        cap.method,
        cap.defense,
        *of,
        *(f"{table.number(value)}{table.spread(value, ends)}" for value, ends in folded),
    ]


def _rise(one: Rise, *, several: bool) -> list[str]:
    return [
        one.method,
        one.defense,
        f"{one.strength:.4g}",
        *([one.target] if several else []),
        one.attack,
        table.number(one.before),
        table.number(one.after),
        f"{table.signed(one.rise)}{table.spread(one.rise, one.ci95)}",
        {True: "yes", False: "no", None: "–"}[one.still_rising],
    ]


def _shown(value: Any) -> str:
    return exact(value) if isinstance(value, float) else str(value)


class _Series(NamedTuple):
    """One curve of a diagram: x, mean, and the ends of its interval."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@own_style()
def _draw(report: SweepReport) -> Curve:
    axes = list(report.sweep.axes)
    first, others = axes[0], axes[1:]
    split = others if not report.sweep.paired else []  # pairs lie on one line
    target = report._targets()[:1]  # leaks of different things differ in measure
    places = [place for place in report.places() if [place.point.target] == target]
    caps_of = [(values, cap) for values, cap in report.caps() if [cap.target] == target]
    rows = list(dict.fromkeys(tuple(values[1:]) if split else () for values, *_ in places))
    names = list(dict.fromkeys(map(_label, places)))
    several_methods = len({place.point.method for place in places}) > 1
    measures = ["utility", "leak", *(["CAP"] if caps_of else [])]
    figure = Curve(figsize=(3.9 * len(measures), 1.1 + 2.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(measures), squeeze=False, sharex=True, sharey="col")
    for row, fixed in enumerate(rows):
        own = [place for place in places if not split or tuple(place.values[1:]) == fixed]
        caps = [(values, cap) for values, cap in caps_of if not split or tuple(values[1:]) == fixed]
        for column, measure in enumerate(measures):
            ax = grid[row][column]
            curves = {name: _series(report, own, name, measure) for name in names}
            if measure == "CAP":
                curves = {
                    name: _cap_series(report, caps, name) for name in dict.fromkeys(_cap_label(c) for _, c in caps)
                }
            first_color = len(names) if measure == "CAP" else 0  # no curve of CAP looks like one of another measure
            for k, (name, series) in enumerate(curves.items(), start=first_color):
                label = name if several_methods else name.partition(", ")[2]
                _line(ax, series, k, f"CAP of {label}" if measure == "CAP" else label)
            if measure == "leak":
                _alone(ax, report, own)
            where = ", ".join(f"{path} = {value}" for path, value in zip(split, fixed, strict=True))
            ax.set_title(where, loc="left", fontsize=9)
            ax.set_ylabel(NAMES[measure])
            _dress(ax, report, first if row == len(rows) - 1 else "")
    named = {label: handle for ax in grid[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    of = dict.fromkeys(one.summary.dataset for one in report.reports)
    who = dict.fromkeys(one.summary.adversary for one in report.reports)
    title = f"{', '.join(of)}: what {' or '.join(who)} infers ({', '.join(target)}) against {', '.join(axes)}"
    figure.suptitle("\n".join(textwrap.wrap(title, 30 * len(measures))), x=0.01, ha="left")
    return figure


def _label(place: Place) -> str:
    p = place.point
    return f"{p.method}, {f'{p.defense} {p.strength:.4g}' if p.strength else place.undefended}"


def _cap_label(cap: Cap) -> str:
    return f"{cap.method}, {cap.defense}"


def _x(report: SweepReport) -> dict[str, float]:
    """Return where each value of the first setting lies: numbers at their value, others in their order."""
    values = next(iter(report.sweep.axes.values()))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return {_shown(value): float(value) if numeric else float(k) for k, value in enumerate(values)}


def _series(report: SweepReport, places: Sequence[Place], name: str, measure: str) -> _Series:
    at, found = _x(report), _Series([], [], [], [])
    for place in places:
        one = place.point.utility if measure == "utility" else place.point.leak
        if _label(place) == name and one.mean is not None:
            low, high = one.ci95
            _add(found, at[place.values[0]], one.mean, low, high)
    return found


def _cap_series(report: SweepReport, caps: Sequence[tuple[tuple[str, ...], Cap]], name: str) -> _Series:
    at, found = _x(report), _Series([], [], [], [])
    for values, cap in caps:
        if _cap_label(cap) == name and cap.value is not None:
            _add(found, at[values[0]], cap.value, *cap.ci95)
    return found


def _add(series: _Series, x: float, mean: float, low: float | None, high: float | None) -> None:
    for values, value in zip(
        series, (x, mean, mean if low is None else low, mean if high is None else high), strict=True
    ):
        values.append(value)


def _line(ax: Axes, series: _Series, k: int, label: str) -> None:
    if not series.x:
        return
    color, marker = COLORS[k % len(COLORS)], MARKERS[(k + k // len(COLORS)) % len(MARKERS)]
    ax.plot(series.x, series.mean, color=color, marker=marker, ms=4, label=label)
    ax.fill_between(series.x, series.low, series.high, color=color, alpha=0.15, linewidth=0)


def _alone(ax: Axes, report: SweepReport, places: Sequence[Place]) -> None:
    """Draw what the adversary infers without joining, as far as all headlines of a value agree on its rows."""
    at = _x(report)
    alone = {p.values[0]: p.point.leak.alone for p in places if p.point.leak.alone is not None and not p.point.strength}
    ax.plot([at[v] for v in alone], list(alone.values()), color=GRAY, linestyle="--", marker=".", label="alone")


def _dress(ax: Axes, report: SweepReport, path: str) -> None:
    at = _x(report)
    values = [x for x in at.values() if isfinite(x)]
    numeric = [_shown(x) for x in values] == list(at)
    if not numeric:
        ax.set_xticks(values, list(at))
    elif min(values) > 0 and max(values) / min(values) >= LOGARITHMIC:
        ax.set_xscale("log")
        ax.set_xticks(values, list(at))
        ax.minorticks_off()
    elif len(values) <= 8:
        ax.set_xticks(values, list(at))
    ax.set_xlabel(path)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
