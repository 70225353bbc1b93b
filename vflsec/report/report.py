"""A finished evaluation that shows itself: table, curve, JSON."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from matplotlib.figure import Figure
from rich.console import RenderableType

from vflsec.base import files
from vflsec.base.errors import StoreError, UsageError, VflsecError
from vflsec.report import columns, curve, page, table
from vflsec.report.formats import Document, as_text
from vflsec.results.analysis.results import Cap, Damage, Point, Summary, name_defense
from vflsec.results.analysis.summary import summarize
from vflsec.results.records import folder as folders
from vflsec.results.records.manifest import Manifest, RunLimits
from vflsec.results.records.schema import Record, Result

Traffic = tuple[str, str, str, str, int]
"""Defense with its strength, sender, receiver, kind of message, and bytes."""


class Shown(ABC):
    """What shows itself as tables with lines around them, and as a curve."""

    @abstractmethod
    def document(self, *, details: bool = False) -> Document:
        """Return tables and lines; with ``details`` a row for each attack, and all columns."""

    @abstractmethod
    def plot(self) -> Figure:
        """Return the curve."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return what ``--format json`` prints, as data."""

    def to_json(self) -> str:
        """Return one JSON object."""
        return msgspec.json.encode(self.to_dict()).decode()

    def rich(self, width: int, *, details: bool = False) -> RenderableType:
        """Return the tables for a terminal of ``width`` columns."""
        return self.document(details=details).rich(width)

    def table(self, width: int = 140, *, details: bool = False) -> str:
        """Return the tables as text of at most ``width`` columns; below 110, some columns are left out."""
        return as_text(self.rich(width, details=details), width)

    def to_markdown(self, *, details: bool = False) -> str:
        """Return the tables as Markdown."""
        return self.document(details=details).markdown()

    def to_latex(self, *, details: bool = False) -> str:
        r"""Return the tables as LaTeX, for ``\usepackage{booktabs}``; what stands around them is in comments."""
        return self.document(details=details).latex()

    def save_curve(self, folder: Path | str) -> list[Path]:
        """Write ``curve.svg`` and ``curve.png`` into ``folder``."""
        return curve.save(self.plot(), Path(folder))

    def __repr__(self) -> str:
        """Show the table."""
        return self.table()


class Report(Shown):
    """The result of an evaluation.

    Args:
        summary: its points, scores and gates.
        manifest: what was evaluated, with all settings and where the numbers come from.
        traffic: what crosses in a training under each defense, on average.
    """

    def __init__(self, summary: Summary, manifest: Manifest, traffic: Sequence[Traffic] = ()) -> None:
        self.summary = summary
        self.manifest = manifest
        self.traffic = traffic

    @classmethod
    def read(
        cls,
        folder: Path | str,
        *,
        max_leak: Mapping[str, float] | None = None,
        min_utility: float | None = None,
        max_undetected: float | None = None,
    ) -> Report:
        """Return the report of a results folder.

        The folder may be read-only and come from another machine: reading it needs neither the data nor the plug-ins
        of the evaluation, and executes nothing. The limits that its runs were given always count; the arguments add
        others.

        Args:
            folder: of an evaluation.
            max_leak: limits on the leak, by attack.
            min_utility: a limit on the utility.
            max_undetected: a limit on the advantage that could have been overlooked.

        Raises:
            StoreError: the folder holds no evaluation, or a damaged one.
            UsageError: a limit on an attack that was not run.
        """
        folder = files.make_path(folder)
        manifest, records = folders.read_manifest(folder), folders.read_records(folder)
        folders.expect_limits(folder, manifest)
        subgroups, stored = folders.read_subgroups(folder), folders.read_limits(folder)
        try:
            limits = RunLimits(max_leak=dict(max_leak or {}), min_utility=min_utility, max_undetected=max_undetected)
        except ValueError as error:
            raise UsageError(str(error)) from None
        try:
            manifest, records = folders.with_given_names(manifest, records)
            summary = summarize(
                manifest, records, out=os.fsencode(folder).decode(errors="replace"), limits=limits, stored=stored,
                subgroups=subgroups,
            )  # fmt: skip
        except VflsecError:
            raise
        except Exception as error:  # whatever a folder contains, its reader gets one line
            raise StoreError(
                f"expected an evaluation of vflsec in {folder}, found a damaged manifest or records "
                f"({type(error).__name__}: {error}): compute them again with --fresh"
            ) from error
        return cls(summary, manifest, _sum_traffic(manifest, records))

    @property
    def points(self) -> list[Point]:
        """One per method, defense, strength and attack."""
        return self.summary.points

    @property
    def worst(self) -> list[Point]:
        """The headlines: one per method, defense, strength and target."""
        return self.summary.worst

    @property
    def cap(self) -> list[Cap]:
        """One per method, defense and attack."""
        return self.summary.cap

    @property
    def integrity(self) -> list[Damage]:
        """One per method, defense, strength and attack on integrity."""
        return self.summary.integrity

    def document(self, *, details: bool = False) -> Document:
        """Return tables and lines; with ``details`` a row for each attack, and all columns."""
        return table.show(self.summary, details=details)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--format json`` prints, as data."""
        content: dict[str, Any] = msgspec.to_builtins(self.summary)
        return content

    def to_csv(self) -> str:
        """Return one line per point, and per attack on integrity."""
        return columns.as_csv(self.summary)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per point, per headline and per attack on integrity.

        Its columns are the dataset and those of ``to_csv``. Numbers that are missing are NaN, so that the tables of
        several reports can be joined by ``pandas.concat``.
        """
        shown = columns.select_file_columns()
        frame = pd.DataFrame(columns.list_lines(self.summary), columns=[column.name for column in shown])
        frame = frame.astype({column.name: float for column in shown if column.kind == "number"})
        frame["seeds"] = frame["seeds"].astype(int)
        frame.insert(0, "dataset", self.summary.dataset)
        return frame

    def to_html(self) -> str:
        """Return one HTML document: verdict, curve, tables, threat model, and where the numbers come from.

        It needs no network and runs no script.
        """
        return page.write_page([self.draw_part()])

    def draw_part(self) -> page.Part:
        """Return what a page needs, which may be about several reports."""
        drawn = self.summary.points and not self.summary.audited  # an audit has one strength, and no utility
        dots = curve.draw_attacks(self.summary)
        plain = msgspec.structs.replace(self.summary, notes=[], not_run=[], alarms=[])  # the page lists these itself
        pictures = [curve.to_svg(curve.draw(plain)) if drawn else b"", curve.to_svg(dots) if dots else b""]
        return page.Part(self.summary, self.manifest, self.traffic, *pictures)

    def save_page(self, folder: Path | str) -> Path:
        """Write ``report.html`` into ``folder``."""
        path = Path(folder) / "report.html"
        files.replace(path, self.to_html().encode(), mode=0o666)
        return path

    def plot(self) -> Figure:
        """Return the privacy-utility curve; ``vflsec.plot`` draws several reports side by side."""
        return curve.draw(self.summary)

    def save(self, folder: Path | str) -> list[Path]:
        """Write page and curve into ``folder``; an audit, which has one strength and no utility, has no curve."""
        curves = [] if self.summary.audited else self.save_curve(folder)
        return [*curves, self.save_page(folder)]

    def _repr_html_(self) -> str:
        return page.write_fragment(self.summary)


def plot(reports: Iterable[Report]) -> Figure:
    """Return the privacy-utility curves of several reports side by side, with one legend where one serves for all.

    Args:
        reports: as ``evaluate`` or ``Report.read`` return them, for example of several datasets.

    Raises:
        UsageError: no report, or something else among them.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    for report in several:
        if not isinstance(report, Report):
            raise UsageError(f"expected reports to plot, got {type(report).__name__}: read a folder with Report.read")
    if not several:
        raise UsageError("expected at least one report to plot, got none")
    return curve.draw(*(report.summary for report in several))


def order_roles(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of several adversaries, the one first that gains most by joining.

    Raises:
        UsageError: a report is given twice, or with a copy of it.
    """
    seen: dict[bytes, str] = {}
    for report in reports:
        content = msgspec.json.encode((report.manifest, msgspec.structs.replace(report.summary, out="", gates=[])))
        if content in seen:
            both = f"{seen[content]} and {report.summary.out}"
            raise UsageError(f"expected different evaluations, found the same in {both}: name each once")
        seen[content] = report.summary.out
    return sorted(reports, key=lambda report: -table.measure_gain(report.summary))


def _sum_traffic(manifest: Manifest, records: Mapping[str, Record]) -> list[Traffic]:
    """Return the bytes of each route in a training, the mean under each defense; predictions are left out."""
    several = len({row.method for row in manifest.rows}) > 1
    by_place: dict[str, dict[str, Result]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if isinstance(record, Result) and record.traffic:
            place = f"{row.method}, " * several + name_defense(row, manifest.baseline_defense)
            by_place.setdefault(place, {})[record.cell] = record
    total: Counter[tuple[str, str, str, str]] = Counter()
    for place, by_cell in by_place.items():
        for phase, sender, receiver, kind, nbytes in chain(*(record.traffic for record in by_cell.values())):
            if phase != "predict":
                total[place, sender, receiver, kind] += nbytes
    return [(*route, round(nbytes / len(by_place[route[0]]))) for route, nbytes in total.items()]
