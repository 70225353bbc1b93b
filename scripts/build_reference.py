"""Makes the pages of docs/reference from the code: commands, Python, results, and the card of everything registered."""

from __future__ import annotations

import inspect
import os
import re
import typing
from collections.abc import Callable
from typing import Any

import click
import msgspec
from click.testing import CliRunner

import vflsec
from vflsec.cli import cli
from vflsec.core import registry
from vflsec.results.analysis import results
from vflsec.results.records import manifest, schema

NOTE = "<!-- written by `make docs` -->\n\n"


def commands() -> str:
    """Return the help of every command."""
    parts = ["# Commands\n", NOTE, "What `--help` prints. Lists of names are comma-separated; most options repeat.\n"]
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        names = [name, *(f"{name} {inner}" for inner in getattr(command, "commands", {}))]
        parts += [f"\n## vflsec {one}\n\n```text\n{_printed(*one.split(), '--help')}\n```\n" for one in names]
    return "".join(parts)


def cards(kind: str) -> str:
    """Return the card of each of ``kind`` that comes with vflsec."""
    one = kind.removesuffix("s")
    parts = [f"# {kind.capitalize()}\n\n", NOTE, f"The cards that `vflsec show {one} NAME` prints.\n"]
    for name, entry in registry.entries(kind).items():
        if entry.origin == "built in":
            parts.append(f"\n## {name}\n\n```text\n{_printed('show', one, name)}\n```\n")
    return "".join(parts)


def python() -> str:
    """Return signature and documentation of each public name."""
    parts = ["# Python\n\n", NOTE, "`import vflsec` loads nothing heavy; names are imported when they are used.\n"]
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
        NOTE,
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


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "python.md": python,
    "results.md": fields,
    **{f"{kind}.md": lambda kind=kind: cards(kind) for kind in registry.PACKAGES},  # type: ignore[misc]
}
"""The pages of docs/reference that are written whole."""
