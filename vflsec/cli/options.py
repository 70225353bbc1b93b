"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

settings = click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any setting, for example data.n_labeled=200."
)
config = click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings in a TOML file; options win.",
)
device = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
output_format = click.option(
    "--format", "form", type=click.Choice(["table", "json", "csv", "markdown"]), default="table", show_default=True
)


def limits(command: Command) -> Command:
    """Add the gates: limits that decide the exit code."""
    command = click.option("--min-utility", type=float, help="Fail (exit 1) if the utility may lie below this.")(
        command
    )
    return click.option(
        "--max-leak", multiple=True, metavar="NAME=X", help="Fail (exit 1) if the leak may lie above this; repeat."
    )(command)


def numbers(texts: Sequence[str]) -> list[float]:
    """Read comma lists of numbers.

    Raises:
        click.BadParameter: something else.
    """
    found = []
    for text in texts:
        try:
            found += [float(piece) for piece in text.split(",")]
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is not a comma-separated list of numbers", param_hint="--lambda"
            ) from None
    return found
