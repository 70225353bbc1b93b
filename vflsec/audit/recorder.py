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
from torch import Tensor

from vflsec.audit.transcript import AUDITOR, LONGEST_TEXT, Sent, TranscriptHeader, TranscriptWriter
from vflsec.core.errors import UsageError, VflsecError, plain

FLUSH = 1 << 24
"""Bytes of vectors in a file."""

WAITING = 2
"""Files that wait for the writing thread; the loop then waits for it, so that memory stays bounded."""

Rows = Sequence[int] | Sequence[str] | Tensor | np.ndarray


class _Seen(NamedTuple):
    """A message on its way to the writing thread."""

    kind: str
    sender: str
    receiver: str
    phase: str
    split: str
    step: int
    rows: Rows
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
        folder: a new folder, or the transcript of an interrupted run of the same parties, which is continued.
        parties: ``active``, ``passive`` or ``server`` by the name of the party.
        observer: the party whose messages are recorded; by default ``auditor``, which may record those of all parties.
        classes: number of classes of the task, if it is known.

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
    ) -> None:
        self.header = TranscriptHeader(
            observer=observer, parties=dict(parties), classes=classes, software=f"vflsec {version('vflsec')}"
        )
        self._writer = TranscriptWriter(folder, self.header)
        self._active = next(name for name, side in parties.items() if side == "active")
        self._steps: dict[tuple[str, str], int] = {}
        self._widths: dict[tuple[str, str, str], int] = {}
        self._error: BaseException | None = None
        self._passives = [name for name, side in parties.items() if side == "passive"]
        self._texts: set[str] = set()
        self._seen: list[_Seen] = []
        self._size = 0
        self._queue: Queue[list[_Seen] | None] = Queue(WAITING)
        self._thread = Thread(target=self._write, name="vflsec recorder", daemon=True)
        self._thread.start()
        self._closed = False
        atexit.register(self.close)

    def cut(
        self,
        h: Tensor,
        *,
        rows: Rows,
        party: str | None = None,
        split: str = "train",
        phase: str | None = None,
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
        self.embedding(h, rows=rows, party=party, split=split, phase=phase)
        if h.requires_grad and torch.is_grad_enabled():
            sent = self._last

            def returned(gradient: Tensor) -> None:  # it has the shape of the embedding, which was checked
                back = _Seen(
                    "gradient", sent.receiver, sent.sender, sent.phase, sent.split, sent.step, sent.rows, gradient
                )
                self._append(back)

            h.register_hook(returned)  # type: ignore[no-untyped-call]
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
        sender = self._passive(party)
        phase = phase or _PHASES.get(split, split)
        step = self._last_step(sender, phase) + 1 if step is None else step
        self._put(_Seen("embedding", sender, self._active, phase, split, step, rows, value))
        self._steps[sender, phase] = step
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
        receiver = self._passive(party)
        phase = phase or _PHASES.get(split, split)
        step = max(self._last_step(receiver, phase), 0) if step is None else step
        self._put(_Seen("gradient", self._active, receiver, phase, split, step, rows, value))

    def prediction(
        self, value: Tensor, *, rows: Rows, receiver: str, split: str = "test", phase: str | None = None
    ) -> None:
        """Record a prediction of the joint model, (B, C), that the active party sends to ``receiver``."""
        receiver, phase = self._passive(receiver), phase or _PHASES.get(split, split)
        step = self._last_step(f"prediction {receiver}", phase) + 1
        self._put(_Seen("prediction", self._active, receiver, phase, split, step, rows, value))
        self._steps[f"prediction {receiver}", phase] = step

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

    def _last_step(self, who: str, phase: str) -> int:
        """Return the last step of this recorder, or of the transcript that it continues; -1 if there is none."""
        step = self._steps.get((who, phase))
        return self._writer.last_steps.get((who, phase), -1) if step is None else step

    def _passive(self, party: str | None) -> str:
        others = self._passives
        if party is None and len(others) == 1:
            return others[0]
        if party not in others:
            raise UsageError(f"expected party= to be a passive party, one of {', '.join(others)}, got {party!r}")
        if self.header.observer not in (AUDITOR, self._active, party):
            raise UsageError(f"expected messages of {self.header.observer}, who records them, got some of {party}")
        return party

    def _put(self, seen: _Seen) -> None:
        """Queue a message for writing; what the transcript could not hold is refused here, where it was made."""
        if not isinstance(seen.value, Tensor) or seen.value.dim() < 1 or not seen.value.numel():
            shape = f"shape {tuple(seen.value.shape)}" if isinstance(seen.value, Tensor) else type(seen.value).__name__
            raise UsageError(f"expected a tensor (B, d) of at least one number, got {shape}")
        rows = _copied(seen.rows)
        if len(rows) != len(seen.value):
            raise UsageError(f"expected one id for each of {len(seen.value)} rows, got {len(rows)}")
        width = seen.value.numel() // len(seen.value)
        known = self._widths.setdefault((seen.kind, seen.sender, seen.receiver), width)
        if width != known:
            raise UsageError(f"expected {known} numbers a row as before, got {width}: record other layers elsewhere")
        for name, text in (("phase", seen.phase), ("split", seen.split)):
            if text in self._texts:
                continue
            if not isinstance(text, str) or not text or plain(text) != text or len(text) > LONGEST_TEXT:
                raise UsageError(f"expected {name}= to be 1 to {LONGEST_TEXT} plain characters, got {text!r}")
            self._texts.add(text)
        if not 0 <= seen.step < 1 << 63:
            raise UsageError(f"expected a step of at least 0, got {seen.step}")
        self._last = seen._replace(rows=rows)
        self._append(self._last)

    def _append(self, seen: _Seen) -> None:
        """Queue a message that has been checked."""
        if self._closed:
            raise UsageError("expected a recorder that is open, got one after close()")
        if self._error is None:
            self._seen.append(seen._replace(value=seen.value.detach().clone()))
            self._size += 4 * seen.value.numel()
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
            sent: list[Sent] = []
            try:
                for one in seen:
                    sent.append(_on_the_wire(one))  # noqa: PERF401  (after an error, those before it are written)
            except Exception as error:  # noqa: BLE001  (the thread must go on, or the training would wait for it)
                self._fail(error)
            try:
                self._writer.write(sent)
            except Exception as error:  # noqa: BLE001
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._error is not None:
            return
        known = isinstance(error, VflsecError | OSError)
        self._error = error if known else UsageError(f"cannot record: {type(error).__name__}: {error}")
        warnings.warn(f"recording has stopped, training goes on: {error}", stacklevel=2)


_PHASES = {"train": "train", "val": "validate", "test": "predict"}


def _copied(rows: Rows) -> np.ndarray | Tensor:
    """Return ids (B,) that do not change with the caller's; those on a GPU stay there."""
    if isinstance(rows, Tensor):
        found: np.ndarray | Tensor = rows.detach().clone()
    else:
        found = np.array(rows)
    if found.ndim != 1 or isinstance(rows, str):
        raise UsageError(f"expected rows= to be one id for each row, got {type(rows).__name__}")
    return found


def _on_the_wire(seen: _Seen) -> Sent:
    """Return a message with float32 vectors; ids are whole numbers of 64 bits, or text: 7 and "7" are the same row.

    Raises:
        UsageError: its vectors are not finite.
    """
    rows = seen.rows.cpu().numpy() if isinstance(seen.rows, Tensor) else np.asarray(seen.rows)
    values = seen.value.reshape(len(seen.value), -1).float().cpu().numpy()
    if not np.isfinite(values).all():
        raise UsageError(f"expected finite numbers in {seen.kind} {seen.step} of {seen.phase}, got others")
    whole = np.issubdtype(rows.dtype, np.integer) and np.can_cast(rows.dtype, np.int64)
    rows = rows.astype(np.int64 if whole else str)
    return Sent(seen.kind, seen.sender, seen.receiver, seen.phase, seen.split, seen.step, rows, values)
