"""What a party keeps on its disk: its state after the last two batches, so that it can go back by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vflsec.core.errors import StoreError
from vflsec.remote.files import replace, sync

KEPT = 2
"""Parties that commit one after the other are one batch apart at most, and the one ahead must be able to go back."""


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


class Snapshots:
    """The states in ``folder``, for their owner alone; each is written as a whole or not at all.

    Args:
        folder: made if need be. One process at a time has it, until it ends, however it ends.

    Raises:
        StoreError: another process has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / ".lock", thread_local=False)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise StoreError(f"another vflsec party works in {folder}: wait for it, or choose another --out") from None
        except OSError as error:
            raise StoreError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None

    def save(self, facts: Facts, state: Mapping[str, np.ndarray]) -> None:
        """Keep the state after ``facts.step`` batches, and of the others the one before.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        content = save(
            {key: np.asarray(value, order="C") for key, value in state.items()},
            {"facts": msgspec.json.encode(facts).decode()},
        )
        self.write(self._path(facts.step).name, content)
        for step in sorted(self._steps())[:-KEPT]:
            self._path(step).unlink()

    def load(self, step: int) -> dict[str, np.ndarray]:
        """Return the state after ``step`` batches.

        Raises:
            StoreError: it is damaged.
        """
        return self._read(step)[1]

    def kept(self) -> dict[int, Facts]:
        """Return what is known of each kept state, by the number of batches done.

        Raises:
            StoreError: one is damaged.
        """
        return {step: self._read(step)[0] for step in sorted(self._steps())}

    def forget_after(self, step: int) -> None:
        """Drop the states of batches after ``step``: they are to be done again."""
        for later in self._steps():
            if later > step:
                self._path(later).unlink()
        sync(self.folder)

    def clear(self) -> None:
        """Drop all states, C's key among them: the run is over."""
        for step in self._steps():
            self._path(step).unlink()
        sync(self.folder)

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
        """Return the content of a file beside the states, or None where there is none."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def close(self) -> None:
        """Leave the folder to others."""
        self._lock.release()

    def _steps(self) -> list[int]:
        return [int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.safetensors")]

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step:08}.safetensors"

    def _read(self, step: int) -> tuple[Facts, dict[str, np.ndarray]]:
        path = self._path(step)
        try:
            with safe_open(path, "numpy") as file:
                facts = msgspec.json.decode((file.metadata() or {})["facts"], type=Facts)
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
        except (OSError, SafetensorError, KeyError, msgspec.DecodeError) as error:
            raise StoreError(f"expected a state in {path}, got {error}: restore a copy, or start anew") from None
        return facts, state
