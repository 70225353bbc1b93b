"""``vflsec show``: the card of one plug-in or dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from vflsec.core import registry
from vflsec.core.errors import DataError

if TYPE_CHECKING:
    from vflsec.data.dataset import VerticalDataset

KINDS = {kind.removesuffix("s"): kind for kind in registry.PACKAGES}


@click.command("show")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("name")
def command(kind: str, name: str) -> None:
    """Show the card of one attack, defense, method, protocol or dataset."""
    if kind == "dataset" and name.endswith(".toml"):
        from vflsec.evaluation.world import load_dataset

        _print(_dataset(load_dataset(name)))
        return
    found = registry.load(KINDS[kind], name)
    _print(_registered(name, found) if kind == "dataset" else _facts(kind, found))
    options = _options(found)
    if options:
        click.echo("options:")
        for option, default in options.items():
            click.echo(f"  {option} = {default!r}")
    click.echo(f"\n{inspect.getdoc(found)}")


def _facts(kind: str, found: Any) -> dict[str, Any]:
    if kind == "attack":
        from vflsec.core.attack import describe

        return describe(found)
    if kind == "defense":
        from vflsec.core.defense import describe as describe_defense

        return describe_defense(found)
    facts = {"name": found.name, "reference": found.reference}
    if kind == "method":
        return {**facts, "phases": ", ".join(found.phases)}
    return {**facts, **{f"{role} learns": "; ".join(what) for role, what in found.reveals.items()}}


def _print(facts: Mapping[str, Any]) -> None:
    width = max(map(len, facts))
    for key, value in facts.items():
        click.echo(f"{key + ':':{width + 1}} {value}")


def _registered(name: str, load: Callable[[], VerticalDataset]) -> dict[str, Any]:
    """Return the facts of a dataset; where its files are not bundled and not here, its card and the way to them."""
    from vflsec.data import bundle

    try:
        return _dataset(load())
    except DataError as error:
        if name not in bundle.cards():
            raise
        return {"name": name, "files": str(error), **asdict(bundle.card(name))}


def _dataset(dataset: VerticalDataset) -> dict[str, Any]:
    facts = {
        "name": dataset.name,
        "parties": ", ".join(f"{p.name} ({p.frame.shape[1]} columns)" for p in dataset.parties),
        "classes": ", ".join(dataset.classes),
        "metric": dataset.metric,
    }
    return {**facts, **(asdict(dataset.card) if dataset.card else {})}


def _options(found: Any) -> dict[str, Any]:
    signature = inspect.signature(found.__init__ if inspect.isclass(found) else found)
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default for p in signature.parameters.values() if p.kind in keywords and p.default is not p.empty}
