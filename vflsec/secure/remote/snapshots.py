"""What a party keeps on its disk while a run lasts: states to go back to, C's key, and a journal.

Each file is sealed with a SHA-256, written as a whole or not at all, and readable by its owner alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from filelock import FileLock, Timeout
from safetensors.numpy import load, save

from vflsec.core.errors import StoreError
from vflsec.core.files import replace, seal, sweep, sync, unseal

KEPT = 2
"""Parties that commit one after the other are one batch apart at most, and the one ahead must be able to go back."""
EPOCHS_KEPT = 2
"""States at the ends of epochs, kept to go back further where a newer state turns out to be spoiled."""
KEY, JOURNAL = "key.bin", "journal.bin"
T = TypeVar("T")
_STATE = re.compile(r"state-(\d{8}|[1-9]\d{8,})\.bin")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot says of itself.

    Attributes:
        role: whose it is.
        run: of which run; empty before the parties have met.
        step: how many batches are done.
        history: SHA-256 over what both parties saw of all batches until now.
        settings: the job.
        rows: digest of the row ids.
    """

    role: str
    run: str
    step: int
    history: str
    settings: dict[str, str]
    rows: str


class Journal(msgspec.Struct, forbid_unknown_fields=True):
    """What must survive a restart although it is part of no state.

    Attributes:
        answered: batches that were answered at least once, by C with scores or by p with delta^C; they come in order.
        repeats: how often a batch was answered again, by its number.
        failed: the last batch that could not be done because of the state before it, or -1.
    """

    answered: int = 0
    repeats: dict[int, int] = {}
    failed: int = -1


class Kept(msgspec.Struct, frozen=True):
    """One state file: what it says of itself, and its tensors as safetensors."""

    facts: Facts
    tensors: bytes


class Snapshots:
    """The files of a run in ``folder``. What a killed process left unfinished is removed at the start.

    Args:
        folder: made if need be. One process at a time has it, until it ends, however it ends.

    Attributes:
        damaged: numbers of the states that ``kept`` found damaged.

    Raises:
        StoreError: another process has it, it cannot be written, or a folder has the name of one of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[int] = []
        self._lock = FileLock(folder / ".lock", thread_local=False)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire(blocking=False)
            sweep(folder)
        except Timeout:
            raise StoreError(f"another vflsec party works in {folder}: wait for it, or choose another --out") from None
        except OSError as error:
            raise StoreError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
        for path in (*map(self._path, self._steps()), folder / KEY, folder / JOURNAL):
            if path.is_dir():
                self.close()
                raise StoreError(f"expected a file {path}, got a folder: move it away, or choose another --out")

    def save(self, facts: Facts, state: Mapping[str, np.ndarray], epoch: int = 1) -> list[int]:
        """Keep the state after ``facts.step`` batches, and of the others the one before and the last ends of epochs.

        Args:
            facts: what the state is.
            state: its arrays.
            epoch: batches in an epoch.

        Returns:
            The numbers of all states that are kept now.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        tensors = save({key: np.asarray(value, order="C") for key, value in state.items()})
        self._write_sealed(self._path(facts.step).name, Kept(facts, tensors))
        steps = self._steps()
        ends = [step for step in steps[:-KEPT] if step % epoch == 0]
        kept = sorted({*steps[-KEPT:], *ends[-EPOCHS_KEPT:]})
        for step in {*steps} - {*kept}:
            self._path(step).unlink()
        return kept

    def load(self, step: int) -> dict[str, np.ndarray]:
        """Return the state after ``step`` batches.

        Raises:
            StoreError: it is damaged.
        """
        found: dict[str, np.ndarray] = load(self._read(step).tensors)
        return found

    def kept(self) -> dict[int, Facts]:
        """Return what is known of each intact state, by the number of batches done.

        Raises:
            StoreError: none is intact.
        """
        found, self.damaged, steps = {}, [], self._steps()
        for step in steps:
            try:
                found[step] = self._read(step).facts
            except StoreError:
                self.damaged.append(step)
                if len(self.damaged) == len(steps):
                    raise
        return found

    def forget_after(self, step: int) -> None:
        """Drop the states of batches after ``step``: they are to be done again."""
        for later in self._steps():
            if later > step:
                self._path(later).unlink()
        sync(self.folder)

    def clear(self) -> None:
        """Drop all states, the journal and C's key: the run is over."""
        sweep(self.folder)
        for path in (*map(self._path, self._steps()), self.folder / KEY, self.folder / JOURNAL):
            path.unlink(missing_ok=True)
        sync(self.folder)

    def save_key(self, numbers: Mapping[str, bytes]) -> None:
        """Keep C's private key, once for the whole run.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        self._write_sealed(KEY, dict(numbers))

    def load_key(self) -> dict[str, bytes]:
        """Return C's private key.

        Raises:
            StoreError: it is missing or damaged.
        """
        return self._read_sealed(KEY, dict[str, bytes])

    def save_journal(self, journal: Journal) -> None:
        """Keep the journal.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        self._write_sealed(JOURNAL, journal)

    def load_journal(self) -> Journal:
        """Return the journal of the run, which is written before its first state.

        Raises:
            StoreError: it is missing or damaged: nobody knows then how often a batch was answered.
        """
        return self._read_sealed(JOURNAL, Journal)

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the states, for its owner alone.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        try:
            replace(self.folder / name, content)
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder}: {error.strerror}; make room and start again") from None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file beside the states, or None where there is none.

        Raises:
            StoreError: it cannot be read.
        """
        path = self.folder / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"cannot read {path}: {error.strerror or error}; move it away, or choose another --out"
            ) from None

    def close(self) -> None:
        """Leave the folder to others."""
        self._lock.release()

    def _steps(self) -> list[int]:
        found = (_STATE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step:08}.bin"

    def _read(self, step: int) -> Kept:
        return self._read_sealed(self._path(step).name, Kept)

    def _write_sealed(self, name: str, value: object) -> None:
        self.write(name, seal(msgspec.msgpack.encode(value)))

    def _read_sealed(self, name: str, kind: type[T]) -> T:
        path = self.folder / name
        try:
            return msgspec.msgpack.decode(unseal(path.read_bytes()), type=kind)
        except (OSError, ValueError) as error:  # DecodeError is a ValueError
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"expected {path} as it was written, got {reason}: restore a copy, or start anew"
            ) from None
