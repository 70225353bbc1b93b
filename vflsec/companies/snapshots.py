"""The files of a party: checkpoints, the passive party's key and a journal while a run lasts, and then its result.

Each file is sealed with a SHA-256, written as a whole or not at all, and readable by its owner alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from filelock import FileLock, Timeout

from vflsec.base.errors import PeerRefused, StoreError
from vflsec.base.files import replace, seal, sweep, sync, unseal
from vflsec.methods import checkpoint

KEPT = 2
"""Newest checkpoints that are kept: the parties are at most one batch apart, and the one ahead may have to go back."""
EPOCHS_KEPT = 2
"""Checkpoints at the ends of epochs that are kept beside these, in case newer ones turn out to be unusable."""
KEY, JOURNAL, RESULT = "key.bin", "journal.bin", "result.json"
T = TypeVar("T")
_STATE = re.compile(r"state-(\d{8}|[1-9]\d{8,})\.bin")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to.

    Attributes:
        role: ``passive`` or ``active``.
        run: identifier of the run; empty before the parties have met.
        step: number of batches done.
        history: SHA-256 over the messages of all batches until now.
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
    """What must survive a restart although no checkpoint holds it.

    Attributes:
        answered: number of batches that were answered at least once, by the passive party with scores or by the active
            party with delta^C; batches come in order.
        repeats: how often a batch was answered again, by its number.
        failed: the last batch whose checkpoint the next batch failed on, or -1.
    """

    answered: int = 0
    repeats: dict[int, int] = {}
    failed: int = -1


def select_steps(steps: Sequence[int], epoch: int) -> list[int]:
    """Return which of ascending ``steps`` are kept, where an epoch has ``epoch`` batches."""
    ends = [step for step in steps[:-KEPT] if step % epoch == 0]
    return sorted({*steps[-KEPT:], *ends[-EPOCHS_KEPT:]})


class Snapshots:
    """The files of a run in ``folder``; unfinished files of a killed process are removed first.

    Args:
        folder: created if needed. It is locked while this process has it.

    Attributes:
        damaged: numbers of the checkpoints that ``list_checkpoints`` could not read.

    Raises:
        StoreError: another process has the folder, it cannot be written, or a file's name belongs to a folder.
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
        for path in self._list_files():
            if path.is_dir():
                self.close()
                raise StoreError(f"expected a file {path}, got a folder: move it away, or choose another --out")

    def save(self, facts: Facts, state: Mapping[str, np.ndarray], epoch: int = 1) -> list[int]:
        """Write a checkpoint after ``facts.step`` batches, and remove those that are no longer needed.

        Args:
            facts: what it belongs to.
            state: its tensors.
            epoch: batches in an epoch.

        Returns:
            The numbers of all checkpoints that are kept now.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        with self._guard_writing():
            checkpoint.write(self._get_path(facts.step), facts, state)
        steps = self._steps()
        kept = select_steps(steps, epoch)
        for step in {*steps} - {*kept}:
            self._get_path(step).unlink()
        return kept

    def load(self, step: int) -> checkpoint.State:
        """Return the tensors after ``step`` batches.

        Raises:
            StoreError: the checkpoint is damaged.
        """
        return self._read(step)[1]

    def list_checkpoints(self, epoch: int = 1) -> dict[int, Facts]:
        """Return the facts of each intact checkpoint by its number of batches.

        A process that was killed in ``save`` leaves one more than that keeps, which is not among them.

        Raises:
            StoreError: there are some, and none is intact.
        """
        intact, self.damaged, steps = {}, [], self._steps()
        for step in steps:
            try:
                intact[step] = self._read(step)[0]
            except StoreError:
                self.damaged.append(step)
                if len(self.damaged) == len(steps):
                    raise
        return {step: intact[step] for step in select_steps(list(intact), epoch)}

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints after ``step``: their batches are to be done again."""
        for later in self._steps():
            if later > step:
                self._get_path(later).unlink()
        sync(self.folder)

    def clear(self) -> None:
        """Remove all checkpoints, the journal and the key: the run is over."""
        sweep(self.folder)
        for path in self._list_files():
            path.unlink(missing_ok=True)
        sync(self.folder)

    def save_key(self, numbers: Mapping[str, bytes]) -> None:
        """Keep the passive party's private key, once for the whole run.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        self.write(KEY, seal(msgspec.msgpack.encode(dict(numbers))))

    def load_key(self) -> dict[str, bytes]:
        """Return the passive party's private key.

        Raises:
            StoreError: it is missing or damaged.
        """
        return self._read_sealed(KEY, dict[str, bytes])

    def save_journal(self, journal: Journal) -> None:
        """Keep the journal.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        self.write(JOURNAL, seal(msgspec.msgpack.encode(journal)))

    def load_journal(self) -> Journal:
        """Return the journal, which is written before the first checkpoint.

        Raises:
            StoreError: it is missing or damaged, so that repeated answers can no longer be counted.
        """
        return self._read_sealed(JOURNAL, Journal)

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the checkpoints, for its owner alone.

        Raises:
            StoreError: the disk is full, or the folder gone.
        """
        with self._guard_writing():
            replace(self.folder / name, content)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file beside the checkpoints, or None where there is none.

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
        """Unlock the folder."""
        self._lock.release()

    def _steps(self) -> list[int]:
        matches = (_STATE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _get_path(self, step: int) -> Path:
        return self.folder / f"state-{step:08}.bin"

    def _list_files(self) -> list[Path]:
        return [*map(self._get_path, self._steps()), self.folder / KEY, self.folder / JOURNAL]

    def _read(self, step: int) -> tuple[Facts, checkpoint.State]:
        with _guard_reading(self._get_path(step)) as path:
            return checkpoint.read(path, Facts)

    def _read_sealed(self, name: str, kind: type[T]) -> T:
        with _guard_reading(self.folder / name) as path:
            return msgspec.msgpack.decode(unseal(path.read_bytes()), type=kind)

    @contextmanager
    def _guard_writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder}: {error.strerror}; make room and start again") from None


@contextmanager
def _guard_reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (OSError, ValueError) as error:  # a DecodeError is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"expected {path} as it was written, got {reason}: restore a copy, or start anew") from None


class AnswerLimits:
    """Counts the answers to each batch, on the disk and before they are sent.

    Args:
        role: of this party.
        journal: what has been counted until now.
        snapshots: where the journal is kept.
        each: limit of the repeats of one batch.
        in_all: limit of the repeats of all batches together.
        cost: what is said of another answer.
    """

    def __init__(
        self, role: str, journal: Journal, snapshots: Snapshots, *, each: int, in_all: int, cost: str = ""
    ) -> None:
        self.role, self.journal, self.each, self.in_all = role, journal, each, in_all
        self._snapshots, self._cost = snapshots, cost

    def count(self, step: int) -> int:
        """Count an answer to batch ``step``, and return how often it has been answered.

        Raises:
            PeerRefused: it has been answered too often.
        """
        journal = self.journal
        if step >= journal.answered:
            journal.answered = step + 1
        else:
            again, in_all = journal.repeats.get(step, 0) + 1, sum(journal.repeats.values()) + 1
            if again > self.each or in_all > self.in_all:
                raise PeerRefused(
                    f"batch {step} is not answered again: it was answered {again} times, and there were {in_all - 1} "
                    f"repeats of all batches (limits: {self.each} repeats of one, {self.in_all} of all); "
                    f"if the network is to blame, start {self.role} with more --repeats{self._cost}"
                )
            journal.repeats[step] = again
        self._snapshots.save_journal(journal)
        return self.times(step)

    def times(self, step: int) -> int:
        """Return how often batch ``step`` has been answered."""
        return (step < self.journal.answered) + self.journal.repeats.get(step, 0)

    def text(self, step: int) -> str:
        """Return the counts for a message, batch ``step`` being under way; empty before the first answer."""
        if not self.journal.answered:
            return ""
        repeats = self.journal.repeats
        return (
            f" (answers to batch {step}: {self.times(step)}; repeats: {repeats.get(step, 0)} of {self.each}"
            f", and {sum(repeats.values())} of {self.in_all} in all)"
        )


class PartyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run for one party; the passive party does not learn the utility.

    Attributes:
        role: ``passive`` or ``active``.
        run: identifier of the run.
        batches: number of batches trained.
        history: digest over them, equal at both parties.
        settings: the job.
        rows: digest of the row ids.
        utility: the active party's metrics of test rows by name, the headline first.
        epsilon: of every label, from the active party of sealed training, which counts its answers; else None.
        sent: bytes sent by the process that ended the run.
        received: bytes received by it.
        files: SHA-256 of each file beside this one, by its name.
        digest: SHA-256 of all this, by which damage is noticed.
    """

    role: str
    run: str
    batches: int
    history: str
    settings: dict[str, str]
    rows: str
    utility: dict[str, float] = {}
    epsilon: float | None = None
    sent: int = 0
    received: int = 0
    files: dict[str, str] = {}
    digest: str = ""

    def with_digest(self) -> PartyResult:
        """Return it with its digest."""
        content = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=sha256(content).hexdigest())


def write_result(snapshots: Snapshots, result: PartyResult, files: dict[str, bytes]) -> PartyResult:
    """Write ``files`` and then the result, which lists them; return it.

    Raises:
        StoreError: the disk is full, or the folder gone.
    """
    digests = {name: sha256(content).hexdigest() for name, content in files.items()}
    sealed = msgspec.structs.replace(result, files=digests).with_digest()
    for name, content in files.items():
        snapshots.write(name, content)
    snapshots.write(RESULT, msgspec.json.format(msgspec.json.encode(sealed)))
    return sealed


def read_result(snapshots: Snapshots) -> PartyResult | None:
    """Return the result of a run that has ended, or None.

    Raises:
        StoreError: the result or a file that it lists is damaged; a file that was moved elsewhere is not.
    """
    path, content = snapshots.folder / RESULT, snapshots.read(RESULT)
    if content is None:
        return None
    try:
        result = msgspec.json.decode(content, type=PartyResult)
    except ValueError as error:  # a DecodeError, or text that is not in UTF-8
        raise StoreError(f"expected a result in {path}, got {error}: restore a copy, or choose another --out") from None
    if result.with_digest() != result:
        raise StoreError(
            f"expected {path} as it was written, got other numbers: restore a copy, or choose another --out"
        )
    for name, digest in result.files.items():
        content = snapshots.read(name)
        if content is not None and sha256(content).hexdigest() != digest:
            raise StoreError(
                f"expected {path.with_name(name)} as it was written, got another: restore a copy, or move it away"
            )
    return result
