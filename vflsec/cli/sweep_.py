"""``vflsec eval --sweep``: one evaluation for each value of some settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vflsec.base.checks import count
from vflsec.base.errors import UsageError
from vflsec.cli.options import exit_code, kept_on_interrupt, opened, show

if TYPE_CHECKING:
    from vflsec.report.sweep import SweepReport


def axes_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each setting that is swept.

    Raises:
        UsageError: a text of another form, or a setting twice.
    """
    from vflsec.run.sweep import parse_axis

    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, values = parse_axis(text)
        if path in axes:
            raise UsageError(f"expected the values of {path} once, got them twice: name all in one --sweep")
        axes[path] = values
    return axes


def run_sweep(
    settings: dict[str, Any],
    axes: dict[str, list[Any]],
    out: Path | None,
    form: str,
    limit: dict[str, Any],
    how: dict[str, Any],
    *,
    paired: bool,
    dry_run: bool,
    fresh: bool,
    retry_errors: bool,
) -> None:
    """Evaluate at every value of the settings in ``axes``, and print and draw what depends on them."""
    from vflsec.report.progress import shown
    from vflsec.report.sweep import SweepReport
    from vflsec.results.analysis.gates import check_limits
    from vflsec.results.records.naming import with_given_names
    from vflsec.run import sweep
    from vflsec.run.engine import reasons
    from vflsec.run.store import Store

    found = sweep.prepare(settings, axes, paired=paired, command=["vflsec", *sys.argv[1:]])
    folder = out or Path("runs") / sweep.title(found[0], axes)
    for line in dict.fromkeys(line for point in found for line in reasons(point.left_out)):
        click.echo(f"left out: {line}", err=True)
    store = Store(folder)
    if fresh:
        store.expect_own()
    sweep.expect_kind(folder, sweep=True)
    missing = sweep.missing(found, None if fresh else store)
    of = f"{count(len(found), 'point')} of {', '.join(axes)}"
    click.echo(f"vflsec eval  {of}: {count(missing, 'result')} to compute   {folder}", err=True)
    if dry_run:
        for point in found:
            click.echo(point.name, err=True)
        return
    for point in found:
        check_limits(with_given_names(point.manifest, {})[0], limit["max_leak"])
    with opened(store, fresh=fresh, retry_errors=retry_errors):
        store.write_limits(**limit)
        sweep.write(axes, found, store, paired=paired)
        with kept_on_interrupt(store):
            for _ in shown(sweep.compute(found, store, **how), missing):
                pass
    report = SweepReport.read(folder)
    show_sweep(report, folder, form)
    sys.exit(max(map(exit_code, report.reports)))


def show_sweep(report: SweepReport, folder: Path, form: str) -> None:
    """Print a sweep on stdout and draw its curves; print a line if the folder cannot be written."""
    show(report, form)
    click.echo(f"no report.html of a sweep: vflsec report {folder}/points/NAME writes the page of a point", err=True)
    try:
        for path in report.save_curve(folder):
            click.echo(f"curve: {path}", err=True)
    except OSError as error:
        click.echo(f"no curve was drawn: cannot write to {folder}: {error.strerror or error}", err=True)
