"""A results folder: settings, environment, one append-only line per result, and each cell's models.

DIR/spec.toml   DIR/env.json   DIR/records.jsonl   DIR/cells/<key>/{cell.json,<party>.safetensors}
A stage that several cells share is a cell of its own; while it is being computed, DIR/cells/<key>.partial.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from vflsec.core.errors import StoreError
from vflsec.evaluation.records import FAILED, SCHEMA, CellFacts, OtherSchema, Record, StageFacts, decode, encode


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise StoreError, in one line, where the system refuses to write into ``folder``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from None


class Store:
    """Reads and writes one results folder; killed at any moment, it loses at most the line being written.

    Args:
        folder: made when something is first written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / "records.jsonl"

    def lock(self) -> FileLock:
        """Return the acquired lock of this folder.

        Raises:
            StoreError: another run holds it, or the folder cannot be written.
        """
        lock = FileLock(self.folder / ".lock")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise StoreError(
                    f"another vflsec is writing to {self.folder}: wait for it, or choose another --out"
                ) from None
        return lock

    def records(self, *, skip_damaged: bool = False) -> dict[str, Record]:
        """Return all finished results by key; a torn last line counts as unfinished.

        Args:
            skip_damaged: leave damaged lines out.

        Raises:
            StoreError: a line is damaged, or is of another schema.
        """
        found: dict[str, Record] = {}
        for number, line in enumerate(self._complete_lines(), start=1):
            try:
                record = decode(line)
            except OtherSchema as error:
                raise StoreError(
                    f"{self._records} line {number} has schema {error}, expected {SCHEMA}: another "
                    f"version of vflsec wrote it; compute it again with --fresh, or choose another --out"
                ) from None
            except ValueError as error:
                if skip_damaged:
                    continue
                raise StoreError(
                    f"{self._records} line {number} is damaged, {error}: compute it again with vflsec eval "
                    f"--retry-errors, or all with --fresh"
                ) from None
            found[record.key] = record
        return found

    def append(self, record: Record) -> None:
        """Write one result as one line, on the disk before this returns."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._records.open("ab") as file:
                file.write(encode(record))
                file.flush()
                os.fsync(file.fileno())

    def trim(self) -> None:
        """Cut off a torn last line, so that the next one starts on a line of its own."""
        if self._records.exists():
            with writing(self.folder):
                os.truncate(self._records, sum(map(len, self._complete_lines())))

    def forget(self, keep: Callable[[Record], bool], *, skip_damaged: bool = False) -> None:
        """Drop the results that ``keep`` refuses, in one atomic replacement; damaged ones with ``skip_damaged``."""
        kept = [encode(record) for record in self.records(skip_damaged=skip_damaged).values() if keep(record)]
        temporary = self._records.with_suffix(".tmp")
        with writing(self.folder):
            temporary.write_bytes(b"".join(kept))
            temporary.replace(self._records)

    def forget_failures(self) -> None:
        """Drop the results that errored, diverged or are damaged, and their cells, so that these are trained again."""
        for path in self.folder.glob("cells/*/cell.json"):
            folder = CellFolder(path.parent)
            try:
                facts = folder.read()
            except StoreError:
                facts = None
            if facts is None or facts.status in FAILED:
                folder.remove()
        self.forget(lambda record: record.status not in FAILED, skip_damaged=True)

    def expect_own(self) -> None:
        """Raise StoreError if this folder holds cells, or what is called so, that no evaluation wrote."""
        cells = self.folder / "cells"
        if cells.exists() and not (self._records.exists() or (self.folder / "spec.toml").exists()):
            raise StoreError(
                f"expected an evaluation in {self.folder}, found {cells} without spec.toml or records.jsonl: "
                f"remove it, or choose another --out"
            )

    def clear(self) -> None:
        """Drop all results and all cells; what else lies there stays.

        Raises:
            StoreError: this folder is not of an evaluation.
        """
        self.expect_own()
        with writing(self.folder):
            self._records.unlink(missing_ok=True)
            for facts in self.folder.glob("cells/*/cell.json"):
                CellFolder(facts.parent).remove()
            for partial in self.folder.glob("cells/*.partial*"):
                partial.unlink()

    def write_settings(self, spec_toml: str) -> None:
        """Write ``spec.toml`` and ``env.json``."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
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

    @property
    def partial(self) -> Path:
        """The file in which a stage keeps its state while it is being computed."""
        return self.path.with_name(f"{self.path.name}.partial")

    def read(self) -> CellFacts | StageFacts | None:
        """Return the cell's facts, or None where it has not been computed.

        Raises:
            StoreError: they are damaged.
        """
        found: CellFacts | StageFacts | None = self._read(CellFacts | StageFacts)
        return found

    def read_measured(self) -> dict[str, Any] | None:
        """Return what a benchmark has kept of a cell of its own, or None."""
        found: dict[str, Any] | None = self._read(dict[str, Any])
        return found

    def _read(self, kind: Any) -> Any:
        path = self.path / "cell.json"
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} is damaged ({error}): compute it again with vflsec eval --retry-errors") from None

    def write(self, facts: CellFacts | StageFacts | dict[str, Any], save_models: Callable[[Path], None]) -> None:
        """Write models and facts to a folder beside, then move it here; what another process put here first stays."""
        temporary = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        with writing(self.path):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            save_models(temporary)
            (temporary / "cell.json").write_bytes(msgspec.json.encode(facts))
            try:
                temporary.rename(self.path)
            except OSError:  # the same cell, which a killed run's last worker was still computing
                shutil.rmtree(temporary)
                if self.read() is None:
                    raise

    def check(self) -> None:
        """Raise StoreError unless this folder is new and can be made; it is made and removed again."""
        with writing(self.path):
            if self.path.exists():
                raise StoreError(f"expected a new folder for --out, got {self.path}, which exists: name another")
            made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True)
            for folder in made:
                folder.rmdir()

    def remove(self) -> None:
        """Drop models and facts."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.partial.unlink(missing_ok=True)


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
