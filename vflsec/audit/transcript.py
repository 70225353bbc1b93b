"""The open transcript: the messages that one party saw, as files that any language can write.

A transcript is a folder. ``transcript.toml`` names the parties and the task; ``*.parquet`` files hold one vector per
line; ``parts.jsonl`` lists the finished files with their length and hash. docs/transcript_format.md is the
specification.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w

from vflsec.audit.transcript_lines import COLUMNS, TEXT, Lines, Sent, TranscriptHeader, check_schema, import_arrow
from vflsec.base import files
from vflsec.base.checks import count
from vflsec.base.errors import DataError, UsageError, clean

HEADER = "transcript.toml"
INDEX = "parts.jsonl"
LARGEST_HEADER = 1 << 16
LARGEST_INDEX = 1 << 26
BATCH = 1 << 14  # lines that are read at once
MAX_LINES = 1 << 20  # lines of the longest message

Head = tuple[str, str, str, str, str, int]
"""Kind, sender, receiver, phase, split and step of a message."""


class PartFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of ``parts.jsonl``: a finished file, its number of vectors and its SHA-256."""

    file: str
    rows: int
    sha256: str


class TranscriptWriter:
    """Writes a transcript, one file after another; a kill loses at most the vectors of the file in progress.

    Args:
        folder: a new folder, or one with a transcript that has the same header, which is continued.
        header: parties and task.

    Raises:
        UsageError: the folder holds something else, or another header.
    """

    def __init__(self, folder: Path | str, header: TranscriptHeader) -> None:
        import_arrow()
        self.folder = Path(folder)
        self.header = header
        try:
            msgspec.convert(msgspec.to_builtins(header), TranscriptHeader).check()
        except (ValueError, TypeError) as error:  # a ValidationError is a ValueError
            raise UsageError(str(error)) from None
        self.parts = 0
        self._earlier: TranscriptFolder | None = None
        if (self.folder / HEADER).is_file():
            earlier = TranscriptFolder(self.folder)
            if earlier.header != header:
                raise UsageError(
                    f"expected the same parties and task as in {self.folder}, found others: choose another folder"
                )
            self.parts, self._earlier = earlier.next_part, earlier
            index = self.folder / INDEX
            if index.is_file():  # which may end in a torn line
                files.truncate(index, index.read_bytes().rfind(b"\n") + 1)
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"expected a folder for a transcript, found the file {self.folder}: choose another")
        if self.folder.exists() and any(each.name != INDEX or each.stat().st_size for each in self.folder.iterdir()):
            raise UsageError(f"expected a new folder for a transcript, found files in {self.folder}: choose another")
        fields = {key: value for key, value in msgspec.to_builtins(header).items() if value is not None}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.replace(self.folder / INDEX, b"")
            files.replace(self.folder / HEADER, tomli_w.dumps(fields).encode())
        except OSError as error:
            raise UsageError(
                f"expected a folder for a transcript, cannot write {self.folder}: {error.strerror or error}"
            ) from None

    @cached_property
    def last_steps(self) -> dict[tuple[str, str], int]:
        """The last step by sender, or ``prediction RECEIVER``, and phase of a transcript that is continued."""
        last: dict[tuple[str, str], int] = {}
        for sent in self._earlier.messages() if self._earlier is not None else ():
            who = f"prediction {sent.receiver}" if sent.kind == "prediction" else sent.sender
            last[who, sent.phase] = max(last.get((who, sent.phase), -1), sent.step)
        return last

    def write(self, messages: Iterable[Sent]) -> None:
        """Write ``messages`` as one file."""
        filled = [message for message in messages if len(message.rows)]
        for message in filled:
            if message.values.ndim != 2 or len(message.rows) != len(message.values):
                raise UsageError(
                    f"expected (B, d) values and B ids, got {message.values.shape} and {len(message.rows)} ids"
                )
        if filled:
            numbers = [np.asarray(message.values, dtype=np.float32).reshape(-1) for message in filled]
            self.write_lines(
                [message[:6] for message in filled],
                [message.values.shape for message in filled],
                join_ids(np.asarray(message.rows) for message in filled),
                np.concatenate(numbers),
            )

    def write_lines(
        self, heads: Sequence[Head], shapes: Sequence[tuple[int, ...]], rows: np.ndarray, numbers: np.ndarray
    ) -> None:
        """Write messages as one file: the head and the shape (B, d) of each, the ids and the vectors of all.

        ``rows`` (n,) are whole numbers or text; ``numbers`` (m,) are float32, one vector after another.
        """
        pa, parquet = import_arrow()
        *texts, steps = zip(*heads, strict=True)
        sizes, widths = np.array(shapes, dtype=np.int32).T
        fields: dict[str, Any] = {}
        for column, values in zip(TEXT, texts, strict=True):
            known: dict[str, int] = {}
            codes = np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int32)
            fields[column] = pa.DictionaryArray.from_arrays(np.repeat(codes, sizes), pa.array(list(known)))
        fields["step"] = np.repeat(np.array(steps, dtype=np.int64), sizes)
        fields["row"] = rows
        ends = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(np.repeat(widths, sizes), dtype=np.int32)])
        fields["value"] = pa.ListArray.from_arrays(ends, numbers)
        table = pa.table(fields)
        name = f"{self.parts:06d}.parquet"
        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, compression="lz4", use_dictionary=[*TEXT, "step"], write_statistics=False)
        content = memoryview(sink.getvalue())
        files.replace(self.folder / name, content)
        part = PartFile(name, table.num_rows, hashlib.sha256(content).hexdigest())
        files.append(self.folder / INDEX, msgspec.json.encode(part) + b"\n")
        self.parts += 1


class TranscriptFolder:
    """Reads a transcript, a batch at a time.

    Args:
        folder: of a transcript. Nothing in it is executed, and nothing is written.

    Attributes:
        header: parties and task.
        parts: the finished files.
        notes: what was dropped: a torn line at the end of the index, unfinished files.

    Raises:
        DataError: no transcript, or a header or index that is damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        import_arrow()
        self.folder = Path(folder)
        self.notes: list[str] = []
        self.header = self._read_header()
        self.parts = self._read_index()
        listed = {part.file for part in self.parts}
        unfinished = sorted(p.name for p in self.folder.iterdir() if p.suffix == ".parquet" and p.name not in listed)
        if unfinished:
            self.notes.append(
                f"{count(len(unfinished), 'unfinished file')} dropped: {', '.join(map(clean, unfinished[:3]))}"
            )

    def messages(self) -> Iterator[Sent]:
        """Yield the messages in order; consecutive lines that differ in row and value alone are one message.

        A message of more than ``MAX_LINES`` lines comes in several pieces.

        Raises:
            DataError: a file is missing or damaged, or a line contradicts the header or an earlier line; names file
                and row.
        """
        lines = Lines(self.header)
        pieces: list[Sent] = []
        for piece in (piece for part in self.parts for piece in self._read_part(part, lines)):
            if pieces and (piece[:6] != pieces[0][:6] or sum(len(each.rows) for each in pieces) >= MAX_LINES):
                yield _join_pieces(pieces)
                pieces = []
            pieces.append(piece)
        if pieces:
            yield _join_pieces(pieces)

    @property
    def next_part(self) -> int:
        """The number of the next file, which no finished file has."""
        return max((int(part.file[:6]) + 1 for part in self.parts if part.file[:6].isdecimal()), default=0)

    @property
    def fingerprint(self) -> str:
        """A hash of the header and of the hashes of all finished files."""
        facts = [msgspec.to_builtins(self.header), [part.sha256 for part in self.parts]]
        return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()

    def _read_header(self) -> TranscriptHeader:
        path = self.folder / HEADER
        content = _read(path, LARGEST_HEADER, f"expected a transcript in {self.folder}, found no {HEADER}")
        try:
            header = msgspec.convert(files.parse_toml(content.decode()), TranscriptHeader)
            header.check()
        except (ValueError, MemoryError) as error:  # a ValidationError is a ValueError
            raise DataError(f"{path}: {clean(str(error))[:500]}; write the header again") from None
        return header

    def _read_index(self) -> list[PartFile]:
        path = self.folder / INDEX
        content = _read(path, LARGEST_INDEX, f"expected a list of finished files in {self.folder}, found no {INDEX}")
        *lines, torn = content.split(b"\n")
        if torn:
            self.notes.append(f"a torn line at the end of {INDEX} dropped")
        parts: list[PartFile] = []
        for number, line in enumerate(lines, start=1):
            try:
                part = msgspec.json.decode(line, type=PartFile)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: {clean(str(error))}; remove the line and what follows"
                ) from None
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}\.parquet", part.file) or part.rows < 1:
                raise DataError(f"{path}, line {number}: expected the name of a .parquet file and its rows")
            parts.append(part)
        names = [part.file for part in parts]
        if len(set(names)) < len(names):
            raise DataError(f"{path}: expected each file once, found {max(names, key=names.count)} twice")
        return parts

    def _read_part(self, part: PartFile, lines: Lines) -> Iterator[Sent]:
        _, parquet = import_arrow()
        path = self.folder / part.file
        with _open(path) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                raise DataError(
                    f"{path}: expected the hash in {INDEX}, found another: the file is damaged or was changed"
                )
            file.seek(0)
            try:
                opened = parquet.ParquetFile(
                    file, thrift_string_size_limit=LARGEST_HEADER, thrift_container_size_limit=LARGEST_HEADER
                )
                check_schema(opened.schema_arrow, path)
                if opened.metadata.num_rows != part.rows:
                    raise DataError(
                        f"{path}: expected {part.rows} rows as in {INDEX}, found {opened.metadata.num_rows}"
                    )
                first = 0
                for batch in opened.iter_batches(BATCH, columns=list(COLUMNS), use_threads=False):
                    yield from lines.messages(batch, path, first)
                    first += batch.num_rows
                if first != part.rows:
                    raise DataError(f"{path}: expected {part.rows} rows as in {INDEX}, found {first}")
            except DataError:
                raise
            except MemoryError:
                raise DataError(f"{path}: too large for the memory of this machine: use one with more") from None
            except Exception as error:  # noqa: BLE001  (a damaged file may end in any error of the library)
                raise DataError(
                    f"{path}: cannot be read as Parquet: {clean(' '.join(str(error).split())[:200])}"
                ) from None


def _join_pieces(pieces: list[Sent]) -> Sent:
    """Return the pieces of one message, which the borders of batches and files have divided, as one."""
    if len(pieces) == 1:
        return pieces[0]
    rows = np.concatenate([piece.rows for piece in pieces])
    return pieces[0]._replace(rows=rows, values=np.concatenate([piece.values for piece in pieces]))


def join_ids(rows: Iterable[np.ndarray]) -> np.ndarray:
    """Return the ids of several messages as whole numbers of 64 bits, or as text if any are not: 7 and "7" are one."""
    ids = list(rows)
    types = {each.dtype for each in ids}
    whole = all(np.issubdtype(kind, np.integer) and np.can_cast(kind, np.int64) for kind in types)
    return np.concatenate([each.astype(np.int64 if whole else str, copy=False) for each in ids])


def _open(path: Path) -> Any:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DataError(f"{path}: expected a plain file")
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read(path: Path, largest: int, missing: str) -> bytes:
    if not path.is_file():
        raise DataError(missing)
    with _open(path) as file:
        content: bytes = file.read(largest + 1)
    if len(content) > largest:
        raise DataError(f"{path}: expected at most {largest} bytes, found more")
    return content
