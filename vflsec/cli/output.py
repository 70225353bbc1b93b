"""What commands print at their end, and the code with which they exit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from vflsec.base.checks import count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vflsec.report.report import Report
    from vflsec.run.store import Store


WIDEST = 2000
"""So many columns a table has at most in files and pipes."""


class Printable(Protocol):
    """A report that prints itself in every format."""

    def rich(self, width: int) -> RenderableType:
        """Return the tables for a terminal of ``width`` columns."""

    def to_json(self) -> str:
        """Return one JSON object."""

    def to_csv(self) -> str:
        """Return one line per row."""

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""

    def to_latex(self) -> str:
        """Return the tables as LaTeX."""


@contextmanager
def kept_on_interrupt(store: Store) -> Iterator[None]:
    """On Ctrl-C, print how many trainings and results are kept and exit."""
    try:
        yield
    except KeyboardInterrupt:
        trained, found = count(store.trained(), "training"), count(len(store.records()), "result")
        kept = f"{trained} and {found} are kept in {store.folder}"
        click.echo(f"interrupted: {kept}; the same command goes on from there", err=True)
        sys.exit(130)


@contextmanager
def opened(store: Store, *, fresh: bool, retry_errors: bool) -> Iterator[None]:
    """Lock a results folder for writing, and drop what is to be computed anew."""
    with store.lock():
        if fresh:
            store.clear()
        store.trim()
        if retry_errors:
            store.forget_failures()
        yield


def draw(report: Report, folder: Path, form: str) -> None:
    """Print the results on stdout, and write page and curve of the folder."""
    show(report, form)
    save(report, folder)


def save(report: Report, folder: Path) -> None:
    """Write page and curve of a folder; print a line if it cannot be written."""
    try:
        curves = [] if report.summary.audited else report.save_curve(folder)  # that has one strength, without utility
        page = report.save_page(folder)
    except OSError as error:
        click.echo(f"no curve was drawn: cannot write to {folder}: {error.strerror or error}", err=True)
        return
    for path in curves:
        click.echo(f"curve: {path}", err=True)
    click.echo(f"report: {page}", err=True)


def show(report: Printable, form: str) -> None:
    """Print the results on stdout."""
    if form == "table":
        on_terminal(report.rich)
        return
    forms = {"json": report.to_json, "csv": report.to_csv, "markdown": report.to_markdown, "latex": report.to_latex}
    click.echo(forms[form]().rstrip("\n"))


def on_terminal(make: Callable[[int], RenderableType]) -> None:
    """Print what ``make`` returns for the width of the terminal, or in files and pipes for all columns."""
    from rich.console import Console

    from vflsec.report.formats import as_text

    console = Console()
    width = max(console.width, 80 if console.is_terminal else 140)
    while not console.is_terminal and width < WIDEST and "NOT SHOWN" in as_text(make(width), width):
        width += 20
    Console(width=width).print(make(width))


def exit_code(report: Report) -> int:
    """Return 1 if a gate in force failed, 3 if a cell gave no number or a gate is undecided, else 0."""
    verdicts = [gate.holds for gate in report.summary.gates if not gate.replaced]
    if False in verdicts:
        return 1
    statuses = [*(point.statuses for point in report.points), *(found.statuses for found in report.integrity)]
    lost = any(set(found) & {"error", "diverged", "collapsed", "missing"} for found in statuses)
    return 3 if lost or report.summary.lost or None in verdicts else 0
