"""Options that several commands share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
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
data_dir = click.option(
    "--data-dir",
    type=click.Path(file_okay=False),
    help="Folder of the dataset's files where they are not bundled; short for data.options.data_dir.",
)
device = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
output_format = click.option(
    "--format", "form", type=click.Choice(["table", "json", "csv", "markdown"]), default="table", show_default=True
)


def resolve(
    file: Mapping[str, Any],
    assignments: Sequence[str],
    *,
    methods: Sequence[str] = (),
    fixed: Sequence[str] = (),
    data_dir: str | None = None,
    **plain: Any,
) -> dict[str, Any]:
    """Return the settings: those of the file, then options, then ``--set``; further fixed defences are added."""
    from vflsec.evaluation import spec as specs

    found = {**file, **{key: value for key, value in plain.items() if value is not None}}
    if methods:
        found["methods"] = several(methods)
        if isinstance(found.get("method"), dict):  # the file's options of a method that is not chosen
            found["method"] = {name: own for name, own in found["method"].items() if name in found["methods"]}
    if fixed:
        before = found.get("fixed", [])
        found["fixed"] = [*(before if isinstance(before, list) else [before]), *several(fixed)]
    if data_dir is not None:  # quoted, so that a folder called 2024 is no number
        assignments = [f"data.options.data_dir={json.dumps(data_dir, ensure_ascii=False)}", *assignments]
    return specs.merge(found, assignments)


def several(texts: Sequence[str]) -> list[str]:
    """Return the references in comma lists."""
    from vflsec.evaluation import grammar

    return [name for text in texts for name in grammar.split_list(text)]


def limits(command: Command) -> Command:
    """Add the gates: limits that decide the exit code."""
    command = click.option(
        "--min-utility", type=float, callback=_finite, help="Fail (exit 1) if the utility may lie below this."
    )(command)
    return click.option(
        "--max-leak", multiple=True, metavar="NAME=X", help="Fail (exit 1) if the leak may lie above this; repeat."
    )(command)


def _finite(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"expected a finite number, got {value}", param=parameter)
    return value


def numbers(texts: Sequence[str], option: str = "--lambda") -> list[float]:
    """Read comma lists of numbers.

    Raises:
        click.BadParameter: something else.
    """
    found = []
    for text in texts:
        try:
            found += [float(piece) for piece in text.split(",")]
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a comma-separated list of numbers", param_hint=option) from None
    return found
