"""``vflsec list`` and ``vflsec show``: the catalogue, and the card of one plug-in or dataset."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click

from vflsec.base.errors import DataError, VflsecError
from vflsec.cli.options import KindOfPlugin, name_of_kind
from vflsec.core import registry
from vflsec.core.options import CONTRIB, convert_options, list_choices, list_options
from vflsec.run.grammar import parse_reference

if TYPE_CHECKING:
    from vflsec.core.attack import Attack
    from vflsec.core.defense import Defense
    from vflsec.core.message import Kind
    from vflsec.core.method import Method
    from vflsec.data.dataset import VerticalDataset

WIDTH = 80
"""Columns of a card."""

ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)
"""How an argument begins in the section ``Args`` of a docstring."""

ITEM = re.compile(r"\s*(?:[-*] |\d+\. |\|)")
"""How an item of a list, or a row of a table, begins."""

KINDS = [kind.removesuffix("s") for kind in registry.PACKAGES]


@click.command("show")
@click.argument("kind", type=KindOfPlugin(of_names=True), metavar=f"{{{'|'.join(KINDS)}}}")
@click.argument("name", shell_complete=name_of_kind)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(kind: str, name: str, form: str) -> None:
    """Show the card of one attack, defense, method, protocol or dataset."""
    plural, kind = kind, kind.removesuffix("s")
    if kind == "dataset" and name.endswith(".toml"):
        from vflsec.run.plan import load_dataset

        facts = _list_dataset(load_dataset(name))
        click.echo(json.dumps(facts, default=str, ensure_ascii=False)) if form == "json" else _print(facts)
        return
    name, given = _parse_reference(kind, name)
    plugin = registry.load(plural, name)
    convert_options(name, plugin, registry.resolve_classes(name, plugin, given))  # refuses unknown options
    facts = _describe_dataset(name, plugin) if kind == "dataset" else describe(kind, plugin)
    if form == "json":
        differs = {"differs": plugin.differs} if getattr(plugin, "differs", ()) else {}
        click.echo(json.dumps({**facts, **differs, "options": _list_options(plugin)}, default=str, ensure_ascii=False))
        return
    _print(facts)
    _print_card(kind, plugin)


def _parse_reference(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a reference such as ``fedhssl-simsiam:pma=false``; a card shows all options anyway."""
    if kind == "dataset":
        return text, {}
    name, options, _ = parse_reference(text, kind)
    return name, {key: value for key, value in options.items() if kind != "defense" or key not in ("lambda", "epsilon")}


def _print_card(kind: str, plugin: Any) -> None:
    """Print the differences from the paper, the docstrings of the class and its bases, and every option."""
    if kind in ("attack", "method") and (plugin.differs or not plugin.reference.startswith("none")):
        click.echo("differs from the paper in:")
        for sentence in _list_differences(plugin):
            _print_text(sentence, "  * ")
    for number, text in enumerate(_get_docs(plugin)):
        if number == 1:
            click.echo("\nCommon to its family:")
        for paragraph in text.split("\n\n"):
            click.echo()
            _print_text(paragraph, "")
    explained, made, options = _explain_arguments(plugin), _make_default(kind, plugin), _list_options(plugin)
    if options or kind == "method":
        click.echo("\noptions:")
    if kind == "defense":
        _print_text("strength", "  ")
        _print_text(explained["strength"], "      ")
        options.pop("strength", None)
    for option, default in options.items():
        used = (getattr(made, option, None) or None) if default is None else default
        shown = f"{default!r}" if used == default else f"{default!r}, which means {used!r}"
        _print_text(f"{option} = {shown}", "  ")
        if option in explained:
            _print_text(explained[option], "      ")
    if kind == "method":
        _print_settings(plugin, made)


def _print_settings(method: Any, made: Any) -> None:
    """Print the values of ``train`` and ``model`` that a method has unless others are set."""
    import msgspec

    for option, nested in method.option_tables().items():
        values = {key: value for key, value in _list_options(nested).items() if value is not None}
        _print_text(f"{option}: " + ", ".join(f"{key} = {value!r}" for key, value in values.items()), "  ")
    if made.pretraining is not None:
        numbers = ", ".join(f"{key} = {value!r}" for key, value in msgspec.structs.asdict(made.pretraining).items())
        _print_text(f"train.pretrain: {numbers}", "  ")
    for name, spec in (("train", made.train_spec), ("model", made.model_spec)):
        values = {key: value for key, value in msgspec.structs.asdict(spec).items() if key != "pretrain"}
        if name == "model" and values["encoder"] is None:
            values["encoder"] = method.encoder
        _print_text(f"{name}: " + ", ".join(f"{key} = {value!r}" for key, value in values.items()), "  ")


def _list_differences(plugin: Any) -> tuple[str, ...]:
    """Return ``differs``, or why it is empty."""
    base = plugin.__mro__[-3]  # Attack or Method, above ABC and object
    stated = any("differs" in vars(base_class) for base_class in plugin.__mro__ if base_class is not base)
    return plugin.differs or (("nothing known",) if stated else ("not stated by its author",))


def _get_docs(plugin: Any) -> list[str]:
    texts = [inspect.getdoc(source) or "" for source in _list_documented(plugin, 3)]
    return [re.split(r"\n(?:Args|Class attributes|Attributes|Raises)\b", text)[0].strip() for text in texts if text]


def _list_documented(plugin: Any, common: int) -> list[Any]:
    """Return a function, or a class and its bases without the last ``common`` ones, where it has its own docstring."""
    return (
        [source for source in plugin.__mro__[:-common] if "__doc__" in vars(source)]
        if inspect.isclass(plugin)
        else [plugin]
    )


def _explain_arguments(plugin: Any) -> dict[str, str]:
    """Return the description of each argument: from the class itself, else its bases, else the shared options."""
    explained: dict[str, str] = {}
    shared = [plugin.shared_options] if hasattr(plugin, "shared_options") else []
    for source in [*shared, *reversed(_list_documented(plugin, 2))]:
        for section in re.findall(r"^Args\b.*:\n((?:(?:    .*)?\n?)*)", inspect.getdoc(source) or "", re.MULTILINE):
            names, parts = ENTRY.findall(section), ENTRY.split(section)[2::2]
            explained.update({name: " ".join(part.split()) for name, part in zip(names, parts, strict=True)})
    return explained


def _make_default(kind: str, plugin: Any) -> Any:
    """Return an instance with default options, whose attributes are the values that None stands for, or None."""
    from vflsec.core.settings import ModelSpec, TrainSpec

    if kind == "dataset":
        return None
    with suppress(VflsecError, TypeError):
        return plugin(TrainSpec(), ModelSpec()) if kind == "method" else plugin()
    return None


def _print_text(text: str, indent: str) -> None:
    """Print a paragraph in ``WIDTH`` columns; items of lists, indented lines and tables begin on lines of their own."""
    text = text.replace("``", "`")
    items: list[str] = []
    for line in text.split("\n"):
        continues = bool(items) and not ITEM.match(line) and (not line.startswith(" ") or ITEM.match(items[0]))
        if continues:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    for item in items:
        first = indent + item[: len(item) - len(item.lstrip())]
        mark = ITEM.match(item)
        later = " " * (len(indent) + len(mark[0])) if mark else " " * len(first)
        click.echo(textwrap.fill(item.strip(), WIDTH, initial_indent=first, subsequent_indent=later))


def describe(kind: str, plugin: Any) -> dict[str, Any]:
    """Return the card of a plug-in as data, without its options."""
    if kind == "attack":
        return _describe_attack(plugin)
    if kind == "defense":
        return _describe_defense(plugin)
    facts = {"name": plugin.name, "reference": plugin.reference}
    if kind == "method":
        from vflsec.core.knowledge import KNOWLEDGE

        sends = {
            phase: ", ".join(kind + _describe_condition(plugin, [phase], {kind}) for kind in sorted(kinds)) or "nothing"
            for phase, kinds in plugin.messages.items()
        }
        shows = {
            side: ", ".join(
                need.name + _describe_condition(plugin, plugin.phases, need.kinds)
                for need in sorted(KNOWLEDGE)
                if need.select_kinds(side, plugin.receives) or (need.is_local and side in need.sides)
            )
            for side in plugin.receives
        }
        return {
            **facts,
            "version": plugin.version,
            "phases": ", ".join(plugin.phases),
            **{f"sends in {phase}": what for phase, what in sends.items()},
            **{f"the {side} side sees": what for side, what in shows.items()},
            "tuned over": ", ".join(f"{path} {low:g}-{high:g}" for path, (low, high) in plugin.list_ranges().items()),
        }
    return {**facts, **{f"{role} learns": "; ".join(what) for role, what in plugin.reveals.items()}}


def _describe_attack(attack: type[Attack]) -> dict[str, Any]:
    from vflsec.core.attack import ActingAttack, Attack

    acts = issubclass(attack, ActingAttack) or attack.optimizer is not Attack.optimizer
    return {
        "name": attack.name,
        "breaks" if attack.target == "integrity" else "recovers": attack.target,
        "adversary": attack.side,
        "behavior": "acts in training" if acts else "honest-but-curious",
        "needs": ", ".join(sorted(map(str, attack.needs))),
        **({"also reads": ", ".join(sorted(map(str, attack.wants)))} if attack.wants else {}),
        "classes": "any number" if attack.classes is None else attack.classes,
        "head": "any" if attack.head is None else attack.head,
        "reference": attack.reference,
        "verified": attack.verified,
        "version": attack.version,
        **{fact: text for fact in ("costs", "fails") if (text := getattr(attack, fact))},
        **({"contrib": CONTRIB} if attack.contrib else {}),
    }


def _describe_defense(defense: type[Defense]) -> dict[str, Any]:
    from vflsec.core import hooks
    from vflsec.core.defense import list_hooks

    used = [hook for hook in hooks.HOOKS if hook in list_hooks(defense)]
    places = [point.value for point in defense.points]
    places += [hook.acts_at for hook in used if hook.acts_at and not hook.kind]
    when: dict[str, list[str]] = {}
    for hook in used:
        when.setdefault(hook.run_by, []).extend(hook.when)
    changes = [change for change in hooks.Changes if any(hook.changes == change for hook in used)]
    return {
        "name": defense.name,
        "acts at": ", ".join(dict.fromkeys(places)),
        "runs at": "; ".join(f"{who}: {', '.join(dict.fromkeys(times))}" for who, times in when.items()),
        "changes training": next(iter(changes), "no"),
        "strength": defense.strength_name,
        "usual strengths": ", ".join(f"{strength:.3g}" for strength in defense.strengths),
        "reference": defense.reference,
        "guarantee": defense.guarantee,
        **{fact: text for fact in ("hides", "costs", "fails") if (text := getattr(defense, fact))},
        **({"contrib": CONTRIB} if defense.contrib else {}),
    }


def _describe_condition(method: type[Method], phases: Sequence[str], kinds: Set[Kind]) -> str:
    """Return the values of an option with which alone ``kinds`` are sent in ``phases``, in parentheses.

    Options that are a choice, or on or off, are tried one at a time.
    """
    hints = get_type_hints(method.__init__)
    for option in list_options(method) if kinds else ():
        hint = hints.get(option)
        choices = (True, False) if bool in (hint, *get_args(hint)) else list_choices(hint)
        sent = [value for value in choices if any(kinds <= method.messages_in(p, {option: value}) for p in phases)]
        if sent and len(sent) < len(choices):
            return f" ({option} {' or '.join(json.dumps(value).strip(chr(34)) for value in sent)})"
    return ""


def _print(facts: Mapping[str, Any]) -> None:
    width = max(map(len, facts))
    for key, value in facts.items():
        lines = textwrap.wrap(str(value), max(WIDTH - width - 2, 20), break_long_words=False) or [""]
        click.echo(f"{key + ':':{width + 1}} " + f"\n{' ' * (width + 2)}".join(lines))


def _describe_dataset(name: str, load: Callable[[], VerticalDataset]) -> dict[str, Any]:
    """Return the facts of a dataset; where its files are not bundled and not here, its card and the way to them."""
    from vflsec.data import bundle

    try:
        return _list_dataset(load())
    except DataError as error:
        card = bundle.find_card(name, load)
        if card is None:
            raise
        return {"name": name, "files": str(error), **asdict(card)}


def _list_dataset(dataset: VerticalDataset) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": dataset.name,
        "parties": ", ".join(f"{dataset.display_name(p.name)} ({p.frame.shape[1]} columns)" for p in dataset.parties),
        "classes": ", ".join(dataset.classes),
        "metric": dataset.metric,
    }
    card = asdict(dataset.card) if dataset.card else {}
    return {**facts, **{key: value for key, value in card.items() if value}}


def _list_options(plugin: Any) -> dict[str, Any]:
    signature = inspect.signature(plugin)
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in signature.parameters.values() if p.kind in keywords and p.default is not p.empty]
    return {p.name: getattr(p.default, "name", "") if isinstance(p.default, type) else p.default for p in given}


@click.command("list")
@click.argument("kind", type=KindOfPlugin(), required=False, metavar=f"[{'|'.join(registry.PACKAGES)}]")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def list_plugins(kind: str | None, form: str) -> None:
    """List attacks, defenses, methods, protocols and datasets."""
    kinds = [kind] if kind else list(registry.PACKAGES)
    summaries = {k: {name: registry.summarize(entry) for name, entry in registry.list_all(k).items()} for k in kinds}
    if form == "json":
        click.echo(json.dumps(summaries, ensure_ascii=False))
        return
    width = max((len(name) for names in summaries.values() for name in names), default=0)
    for k, names in summaries.items():
        click.echo(f"{k}:")
        for name, text in names.items():
            click.echo(_wrap(f"  {name:{width}}  ", text))
    if any(text.endswith("(contrib)") for names in summaries.values() for text in names.values()):
        click.echo("\n" + _wrap("contrib: ", CONTRIB))


def _wrap(start: str, text: str) -> str:
    """Return ``text`` after ``start``, wrapped on a terminal; in one line elsewhere, for tools such as grep."""
    if not sys.stdout.isatty():
        return start + text
    columns = max(shutil.get_terminal_size().columns, len(start) + 20)
    return textwrap.fill(start + text, columns, subsequent_indent=" " * len(start), drop_whitespace=True)
