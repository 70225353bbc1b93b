"""A results folder: settings, environment, one append-only line per result, and each cell's models.

DIR/spec.toml   DIR/env.json   DIR/manifest.json   DIR/records.jsonl   DIR/cells/<key>/{cell.json,<party>.safetensors}
DIR/gates.json holds the limits that runs were given.
A stage that several cells share is a cell of its own; while one is being trained, DIR/cells/<key>.partial.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.core.message import ReleaseCount
from vflsec.results.records.folder import (
    GATES,
    MANIFEST,
    POINTS,
    RECORDS,
    SUBGROUPS,
    SWEEP,
    complete_lines,
    expect_limits,
    read_manifest,
    read_records,
    write_limits,
)
from vflsec.results.records.manifest import Manifest, RunLimits
from vflsec.results.records.schema import FAILED, Block, Maybe, Number, Record, Status, encode, seal, unseal


class StageDone(msgspec.Struct, frozen=True, kw_only=True):
    """States that a stage was run; it has no record."""

    method: str
    seed: int
    stage: str
    status: Status


class StageFacts(msgspec.Struct, kw_only=True, tag_field="kind", tag="stage", forbid_unknown_fields=True):
    """The facts of a stage."""

    stage: str
    status: Status = "ok"
    error: str | None = None
    history: Sequence[Maybe] = ()
    spread: Mapping[str, Maybe] = {}
    traffic: list[tuple[str, str, str, str, int]] = []
    releases: list[ReleaseCount] = []
    seconds: float = 0.0


class CellFacts(msgspec.Struct, kw_only=True, tag_field="kind", tag="cell", forbid_unknown_fields=True):
    """The facts of a cell.

    Attributes:
        history: the loss of each epoch, by phase.
        active_alone: the utility of a quick model of the active party's columns; None under defenses.
        quick_joint: the same of all columns, of seed 0.
        phase_seconds: CPU seconds of training, by phase; a phase that was loaded counts with those that it took.
    """

    status: Status = "ok"
    error: str | None = None
    utility: Block | None = None
    history: Mapping[str, Sequence[Maybe]] = {}
    spread: dict[str, Mapping[str, Maybe]] = {}
    notes: list[str] = []
    active_alone: Maybe = None
    quick_joint: Maybe = None
    reached: dict[str, Number] = {}
    traffic: list[tuple[str, str, str, str, int]] = []
    releases: list[ReleaseCount] = []
    seconds: float = 0.0
    phase_seconds: dict[str, float] = {}


SHARED = 0o666
"""The mode of files that others may read, as far as the umask lets them."""


@contextmanager
def guard_writing(folder: Path) -> Iterator[None]:
    """Raise StoreError, in one line, if the system refuses to write into ``folder``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot write to {folder}: {cause}; choose another --out") from None


def _acquire(lock: FileLock, folder: Path) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise StoreError(f"another vflsec is writing to {folder}: wait for it, or choose another --out") from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock beside a folder that is still to be made.

    Raises:
        StoreError: another process holds it, or it cannot be made.
    """
    lock = FileLock(folder.with_name(f"{files.UNFINISHED}{folder.name[:200]}.lock"))
    with guard_writing(folder):
        folder.exists()  # not with a name that is too long
        folder.parent.mkdir(parents=True, exist_ok=True)
        _acquire(lock, folder)
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


class Store:
    """Reads and writes one results folder; a kill loses at most the line being written.

    Args:
        folder: created by the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / RECORDS

    def lock(self) -> FileLock:
        """Return the acquired lock of this folder.

        Raises:
            StoreError: another run holds it, or the folder cannot be written.
        """
        lock = FileLock(self.folder / ".lock")
        for path in (self.folder / ".lock", self.folder / "cells", self.folder / POINTS):
            if path.is_symlink():
                raise StoreError(f"expected no link in a results folder, found {path}: remove it")
        with guard_writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _acquire(lock, self.folder)
            self._sweep()
        return lock

    def _sweep(self) -> None:
        """Remove the unfinished files of a killed run, whose workers have ended with it."""
        files.sweep(self.folder)
        for pattern in (f"cells/{files.UNFINISHED}*", "cells/*.partial-*"):
            for unfinished in self.folder.glob(pattern):
                files.discard(unfinished)
        for partial in self.folder.glob("cells/*.partial"):
            if partial.with_suffix("").joinpath("cell.json").exists():  # killed between its end and this
                files.discard(partial)

    def records(self, *, skip_damaged: bool = False) -> dict[str, Record]:
        """Return all finished results by key, see ``read_records``."""
        return read_records(self.folder, skip_damaged=skip_damaged)

    def append(self, record: Record) -> None:
        """Write one result as one line, on the disk before this returns."""
        with guard_writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            files.append(self._records, encode(record))

    def count_trainings(self) -> int:
        """Return the number of trainings that are kept, each phase that others share among them."""
        return sum(1 for _ in self.folder.glob("cells/*/cell.json"))

    def trim(self) -> None:
        """Cut off an incomplete last line."""
        if self._records.exists():
            with guard_writing(self.folder):
                files.truncate(self._records, sum(map(len, complete_lines(self._records))))

    def forget(self, keep: Callable[[Record], bool], *, skip_damaged: bool = False) -> None:
        """Drop the results that ``keep`` rejects, in one atomic replacement; damaged ones with ``skip_damaged``."""
        kept = [encode(record) for record in self.records(skip_damaged=skip_damaged).values() if keep(record)]
        with guard_writing(self.folder):
            files.replace(self._records, b"".join(kept), mode=SHARED)

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

    def expect_evaluation(self) -> None:
        """Raise StoreError if this folder has ``cells`` that no evaluation wrote."""
        cells = self.folder / "cells"
        if cells.exists() and not any((self.folder / name).exists() for name in (RECORDS, "spec.toml", SWEEP)):
            raise StoreError(
                f"expected an evaluation in {self.folder}, found {cells} without spec.toml or records.jsonl: "
                f"remove it, or choose another --out"
            )

    def expect_same(self, manifest: Manifest) -> None:
        """Raise StoreError if this folder has results of what ``manifest`` is not about, which it would replace."""
        try:
            earlier = read_manifest(self.folder)
        except StoreError:  # there is none, or it is damaged and is written anew
            return
        if differs := _find_difference(earlier, manifest):
            raise StoreError(
                f"expected no results of another system or other data in {self.folder}, found those of "
                f"{earlier.audited or earlier.dataset} ({differs}): choose another --out, or delete them with --fresh"
            )

    def clear(self) -> None:
        """Drop all results and all cells; other files are kept.

        Raises:
            StoreError: no evaluation wrote this folder.
        """
        self.expect_evaluation()
        with guard_writing(self.folder):
            self._records.unlink(missing_ok=True)
            for kept in (GATES, MANIFEST):
                (self.folder / kept).unlink(missing_ok=True)
            for facts in self.folder.glob("cells/*/cell.json"):
                CellFolder(facts.parent).remove()
            for extra in (*self.folder.glob("cells/*.partial*"), self.folder / "guesses", self.folder / SUBGROUPS):
                files.discard(extra)

    def write_settings(self, spec_toml: str, manifest: Manifest, point: str = "") -> None:
        """Write ``spec.toml``, ``env.json`` and ``manifest.json``; of a sweep, into the folder of one ``point``."""
        versions = msgspec.json.encode(manifest.provenance.versions)
        folder = self.folder / POINTS / point if point else self.folder
        manifest = msgspec.structs.replace(manifest, limited=(self.folder / GATES).exists())
        with guard_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files.replace(folder / "spec.toml", spec_toml.encode(), mode=SHARED)
            files.replace(folder / "env.json", msgspec.json.format(versions, indent=2), mode=SHARED)
            files.replace(folder / MANIFEST, seal(manifest), mode=SHARED)

    def write_limits(self, given: RunLimits) -> None:
        """Make these the limits of the folder, if there are any, see ``RunLimits``.

        Raises:
            StoreError: those of earlier runs are lost.
        """
        try:
            earlier = read_manifest(self.folder)
        except StoreError:  # there is none, or it is damaged and is written anew
            earlier = None
        if earlier and given == RunLimits():
            expect_limits(self.folder, earlier)
        with guard_writing(self.folder):
            write_limits(self.folder, given)

    def cell(self, key: str) -> CellFolder:
        """Return the folder of one cell."""
        return CellFolder(self.folder / "cells" / key)


class _Stored(msgspec.Struct, frozen=True):
    """The content of ``cell.json``.

    Attributes:
        name: of its folder, which is the key of the cell in a results folder; empty if it may be renamed.
        facts: of the cell.
        models: the SHA-256 of each other file.
    """

    name: str
    facts: msgspec.Raw
    models: dict[str, str]


SUBJECT = {"sha256": "other content", "party": "another party", "train_rows": "other rows", "test_rows": "other rows"}
"""The settings of an audit that say what it is about, and what it means if they differ."""


def _find_difference(earlier: Manifest, later: Manifest) -> str:
    """Return in which respect two manifests are about different things; an evaluation's data may have been edited."""
    if bool(earlier.audited) != bool(later.audited):
        return f"an {'audit' if earlier.audited else 'evaluation'}"
    before, after = (
        msgspec.to_builtins(manifest.provenance.sources.get("dataset", {})) for manifest in (earlier, later)
    )
    hashes = list(before.values()) != list(after.values())
    if hashes and (later.audited or before.keys() != after.keys()):
        return "other data"
    differing = [text for key, text in SUBJECT.items() if earlier.settings.get(key) != later.settings.get(key)]
    return differing[0] if later.audited and differing else ""


class CellFolder:
    """One cell's models and facts; written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def partial(self) -> Path:
        """The file with the state of a phase while it is being trained."""
        return self.path.with_name(f"{self.path.name}.partial")

    @contextmanager
    def _prepare_folder(self) -> Iterator[Path]:
        """Yield the path of a new folder; it is removed unless it is moved here, lest it fill a full disk further."""
        temporary = self.path.with_name(f"{files.UNFINISHED}{self.path.name}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def read(self) -> CellFacts | StageFacts | None:
        """Return the cell's facts, or None if it must be computed.

        That is also the case if its models are damaged or those of another cell, since computing them again gives the
        same ones, or if an earlier version of vflsec wrote it.

        Raises:
            StoreError: they are damaged.
        """
        facts: CellFacts | StageFacts | None = self._read(CellFacts | StageFacts)
        return facts

    def read_measured(self) -> dict[str, Any] | None:
        """Return the facts that a benchmark stored for a cell of its own, or None."""
        facts: dict[str, Any] | None = self._read(dict[str, Any])
        return facts

    def _read(self, kind: Any) -> Any:
        path = self.path / "cell.json"
        try:
            content = files.read(path)
            stored: _Stored = unseal(content, _Stored)
            facts = msgspec.json.decode(stored.facts, type=kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (msgspec.DecodeError, ValueError, OSError) as error:
            raise StoreError(f"{path} is damaged ({error}): compute it again with vflsec eval --retry-errors") from None
        intact = stored.name in ("", self.path.name) and all(
            path.is_file() and files.hash_file(path) == digest
            for path, digest in ((self.path / name, digest) for name, digest in stored.models.items())
        )
        return facts if intact else None

    def write(
        self,
        facts: CellFacts | StageFacts | dict[str, Any],
        save_models: Callable[[Path], None],
        *,
        portable: bool = False,
    ) -> None:
        """Write models and facts to a temporary folder, then move it here, unless another process was first.

        Args:
            facts: of the cell.
            save_models: writes all other files into a folder that it makes.
            portable: whether the folder may be renamed later.
        """
        with guard_writing(self.path), self._prepare_folder() as temporary:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            save_models(temporary)
            models = {path.name: files.hash_file(path) for path in sorted(temporary.iterdir())}
            stored = _Stored(
                name="" if portable else self.path.name, facts=msgspec.Raw(msgspec.json.encode(facts)), models=models
            )
            (temporary / "cell.json").write_bytes(seal(stored))
            try:
                temporary.rename(self.path)
            except OSError:  # another process was first, or this is an incomplete cell
                if self.read() is not None:
                    return
                files.discard(self.path)
                temporary.rename(self.path)

    def check(self, save_models: Callable[[Path], None]) -> None:
        """Raise StoreError unless this folder is new and has room for such files, which are removed again."""
        with guard_writing(self.path):
            if self.path.exists():
                raise StoreError(f"expected a new folder for --out, got {self.path}, which exists: name another")
            made = [folder for folder in self.path.parents if not folder.exists()]
            with self._prepare_folder() as temporary:
                save_models(temporary)
            for folder in made:
                folder.rmdir()

    def remove(self) -> None:
        """Drop models and facts."""
        files.discard(self.path)
        files.discard(self.partial)


def get_environment() -> dict[str, str]:
    """Return versions, without user names or paths."""
    packages = ("vflsec", "torch", "numpy", "scipy", "scikit-learn", "pandas")
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        **{name: version(name) for name in packages},
    }
