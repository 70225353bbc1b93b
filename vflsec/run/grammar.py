"""The small grammar that names attacks, defenses and methods.

NAME[:option=value,...][@point+...]        mc:mode=mixmatch     my.py:Mine:k=3     label-dp:epsilon=2@labels

A defense that is swept may have strengths of its own, as a list: iso:lambda=1,5,25 or gaussian-dp:epsilon=8,2,clip=1.0.

The points of a defense are kinds of message, in every phase or in one: iso:lambda=5@gradient, iso@pretrain.embedding.
That of an attack is a phase after which it strikes: mc@pretrain. A method has none; a dot in the name of one of its
options leads into a table: fedhssl-moco:ssl_options.queue=64.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vflsec.base.errors import UsageError
from vflsec.base.files import parse_toml

_SHORT_NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")
"""What TOML wants a zero in."""

_OPTION_FIRST = re.compile(r"[^:]*:[^:=]*=")
"""A reference whose ``.py:`` is in an option, not in its name."""


def parse_reference(text: str, what: str) -> tuple[str, dict[str, Any], tuple[str, ...] | None]:
    """Split ``NAME[:option=value,...][@point+...]`` into name, options and points; several numbers are a list."""
    head, _, points = text.partition("@")
    if ".py:" in head and not _OPTION_FIRST.match(head.partition(".py:")[0]):
        path, _, rest = head.partition(".py:")
        attribute, _, options_text = rest.partition(":")
        name = f"{path}.py:{attribute}"
    else:
        name, _, options_text = head.partition(":")
    options: dict[str, Any] = {}
    last = ""
    for item in filter(None, (item.strip() for item in options_text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if equals and key in options:
            raise UsageError(f"expected {key} once in {text!r}, got it twice: drop one")
        if equals:
            options[key], last = parse_value(value), key
        elif last and _is_number(item):
            before = options[last]
            options[last] = [*(before if isinstance(before, list) else [before]), parse_value(item)]
        else:
            raise UsageError(f"expected {what} {name}:option=value, got {item!r} in {text!r}")
    return name, options, tuple(filter(None, points.split("+"))) or None


def format_reference(name: str, options: Mapping[str, Any]) -> str:
    """Return the reference with these options in the order of their names, such that equal options give equal texts."""
    given = ",".join(f"{key}={_format_value(value)}" for key, value in sorted(_list_leaves(options)))
    return f"{name}:{given}" if given else name


def _list_leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:  # an empty table is a value, and often one of the wrong type
            yield from _list_leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_format_value, value))
    plain = isinstance(value, str) and parse_value(value) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def split_list(text: str) -> list[str]:
    """Split a comma list of references; ``a:x=1,2,y=2,b`` is ``a:x=1,2,y=2`` and ``b``."""
    items: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        option = "=" in piece and ":" not in piece.partition("=")[0]
        if items and (option or _is_number(piece.partition("@")[0])):
            items[-1] += f",{piece}"
        else:
            items.append(piece)
    return items


def parse_value(text: str) -> Any:
    """Read a TOML value, or ``.5``; what is none is text, so that ``mode=mixmatch`` needs no quotes."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return float(text) if _SHORT_NUMBER.fullmatch(text) else text


def _is_number(text: str) -> bool:
    return isinstance(parse_value(text), int | float) and text not in ("true", "false")


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each setting of which ``path.to.key=1,2,3`` names several.

    Values that hold commas are written as a TOML list.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = (part.strip() for part in text.partition("="))
        if not (equals and path and values):
            raise UsageError(f"expected --sweep path.to.key=value,value, got {text!r}")
        if path in axes:
            raise UsageError(f"expected the values of {path} once, got them twice: name all in one --sweep")
        whole = parse_value(values)
        axes[path] = whole if isinstance(whole, list) else [parse_value(value.strip()) for value in values.split(",")]
    return axes


def is_several(assignment: str) -> bool:
    """Whether ``path.to.key=value`` names several values: an unquoted list with commas."""
    value = assignment.partition("=")[2].strip()
    return "," in value and isinstance(parse_value(value), str) and value[:1] not in ("'", '"')
