"""The names that users give to parties; the records know them as ``active``, ``passive_1``, ``passive_2``..."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from vflsec.records.manifest import Manifest
from vflsec.records.schema import Record

Struct = TypeVar("Struct", bound=msgspec.Struct)

SHOWN = ("adversary", "attacks", "rows", "baselines", "left_out")
"""The fields of a manifest that name parties to a reader; settings stay as they are written."""


def with_given_names(manifest: Manifest, records: dict[str, Record]) -> tuple[Manifest, dict[str, Record]]:
    """Return manifest and records with each party under the name that the data give it."""
    names = manifest.names
    if not names:
        return manifest, records
    shown = msgspec.structs.replace(manifest, **{field: _given(getattr(manifest, field), names) for field in SHOWN})
    return shown, {key: _renamed(record, names) for key, record in records.items()}


def _renamed(record: Struct, names: Mapping[str, str]) -> Struct:
    return msgspec.convert(_given(msgspec.to_builtins(record), names), type(record))


def _given(value: Any, names: Mapping[str, str]) -> Any:
    """Return ``value`` with every name of a party in its texts replaced."""
    if isinstance(value, str):
        # "active" is also a word: as a name it stands alone, or after "victim=" or "of".
        pattern = r"(?<![\w-])passive_\d+(?![\w-])|^active$|(?<=victim=)active\b|(?<=\bof )active$"
        return re.sub(pattern, lambda found: names.get(found[0], found[0]), value)
    if isinstance(value, msgspec.Struct):
        return _renamed(value, names)
    if isinstance(value, dict):
        return {_given(key, names): _given(one, names) for key, one in value.items()}
    return [_given(one, names) for one in value] if isinstance(value, list | tuple) else value
