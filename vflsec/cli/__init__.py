"""The command line; commands are imported when they run."""

import os
import signal
import sys
from io import TextIOWrapper
from typing import Any

import click

from vflsec import __version__
from vflsec.base.checks import describe_unknown
from vflsec.base.errors import TRACEBACK, UsageError, VflsecError, clean
from vflsec.core import registry
from vflsec.core.registry import Entry

BUILT_IN = {
    "list": "List attacks, defenses, methods, protocols and datasets.",
    "show": "Show the card of one attack, defense, method, protocol or dataset.",
    "train": "Train one federation and save it.",
    "eval": "Train, defend, attack: print the privacy-utility table, draw the curve.",
    "data": "Draft and check the description of your own data.",
    "audit": "Audit what others trained, or a recording of an encrypted layer.",
    "report": "Print a finished evaluation again, in any format.",
}


def list_all() -> dict[str, Entry]:
    """Return all commands by name, in the order of use; those of the group ``vflsec.commands`` come last."""
    built_in = {name: _get_entry(name) for name in BUILT_IN}
    try:
        return registry.add_plugins("commands", built_in)
    except UsageError as error:
        raise Failure(error) from None


def _get_entry(name: str) -> Entry:
    return Entry(name, "vflsec.cli.show_:list_plugins" if name == "list" else f"vflsec.cli.{name}_:command", "built in")


class Suggesting(click.Group):
    """A group that suggests the right word for a misspelt command, and gives wrong options one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run, with one line for options that are wrong."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise Failure(UsageError(_explain_unknown_option(error))) from None
        except click.UsageError as error:
            command = error.ctx.command_path.replace("cli", "vflsec", 1) if error.ctx else "vflsec"
            raise Failure(UsageError(f"{error.format_message().removesuffix('.')}; see {command} --help")) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named first."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            renamed = {"sweep": "eval --sweep"}
            hint = (
                f"; {args[0]} is an option: vflsec {renamed[args[0]]}" if args[0] in renamed and "eval" in known else ""
            )
            raise Failure(UsageError(describe_unknown("command", args[0], known) + hint))
        return super().resolve_command(ctx, args)


def _explain_unknown_option(error: click.NoSuchOption) -> str:
    """Return the nearest option, the setting of this name, or the commands that have the option."""
    name, near = error.option_name.lstrip("-"), sorted(error.possibilities or ())
    text = f"no such option {error.option_name}"
    tables = [table for table, fields in SETTINGS.items() if name.replace("-", "_") in fields]
    if tables:
        return f"{text}; write --set {tables[0]}.{name.replace('-', '_')}=..."
    if near:
        return f"{text}. Did you mean {' or '.join(near)}?"
    this = error.ctx.info_name if error.ctx else None
    options = {name: [o for p in registry.resolve(entry).params for o in p.opts] for name, entry in list_all().items()}
    others = [name for name, known in options.items() if name != this and error.option_name in known]
    return f"{text}; it is one of {' and '.join(f'vflsec {name}' for name in others)}" if others else text


def _explain_os_error(error: OSError | RuntimeError) -> str:
    """Return the file and what is wrong with it; an error without a file comes from printing."""
    if isinstance(error, OSError) and error.filename is None:
        return f"cannot write the output: {error.strerror or error}; free some space, or print elsewhere"
    if isinstance(error, OSError):
        return f"cannot use {str(error.filename)[:100]}: {error.strerror}; choose another path"
    return f"{error}; choose another path"


SETTINGS = {
    "train": ("epochs", "batch", "lr", "optimizer", "momentum", "weight_decay", "schedule", "patience", "clip"),
    "data": ("n_labeled", "aligned", "overlap", "test", "validation"),
    "model": ("encoder", "bottom", "cut", "head"),
    "aux": ("n", "folds"),
}
"""Settings that people look for among the options; a test compares them with the specification."""


class Lazy(Suggesting):
    """A group whose commands are imported when they run; the short help of the built-in ones is kept here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of use."""
        return list(list_all())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        entry = _get_entry(cmd_name) if cmd_name in BUILT_IN else list_all().get(cmd_name)
        if entry is None:
            return None
        command = registry.resolve(entry)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands and their short help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, BUILT_IN.get(name) or registry.summarize(entry)) for name, entry in list_all().items()]
            )

    def invoke(self, ctx: click.Context) -> Any:
        """Run, turning our errors into one line and their exit code."""
        before = os.environ.get(TRACEBACK)
        if ctx.params["traceback"]:
            os.environ[TRACEBACK] = "1"  # for failures that become the status of a result, also in worker processes
        try:
            return super().invoke(ctx)
        except VflsecError as error:
            if ctx.params["traceback"]:
                raise
            raise Failure(error) from None
        except MemoryError as error:
            if ctx.params["traceback"]:
                raise
            text = f"too large for the memory of this machine ({error}): use less data, or a machine with more memory"
            raise Failure(UsageError(text)) from None
        except BrokenPipeError:  # ``| head`` has read enough
            sys.exit(128 + signal.SIGPIPE)
        except (OSError, RuntimeError) as error:
            loop = str(error).startswith("Symlink loop")  # of pathlib before Python 3.13
            if ctx.params["traceback"] or not (loop or isinstance(error, OSError)):
                raise
            raise Failure(UsageError(_explain_os_error(error))) from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)
        finally:
            os.environ.pop(TRACEBACK, None)
            os.environ |= {} if before is None else {TRACEBACK: before}


MAX_MESSAGE = 2000
"""Characters of an error; some quote whole inputs."""


class Failure(click.ClickException):
    """One line on stderr, and the exit code of the error."""

    def __init__(self, error: VflsecError) -> None:
        text = clean(" ".join(str(error).split()))
        super().__init__(text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}...")
        self.exit_code: int = error.exit_code  # type: ignore[misc]  # click sets a class attribute, ours varies


@click.group(cls=Lazy, context_settings={"auto_envvar_prefix": "VFLSEC", "help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.version_option(__version__, prog_name="vflsec")
def cli(traceback: bool) -> None:
    """Measure what a vertical federated learning system leaks.

    \b
    vflsec eval --attack mc --defense iso --lambda 1,5,25
    vflsec list attacks
    vflsec show attack mc

    Results go to stdout, everything else to stderr. Exit codes: 0 done and all gates hold; 1 a gate failed; 2 wrong
    usage; 3 a result is missing because its cell errored, diverged or collapsed, a gate cannot be decided, or the
    other party disconnected; 130 interrupted (finished results are kept).
    """


def main() -> None:
    """Run the command line; SIGTERM, which cluster schedulers send, ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign shows a question mark instead
    try:
        cli(prog_name="vflsec")
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # or Python tries again at its end, and exits with a code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
