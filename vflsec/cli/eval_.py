"""``vflsec eval``: the main job."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vflsec.cli.options import config, device, limits, numbers, output_format, settings

if TYPE_CHECKING:
    from vflsec.evaluation.engine import Plan
    from vflsec.evaluation.spec import EvalSpec
    from vflsec.evaluation.store import Record
    from vflsec.report.report import Report


@click.command("eval")
@click.option("--dataset", help="Registered name, or a TOML file.  [default: credit-default]")
@click.option(
    "--method", "methods", multiple=True, help="Method; repeat or list for several curves.  [default: fedsplitnn]"
)
@click.option("--attack", "attacks", multiple=True, help="NAME[:option=value,...]; repeat or list.  [default: mc]")
@click.option("--defense", "defenses", multiple=True, help="NAME[:option=value,...][@point]; swept over --lambda.")
@click.option("--lambda", "--strength", "strengths", multiple=True, help="Strengths, for example 1,5,25; 0 is added.")
@click.option("--at", "at", multiple=True, help="Where the defense acts: gradient, embedding, parameters.")
@click.option("--with", "fixed", multiple=True, help="NAME:knob=value@point: a further defense that stays as it is.")
@click.option("--adversary", help="The attacking party.  [default: passive_1]")
@click.option("--seeds", type=click.IntRange(min=1), help="Repetitions.  [default: 5]")
@settings
@config
@click.option("--out", type=click.Path(path_type=Path), help="Results folder.  [default: runs/<name>]")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes.  [default: the number of cores]")
@click.option("--engine", default="local", show_default=True, help="local, or dask:ADDRESS of a running scheduler.")
@device
@click.option("--dry-run", is_flag=True, help="Print the plan and the resolved settings; compute nothing.")
@click.option("--fresh", is_flag=True, help="Forget what the results folder holds.")
@click.option("--retry-errors", is_flag=True, help="Compute again what errored or diverged.")
@limits
@output_format
def command(
    out: Path | None,
    jobs: int | None,
    engine: str,
    device: str,
    dry_run: bool,
    fresh: bool,
    retry_errors: bool,
    max_leak: tuple[str, ...],
    min_utility: float | None,
    form: str,
    **chosen: Any,
) -> None:
    """Train, defend, attack: print the privacy-utility table, draw the curve.

    Results are kept as they are computed: the same command goes on where it stopped, and a finished one computes
    nothing. --lambda 0, the undefended row, is always added.
    """
    from vflsec import api
    from vflsec.evaluation import engine as engines
    from vflsec.evaluation import spec as specs
    from vflsec.evaluation.gates import check_limits
    from vflsec.evaluation.store import Store
    from vflsec.report.report import Report

    limit = leak_limits(max_leak)
    spec = specs.read(resolve(**chosen))
    folder = out or Path("runs") / spec.name
    check_limits(spec, limit)
    engines.check_engine(engine)
    engines.check(spec)  # before anything is written: bad input leaves nothing behind
    if dry_run:
        announce(spec, engines.plan(spec, Store(folder) if folder.exists() else None), folder)
        click.echo(specs.to_toml(spec), nl=False)
        return
    store = Store(folder)
    with store.lock():
        if fresh:
            store.clear()
        store.trim()
        if retry_errors:
            store.forget(lambda record: record["status"] not in ("error", "diverged"))
        todo = engines.plan(spec, store)
        announce(spec, todo, folder)
        store.write_settings(specs.to_toml(spec))
        try:
            watch(engines.evaluate(todo, store, jobs=jobs or api.cores(), device=device, engine=engine), todo)
        except KeyboardInterrupt:
            kept = len(store.records())
            click.echo(
                f"interrupted: {kept} results are kept in {folder}; the same command goes on from there", err=True
            )
            sys.exit(130)
    report = Report.read(folder, max_leak=limit, min_utility=min_utility)
    finish(report, folder, form)


def resolve(
    config: Path | None,
    assignments: Sequence[str],
    methods: Sequence[str],
    attacks: Sequence[str],
    defenses: Sequence[str],
    strengths: Sequence[str],
    at: Sequence[str],
    fixed: Sequence[str],
    **plain: Any,
) -> dict[str, Any]:
    """Return the settings: defaults, then the file, then options, then ``--set``."""
    import msgspec

    from vflsec.evaluation import spec as specs

    found: dict[str, Any] = specs.read_toml(config) if config else {}
    found |= {key: value for key, value in plain.items() if value is not None}
    if methods:
        found["methods"] = [name for text in methods for name in specs.split_list(text)]
    if attacks:
        found["attacks"] = [specs.parse_attack(name) for text in attacks for name in specs.split_list(text)]
    if defenses:
        swept = [specs.parse_defense(name) for text in defenses for name in specs.split_list(text)]
        found["strengths"] = sorted({d.strength for d in swept if d.strength})
        points = tuple(point for text in at for point in text.split(","))
        found["defenses"] = [msgspec.structs.replace(d, strength=0.0, at=d.at or points or None) for d in swept]
    if strengths:
        found["strengths"] = numbers(strengths)
    if fixed:
        found["fixed"] = [specs.parse_defense(text) for text in fixed]
    return specs.merge(msgspec.to_builtins(found), assignments)


def announce(spec: EvalSpec, todo: Plan, folder: Path) -> None:
    """Say what is going to happen."""
    attacks = ", ".join(attack.name for attack in spec.attacks)
    defenses = ", ".join(defense.label for defense in spec.defenses) or "no defense"
    click.echo(f"vflsec eval  {spec.dataset} / {', '.join(spec.methods)} / {defenses} / {attacks}", err=True)
    click.echo(f"adversary: {spec.adversary}, honest-but-curious, {spec.aux.n} labeled rows", err=True)
    total = todo.cached + todo.missing
    what = f"{todo.missing} to compute" if todo.missing else "nothing to compute"
    click.echo(f"{total} results: {todo.cached} cached, {what}   {folder}", err=True)


def watch(records: Iterable[Record], todo: Plan) -> None:
    """Show progress on stderr: a bar on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not todo.missing:
        return
    if not console.is_terminal:
        for done, record in enumerate(records, start=1):
            click.echo(f"[{done}/{todo.missing}] {describe(record)}", err=True)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("results", total=todo.missing)
        for record in records:
            progress.update(bar, advance=1, description=describe(record))


def describe(record: Record) -> str:
    """Return one record in a few words."""
    what = " ".join(record.get("defenses") or ["no defense"]) if record["kind"] == "result" else "alone"
    return f"{record['method']} {what} {record['attack']['name']} seed {record['seed']}: {record['status']}"


def finish(report: Report, folder: Path, form: str) -> None:
    """Print the results, draw the curve, leave with the right exit code."""
    show(report, form)
    for path in report.save_curve(folder):
        click.echo(f"curve: {path}", err=True)
    sys.exit(exit_code(report))


def show(report: Report, form: str) -> None:
    """Print the results on stdout."""
    if form == "table":
        from rich.console import Console

        from vflsec.report import table

        console = Console()
        Console(width=max(console.width, 100)).print(table.rich(report.summary))
    else:
        click.echo({"json": report.to_json, "csv": report.to_csv, "markdown": report.to_markdown}[form]().rstrip("\n"))


def exit_code(report: Report) -> int:
    """Return 1 if a gate failed, 3 if a cell gave no number, else 0."""
    if any(gate.holds is False for gate in report.summary.gates):
        return 1
    lost = any(set(point.statuses) & {"error", "diverged", "missing"} for point in report.points)
    return 3 if lost else 0


def leak_limits(texts: Sequence[str]) -> dict[str, float]:
    """Read ``NAME=X`` limits.

    Raises:
        click.BadParameter: a text of another form.
    """
    limit = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            limit[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=LIMIT, for example mc=0.35, got {text!r}", param_hint="--max-leak")
    return limit
