"""Records the messages at a cut layer from any PyTorch training loop, as a transcript."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from vflsec.audit.transcript import TranscriptWriter, join_ids
from vflsec.audit.transcript_lines import AUDITOR, TranscriptHeader, check_name
from vflsec.base.errors import UsageError, VflsecError

LOCK = ".lock"  # a file in the folder, which the recorder that writes there holds
PATIENCE = 10.0  # seconds to wait for another recorder to finish
FLUSH = 1 << 22  # bytes of vectors in a file
OVERHEAD = 1 << 10  # bytes that a message takes besides its vectors
PHASES = {"train": "train", "val": "validate", "test": "predict"}  # by split, where none is named
WAITING = 2  # files that wait for the writing thread; the loop then waits for it, so that memory stays bounded

Rows = Sequence[int] | Sequence[str] | Tensor | np.ndarray


class _Head(NamedTuple):
    """What the messages of a kind have in common."""

    kind: str
    sender: str
    receiver: str
    phase: str
    split: str


class _Seen(NamedTuple):
    """A message on its way to the writing thread."""

    head: _Head
    step: int
    rows: np.ndarray | Tensor
    value: Tensor


class Recorder:
    """Writes what crosses a cut layer into a transcript.

    ``cut`` is the identity, so one line is added to a training loop::

        with vflsec.Recorder("transcript", parties={"bank": "active", "bureau": "passive"}) as recorder:
            for ids, x, y in batches:
                h = recorder.cut(bottom(x), rows=ids)
                loss = F.cross_entropy(top(h), y)
                ...

    It records the embedding, and the gradient when it comes back. In a loop that does not use autograd at the cut
    layer, call ``embedding`` and ``gradient``. A thread writes the files. If it fails, on a full disk for example, the
    training goes on, a warning is issued, and ``close`` raises the error.

    Args:
        folder: a new folder.
        parties: ``active``, ``passive`` or ``server`` by the name of the party.
        observer: the party whose messages are recorded; by default ``auditor``, which may record those of all parties.
        classes: number of classes of the task, if it is known.
        resume: whether a transcript in ``folder`` is continued, for an interrupted run of the same training. An audit
            of the messages of two trainings means nothing.

    Raises:
        UsageError: no active party, an unknown observer, a folder with something else, or pyarrow is not installed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        parties: Mapping[str, Literal["active", "passive", "server"]],
        observer: str = AUDITOR,
        classes: int | None = None,
        resume: bool = False,
    ) -> None:
        self.header = TranscriptHeader(
            observer=observer, parties=dict(parties), classes=classes, software=f"vflsec {version('vflsec')}"
        )
        self._writer = TranscriptWriter(folder, self.header)
        if self._writer.parts and not resume:
            raise UsageError(
                f"expected a new folder, found a transcript in {folder}: choose another, delete it, or add resume=True "
                f"if the same training goes on"
            )
        self._lock = FileLock(Path(folder) / LOCK)
        try:
            self._lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise UsageError(
                f"expected one recorder in {folder}, found another at work: choose another folder"
            ) from None
        self._active = next(name for name, side in parties.items() if side == "active")
        self._steps: dict[tuple[str, str], int] = {}
        self._widths: dict[tuple[str, ...], int] = {}
        self._error: BaseException | None = None
        self._passives = [name for name, side in parties.items() if side == "passive"]
        self._known: dict[tuple[str | None, str, str | None], tuple[_Head, _Head]] = {}
        self._seen: list[_Seen] = []
        self._size = 0
        self._queue: Queue[list[_Seen] | None] = Queue(WAITING)
        self._thread = Thread(target=self._write, name="vflsec recorder", daemon=True)
        self._thread.start()
        self._closed = False
        atexit.register(self.close)

    def cut(
        self, h: Tensor, *, rows: Rows, party: str | None = None, split: str = "train", phase: str | None = None
    ) -> Tensor:
        """Record the embedding ``h``, and its gradient in the backward pass; return ``h`` itself.

        Args:
            h: (B, d) the embedding at the cut layer; (B, ...) is flattened.
            rows: (B,) ids of the rows, as in the data files.
            party: the passive party whose embedding this is; may be left out if there is only one.
            split: ``train``, ``val`` or ``test``.
            phase: by default ``train``, ``validate`` or ``predict``, according to ``split``.

        Raises:
            UsageError: not one id for each row, or a party that is not passive.
        """
        sent, back = self._find_heads(party, split, phase)
        step = self._find_last_step(sent.sender, sent.phase) + 1
        copied = self._put(sent, step, rows, h)
        self._steps[sent.sender, sent.phase] = step
        if h.requires_grad and torch.is_grad_enabled():
            # It has the shape of the embedding, which was checked.
            h.register_hook(lambda gradient: self._append(back, step, copied, gradient))  # type: ignore[no-untyped-call]
        return h

    def embedding(
        self,
        value: Tensor,
        *,
        rows: Rows,
        party: str | None = None,
        split: str = "train",
        phase: str | None = None,
        step: int | None = None,
    ) -> int:
        """Record an embedding that ``party`` sends to the active party; return the number of its step."""
        head, _ = self._find_heads(party, split, phase)
        step = self._find_last_step(head.sender, head.phase) + 1 if step is None else step
        self._put(head, step, rows, value)
        self._steps[head.sender, head.phase] = step
        return step

    def gradient(
        self,
        value: Tensor,
        *,
        rows: Rows,
        party: str | None = None,
        split: str = "train",
        phase: str | None = None,
        step: int | None = None,
    ) -> None:
        """Record a gradient that the active party returns to ``party``, by default for its last embedding."""
        _, head = self._find_heads(party, split, phase)
        step = max(self._find_last_step(head.receiver, head.phase), 0) if step is None else step
        self._put(head, step, rows, value)

    def prediction(
        self, value: Tensor, *, rows: Rows, receiver: str, split: str = "test", phase: str | None = None
    ) -> None:
        """Record a prediction of the joint model, (B, C), that the active party sends to ``receiver``."""
        head = self._find_heads(receiver, split, phase)[1]._replace(kind="prediction")
        step = self._find_last_step(f"prediction {receiver}", head.phase) + 1
        self._put(head, step, rows, value)
        self._steps[f"prediction {receiver}", head.phase] = step

    def close(self) -> None:
        """Write what is left. Called at the end of a ``with`` block, and at exit.

        Raises:
            VflsecError, OSError: the transcript could not be written.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._hand_over()
        self._queue.put(None)
        self._thread.join()
        self._lock.release()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (VflsecError, OSError):
            if error is None:  # else the loop's own error comes first; a warning has been issued
                raise

    def _find_last_step(self, who: str, phase: str) -> int:
        """Return the last step of this recorder, or of the transcript that it continues; -1 if there is none."""
        step = self._steps.get((who, phase))
        return self._writer.last_steps.get((who, phase), -1) if step is None else step

    def _find_heads(self, party: str | None, split: str, phase: str | None) -> tuple[_Head, _Head]:
        """Return what embeddings of ``party`` and the gradients that come back have in common."""
        heads = self._known.get((party, split, phase)) if isinstance(split, str) else None
        if heads is None:
            check_name("split", split)
            passive, named = self._passive(party), PHASES.get(split, split) if phase is None else phase
            check_name("phase", named)
            heads = (
                _Head("embedding", passive, self._active, named, split),
                _Head("gradient", self._active, passive, named, split),
            )
            self._known[party, split, phase] = heads
        return heads

    def _passive(self, party: str | None) -> str:
        if party is None and len(self._passives) == 1:
            return self._passives[0]
        if party not in self._passives:
            names = ", ".join(self._passives)
            raise UsageError(f"expected party= to be a passive party, one of {names}, got {party!r}")
        if self.header.observer not in (AUDITOR, self._active, party):
            raise UsageError(f"expected messages of {self.header.observer}, who records them, got some of {party}")
        return party

    def _put(self, head: _Head, step: int, rows: Rows, value: Tensor) -> np.ndarray | Tensor:
        """Queue a message; what the transcript could not hold is refused here, where it was made. Return its ids."""
        if not isinstance(value, Tensor) or value.dim() < 1 or not value.numel():
            shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"expected a tensor (B, d) of at least one number, got {shape}")
        if value.layout is not torch.strided or value.is_complex():
            raise UsageError(f"expected a dense tensor of real numbers, got {value.layout} of {value.dtype}")
        copied, n = _copy_ids(rows), value.shape[0]
        if len(copied) != n:
            raise UsageError(f"expected one id for each of {n} rows, got {len(copied)}")
        width = value.numel() // n
        known = self._widths.setdefault(head[:3], width)
        if width != known:
            raise UsageError(f"expected {known} numbers a row as before, got {width}: pad texts to one length")
        if not 0 <= step < 1 << 63:
            raise UsageError(f"expected a step of at least 0, got {step}")
        self._append(head, step, copied, value)
        return copied

    def _append(self, head: _Head, step: int, rows: np.ndarray | Tensor, value: Tensor) -> None:
        """Queue a message that has been checked."""
        if self._closed:
            raise UsageError("expected a recorder that is open, got one after close()")
        if self._error is None:
            self._seen.append(_Seen(head, step, rows, value.detach().clone()))
            self._size += 4 * value.numel() + OVERHEAD
            if self._size >= FLUSH:
                self._hand_over()

    def _hand_over(self) -> None:
        """Pass what was seen to the writing thread; many messages at once, since each switch of threads takes time."""
        self._queue.put(self._seen)
        self._seen, self._size = [], 0

    def _write(self) -> None:
        """Write what is handed over, until ``close``; after an error, drop it."""
        while (seen := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._write_block(seen)
            except Exception as error:  # noqa: BLE001  (the thread must go on, or the training would wait for it)
                known = isinstance(error, VflsecError | OSError)
                self._error = error if known else UsageError(f"cannot record: {type(error).__name__}: {error}")
                warnings.warn(f"recording has stopped, training goes on: {error}", stacklevel=2)

    def _write_block(self, seen: list[_Seen]) -> None:
        """Write messages as one file, up to the first whose vectors are not finite.

        Raises:
            UsageError: there is one.
        """
        numbers = torch.cat([each.value.reshape(-1).float().cpu() for each in seen]).numpy() if seen else np.empty(0)
        bad = None
        if not np.isfinite(numbers).all():
            ends = np.cumsum([each.value.numel() for each in seen])
            first = int(np.searchsorted(ends, np.argmin(np.isfinite(numbers)), side="right"))
            bad, numbers, seen = seen[first], numbers[: ends[first - 1] if first else 0], seen[:first]
        if seen:
            shapes = [(len(each.value), each.value.numel() // len(each.value)) for each in seen]
            rows = join_ids(each.rows.cpu().numpy() if isinstance(each.rows, Tensor) else each.rows for each in seen)
            self._writer.write_lines([(*each.head, each.step) for each in seen], shapes, rows, numbers)
        if bad is not None:
            raise UsageError(f"expected finite numbers in {bad.head.kind} {bad.step} of {bad.head.phase}, got others")


def _copy_ids(rows: Rows) -> np.ndarray | Tensor:
    """Return ids (B,) that do not change with the caller's; those on a GPU stay there."""
    ids = rows.detach().clone() if isinstance(rows, Tensor) else np.array(rows)
    if ids.ndim != 1 or isinstance(rows, str):
        raise UsageError(f"expected rows= to be one id for each row, got {type(rows).__name__}")
    return ids
