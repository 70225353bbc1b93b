"""``vflsec report``: a finished evaluation again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from vflsec.base import files
from vflsec.base.errors import UsageError
from vflsec.cli import options
from vflsec.cli.eval_ import read_limits

if TYPE_CHECKING:
    from vflsec.report.report import Report

HEAD = 8
"""Bytes by which each kind of file that is written is known."""


def add_file(name: str, help_: str) -> Callable[[Any], Any]:
    """Return the option that names a file to be written."""
    return click.option(name, type=options.FilePath(path_type=Path, dir_okay=False), metavar="FILE", help=help_)


@click.command("report")
@click.argument("folders", nargs=-1, required=True, type=options.PATH, metavar="DIR...")
@click.option("--compare", is_flag=True, help="Print what changed from the first of two folders to the second.")
@add_file(
    "--html",
    "Write the page to FILE, for example if the folder is read-only; of several folders, one page with a section for "
    "each adversary.  [default: DIR/report.html]",
)
@add_file("--pdf", "Also print this page to FILE, by Chromium, Chrome, Edge or WeasyPrint.")
@add_file("--junit", "Write the gates to FILE as JUnit, which build servers show as tests.")
@add_file("--sarif", "Write gates and leaks to FILE as SARIF 2.1.0, for a code-scanning page.")
@add_file("--summary", "Write Markdown for the comment on a pull request to FILE.")
@click.option(
    "--accepted",
    type=options.PATH,
    metavar="DIR",
    help="The folder of the last accepted run, with which --summary and --max-rise compare.",
)
@click.option(
    "--max-rise",
    type=click.FloatRange(0, 1),
    callback=options.check_finite,
    help="Fail if the strongest attack leaks more than in --accepted by more than this, with its whole 95 % interval.",
)
@options.add_limits
@options.track
@options.output_format
@options.details
def command(
    folders: tuple[Path, ...],
    compare: bool,
    html: Path | None,
    pdf: Path | None,
    junit: Path | None,
    sarif: Path | None,
    summary: Path | None,
    accepted: Path | None,
    max_rise: float | None,
    max_leak: tuple[str, ...],
    min_utility: float | None,
    max_undetected: float | None,
    trackers: tuple[str, ...],
    form: str,
    details: bool,
) -> None:
    """Print a finished evaluation or audit again, in any format, and draw its curve again.

    Several folders, for example one for each adversary, are printed one after the other, and then side by side.

    The limits that it was given are checked again. Further limits are checked and printed, and decide the exit code as
    well, but do not change DIR/report.html.
    """
    from vflsec.report.page import expect_printer, print_page, write_page
    from vflsec.report.report import order_roles
    from vflsec.report.table import show_roles
    from vflsec.results.records.folder import is_sweep
    from vflsec.results.records.manifest import RunLimits

    options.expect_trackers(trackers)
    exports = {"junit": junit, "sarif": sarif, "summary": summary}
    named = [f"--{name}" for name, path in {"html": html, "pdf": pdf, **exports, "accepted": accepted}.items() if path]
    if compare:
        if named or max_leak or trackers or not {min_utility, max_undetected, max_rise} <= {None}:
            raise UsageError("expected no limits with --compare, nor other files: set them in a report of one folder")
        _compare(folders, form)
        return
    given = RunLimits(max_leak=read_limits(max_leak), min_utility=min_utility, max_undetected=max_undetected)
    limits_ = msgspec.structs.asdict(given)
    swept = any(map(is_sweep, (*folders, accepted or folders[0])))
    single = [name for name in named if name not in ("--html", "--pdf")]
    if (single and len(folders) > 1) or (named and swept):
        name = (single or named)[0]
        raise UsageError(f"expected one evaluation or audit with {name}: name one DIR, of a sweep DIR/points/NAME")
    if max_rise is not None and accepted is None:
        raise UsageError("expected --accepted DIR with --max-rise: name the folder of the last accepted run")
    if swept and len(folders) > 1:
        raise UsageError(f"expected one folder of a sweep, got {len(folders)}: print one at a time")
    if pdf:
        expect_printer()
    reports = [options.read_report(folder, **limits_) for folder in folders]
    before = options.read_report(accepted) if accepted else None
    stored = reports if given == RunLimits() else [options.read_report(folder) for folder in folders]
    ordered = [] if swept else order_roles(stored)
    for report in reports:
        options.show(report, form, details=details)
    if len(ordered) > 1 and form not in ("json", "csv"):
        options.show_document(show_roles([report.summary for report in ordered]), form)
    page = write_page([report.draw_part() for report in ordered]) if html or pdf else ""
    if html:
        _write(html, page.encode(), "html")
    if pdf:
        _write(pdf, print_page(page), "pdf")
    for report, folder in zip(stored, folders, strict=True):
        if not (html or pdf):
            options.save(report, folder)
        options.send(trackers, report, folder)
    codes = {options.exit_code(report) for report in reports}
    if before or any(exports.values()):
        codes.add(_export(reports[0], before, max_rise, exports))
    sys.exit(1 if 1 in codes else max(codes))


def _export(report: Report, accepted: Report | None, max_rise: float | None, exports: Mapping[str, Path | None]) -> int:
    """Write the files for other programs; return 1 if the leak has risen, 3 if that is undecided, else 0."""
    from vflsec.report import comparison, exchange
    from vflsec.report.table import write_gate

    moved = None
    if accepted is not None:
        moved = comparison.compare((accepted.summary, accepted.manifest), (report.summary, report.manifest))
    gates = [gate for gate in report.summary.gates if not gate.replaced]
    code = 0
    if moved is not None and max_rise is not None:
        gates.append(exchange.check_rise(moved, max_rise))
        click.echo(write_gate(gates[-1]), err=True)  # stdout may be JSON
        code = {True: 0, False: 1, None: 3}[gates[-1].holds]
    contents = {
        "junit": lambda: exchange.to_junit(report, gates),
        "sarif": lambda: exchange.to_sarif(report, gates),
        "summary": lambda: exchange.to_comment(report, gates, moved).encode(),
    }
    for name, path in exports.items():
        if path is not None:
            _write(path, contents[name](), name)
    return code


def _write(path: Path, content: bytes, name: str) -> None:
    """Replace an earlier file of this kind, but no device, results or file of another kind."""
    try:
        if path.exists() and not (path.is_file() and path.read_bytes()[:HEAD] in (b"", content[:HEAD])):
            raise UsageError(f"expected a new file for --{name}, found {path}, which is something else: name another")
        files.replace(path, content, mode=0o666)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another file in --{name}") from None
    options.print_note(f"{name}: {path}")


def _compare(folders: tuple[Path, ...], form: str) -> None:
    from vflsec.report import comparison
    from vflsec.report.report import Report

    if len(folders) != 2 or form in ("csv", "latex"):
        got = f"{len(folders)}" if len(folders) != 2 else f"--format {form}"
        raise UsageError(f"expected two folders and --format table, json or markdown with --compare, got {got}")
    before, after = ((report.summary, report.manifest) for report in map(Report.read, folders))
    changes = comparison.compare(before, after)
    if form == "json":
        click.echo(msgspec.json.encode(changes).decode())
    else:
        options.show_document(comparison.show(changes), form)
