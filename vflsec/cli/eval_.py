"""``vflsec eval``: the main job."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vflsec.base.checks import count
from vflsec.base.errors import UsageError
from vflsec.cli import options

if TYPE_CHECKING:
    from vflsec.run.engine import Plan
    from vflsec.run.job import Evaluation, Job

CANARIES = 1000
"""Rows whose labels are tossed for an empirical epsilon, where nobody says how many."""


@click.command("eval")
@options.dataset
@options.add_technique(
    "--method",
    "methods",
    "methods",
    help="NAME[:option=value,...]; repeat or list for several curves.  [default: fedsplitnn]",
)
@options.add_technique("--attack", "attacks", "attacks", help="NAME[:option=value,...]; repeat or list.  [default: mc]")
@options.add_technique(
    "--defense",
    "defenses",
    "defenses",
    help="NAME[:option=value,...][@point]; repeat or list. Swept over its own strengths (iso:lambda=1,5,25), else "
    "those of --lambda, else its usual ones.",
)
@click.option(
    "--lambda",
    "--strength",
    "strengths",
    multiple=True,
    help="Strengths of defenses without their own, for example 1,5,25; 0 is always added.",
)
@click.option(
    "--epsilon",
    "epsilons",
    multiple=True,
    help="In place of --lambda, for defenses with differential privacy: the epsilon that a whole training may spend, "
    "for example 1,2,8.",
)
@click.option("--at", "at", multiple=True, help="What the defense acts on: gradient, embedding, parameters, nodes.")
@options.add_technique(
    "--with",
    "fixed",
    "defenses",
    help="A further defense at one fixed strength: NAME:option=value[@point]; repeat for several.",
)
@click.option(
    "--adversary",
    help="The attacking party: active, passive_1, ...; a+b for parties that collude; server or source where the "
    "method has one.  [default: passive_1]",
)
@click.option(
    "--attack-budget",
    type=click.Choice(["small", "paper", "large"]),
    help="How many settings of each learned attack the adversary compares by cross-validation on its auxiliary "
    "labels: small 4, paper only the default ones, large 16.  [default: paper]",
)
@click.option(
    "--pick",
    is_flag=True,
    help="Also name the attack that the adversary would pick, by cross-validation of every attack on its auxiliary "
    "labels. Attacks then take about six times as long.",
)
@click.option(
    "--adaptive/--no-adaptive",
    default=None,
    help="Whether attacks read every release of a row, so that noise averages out over epochs, or only one.  "
    "[default: adaptive]",
)
@click.option(
    "--audit-epsilon",
    "canaries",
    is_flag=False,
    flag_value=CANARIES,
    type=click.IntRange(min=1),
    help="Toss the labels of so many training rows, and show what attacks on labels prove epsilon to be at least, for "
    f"any defense. Utility and leaks are then of tossed labels.  [default: none; without a number {CANARIES}]",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    help="How many seeds; each has its own split, models, noise and auxiliary labels.  [default: 5]",
)
@click.option(
    "--until",
    type=click.FloatRange(0, 1, min_open=True),
    callback=options.check_finite,
    help="Add seeds, five at a time, until the interval of each headline and utility is at most this wide to one side, "
    "for example 0.01, or until there are --seeds, here by default 50.",
)
@click.option(
    "--trainings",
    metavar="K[,K...]",
    help="How many trainings on the same rows the adversary has seen, each with models, batches and noise of its own; "
    "several numbers, 1,2,5,10, are compared.  [default: 1]",
)
@click.option(
    "--tune",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let each method compare N settings of training on held-out labels of each seed, those given and random ones. "
    "A setting that you give stays as it is.  [default: 1, those given]",
)
@options.settings
@click.option(
    "--sweep",
    "swept",
    multiple=True,
    metavar="PATH=VALUE,VALUE",
    help="Values of a setting, for example data.n_labeled=200,400; repeat for a grid. --set with commas does the same.",
)
@click.option("--paired", is_flag=True, help="Take the values of --sweep in their order, not every combination.")
@options.config
@options.data_dir
@click.option("--out", type=options.PATH, help="Results folder.  [default: runs/<name>]")
@click.option("--jobs", type=click.IntRange(min=1), help="How many worker processes.  [default: the number of cores]")
@click.option("--engine", default="local", show_default=True, help="local, or dask:ADDRESS of a running scheduler.")
@options.device
@click.option(
    "--rows",
    "rows",
    type=options.FilePath(path_type=Path, dir_okay=False),
    metavar="FILE.csv",
    help="Also write, for the owner of the data, how surely each attack infers the label of each training row. It is "
    "sensitive, as are the guesses that are then kept in DIR/guesses; without --rows and --by none are.",
)
@click.option(
    "--by",
    metavar="COLUMN",
    help="Also print the leak on each category of a raw column, or of each quartile of a number, and test whether they "
    "leak the same. Keeps guesses in DIR/guesses, too.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, its time and the resolved settings; compute nothing.")
@click.option("--fresh", is_flag=True, help="Delete the results in the folder and compute them again.")
@click.option("--retry-errors", is_flag=True, help="Recompute results that errored, diverged or are damaged.")
@options.add_limits
@options.add_max_exposure
@options.track
@options.output_format
@options.details
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
    max_undetected: float | None,
    max_exposure: float | None,
    until: float | None,
    trackers: tuple[str, ...],
    form: str,
    details: bool,
    trainings: str | None,
    swept: tuple[str, ...],
    paired: bool,
    assignments: tuple[str, ...],
    rows: Path | None,
    by: str | None,
    **chosen: Any,
) -> None:
    """Train, defend, attack: print the privacy-utility table, draw the curve.

    Each result is stored when it is computed. The same command resumes where it stopped, and computes nothing once it
    is finished. The undefended row, --lambda 0, is always added.
    """
    from vflsec import api
    from vflsec.base import files
    from vflsec.results.analysis import trainings as seeding
    from vflsec.results.records.folder import write_subgroups
    from vflsec.results.records.manifest import RunLimits
    from vflsec.run import engine as engines
    from vflsec.run import guesses
    from vflsec.run import spec as specs
    from vflsec.run.grammar import is_several, parse_axes
    from vflsec.run.job import Job, name_sweep, prepare, prepare_sweep
    from vflsec.run.plan import find_dataset
    from vflsec.run.store import guard_writing

    options.expect_trackers(trackers)
    limit = RunLimits(max_leak=read_limits(max_leak), min_utility=min_utility, max_undetected=max_undetected)
    assignments = (*([f"trainings={trainings}"] if trainings is not None else []), *assignments)
    axes = parse_axes((*swept, *filter(is_several, assignments)))
    chosen["assignments"] = [text for text in assignments if not is_several(text)]
    for text in chosen["assignments"]:
        if (path := text.partition("=")[0].strip()) in axes:
            raise UsageError(f"expected {path} once, got {text} and several values: drop one")
    engines.check_device(device, here=engine == "local")
    engines.check_engine(engine)
    how: dict[str, Any] = {"jobs": jobs or api.count_cores(), "device": device, "engine": engine}
    most, words, keep = chosen["seeds"] or seeding.MAX_SEEDS, ["vflsec", *sys.argv[1:]], bool(rows or by)
    if until is not None:
        chosen["seeds"] = min(seeding.BLOCK, most)
    if axes:
        for name, given in (("--rows or --by", keep), ("--until", until), ("--max-exposure", max_exposure)):
            if given not in (None, False):
                raise UsageError(f"expected no {name} with --sweep: evaluate a single point with it")
        parts = prepare_sweep(collect_settings(**chosen), axes, paired=paired, command=words)
        job = Job(out or Path("runs") / name_sweep(parts[0], axes), parts, axes, paired=paired)
    else:
        if by is not None and not by.strip():
            raise UsageError("expected the name of a raw column for --by, got an empty one")
        if paired:
            raise UsageError("expected --sweep with --paired, got none: name the settings and their values")
        spec = specs.read(collect_settings(**chosen))
        folder = out or Path("runs") / spec.name
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"expected a folder for --out, found the file {folder}: name another")
        if rows:
            expect_rows(rows, folder)
        job = Job(folder, [prepare(spec, words)])
    options.check_job(job, limit, fresh=fresh)  # before anything is written: bad input leaves nothing behind
    evaluation, folder = job.parts[0], job.store.folder
    if not axes:
        options.expose(engines.list_exposures(evaluation.spec), max_exposure)
    if by:
        guesses.get_groups(find_dataset(spec.dataset).load_once(spec.data), by)
    if dry_run:
        show_plan(job, job.plan(fresh=fresh, keep=keep), how["jobs"])
        return
    with job.open(limit, fresh=fresh, retry_errors=retry_errors):
        for seeds in seeding.list_stops(most) if until is not None else [None]:
            if seeds is not None and until is not None:
                job.parts = [evaluation.with_seeds(seeds, until)]
            todo = job.plan(keep=keep)
            announce(job, todo)
            with options.show_progress(job, todo, how["jobs"]) as show:
                for record in job.run(todo, **how):
                    show(record)
            if until is not None and seeding.is_reached(options.read_report(folder).summary, until):
                break
        if by:
            click.echo(f"comparing the groups of {by}", err=True)
            write_subgroups(folder, guesses.measure_subgroups(job.parts[0].spec, folder, by))
    if rows:
        table = guesses.tabulate_rows(job.parts[0].spec, folder)
        with guard_writing(rows.parent):  # only their owner may read them
            files.replace(rows, table.to_csv(index=False).encode())
        click.echo(f"rows: {rows} (sensitive: how surely the label of each person is inferred)", err=True)
    options.finish(options.read_report(folder), folder, form, details=details, trackers=trackers)


def collect_settings(
    config: Path | None,
    assignments: Sequence[str],
    attacks: Sequence[str],
    defenses: Sequence[str],
    strengths: Sequence[str],
    epsilons: Sequence[str],
    at: Sequence[str],
    attack_budget: str | None,
    pick: bool,
    adaptive: bool | None,
    canaries: int | None,
    **shared: Any,
) -> dict[str, Any]:
    """Return the settings: those of the file, then options, then ``--set``.

    An option that is no setting must be an argument here: what is in ``shared`` is read as settings.
    """
    from vflsec.run import spec as specs

    file: dict[str, Any] = specs.read_toml(config) if config else {}
    if at and not defenses:
        raise UsageError(f"expected --defense with --at {','.join(at)}, got none: name it, for example --defense iso")
    if attacks:
        file["attacks"] = options.split_references(attacks)
    if defenses:
        if "none" in (names := options.split_references(defenses)):
            raise UsageError("expected names of defenses, got none: a run without one is always part, so leave it out")
        file["defenses"] = locate_defenses(names, at)
        if all(specs.parse_swept(text).strengths for text in file["defenses"]):
            file.pop("strengths", None)
    if strengths:
        file["strengths"] = options.read_numbers(strengths)
    if epsilons:
        file["epsilons"] = options.read_numbers(epsilons, "--epsilon")
        if not strengths:
            file.pop("strengths", None)
    if attack_budget:
        assignments = [f'aux.budget="{attack_budget}"', *assignments]
    if pick:
        assignments = ["aux.pick=true", *assignments]
    if canaries:
        if any(text.partition("=")[0].strip() == "data.canaries" for text in assignments):
            raise UsageError("expected --audit-epsilon or --set data.canaries, got both: drop one")
        assignments = [f"data.canaries={canaries}", *assignments]
    if adaptive is not None:
        assignments = [f"aux.adaptive={str(adaptive).lower()}", *assignments]
    return options.resolve(file, assignments, **shared)


def locate_defenses(defenses: Sequence[str], at: Sequence[str]) -> list[str]:
    """Return the defenses, those without a point acting at the points of ``--at``."""
    points = "+".join(point for text in at for point in text.split(","))
    if points and all("@" in text for text in defenses):
        raise UsageError(f"expected the point once, got {', '.join(defenses)} and --at {points}: drop one of them")
    return [f"{text}@{points}" if points and "@" not in text else text for text in defenses]


def expect_rows(path: Path, folder: Path) -> None:
    """Raise UsageError unless ``path`` is a new file in a folder that exists or is made, or an earlier table."""
    from vflsec.run.guesses import COLUMNS

    if not path.name:
        raise UsageError("expected the name of a file for --rows, got none: name one, such as rows.csv")
    if path.parent.resolve() != folder.resolve():  # which the run makes
        options.expect_folder(path, "--rows")
    if path.is_symlink() or path.exists():
        head = ",".join(COLUMNS).encode()
        if not (path.is_file() and path.read_bytes().startswith(head)):
            raise UsageError(f"expected a new file for --rows, found {path}, which is no table of rows: name another")


def show_plan(job: Job[Evaluation], todo: Plan, jobs: int) -> None:
    """Print the plan, its time and the resolved settings; of a sweep its points."""
    from vflsec.run import engine
    from vflsec.run.forecast import describe_networks, forecast_time, read_past_results

    announce(job, todo)
    if job.sweep:
        for point in job.sweep.points:
            click.echo(point.name.partition("-")[2], err=True)
        return
    spec = job.parts[0].spec
    for line in describe_networks(spec):
        click.echo(line, err=True)
    if todo.missing:
        click.echo(forecast_time(todo, read_past_results(job.store.folder, spec.dataset)).text(jobs), err=True)
    for line in engine.list_costs(spec):
        click.echo(line, err=True)
    click.echo(job.parts[0].to_toml(), nl=False)


def announce(job: Job[Evaluation], todo: Plan) -> None:
    """Print the plan: what is attacked by whom, and how much of it is computed already."""
    from vflsec.run.plan import resolve as technique

    if job.sweep:
        what = f"{count(len(job.parts), 'point')} of {', '.join(job.sweep.axes)}"
        options.print_note(f"vflsec eval  {what}: {count(todo.missing, 'result')} to compute   {job.store.folder}")
        return
    spec, names = job.parts[0].spec, job.parts[0].names
    attacks = ", ".join(attack.name + attack.place for attack in spec.attacks)
    defenses = ", ".join(defense.label for defense in spec.defenses) or "no defense"
    click.echo(f"vflsec eval  {names.dataset} / {', '.join(spec.methods)} / {defenses} / {attacks}", err=True)
    behavior = "honest-but-curious"
    made = [technique(attack).make() for attack in spec.attacks]
    acting = dict.fromkeys(attack.name for attack in made if attack.acts_in_training)
    if acting:
        behavior += f" (malicious in training under {', '.join(acting)})"
    side = spec.adversary if spec.adversary in ("active", "server", "source") else "passive"
    known = "no labels needed" if side == "server" else f"{spec.aux.n} labeled rows"
    who = side if side == "server" else names.display_name(spec.adversary)
    click.echo(f"adversary: {who}, {behavior}, {known}", err=True)
    what = f"{todo.missing} to compute" if todo.missing else "nothing to compute"
    trainings = len({cell.key for task in todo.tasks if task.rows for cell in task.cells})
    what += f" in {count(trainings, 'training')}" if trainings else ""
    what += f" after {count(todo.trials.missing, 'trial')} of settings" if todo.trials else ""
    what += f"{' and' if todo.trials else ' after'} {count(len(todo.stages), 'pre-training')}" if todo.stages else ""
    shadows = sum(len(task.shadows) for task in todo.groups if task.shadows)
    what += f" and {count(shadows, 'shadow training')}" if shadows else ""
    results = count(todo.cached + todo.missing, "result")
    options.print_note(f"{results}: {todo.cached} cached, {what}   {job.store.folder}")


def read_limits(texts: Sequence[str]) -> dict[str, float]:
    """Read ``NAME=X`` limits."""
    limit: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")  # a name may have options, mc:epochs=5=0.35
        try:
            number = float(value)
        except ValueError:
            name = ""
        if not name:
            raise click.BadParameter(f"expected NAME=LIMIT, for example mc=0.35, got {text!r}", param_hint="--max-leak")
        if name in limit:
            raise click.BadParameter(f"expected one limit for {name}, got two: drop one", param_hint="--max-leak")
        if not math.isfinite(number):
            raise click.BadParameter(f"expected a finite limit for {name}, got {value}", param_hint="--max-leak")
        if not 0 <= number <= 1:
            raise click.BadParameter(f"expected a limit for {name} from 0 to 1, got {value}", param_hint="--max-leak")
        limit[name] = number
    return limit
