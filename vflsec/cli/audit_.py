"""``vflsec audit``: what a recording gives away."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vflsec.cli.eval_ import leak_limits
from vflsec.cli.options import several


@click.command("audit")
@click.argument("recording", type=click.Path(path_type=Path), metavar="RECORDING")
@click.option(
    "--truth",
    type=click.Path(path_type=Path),
    help="The other role's recording of the same run: it says how much of what was recovered is true.",
)
@click.option("--audit", "names", multiple=True, help="Run these alone; repeat or list.  [default: all of the role]")
@click.option(
    "--max-leak",
    multiple=True,
    metavar="NAME=X",
    help="Fail (exit 1) if more may be recovered, where 1 is everything; repeat.",
)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(recording: Path, truth: Path | None, names: tuple[str, ...], max_leak: tuple[str, ...], form: str) -> None:
    """Audit what one role of a protocol saw: run every attack that it could mount on its own recording.

    RECORDING is what one role of an encrypted linear layer sent, received and computed. The audits read nothing else;
    with --truth their success is measured, without it only how well all fits together. What an audit cannot measure it
    calls not measured, and a limit on it never holds (exit code 3).
    """
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from vflsec.secure.transcripts import run, table
    from vflsec.secure.transcripts.audit import Truth
    from vflsec.secure.transcripts.recording import Recording

    limit = leak_limits(max_leak)
    for name, value in limit.items():
        if not 0 <= value <= 1:
            raise click.BadParameter(f"expected a limit for {name} from 0 to 1, got {value:g}", param_hint="--max-leak")
    read = Recording(recording)
    both = Truth(read, Recording(truth)) if truth else None
    chosen = several(names)
    run.suitable(read, list(limit))  # refuses what is unknown, or for the other role
    audits = run.suitable(read, [*chosen, *limit] if chosen else [])
    found = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("audit", total=len(audits))
        for audit in audits:
            progress.update(bar, description=audit.name)
            found.append(audit(read, both))
            progress.advance(bar)
    verdict = run.judge(read, found, both, limit)
    if form == "json":
        click.echo(msgspec.json.encode(verdict).decode())
    else:
        console = Console()
        Console(width=console.width if console.is_terminal else max(console.width, 130)).print(table.rich(verdict))
    sys.exit(verdict.exit_code)
