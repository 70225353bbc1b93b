"""``vflsec report``: a finished evaluation again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vflsec.cli.eval_ import draw, exit_code, leak_limits
from vflsec.cli.options import limits, output_format


@click.command("report")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@limits
@output_format
def command(folders: tuple[Path, ...], max_leak: tuple[str, ...], min_utility: float | None, form: str) -> None:
    """Print a finished evaluation again, in any format, and draw its curve again."""
    from vflsec.report.report import Report

    limit = leak_limits(max_leak)
    reports = [Report.read(folder, max_leak=limit, min_utility=min_utility) for folder in folders]
    for report, folder in zip(reports, folders, strict=True):
        draw(report, folder, form)
    sys.exit(max(exit_code(report) for report in reports))
