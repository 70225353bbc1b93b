"""The recording of one role over the steps of a run: what it sent, received and computed.

A file is MAGIC, then frames: length, CRC-32 of the value and CRC-32 of these two (4 bytes each, big-endian), and one
msgpack value. The CRC-32 of a value starts from that of the value before, so that frames cannot be lost or reordered.
First comes the Header, then for each step a Begin, and its Messages and Notes in the order in which they happened.
Nothing in it is executed; a frame is read after its length was checked, so that memory is bounded by one step.

    with RecordingWriter(path, Header(role="passive", layout=layout, n=keys.public.n)) as recorder:
        recorder.begin(0, rate=0.1)
        recorder.message("received", masked_scores)  # any msgspec Struct
        recorder.note("embedding_gradient", gradient)  # (B, g)
"""

from __future__ import annotations

import functools
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from vflsec.base.checks import expect_known
from vflsec.base.errors import DataError, StoreError, UsageError
from vflsec.cipher.arithmetic.layout import CipherLayout

MAGIC = b"\x89vflsec recording\r\n\x1a\n"
VERSION = 1
# bytes of the largest frame: a batch of 4,096 rows by 10 features, a 4,096-bit key and no packing, is 42 MB
LARGEST_FRAME = 1 << 28

NOTES: Mapping[str, str] = {
    "rows": "B",  # which samples the batch has
    "answers": "1",  # passive: how often it has answered this batch with scores, repeats included
    "answers_beyond": "m2",  # passive: samples of later batches that were answered before, and how often
    "share": "gC",  # the role's share of W at the step's start, integers in units of 2^-64; W is the sum of both
    "mu": "Bg",  # passive: its features, as rounded
    "masked_scores": "BC",  # passive: integers, what it decrypts; needed only where no Scores message has them
    "embedding_gradient": "Bg",  # passive: delta^C as decrypted, not divided by B
    "scores": "BC",  # active: z^C
    "delta": "BC",  # active: its loss gradients, not divided by B, before any defense
    "labels": "B",  # active
    "loss": "1",  # active: the mean loss of the batch
    "columns": "Bd",  # sealed training: the role's columns, after training
    "numbers": "BC",  # sealed training, active: the scores of the passive party's model
    "parameters": "P",  # sealed training, passive: of its model, before the batch
    "sum": "P",  # sealed training, passive: its noised gradients, summed over the batch
}
"""The arrays that a role may note, with their shapes: B and m are free, but B is the same in all notes of a step."""

LARGEST_INTEGER = 1 << 10  # bytes of the largest integer in a note

Direction = Literal["sent", "received"]
S = TypeVar("S", bound=msgspec.Struct)
_HEAD = struct.Struct(">III")


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What is the same in every step.

    Attributes:
        role: who recorded: ``passive`` holds the key and the features, ``active`` the labels.
        layout: what both parties agreed on.
        n: the key's public modulus, little-endian; empty where nothing is encrypted.
        momentum: of the optimizer of W.
        weight_decay: of the optimizer of W.
        score_precision: fractional bits of ``masked_scores``; None for the layout's.
        version: of this format.
    """

    role: Literal["passive", "active"]
    layout: CipherLayout
    n: bytes = b""
    momentum: float = 0.0
    weight_decay: float = 0.0
    score_precision: int | None = None
    version: int = VERSION

    @property
    def agreement(self) -> object:
        """What is the same in the recordings of both roles of a run."""
        return self.layout, self.n

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes of notes that are the same in all steps."""
        return {"g": self.layout.width, "C": self.layout.outputs}


class SealedHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What is the same in every step of sealed training.

    Attributes:
        role: who recorded.
        run: which both roles' recordings share.
        classes: of the task.
        outputs: m, the scores of a row.
        columns: d, of the role.
        hidden: widths of the hidden layers of the role's model.
        parameters: P, of the passive party's model.
        noise: deviation of the noise on each sum.
        epsilon: of every label.
        delta: at which it is meant.
        version: of this format.
    """

    role: Literal["passive", "active"]
    run: str
    classes: int
    outputs: int
    columns: int
    hidden: tuple[int, ...]
    parameters: int
    noise: float
    epsilon: float
    delta: float
    version: int = VERSION

    @property
    def agreement(self) -> object:
        """What is the same in the recordings of both roles of a run."""
        return self.run

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes of notes that are the same in all steps."""
        return {"C": self.outputs, "d": self.columns, "P": self.parameters}


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A step starts. ``rate`` is None where nothing is learned: inference."""

    step: int
    rate: float | None


class RecordedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="Message"):
    """One protocol message as it was on the wire: the struct's name, and its msgpack."""

    direction: Direction
    kind: str
    body: bytes

    def decode(self, kind: type[S]) -> S:
        """Return it as a struct.

        Raises:
            DataError: it is of another kind, or does not fit.
        """
        if self.kind != kind.__name__:
            raise DataError(f"expected a recorded {kind.__name__}, got {self.kind}")
        try:
            return msgspec.msgpack.decode(self.body, type=kind)
        except (ValueError, RecursionError) as error:  # a DecodeError, or text that is not in UTF-8
            raise DataError(f"expected a recorded {kind.__name__}, got other bytes: {error}") from None


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """One array that the role computed, C-contiguous, little-endian: 8 bytes a number, or integers of one size."""

    name: str
    dtype: Literal["<f8", "<i8", "integer"]
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def from_array(cls, name: str, array: Any) -> Note:
        """Encode ``array``; one of dtype object holds Python integers.

        Raises:
            UsageError: an unknown name, another number of dimensions, or a number that is not finite.
        """
        expect_known(NOTES, note=name)
        values = np.asarray(array)
        if values.ndim != len(NOTES[name]):
            raise UsageError(f"expected {name} of {len(NOTES[name])} dimensions, got shape {values.shape}")
        if values.dtype == object:
            numbers = [int(value) for value in values.ravel()]
            size = max((value.bit_length() // 8 + 1 for value in numbers), default=1)
            data = b"".join(value.to_bytes(size, "little", signed=True) for value in numbers)
            return cls(name, "integer", values.shape, data)
        values = values.astype("<f8" if values.dtype.kind == "f" else "<i8", order="C", casting="same_kind")
        if not np.isfinite(values).all():
            raise UsageError(f"expected finite {name}, got {(~np.isfinite(values)).sum()} numbers that are not")
        return cls(name, "<f8" if values.dtype.kind == "f" else "<i8", values.shape, values.tobytes())

    def array(self) -> NDArray[Any]:
        """Return the array, read-only unless of Python integers.

        Raises:
            DataError: what was recorded is none.
        """
        if self.name not in NOTES or len(self.shape) != len(NOTES[self.name]) or min(self.shape) < 0:
            raise DataError(f"expected a note of {', '.join(NOTES)}, got {self.name!r} of shape {self.shape}")
        count = math.prod(self.shape)
        size = 8 if self.dtype != "integer" else len(self.data) // count if count else 0
        fits = len(self.data) == size * count and (1 if count else 0) <= size <= LARGEST_INTEGER
        if not fits or max(self.shape) > LARGEST_FRAME:
            raise DataError(f"expected {count} numbers of {self.name} {self.shape}, got {len(self.data)} bytes")
        if self.dtype == "integer":
            pieces = (self.data[at : at + size] for at in range(0, len(self.data), size or 1))
            integers = np.array([int.from_bytes(piece, "little", signed=True) for piece in pieces], dtype=object)
            return integers.reshape(self.shape)
        values = np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)
        if not np.isfinite(values).all():
            raise DataError(f"expected finite {self.name} in the recording, got {(~np.isfinite(values)).sum()} others")
        return values


Frame = Header | SealedHeader | Begin | RecordedMessage | Note


@dataclass
class RecordedStep:
    """One step as one role saw it."""

    number: int
    rate: float | None
    messages: list[RecordedMessage] = field(default_factory=list)
    notes: dict[str, NDArray[Any]] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        """Return whether all these notes are there; a step that was cut off lacks some."""
        return all(name in self.notes for name in names)


class RecordingWriter:
    """Writes the recording of one role; killed at any moment, it loses at most the frame being written.

    Args:
        path: a new file, made readable by its owner alone: it holds what the role must not show.
        header: what is the same in every step.

    Raises:
        UsageError: the file exists, or cannot be made.
    """

    _cut: int | None = None
    """The byte at which the steps start that do not count."""

    _checksum = 0
    """Of the last frame."""

    def __init__(self, path: Path, header: Header | SealedHeader) -> None:
        self.path = path
        with _guard_writing(path):
            private = functools.partial(os.open, mode=0o600)
            self._file = open(path, "xb", opener=private)  # noqa: SIM115  # closed by close
            self._file.write(MAGIC)
        self._write(header)

    @classmethod
    def resume(cls, path: Path, header: Header | SealedHeader, step: int) -> Self:
        """Go on with a recording whose steps from ``step`` on did not count; the next ``begin`` cuts them off.

        Raises:
            UsageError: the recording is of another run, or cannot be written.
            DataError: the file is no recording.
        """
        recording = Recording(path)
        if recording.first != header:
            raise UsageError(f"expected the recording of this run in {path}, got one with other settings: name another")
        made = cls.__new__(cls)
        made.path = path
        made._cut, made._checksum = recording.end(step)
        with _guard_writing(path):
            made._file = path.open("ab")
        return made

    def begin(self, step: int, *, rate: float | None) -> None:
        """Start a step; ``rate`` is its learning rate, None for inference."""
        if self._cut is not None:
            with _guard_writing(self.path):
                os.truncate(self.path, self._cut)
            self._cut = None
        self._write(Begin(step, rate))

    def message(self, direction: Direction, message: msgspec.Struct) -> None:
        """Add one protocol message."""
        self._write(RecordedMessage(direction, type(message).__name__, msgspec.msgpack.encode(message)))

    def note(self, name: str, array: Any) -> None:
        """Add an array that the role has computed; ``NOTES`` has names and shapes."""
        self._write(Note.from_array(name, array))

    def close(self) -> None:
        """Put all on the disk."""
        with _guard_writing(self.path):
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _write(self, frame: Frame) -> None:
        body = msgspec.msgpack.encode(frame)
        if len(body) > LARGEST_FRAME:
            raise UsageError(f"expected at most {LARGEST_FRAME} bytes in one frame of a recording, got {len(body)}")
        with _guard_writing(self.path):
            self._checksum = zlib.crc32(body, self._checksum)
            start = struct.pack(">II", len(body), self._checksum)
            self._file.write(start + struct.pack(">I", zlib.crc32(start)) + body)
            self._file.flush()


def expect_writable(path: Path) -> None:
    """Raise UsageError unless a recording can be begun, or gone on with, in ``path``."""
    new = not path.exists()
    with _guard_writing(path):
        path.open("ab").close()
        if new:
            path.unlink()


class Recording:
    """Reads a recording, step by step. Everything in the file is checked; a torn last frame counts as never written.

    Attributes:
        first: what is the same in every step.

    Raises:
        DataError: the file cannot be read, or is not a recording of this version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_recording(path):
            raise DataError(f"expected a recording of vflsec, got {path}, which starts otherwise")
        with path.open("rb") as file:
            _, first, _ = next(self._read_frames(file), (0, None, 0))
        if not isinstance(first, Header | SealedHeader):
            raise DataError(f"expected {path} to start with a header, got {type(first).__name__}")
        if first.version != VERSION:
            raise DataError(f"expected a recording of version {VERSION}, got {first.version} in {path}")
        self.first = first

    @property
    def header(self) -> Header:
        """The header of a recording of the encrypted layer, which attacks on recordings read."""
        assert isinstance(self.first, Header), "attacks on recordings read no sealed training"
        return self.first

    def steps(self) -> Iterator[RecordedStep]:
        """Return the steps in order.

        Raises:
            DataError: a damaged frame, of which the text names the byte, or notes that are not of one batch.
        """
        step: RecordedStep | None = None
        with self.path.open("rb") as file:
            for at, frame, _ in self._read_frames(file):
                if isinstance(frame, Begin):
                    if step:
                        if frame.step <= step.number:
                            raise DataError(f"expected a step after {step.number}, got {frame.step} in {self.path}")
                        self._check(step)
                        yield step
                    step = RecordedStep(frame.step, frame.rate)
                elif isinstance(frame, RecordedMessage | Note) and step:
                    if isinstance(frame, RecordedMessage):
                        step.messages.append(frame)
                    else:
                        step.notes[frame.name] = frame.array()
                elif step or not isinstance(frame, Header | SealedHeader):
                    raise DataError(f"expected a step at byte {at} of {self.path}, got {type(frame).__name__}")
        if step:
            self._check(step)
            yield step

    def _check(self, step: RecordedStep) -> None:
        """Raise DataError unless the notes have the shapes of one batch under this layout: no attack reads others."""
        sizes = {"1": 1, "2": 2, **self.first.sizes}
        for name, array in step.notes.items():
            expected = tuple(sizes.setdefault(axis, size) for axis, size in zip(NOTES[name], array.shape, strict=True))
            if array.shape != expected:
                raise DataError(
                    f"expected {name} of shape {expected} as in the other notes of step {step.number} of {self.path}, "
                    f"got {array.shape}: record the run again"
                )

    def end(self, step: int) -> tuple[int, int]:
        """Return the byte at which step ``step`` starts, or would, and the checksum of the frame before."""
        checksum = 0
        with self.path.open("rb") as file:
            for at, frame, current in self._read_frames(file):
                if isinstance(frame, Begin) and frame.step >= step:
                    return at, checksum
                checksum = current
            return file.tell(), checksum

    def _read_frames(self, file: BinaryIO) -> Iterator[tuple[int, Frame, int]]:
        """Yield each whole frame with its first byte and its checksum; leave ``file`` behind the last one."""
        size, before = os.fstat(file.fileno()).st_size, 0
        at = file.seek(len(MAGIC))
        while at + _HEAD.size <= size:
            head = file.read(_HEAD.size)
            length, checksum, _ = _HEAD.unpack(head)
            if zlib.crc32(head[:8]) != int.from_bytes(head[8:], "big"):  # a wrong length would pass for a torn file
                raise DataError(f"{self.path} is damaged at byte {at}: the checksum does not match")
            if length > LARGEST_FRAME:
                raise DataError(f"expected at most {LARGEST_FRAME} bytes, got {length} at byte {at} of {self.path}")
            if at + _HEAD.size + length > size:
                break
            body = file.read(length)
            if zlib.crc32(body, before) != checksum:
                raise DataError(f"{self.path} is damaged at byte {at}: the checksum does not match")
            try:
                frame = _DECODER.decode(body)
                yield at, frame, checksum
            except (ValueError, RecursionError, UsageError) as error:
                raise DataError(f"expected a frame at byte {at} of {self.path}, got other bytes: {error}") from None
            before = checksum
            at += _HEAD.size + length
        file.seek(at)


def is_recording(path: Path) -> bool:
    """Return whether the file starts as a recording does.

    Raises:
        DataError: it cannot be read.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(f"expected a recording of vflsec, got {path}, which is no file")
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


_DECODER = msgspec.msgpack.Decoder(Frame)


@contextmanager
def _guard_writing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise UsageError(f"expected a new file for the recording, got {path}, which exists: name another") from None
    except OSError as error:
        raise StoreError(f"cannot write the recording {path}: {error.strerror or error}") from None
