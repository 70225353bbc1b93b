"""Recipes and studies in files: those that come with vflsec, and TOML files of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vflsec.base import files
from vflsec.base.checks import unknown
from vflsec.base.errors import UsageError
from vflsec.run.spec import read_toml

T = TypeVar("T")


def list_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_bundled(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """Return the settings of a ``kind`` in a folder that comes with vflsec.

    Raises:
        UsageError: no such name.
    """
    if name not in list_names(folder):
        raise UsageError(unknown(kind, name, list_names(folder)))
    return files.parse_toml((folder / f"{name}.toml").read_text(encoding="utf-8"))


def read_table(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """Return the settings of a ``kind`` by name, or from a TOML file.

    Raises:
        UsageError: no such name or file, or no TOML.
    """
    return read_toml(Path(name)) if name.endswith(".toml") else read_bundled(folder, kind, name)


def convert(name: str, table: dict[str, Any], structure: type[T]) -> T:
    """Return settings as a checked structure.

    Raises:
        UsageError: they are wrong; the message begins with ``name``.
    """
    try:
        return msgspec.convert(table, structure)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None
