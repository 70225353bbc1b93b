"""The names that users give to parties and plug-ins; records say ``passive_1`` and ``path/to/file.py:Class``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Record

Struct = TypeVar("Struct", bound=msgspec.Struct)

SHOWN = ("adversary", "attacks", "rows", "baselines", "left_out")
"""The fields of a manifest that name parties and techniques to a reader; settings stay as they are written."""


def with_given_names(manifest: Manifest, records: dict[str, Record]) -> tuple[Manifest, dict[str, Record]]:
    """Return manifest and records with parties as the data name them, and plug-ins as they name themselves."""
    if not (manifest.names or manifest.techniques):
        return manifest, records
    # "active" is also a word: as a name it stands alone, or after "victim=" or "of".
    party = (
        r"(?<![\w-])passive_\d+(?![\w-])|^active$|(?<=victim=)active\b|(?<=\bof )active$|(?<=^attribute of )active\b"
    )
    paths = [rf"(?<![\w/.-]){re.escape(path)}(?!\w)" for path in manifest.techniques]
    pattern, names = re.compile("|".join([party, *paths])), manifest.names | manifest.techniques
    shown = {field: _given(getattr(manifest, field), pattern, names) for field in SHOWN}
    return (
        msgspec.structs.replace(manifest, **shown),
        {key: _renamed(record, pattern, names) for key, record in records.items()},
    )


def _renamed(record: Struct, pattern: re.Pattern[str], names: Mapping[str, str]) -> Struct:
    return msgspec.convert(_given(msgspec.to_builtins(record), pattern, names), type(record))


def _given(value: Any, pattern: re.Pattern[str], names: Mapping[str, str]) -> Any:
    """Return ``value`` with every match of ``pattern`` in its texts replaced by its name."""
    if isinstance(value, str):
        return pattern.sub(lambda found: names.get(found[0], found[0]), value)
    if isinstance(value, msgspec.Struct):
        return _renamed(value, pattern, names)
    if isinstance(value, dict):
        return {_given(key, pattern, names): _given(one, pattern, names) for key, one in value.items()}
    return [_given(one, pattern, names) for one in value] if isinstance(value, list | tuple) else value
