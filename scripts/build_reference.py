"""Writes the pages of docs/reference from the code: commands, Python, results, and a page for each technique.

They are part of the site, and not of the repository: python scripts/build_reference.py
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from click.testing import CliRunner

import vflsec
from vflsec.cli import cli
from vflsec.core import registry
from vflsec.core.options import CONTRIB
from vflsec.results.analysis import results
from vflsec.results.records import manifest, schema

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def commands() -> str:
    """Return the help of every command."""
    parts = ["# Commands\n\n", "What `--help` prints. Lists of names are comma-separated; most options repeat.\n"]
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        names = [name, *(f"{name} {inner}" for inner in getattr(command, "commands", {}))]
        parts += [f"\n## vflsec {one}\n\n```text\n{_printed(*one.split(), '--help')}\n```\n" for one in names]
    return "".join(parts)


def built_in(kind: str) -> dict[str, registry.Entry]:
    """Return what comes with vflsec of ``kind``, by name."""
    return {name: entry for name, entry in registry.list_all(kind).items() if entry.origin == "built in"}


def card(kind: str, name: str) -> str:
    """Return the page of a technique: what ``vflsec show`` prints."""
    return f"# {name}\n\n```text\n{_printed('show', kind.removesuffix('s'), name)}\n```\n"


def catalogue() -> str:
    """Return tables of all techniques, those of attacks by target, with the role and the requirements."""
    parts = ["# Catalogue\n\n", f"*contrib*: {CONTRIB}. These run with `--attack all` like any other.\n"]
    attacks = {name: registry.load("attacks", name) for name in built_in("attacks")}
    for target in dict.fromkeys(attack.target for attack in attacks.values()):
        parts.append(f"\n## Attacks on {target}\n\n| name | adversary | needs | what |\n|---|---|---|---|\n")
        for name, attack in attacks.items():
            if attack.target == target:
                needs = ", ".join(sorted(map(str, attack.needs))) or "nothing"
                parts.append(f"| {_link('attacks', name)} | {attack.side} | {needs} | {_summary('attacks', name)} |\n")
    for kind in [kind for kind in registry.PACKAGES if kind != "attacks"]:
        parts.append(f"\n## {kind.capitalize()}\n\n| name | what |\n|---|---|\n")
        parts += [f"| {_link(kind, name)} | {_summary(kind, name)} |\n" for name in built_in(kind)]
    return "".join(parts)


def _link(kind: str, name: str) -> str:
    return f"[`{name}`]({kind}/{name}.md)"


def _summary(kind: str, name: str) -> str:
    return registry.summarize(registry.list_all(kind)[name])


def python() -> str:
    """Return signature and documentation of each public name."""
    parts = ["# Python\n\n", "`import vflsec` loads nothing heavy; names are imported when they are used.\n"]
    for name in sorted(vflsec.__all__, key=str.lower):
        found = getattr(vflsec, name)
        if not callable(found):
            continue
        parts.append(f"\n## vflsec.{name}\n\n{_documented(name, found)}")
        if inspect.isclass(found):
            for member, value in vars(found).items():
                function = getattr(value, "__func__", value)
                if not member.startswith("_") and (callable(function) or isinstance(value, property)):
                    is_property = isinstance(value, property)
                    documented = _property(member, value) if is_property else _documented(member, function)
                    parts.append(f"\n### {name}.{member}\n\n{documented}")
    return "".join(parts)


def fields() -> str:
    """Return the fields of the JSON output, and of the records in a results folder."""
    parts = [
        "# Results\n\n",
        "`vflsec eval --format json` prints one `Summary`. A results folder has `records.jsonl`, one `BaselineResult` "
        "or `Result` a line, and `manifest.json`, a `Manifest`. Fields may be added; none is renamed.\n",
    ]
    for module, page in ((results, "Of the JSON output"), (schema, "Of records.jsonl"), (manifest, "Of manifest.json")):
        parts.append(f"\n## {page}\n")
        for name, struct in vars(module).items():
            if inspect.isclass(struct) and issubclass(struct, msgspec.Struct) and struct.__module__ == module.__name__:
                parts.append(_struct(name, struct))
    return "".join(parts)


def _struct(name: str, struct: type[msgspec.Struct]) -> str:
    text = inspect.getdoc(struct) or ""
    first = text.split("\n\n")[0].replace("\n", " ")
    explained = _attributes(text)
    rows = "".join(
        f"| `{field.encode_name}` | `{_type(field.type)}` | {explained.get(field.name, '')} |\n"
        for field in msgspec.structs.fields(struct)
    )
    return f"\n### {name}\n\n{first}\n\n| field | type | what |\n|---|---|---|\n{rows}"


def _attributes(text: str) -> dict[str, str]:
    """Return the description of each attribute in a docstring."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    if not section:
        return {}
    entries = re.split(r"^    (\w+): ", section[1], flags=re.MULTILINE)[1:]
    texts = (" ".join(part.split()).replace("|", "\\|") for part in entries[1::2])
    return {name: found[:1].upper() + found[1:] for name, found in zip(entries[::2], texts, strict=True)}


def _type(kind: Any) -> str:
    """Return a type as JSON's reader writes it."""
    text = kind.__name__ if inspect.isclass(kind) and not typing.get_args(kind) else str(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=\w)", "", text).replace("NoneType", "None").replace("|", "\\|")


def _documented(name: str, found: Callable[..., Any]) -> str:
    return f"```python\n{_signature(name, found)}\n```\n\n```text\n{inspect.getdoc(found) or ''}\n```\n"


def _property(name: str, found: property) -> str:
    returned = _annotation(inspect.signature(found.fget).return_annotation) if found.fget else ""
    return f"```python\n{name}: {returned}\n```\n\n```text\n{inspect.getdoc(found) or ''}\n```\n"


def _signature(name: str, found: Callable[..., Any]) -> str:
    """Return the signature, with one argument a line where it is long."""
    signature = inspect.signature(found)
    shown, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "..." if callable(parameter.default) else repr(parameter.default)
        annotation = _annotation(parameter.annotation)
        text = f"{star}{parameter.name}: {annotation}" if annotation else f"{star}{parameter.name}"
        shown.append(text if parameter.default is parameter.empty else f"{text} = {default}")
    returned = _annotation(signature.return_annotation)
    arrow = f" -> {returned}" if returned and not inspect.isclass(found) else ""
    line = f"{name}({', '.join(shown)}){arrow}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){arrow}"


def _annotation(kind: Any) -> str:
    if kind is inspect.Signature.empty:
        return ""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", kind if isinstance(kind, str) else inspect.formatannotation(kind))


def _printed(*words: str) -> str:
    """Return what a command prints on a terminal of 100 columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        result = CliRunner().invoke(cli, list(words), prog_name="vflsec", terminal_width=100)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.splitlines()).strip()


def pages() -> dict[str, Callable[[], str]]:
    """Return what writes each page, by its path below docs/reference."""
    names = [(kind, name) for kind in registry.PACKAGES for name in built_in(kind)]
    cards = {f"{kind}/{name}.md": functools.partial(card, kind, name) for kind, name in names}
    return {"catalogue.md": catalogue, "commands.md": commands, "python.md": python, "results.md": fields, **cards}


def main() -> None:
    """Write all pages, and remove those of former techniques."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    for name, write in pages().items():
        path = REFERENCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
