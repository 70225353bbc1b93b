"""``vflsec list``: the catalogue, read without importing the plug-ins."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap

import click

from vflsec.cli.options import KindOfPlugin
from vflsec.core import registry
from vflsec.core.options import CONTRIB


@click.command("list")
@click.argument("kind", type=KindOfPlugin(), required=False, metavar=f"[{'|'.join(registry.PACKAGES)}]")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(kind: str | None, form: str) -> None:
    """List attacks, defenses, methods, protocols and datasets."""
    kinds = [kind] if kind else list(registry.PACKAGES)
    found = {k: {name: registry.summary(entry) for name, entry in registry.entries(k).items()} for k in kinds}
    if form == "json":
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    width = max((len(name) for names in found.values() for name in names), default=0)
    for k, names in found.items():
        click.echo(f"{k}:")
        for name, text in names.items():
            click.echo(_wrapped(f"  {name:{width}}  ", text))
    if any(text.endswith("(contrib)") for names in found.values() for text in names.values()):
        click.echo("\n" + _wrapped("contrib: ", CONTRIB))


def _wrapped(start: str, text: str) -> str:
    """Return ``text`` after ``start``, wrapped on a terminal; in one line elsewhere, for tools such as grep."""
    if not sys.stdout.isatty():
        return start + text
    columns = max(shutil.get_terminal_size().columns, len(start) + 20)
    return textwrap.fill(start + text, columns, subsequent_indent=" " * len(start), drop_whitespace=True)
