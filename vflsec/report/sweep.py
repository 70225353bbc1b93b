"""A finished sweep that shows itself: leak, utility and CAP against the settings that differ."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd
from matplotlib.axes import Axes

from vflsec.base import files
from vflsec.base.checks import count, group
from vflsec.report import table
from vflsec.report.columns import STRONGEST, is_private, select_columns
from vflsec.report.curve import COLORS, GRAY, MARKERS, Curve, fix_style
from vflsec.report.formats import Cells, Column, Document, as_html, format_signed, spread, write_number
from vflsec.report.report import Report, Shown
from vflsec.results.analysis.results import Cap, Measure, Point
from vflsec.results.analysis.trainings import Rise, add_up, compare, note_spending, note_trainings
from vflsec.results.records.folder import POINTS, read_sweep
from vflsec.results.records.manifest import Sweep, to_text

HIDDEN = ("rows", "status")
"""The columns that are left out in narrow terminals."""

LOGARITHMIC = 10
"""Positive values that differ by this factor or more are drawn on a logarithmic axis."""

NAMES = {"utility": "utility of the joint model", "leak": "leak by the strongest attack", "CAP": "CAP"}


class SweepPlace(NamedTuple):
    """A headline of one point of the sweep, or its CAP, with the values of the settings there."""

    values: tuple[str, ...]
    point: Point | Cap
    undefended: str

    @property
    def defense(self) -> str:
        """The defense, or what a headline without one has."""
        return self.undefended if isinstance(self.point, Point) and not self.point.strength else self.point.defense

    @property
    def label(self) -> str:
        """Method, defense and strength."""
        strength = f" {self.point.strength:.4g}" if isinstance(self.point, Point) and self.point.strength else ""
        return f"{self.point.method}, {self.defense}{strength}"

    def measure(self, name: str) -> Measure:
        """Return utility, leak or CAP with the ends of its interval."""
        if isinstance(self.point, Cap):
            return Measure(metric="CAP", mean=self.point.value, ci95=self.point.ci95, n=self.point.n)
        return self.point.utility if name == "utility" else self.point.leak


Places = Sequence[SweepPlace]


class SweepReport(Shown):
    """The result of a sweep."""

    def __init__(self, sweep: Sweep, reports: Sequence[Report]) -> None:
        self.sweep = sweep
        self.reports = list(reports)

    @classmethod
    def read(cls, folder: Path | str, **limits: Any) -> SweepReport:
        """Return the report of the folder of a sweep.

        Args:
            folder: of a sweep.
            limits: for every point, as of ``Report.read``.

        Raises:
            StoreError: the folder holds no sweep, or a damaged one.
        """
        folder = files.make_path(folder)
        sweep = read_sweep(folder)
        return cls(sweep, [Report.read(folder / POINTS / point.name, **limits) for point in sweep.points])

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
        content: dict[str, Any] = msgspec.to_builtins(self.sweep)
        for point, report in zip(content["points"], self.reports, strict=True):
            point["summary"] = report.to_dict()
        content["alarms"] = self.alarms()
        content["rises"] = [{**msgspec.to_builtins(rise), "still_rising": rise.still_rising} for rise in self.rises()]
        return content

    def to_csv(self) -> str:
        """Return the rows of ``to_frame``."""
        return str(self.to_frame().to_csv(index=False, lineterminator="\n"))

    def document(self, *, details: bool = False) -> Document:
        """Return tables and lines; ``details`` are in the report of each point."""
        return Document([self.heading], self.tables(), self.remarks())

    @property
    def heading(self) -> str:
        """What is swept, on which data, and by how many points."""
        axes = " x ".join(f"{path} ({len(values)})" for path, values in self.sweep.axes.items())
        how = "in pairs" if self.sweep.paired else "every combination"
        how = f", {how}" if len(self.sweep.axes) > 1 else ""
        above = dict.fromkeys(table.write_heading(report.summary) for report in self.reports)
        return f"{chr(10).join(above)}\nswept: {axes}{how}, {count(len(self.reports), 'point')}"

    def tables(self) -> list[Cells]:
        """Return the headlines, then CAP where a defense has several strengths, then what a last step adds."""
        target = [table.TARGET] if len(self._targets()) > 1 else []
        parts = [self._list_cells(target)]
        if caps := self.caps():
            columns = [*self._list_settings(), *_select_place_columns("method", "defense")]
            columns += map(_convert_column, [*target, *table.FOLDED])
            parts.append(Cells.fill("CAP over the defended strengths, by the strongest attack", columns, caps))
        shown = [rise for rise in self.rises() if rise.attack == "worst" or rise.still_rising]
        return [*parts, self._list_rise_cells(shown, target)] if shown else parts

    def _list_settings(self) -> list[Column]:
        """Return a column for each swept setting; ``alone`` is also the title of another column."""
        names = {path: path.rpartition(".")[2] for path in self.sweep.axes}
        titles = [path.removeprefix("method.") if name == "alone" else name for path, name in names.items()]
        return [_make_setting(title, k) for k, title in enumerate(titles)]

    def _list_cells(self, target: Sequence[Column]) -> Cells:
        private = any(is_private(report.summary) for report in self.reports)
        columns = [
            *self._list_settings(),
            *_select_place_columns("method", "defense", "strength", *(["epsilon"] if private else [])),
            *map(_convert_column, [*target, STRONGEST._replace(title="strongest")]),
            *_select_place_columns("utility", "leak", "leak_rows", "alone", "advantage", "status"),
        ]
        columns = [column._replace(detail=int(column.title in HIDDEN and column.name != "")) for column in columns]
        return Cells.fill("The strongest attack at each point", columns, self.places())

    def _list_rise_cells(self, shown: Sequence[Rise], target: Sequence[Column]) -> Cells:
        before, after = self._get_last_two()
        columns = [
            *(_make_rise_setting(column.title, k) for k, column in enumerate(self._list_settings()[1:])),
            *select_columns("method", "defense", "strength"),
            *target,
            table.ATTACK,
            Column("", title=before, cell=lambda rise: write_number(rise.before)),
            Column("", title=after, cell=lambda rise: write_number(rise.after)),
            Column("", title="rise", cell=lambda rise: f"{format_signed(rise.rise)}{spread(rise.rise, rise.ci95)}"),
            Column("", title="still rising", cell=lambda r: {True: "yes", False: "no", None: "–"}[r.still_rising]),
        ]
        return Cells.fill(f"The leak with the last step of {self._first_axis}", columns, shown)

    def places(self) -> list[SweepPlace]:
        """Return the headlines of each point; what points without a defense share comes once."""
        by_key: dict[tuple[Any, ...], SweepPlace] = {}
        for values, report in zip(self._values(), self.reports, strict=True):
            for point in report.worst:
                defense = point.defense if point.strength else ""
                place = SweepPlace(values, point, report.summary.undefended)
                by_key.setdefault((values, point.method, defense, point.strength, point.target), place)
        return list(by_key.values())

    def caps(self) -> list[SweepPlace]:
        """Return CAP by the headlines of each point."""
        pairs = zip(self._values(), self.reports, strict=True)
        return [SweepPlace(values, cap, "") for values, report in pairs for cap in report.cap if cap.attack == "worst"]

    def rises(self) -> list[Rise]:
        """Return how much more leaks at the last value of the first setting than at the one before.

        Only for settings of the adversary, such as its budget; otherwise there are none.
        """
        axes = list(self.sweep.axes)
        of_adversary = [path for path in axes if path in ("attacks", "trainings") or path.startswith("aux.")]
        if of_adversary[:1] != axes[:1] or len(self.sweep.axes[axes[0]]) < 2:
            return []
        if self.sweep.paired and of_adversary != axes:
            return []
        pairs = zip(self._values(), self.reports, strict=True)
        groups = group(pairs, lambda pair: () if self.sweep.paired else pair[0][1:])
        return [
            rise
            for fixed, (*_, (_, before), (_, after)) in groups.items()
            for rise in compare(before.summary, after.summary, dict(zip(axes[1:], fixed, strict=False)))
        ]

    @property
    def _first_axis(self) -> str:
        return next(iter(self.sweep.axes))

    def _get_last_two(self) -> tuple[str, str]:
        before, after = self.sweep.axes[self._first_axis][-2:]
        return to_text(before), to_text(after)

    def _describe_saturation(self) -> list[str]:
        """Return a line that says whether the leak still rises with the last step of the adversary's means."""
        known = [rise for rise in self.rises() if rise.still_rising is not None]
        if not known:
            return []
        before, after = self._get_last_two()
        step = f"from {self._first_axis}={before} to {after}"
        rising = [rise for rise in known if rise.still_rising]
        headlines = [rise for rise in known if rise.attack == "worst"]
        if rising:
            of = f"{sum(rise.attack == 'worst' for rise in rising)} of {count(len(headlines), 'headline')}"
            attacks = list(dict.fromkeys(rise.attack for rise in rising if rise.attack != "worst"))
            single = f" and the leak by {', '.join(attacks)}" if attacks else ""
            return [f"STILL RISING {step}: {of}{single}; more may leak more, so add larger values"]
        most = max(float(rise.ci95[1] or 0.0) for rise in headlines or known)
        return [f"NOT RISING {step}, beyond noise; a rise of the headline by up to {most:.3f} may be overlooked"]

    def remarks(self) -> list[str]:
        """Return saturation, gates and errors of every point, after the values there."""
        lines = self._describe_saturation()
        for where, report in zip(self._describe_points(), self.reports, strict=True):
            lines += [f"{line} ({where})" for line in _list_remarks(report)]
        spending = add_up(report.summary.spending for report in self.reports)
        every = [point for report in self.reports for point in report.points]
        lines += [f"NOTE {note}" for note in (*note_spending(spending, every), *self.alarms())]
        others = self._targets()[1:]
        lines += [f"NOT DRAWN {', '.join(others)}: in the table only"] if others else []
        lines += [f"VERDICT ({places}) {sentence}" for sentence, places in self._group_sentences("verdict")]
        return [*lines, *dict.fromkeys(line for report in self.reports for line in table.list_not_run(report.summary))]

    def alarms(self) -> list[str]:
        """Return each alarm, with the points where it is raised: no number there is to be relied on."""
        return [f"{alarm} ({places})" for alarm, places in self._group_sentences("alarms")]

    def _group_sentences(self, name: str) -> list[tuple[str, str]]:
        said: dict[str, list[str]] = {}
        for where, report in zip(self._describe_points(), self.reports, strict=True):
            for sentence in getattr(report.summary, name):
                said.setdefault(sentence, []).append(where)
        return [(sentence, "; ".join(places)) for sentence, places in said.items()]

    def _describe_points(self) -> list[str]:
        names = [path.rpartition(".")[2] for path in self.sweep.axes]
        return [", ".join(f"{name}={v}" for name, v in zip(names, values, strict=True)) for values in self._values()]

    def plot(self) -> Curve:
        """Return utility, leak and CAP against the first setting; a row of diagrams for each value of the others."""
        return _draw(self)

    def save(self, folder: Path | str) -> list[Path]:
        """Write the curve into ``folder``; pages are those of the points."""
        return self.save_curve(folder)

    def _targets(self) -> list[str]:
        """Return what is recovered, labels first."""
        targets = dict.fromkeys(point.target for report in self.reports for point in report.worst)
        return sorted(targets, key=lambda target: target != "labels")

    def _values(self) -> list[tuple[str, ...]]:
        return [tuple(map(to_text, point.values.values())) for point in self.sweep.points]

    def _repr_html_(self) -> str:
        return "".join(map(as_html, self.tables()))


def _make_setting(title: str, k: int) -> Column:
    return Column("", title=title, cell=lambda place: place.values[k])


def _make_rise_setting(title: str, k: int) -> Column:
    """Return the column of a setting beside the first; pairs have none."""
    return Column("", title=title, cell=lambda rise: dict(enumerate(rise.where.values())).get(k, ""))


def _convert_column(column: Column) -> Column:
    return column._replace(cell=lambda place: column.text(place.point))


def _select_place_columns(*names: str) -> list[Column]:
    """Return columns of the result table for places, whose defense may be what every training has."""
    columns = [_convert_column(column) for column in select_columns(*names)]
    return [c._replace(cell=lambda place: place.defense) if c.name == "defense" else c for c in columns]


def _list_remarks(report: Report) -> list[str]:
    summary = report.summary
    of_all = {*note_spending(summary.spending, report.points), *note_trainings(report.points)}
    return [
        *map(table.write_gate, summary.gates),
        *(f"ERROR {line}" for line in summary.failures),
        *table.list_lost(summary),
        *(f"NOTE {note}" for note in summary.notes if note not in of_all),
    ]


@fix_style()
def _draw(report: SweepReport) -> Curve:
    axes = list(report.sweep.axes)
    split = axes[1:] if not report.sweep.paired else []  # pairs lie on one line
    target = report._targets()[:1]  # leaks of different things differ in measure
    places = [place for place in report.places() if [place.point.target] == target]
    caps = [place for place in report.caps() if [place.point.target] == target]
    rows = list(dict.fromkeys(place.values[1:] if split else () for place in places))
    measures = ["utility", "leak", *(["CAP"] if caps else [])]
    figure = Curve(figsize=(3.9 * len(measures), 1.1 + 2.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(measures), squeeze=False, sharex=True, sharey="col")
    x, labels = _place_values(report), list(dict.fromkeys(place.label for place in places))
    for row, fixed in enumerate(rows):
        for ax, measure in zip(grid[row], measures, strict=True):
            shown = [
                place for place in (caps if measure == "CAP" else places) if place.values[1:] == fixed or not split
            ]
            _draw_measure(ax, shown, measure, x, labels)
            where = ", ".join(f"{path} = {value}" for path, value in zip(split, fixed, strict=True))
            ax.set_title(where, loc="left", fontsize=9)
            _label_axes(ax, x, axes[0] if row == len(rows) - 1 else "")
    named = {label: handle for ax in grid[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    of = dict.fromkeys(single.summary.dataset for single in report.reports)
    who = dict.fromkeys(single.summary.adversary for single in report.reports)
    title = f"{', '.join(of)}: what {' or '.join(who)} infers ({', '.join(target)}) against {', '.join(axes)}"
    figure.suptitle("\n".join(textwrap.wrap(title, 30 * len(measures))), x=0.01, ha="left")
    return figure


def _draw_measure(ax: Axes, places: Places, measure: str, x: Mapping[str, float], labels: list[str]) -> None:
    """Draw one curve for each of the labels; no curve of CAP looks like one of another measure."""
    methods = {label.partition(", ")[0] for label in labels}
    first = len(labels) if measure == "CAP" else 0
    curves = list(dict.fromkeys(place.label for place in places)) if measure == "CAP" else labels
    for k, label in enumerate(curves, start=first):
        name = label if len(methods) > 1 else label.partition(", ")[2]
        of_curve = [place for place in places if place.label == label]
        _draw_curve(ax, of_curve, measure, x, k, f"CAP of {name}" if measure == "CAP" else name)
    if measure == "leak":
        clean = [(p.values[0], p.point) for p in places if isinstance(p.point, Point) and not p.point.strength]
        alone = {value: point.leak.alone for value, point in clean if point.leak.alone is not None}
        at = [x[value] for value in alone]
        ax.plot(at, list(alone.values()), color=GRAY, linestyle="--", marker=".", label="alone")
    ax.set_ylabel(NAMES[measure])


def _draw_curve(ax: Axes, places: Places, measure: str, x: Mapping[str, float], k: int, label: str) -> None:
    rows = []
    for place in places:
        shown = place.measure(measure)
        if shown.mean is not None:
            rows.append((x[place.values[0]], shown.mean, shown.lower, shown.upper))
    if not rows:
        return
    color, marker = COLORS[k % len(COLORS)], MARKERS[(k + k // len(COLORS)) % len(MARKERS)]
    at, means, lows, highs = map(list, zip(*rows, strict=True))
    ax.plot(at, means, color=color, marker=marker, ms=4, label=label)
    ax.fill_between(at, lows, highs, color=color, alpha=0.15, linewidth=0)


def _place_values(report: SweepReport) -> dict[str, float]:
    """Return where each value of the first setting lies: numbers at their value, others in their order."""
    values = next(iter(report.sweep.axes.values()))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return {to_text(value): float(value) if numeric else float(k) for k, value in enumerate(values)}


def _label_axes(ax: Axes, x: Mapping[str, float], path: str) -> None:
    values = [value for value in x.values() if isfinite(value)]
    is_numeric = [to_text(value) for value in values] == list(x)
    is_logarithmic = is_numeric and min(values) > 0 and max(values) / min(values) >= LOGARITHMIC
    if is_logarithmic:
        ax.set_xscale("log")
        ax.minorticks_off()
    if is_logarithmic or not is_numeric or len(values) <= 8:
        ax.set_xticks(values, list(x))
    ax.set_xlabel(path)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
