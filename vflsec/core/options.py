"""Options that several plug-ins share, declared once as the fields of a struct."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import msgspec

C = TypeVar("C", bound=type)


def shares_options(spec: type[msgspec.Struct]) -> Callable[[C], C]:
    """Return a class decorator that puts the fields of ``spec`` into the constructor's signature for ``**options``.

    The registry and ``vflsec show`` read types and defaults of options from signatures.

    Args:
        spec: a struct; its docstring explains the fields under ``Args``.
    """

    def decorate(made: C) -> C:
        init = made.__init__  # type: ignore[misc]  # of this very class
        signature, fields = inspect.signature(init), msgspec.structs.fields(spec)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields
        ]
        init.__signature__ = signature.replace(parameters=[*own, *shared])
        init.__annotations__ |= {field.name: field.type for field in fields}
        made.shared_options = spec  # type: ignore[attr-defined]
        return made

    return decorate
