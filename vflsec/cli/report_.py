"""``vflsec report``: a finished evaluation again."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from vflsec.base import files
from vflsec.base.errors import UsageError
from vflsec.cli.eval_ import read_limits
from vflsec.cli.options import FilePath, add_limits, exit_code, output_format, read_report, save, show


@click.command("report")
@click.argument("folders", nargs=-1, required=True, type=FilePath(path_type=Path), metavar="DIR...")
@click.option("--compare", is_flag=True, help="Print what changed from the first of two folders to the second.")
@click.option(
    "--html",
    type=FilePath(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the page of one folder to FILE, for example if the folder is read-only.  [default: DIR/report.html]",
)
@add_limits
@output_format
def command(
    folders: tuple[Path, ...],
    compare: bool,
    html: Path | None,
    max_leak: tuple[str, ...],
    min_utility: float | None,
    max_undetected: float | None,
    form: str,
) -> None:
    """Print a finished evaluation or audit again, in any format, and draw its curve again.

    The limits that it was given are checked again. Further limits are checked and printed, and decide the exit code as
    well, but do not change DIR/report.html.
    """
    from vflsec.results.records.folder import is_sweep
    from vflsec.results.records.manifest import RunLimits

    if compare:
        if html or max_leak or min_utility is not None or max_undetected is not None:
            raise UsageError("expected no limits with --compare, nor --html: set them in a report of one folder")
        _compare(folders, form)
        return
    given = RunLimits(max_leak=read_limits(max_leak), min_utility=min_utility, max_undetected=max_undetected)
    limits_ = msgspec.structs.asdict(given)
    swept = any(map(is_sweep, folders))
    if html and (len(folders) > 1 or swept):
        raise UsageError("expected one evaluation or audit with --html: name one DIR, of a sweep DIR/points/NAME")
    if swept and len(folders) > 1:
        raise UsageError(f"expected one folder of a sweep, got {len(folders)}: print one at a time")
    reports = [read_report(folder, **limits_) for folder in folders]
    for report, folder in zip(reports, folders, strict=True):
        show(report, form)
        stored = report if swept or given == RunLimits() else read_report(folder)
        if html:
            _write(html, stored.to_html())
        else:
            save(stored, folder)
    sys.exit(max(exit_code(report) for report in reports))


def _write(path: Path, page: str) -> None:
    try:
        files.replace(path, page.encode(), mode=0o666)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another file in --html") from None
    click.echo(f"report: {path}", err=True)


def _compare(folders: tuple[Path, ...], form: str) -> None:
    from rich.console import Console

    from vflsec.report import comparison
    from vflsec.report.formats import NARROW
    from vflsec.report.report import Report

    if len(folders) != 2 or form in ("csv", "latex"):
        got = f"{len(folders)}" if len(folders) != 2 else f"--format {form}"
        raise UsageError(f"expected two folders and --format table, json or markdown with --compare, got {got}")
    before, after = ((report.summary, report.manifest) for report in map(Report.read, folders))
    changes = comparison.compare(before, after)
    if form == "table":
        console = Console()
        width = console.width if console.is_terminal else max(console.width, NARROW)
        Console(width=width).print(comparison.show(changes).rich(width))
    else:
        text = msgspec.json.encode(changes).decode() if form == "json" else comparison.show(changes).markdown()
        click.echo(text.rstrip("\n"))
