"""Options that several commands share, what they print at their end, and the code with which they exit."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from vflsec.base.checks import count, describe_unknown
from vflsec.base.errors import UsageError, clean
from vflsec.core import registry

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vflsec.report.formats import Document
    from vflsec.report.report import Report
    from vflsec.report.sweep import SweepReport
    from vflsec.results.records.manifest import RunLimits
    from vflsec.run.engine import Plan
    from vflsec.run.job import Job
    from vflsec.run.store import Store


Command = TypeVar("Command", bound=Callable[..., Any])


class KindOfPlugin(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A kind of plug-in, in the singular or the plural; it becomes the plural."""

    name = "kind"

    def __init__(self, *, of_names: bool = False) -> None:
        self._of_names = of_names

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name of the kind in the registry."""
        plural = value if value.endswith("s") else f"{value}s"
        if plural not in registry.PACKAGES:
            kinds = [kind for kind in registry.PACKAGES if value in registry.list_all(kind)] if self._of_names else []
            if kinds:
                raise UsageError(f"expected the kind first: vflsec show {kinds[0].removesuffix('s')} {value}")
            raise UsageError(describe_unknown("kind", value, [*registry.PACKAGES]))
        return plural

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the kinds that begin so."""
        return [CompletionItem(kind) for kind in registry.PACKAGES if kind.startswith(incomplete)]


class FilePath(click.Path):
    """A path; an empty text, as of a variable that is not set, would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: it is empty, or does not exist where it must.
        """
        if not str(value):
            self.fail("expected a path, got an empty text", param, ctx)
        return super().convert(value, param, ctx)


PATH = FilePath(path_type=Path)


def complete_names(kind: str, *more: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the shell completion of a comma list of names of ``kind``, and of ``more`` words."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        known = [*more, *registry.list_all(kind)]
        return [CompletionItem(f"{before}{comma}{name}") for name in known if name.startswith(last)]

    return complete


def expect_folder(path: Path, option: str) -> None:
    """Raise UsageError unless the folder exists in which ``option`` names a file."""
    if not path.parent.is_dir():
        raise UsageError(f"expected a folder {path.parent} for {option}, found none: make it")


def name_of_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of the kind that stands before, in ``vflsec show``."""
    kind = ctx.params.get("kind")
    return complete_names(kind)(ctx, param, incomplete) if kind else []


def add_technique(flag: str, name: str, kind: str, help: str) -> Callable[[Command], Command]:
    """Return a repeatable option for names of ``kind``, which the shell completes; ``all`` is every attack."""
    words = ["all"] if kind == "attacks" else []
    return click.option(flag, name, multiple=True, shell_complete=complete_names(kind, *words), help=help)


dataset = click.option(
    "--dataset",
    shell_complete=complete_names("datasets"),
    help="Registered name, or a TOML file.  [default: credit-default]",
)
settings = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change any setting, for example data.n_labeled=200; repeat.",
)
config = click.option(
    "--config",
    type=FilePath(path_type=Path, exists=True, dir_okay=False),
    help="Settings in a TOML file; options take precedence.",
)
data_dir = click.option(
    "--data-dir",
    type=FilePath(file_okay=False),
    help="Folder with the files of a dataset that is not bundled; short for --set data.options.data_dir.",
)
device = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
output_format = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "markdown", "latex"]),
    default="table",
    show_default=True,
)
track = click.option(
    "--track",
    "trackers",
    multiple=True,
    type=click.Choice(["mlflow", "wandb", "tensorboard"]),
    help="Also send settings, the numbers of the table, page and pictures to an experiment tracker; repeat.",
)
details = click.option("--details", is_flag=True, help="A row for each attack, and all columns.")


def expect_trackers(names: Sequence[str]) -> None:
    """Raise UsageError unless the package of each tracker is installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"expected the package {name} for --track, found none: pip install 'vflsec[{name}]'")


def resolve(
    file: Mapping[str, Any],
    assignments: Sequence[str],
    *,
    methods: Sequence[str] = (),
    fixed: Sequence[str] = (),
    data_dir: str | None = None,
    **plain: Any,
) -> dict[str, Any]:
    """Return the settings: those of the file, then options, then ``--set``; further fixed defenses are added."""
    from vflsec.run import spec as specs

    settings = {**file, **{key: value for key, value in plain.items() if value is not None}}
    if methods:
        settings["methods"] = split_references(methods)
        if isinstance(settings.get("method"), dict):  # the file's options of a method that is not chosen
            chosen = {specs.parse_method(text).name for text in settings["methods"]}
            settings["method"] = {name: options for name, options in settings["method"].items() if name in chosen}
    if fixed:
        before = settings.get("fixed", [])
        settings["fixed"] = [*(before if isinstance(before, list) else [before]), *split_references(fixed)]
    if data_dir is not None:  # quoted, so that a folder called 2024 is no number
        assignments = [f"data.options.data_dir={json.dumps(data_dir, ensure_ascii=False)}", *assignments]
    return specs.merge(settings, assignments)


def split_references(texts: Sequence[str]) -> list[str]:
    """Return the references in comma lists."""
    from vflsec.run import grammar

    return [name for text in texts for name in grammar.split_list(text)]


def add_limits(command: Command) -> Command:
    """Add the gates: limits that decide the exit code."""
    command = click.option(
        "--min-utility",
        type=float,
        callback=from_0_to_1,
        help="Fail (exit code 1) if the lower end of the utility's interval is below this.",
    )(command)
    command = add_max_undetected(command)
    return click.option(
        "--max-leak",
        multiple=True,
        metavar="NAME=X",
        help="Fail (exit code 1) if the upper end of an attack's interval is above X, for example worst=0.8; repeat.",
    )(command)


def add_max_undetected(command: Command) -> Command:
    """Add the gate on what the runs could have overlooked."""
    return click.option(
        "--max-undetected",
        type=float,
        callback=from_0_to_1,
        help="Fail (exit code 1) if the strongest attack could have a larger advantage than this without being seen.",
    )(command)


def add_max_exposure(command: Command) -> Command:
    """Add the gate on what will be computable behind an encrypted layer, which is known before training."""
    return click.option(
        "--max-exposure",
        type=click.FloatRange(0, 1),
        callback=check_finite,
        help="Exit with code 1 before any message is sent if the scores of an encrypted layer determine more than this "
        "share of the directions of the passive party's features. Not a bound where features depend on each other or "
        "have few values.",
    )(command)


def expose(exposures: Sequence[tuple[str, float]], limit: float | None) -> None:
    """Print how much of a party's features will be computable; exit with code 1 where that is more than ``limit``."""
    for line, _ in exposures:
        click.echo(line, err=True)
    most = max((share for _, share in exposures), default=None)
    if limit is not None and most is None:
        raise UsageError("expected an encrypted layer with --max-exposure, got none: add --defense phe, or drop it")
    if limit is not None and most is not None and most > limit:
        click.echo(f"gate failed: exposure {most:.2f} > {limit:g}; nothing was sent", err=True)
        raise click.exceptions.Exit(1)


def check_finite(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Return an option's number, or raise BadParameter if it is infinite or not a number."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"expected a finite number, got {value}", param=parameter)
    return value


def from_0_to_1(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Return an option's number, or raise BadParameter if it is less, more or not a number."""
    check_finite(context, parameter, value)
    if value is not None and not 0 <= value <= 1:
        bound = "at least 0" if value < 0 else "at most 1"
        raise click.BadParameter(f"expected a number of {bound}, got {value:g}", param=parameter)
    return value


def read_numbers(texts: Sequence[str], option: str = "--lambda") -> list[float]:
    """Read comma lists of numbers."""
    values: list[float] = []
    for text in texts:
        try:
            values += map(float, text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a comma-separated list of numbers", param_hint=option) from None
    return values


MAX_WIDTH = 2000
"""So many columns a table has at most in files and pipes."""


@contextmanager
def report_interrupt(store: Store) -> Iterator[None]:
    """On Ctrl-C, print how many trainings and results are kept and exit."""
    try:
        yield
    except KeyboardInterrupt:
        trained, results = count(store.count_trainings(), "training"), count(len(store.records()), "result")
        kept = f"{trained} and {results} are kept in {store.folder}"
        click.echo(f"interrupted: {kept}; the same command goes on from there", err=True)
        sys.exit(130)


def check_job(job: Job[Any], limits: RunLimits, *, fresh: bool) -> None:
    """Print what is left out and what the data note; raise unless the job may be run in its folder."""
    for line in job.exclusions:
        click.echo(f"left out: {line}", err=True)
    for note in job.parts[0].manifest.data_notes if job.sweep is None else ():
        click.echo(f"NOTE {note}", err=True)
    job.check(limits.max_leak, fresh=fresh)


@contextmanager
def show_progress(job: Job[Any], todo: Plan, jobs: int = 1) -> Iterator[Callable[[Any], None]]:
    """Return a function that shows each record; on Ctrl-C, print what is kept and exit."""
    from vflsec.report.progress import display

    with report_interrupt(job.store), display(todo, jobs) as show:
        yield show


def read_report(folder: Path, **limits: Any) -> Any:
    """Return the report of an evaluation, an audit or a sweep."""
    from vflsec.report.report import Report
    from vflsec.report.sweep import SweepReport
    from vflsec.results.records.folder import is_sweep

    return SweepReport.read(folder, **limits) if is_sweep(folder) else Report.read(folder, **limits)


def finish(
    report: Report | SweepReport, folder: Path, form: str, *, details: bool = False, trackers: Sequence[str] = ()
) -> NoReturn:
    """Print the results on stdout, draw them in their folder, send them to trackers, and exit."""
    show(report, form, details=details)
    save(report, folder)
    send(trackers, report, folder)
    sys.exit(exit_code(report))


def save(report: Report | SweepReport, folder: Path) -> None:
    """Write page and curve of a folder; print a line if it cannot be written."""
    from vflsec.results.records.folder import is_sweep

    if is_sweep(folder):
        click.echo(
            f"no report.html of a sweep: vflsec report {folder}/points/NAME writes the page of a point", err=True
        )
    try:
        for path in report.save(folder):
            print_note(f"{'report' if path.suffix == '.html' else 'curve'}: {path}")
    except OSError as error:
        print_note(f"curve or report.html is missing: cannot write to {folder}: {error.strerror or error}")


def send(trackers: Sequence[str], report: Any, folder: Path) -> None:
    """Send the results to each tracker; of a sweep each point."""
    for name in trackers:
        from vflsec.report.trackers import send as send_to

        for part in getattr(report, "reports", [report]):
            send_to(name, part, folder)
        click.echo(f"{name}: sent", err=True)


def show(report: Any, form: str, **how: Any) -> None:
    """Print the results on stdout."""
    if form == "table":
        print_to_terminal(partial(report.rich, **how))
        return
    forms = {
        "json": report.to_json, "csv": report.to_csv, "markdown": partial(report.to_markdown, **how),
        "latex": partial(report.to_latex, **how),
    }  # fmt: skip
    click.echo(forms[form]().rstrip("\n"))


def show_document(document: Document, form: str) -> None:
    """Print tables that are about several folders on stdout."""
    if form == "table":
        print_to_terminal(document.rich)
    else:
        click.echo((document.latex() if form == "latex" else document.markdown()).rstrip("\n"))


def print_note(text: str) -> None:
    """Print one line on stderr; control characters of names of files become question marks."""
    click.echo(clean(text), err=True)


def print_to_terminal(make: Callable[[int], RenderableType]) -> None:
    """Print what ``make`` returns for the width of the terminal, or in files and pipes for all columns."""
    from rich.console import Console

    from vflsec.report.formats import as_text

    console = Console()
    width = max(console.width, 80 if console.is_terminal else 140)
    while not console.is_terminal and width < MAX_WIDTH and "NOT SHOWN" in as_text(make(width), width):
        width += 20
    Console(width=width).print(make(width))


def exit_code(report: Report | SweepReport) -> int:
    """Return 1 if a gate in force failed, 3 if a cell gave no number or a gate is undecided, else 0."""
    from vflsec.report.sweep import SweepReport

    if isinstance(report, SweepReport):
        return max(map(exit_code, report.reports))
    verdicts = [gate.holds for gate in report.summary.gates if not gate.replaced]
    if False in verdicts:
        return 1
    statuses = [*(point.statuses for point in report.points), *(damage.statuses for damage in report.integrity)]
    lost = any({"error", "diverged", "collapsed", "missing"} & {*by_seed} for by_seed in statuses)
    return 3 if lost or report.summary.lost or None in verdicts else 0
