"""``vflsec data``: describe and check the user's own data."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from vflsec.base.errors import UsageError
from vflsec.cli import Suggesting
from vflsec.cli.options import PATH, expect_folder, print_note

if TYPE_CHECKING:
    from vflsec.data.checkup import Checkup


@click.group("data", cls=Suggesting)
def command() -> None:
    """Draft and check the TOML file that describes your own data.

    \b
    vflsec data init bank.csv bureau.csv --label defaulted
    vflsec data check data.toml
    vflsec eval --dataset data.toml
    """


@command.command()
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option("--label", help="The column of labels.  [default: guessed from names and values]")
@click.option(
    "--id",
    "keys",
    multiple=True,
    help="The columns that identify a row, comma-separated; where their names differ, once for each file in turn.  "
    "[default: guessed]",
)
@click.option("--active", help="The file of the active party.  [default: the one with the label]")
@click.option("--out", type=PATH, default="data.toml", show_default=True, help="Where to write the draft.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(
    files: tuple[Path, ...], label: str | None, keys: tuple[str, ...], active: str | None, out: Path, force: bool
) -> None:
    """Draft the TOML file for one CSV or Parquet file per party.

    The types of columns, the id, the label and the way files are written are guessed from the data, and a comment says
    why. Read the draft, then run vflsec data check.
    """
    from vflsec.data.draft import draft

    expect_folder(out, "--out")
    text = draft(files, out.parent, label=label, keys=[key.split(",") for key in keys], active=active)
    if out.exists() and not force:
        raise UsageError(f"expected a new file {out}, found one: name another with --out, or overwrite it with --force")
    out.write_text(text, "utf-8")
    click.echo(text, nl=False)
    click.echo(err=True)
    print_note(f"written to {out}; next: vflsec data check {out}")


@command.command()
@click.argument("path", type=PATH, metavar="TOML")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def check(path: Path, form: str) -> None:
    """Report what is in your data, and everything that is wrong with them.

    Matched ids, and what they tell of the customers of others, balance of classes, types, missing values, encoded
    widths, texts that differ only in spelling, numbers far from the others of their column, columns that look like ids
    or nearly copy the label, rows that are in training and test, and what joining the parties is worth to quick models.
    Exit code 2 with faults.
    """
    from vflsec.data import checkup

    report = add_label_warning(checkup.check(path))
    click.echo(msgspec.json.encode(report).decode() if form == "json" else render(report, path), nl=form == "json")
    sys.exit(2 if report.faults else 0)


def add_label_warning(report: Checkup) -> Checkup:
    """Return ``report`` with a warning if an adversary that knows the default number of labels knows too many."""
    fewer, default = limit_labels(report)
    if fewer is None:
        return report
    name, rows = min(report.train.items(), key=lambda item: item[1])
    warning = (
        f"the {default} labels that the adversary knows by default are more than a tenth of the {rows} training rows "
        f"of class {name!r}, and gates are undecided: set aux.n={fewer}"
    )
    return msgspec.structs.replace(report, warnings=[*report.warnings, warning])


def limit_labels(report: Checkup) -> tuple[int | None, int]:
    """Return how many labels an evaluation should let the adversary know, or None for the default, and the default.

    They are drawn evenly from the classes: at most ``MAX_KNOWN_SHARE`` of the rarest class, but at least one row.
    """
    from vflsec.results.analysis.gates import MAX_KNOWN_SHARE
    from vflsec.run.spec import AuxSpec

    default, classes = AuxSpec().n, len(report.train)
    rarest = min(report.train.values(), default=0)
    if not rarest or -(-default // classes) / rarest <= MAX_KNOWN_SHARE:
        return None, default
    return classes * max(1, int(MAX_KNOWN_SHARE * rarest + 1e-9)), default


def render(report: Checkup, path: Path) -> str:
    """Return the report as text of at most 80 columns where names are not longer."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=80 if not sys.stdout.isatty() else None, color_system=None, highlight=False)

    def show(title: str, header: str, rows: list[list[str]], left: int) -> None:
        made = Table(box=SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(header.split("|")):
            made.add_column(name, justify="left" if number < left else "right", overflow="fold")
        for row in rows:
            made.add_row(*map(Text, row))
        console.print(Text(title), made, sep="")

    def three_digits(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:.3f}"

    def show_warnings() -> None:
        for warning in report.warnings:
            console.print(Text(f"WARNING {warning}"), soft_wrap=True)

    for fault in report.faults:
        console.print(Text(f"FAULT {fault}"), soft_wrap=True)
    if report.faults:
        show_warnings()
        return out.getvalue()
    rows = [
        [p.name, p.role, p.file, f"{p.rows:,}", f"{p.common:,}", str(p.columns), str(p.encoded)] for p in report.parties
    ]
    show(f"{report.name}: parties", "party|role|file|rows|in common|columns|encoded", rows, 3)
    rows = [[p.name, f"{p.common / p.rows:.1%}", three_digits(p.guess)] for p in report.parties]
    show("what matching tells each party", "party|share of its rows in common|AUC of a guess which", rows, 1)
    total = sum(report.classes.values())
    rows = [[name, f"{n:,}", f"{n / total:.1%}"] for name, n in report.classes.items()]
    show("label, on rows in common", "class|rows|share", rows, 1)
    measure = "AUC" if report.metric == "auc" else report.metric
    rows = [
        [c.party, c.column, c.kind, f"{c.missing:.1%}", f"{c.values:,}", str(c.encoded), three_digits(c.predicts)]
        for c in report.columns
    ]
    show("columns", f"party|column|type|missing|values|encoded|{measure} alone", rows, 3)
    rows = [[who, three_digits(value)] for who, value in report.utility.items()]
    show("quick models, test rows of one split", f"columns of|{measure}", rows, 1)
    show_warnings()
    fewer, _ = limit_labels(report)
    known = " --method split-lm" if any(c.kind == "text" for c in report.columns) else ""
    known += "" if fewer is None else f" --set aux.n={fewer}"
    if not report.warnings or fewer is not None:
        fine = "" if report.warnings else "nothing looks wrong; "
        console.print(Text(f"{fine}next: vflsec eval --dataset {path}{known}"), soft_wrap=True)
    return out.getvalue()
