"""A results folder: settings, environment, one append-only line per result, and each cell's models.

DIR/spec.toml   DIR/env.json   DIR/records.jsonl   DIR/cells/<key>/{cell.json,<party>.safetensors}
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from vflsec.core.errors import StoreError

SCHEMA = 1
Record = dict[str, Any]


class Store:
    """Reads and writes one results folder; killed at any moment, it loses at most the line being written.

    Args:
        folder: made if it does not exist.

    Raises:
        StoreError: the folder cannot be written, or holds lines of another schema.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / "records.jsonl"
        try:
            (folder / "cells").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write results to {folder}: {error.strerror}; choose another --out") from None

    def lock(self) -> FileLock:
        """Return the acquired lock of this folder.

        Raises:
            StoreError: another run holds it.
        """
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise StoreError(
                f"another vflsec is writing to {self.folder}: wait for it, or choose another --out"
            ) from None
        return lock

    def records(self) -> dict[str, Record]:
        """Return all finished results by key; a torn last line counts as unfinished.

        Raises:
            StoreError: a line that is not a result, or is of another schema.
        """
        found: dict[str, Record] = {}
        for number, line in enumerate(self._complete_lines(), start=1):
            try:
                record: Record = msgspec.json.decode(line)
                if record["schema"] != SCHEMA:
                    raise StoreError(f"{self._records} line {number} has schema {record['schema']}, expected {SCHEMA}")
                found[record["key"]] = record
            except (msgspec.DecodeError, KeyError, TypeError):
                raise StoreError(
                    f"{self._records} line {number} is not a result: remove it, or start --fresh"
                ) from None
        return found

    def append(self, record: Record) -> None:
        """Write one result as one line, on the disk before this returns."""
        with self._records.open("ab") as file:
            file.write(msgspec.json.encode({"schema": SCHEMA, **record}) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def trim(self) -> None:
        """Cut off a torn last line, so that the next one starts on a line of its own."""
        if self._records.exists():
            os.truncate(self._records, sum(map(len, self._complete_lines())))

    def forget(self, keep: Callable[[Record], bool]) -> None:
        """Drop the results that ``keep`` refuses, in one atomic replacement."""
        kept = [line for line in self._complete_lines() if keep(msgspec.json.decode(line))]
        temporary = self._records.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(self._records)

    def clear(self) -> None:
        """Drop all results and all cells."""
        self._records.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "cells")
        (self.folder / "cells").mkdir()

    def write_settings(self, spec_toml: str) -> None:
        """Write ``spec.toml`` and ``env.json``."""
        (self.folder / "spec.toml").write_text(spec_toml, encoding="utf-8")
        (self.folder / "env.json").write_bytes(msgspec.json.format(msgspec.json.encode(environment()), indent=2))

    def cell(self, key: str) -> CellFolder:
        """Return the folder of one cell."""
        return CellFolder(self.folder / "cells" / key)

    def _complete_lines(self) -> list[bytes]:
        if not self._records.exists():
            return []
        return [line for line in self._records.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class CellFolder:
    """One cell's models and facts; appears whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Record | None:
        """Return the cell's facts, or None where it has not been computed."""
        facts = self.path / "cell.json"
        return msgspec.json.decode(facts.read_bytes()) if facts.exists() else None

    def write(self, facts: Record, save_models: Callable[[Path], None]) -> None:
        """Write models and facts to a folder beside, then move it here; what another process put here first stays."""
        temporary = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        save_models(temporary)
        (temporary / "cell.json").write_bytes(msgspec.json.encode(facts))
        try:
            temporary.rename(self.path)
        except OSError:  # the same cell, which a killed run's last worker was still computing
            shutil.rmtree(temporary)
            if self.read() is None:
                raise


def environment() -> dict[str, str]:
    """Return versions, without user names or paths."""
    packages = ("vflsec", "torch", "numpy", "scipy", "scikit-learn", "pandas")
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        **{name: version(name) for name in packages},
    }
