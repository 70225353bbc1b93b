"""Options of plug-ins: checked against annotations, and shared by several as the fields of a struct."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import UsageError, VflsecError

C = TypeVar("C", bound=type)

CONTRIB = "not verified against a published source, or made for this project"
"""What ``contrib = True`` in the class of a technique means."""


def share_options(spec: type[msgspec.Struct]) -> Callable[[C], C]:
    """Return a class decorator that puts the fields of ``spec`` into the constructor's signature for ``**options``.

    The registry and ``vflsec show`` read types and defaults of options from signatures.

    Args:
        spec: a struct; its docstring explains the fields under ``Args``.
    """

    def decorate(made: C) -> C:
        init = made.__init__  # type: ignore[misc]  # of this very class
        signature, fields = inspect.signature(init), msgspec.structs.fields(spec)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields
        ]
        init.__signature__ = signature.replace(parameters=[*named, *shared])
        init.__annotations__ |= {field.name: field.type for field in fields}
        made.shared_options = spec  # type: ignore[attr-defined]
        return made

    return decorate


def make(name: str, factory: Any, *args: Any, **options: Any) -> Any:
    """Return ``factory(*args, **options)``, each option checked against the annotation of a keyword-only argument.

    Raises:
        UsageError: an unknown option, or one of the wrong type; the message starts with ``name``.
    """
    options = convert_options(name, factory, options)
    try:
        return factory(*args, **options)
    except VflsecError:
        raise
    except (Exception, SystemExit) as error:  # a plug-in's own mistake is its user's, not a crash of ours
        raise UsageError(f"{name} cannot be made: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=1024)
def list_options(factory: Any) -> frozenset[str]:
    """Return the names of the keyword-only arguments of ``factory``."""
    return frozenset(p.name for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY)


def convert_options(name: str, factory: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options``, each checked against the annotation of a keyword-only argument of ``factory``.

    Raises:
        UsageError: an unknown option, or one of the wrong type; the message starts with ``name``.
    """
    known = list_options(factory)
    try:
        hints = _get_hints(factory)
    except NameError as error:
        raise UsageError(f"{name}: an annotation of its options cannot be read: {error}") from None
    checked = {}
    for option, value in options.items():
        if option not in known:
            raise UsageError(f"{name}: {describe_unknown('option', option, known)}")
        choices = list_choices(hints.get(option, Any))
        if isinstance(value, str) and choices and value not in choices:
            texts = [choice for choice in choices if isinstance(choice, str)]
            raise UsageError(f"{name}: {describe_unknown(option, value, texts)}")
        if get_origin(hints.get(option)) is type:  # whose name the registry has replaced by the class
            if not isinstance(value, type):
                raise UsageError(f"{name}: expected the name of a class for {option}, got {value!r}")
            checked[option] = value
            continue
        try:
            checked[option] = msgspec.convert(value, hints.get(option, Any))
        except msgspec.ValidationError as error:
            raise UsageError(f"{name}: option {option}={value!r}: {error}") from None
        if isinstance(value, int | float) and not abs(value) < 1 << 63:  # also NaN
            raise UsageError(f"{name}: expected a finite number below 2^63 for {option}, got {value!r:.40}")
    return checked


def list_classes(factory: Any) -> dict[str, type]:
    """Return the options of ``factory`` that take a class, with the class that it must be derived from."""
    try:
        hints = _get_hints(factory)
    except NameError:  # ``convert_options`` reports it
        return {}
    return {option: get_args(hint)[0] for option, hint in hints.items() if get_origin(hint) is type}


@lru_cache(maxsize=1024)
def _get_hints(factory: Any) -> dict[str, Any]:
    return get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)


def list_choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of a ``Literal``, alone or with None; none for any other annotation."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [part for part in parts if part is not type(None)]
    return get_args(literals[0]) if len(literals) == 1 and get_origin(literals[0]) is Literal else ()
