"""The open transcript: the messages that one party saw, as files that any language can write.

A transcript is a folder. ``transcript.toml`` names the parties and the task; ``*.parquet`` files hold one vector per
line; ``parts.jsonl`` lists the finished files with their length and hash. docs/transcript_format.md is the
specification.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import tomli_w

from vflsec.audit.node_paths import NodePaths
from vflsec.base import files
from vflsec.base.checks import count
from vflsec.base.errors import DataError, UsageError, plain
from vflsec.core.message import AFTERWARDS

Arrow = Any
"""An object of pyarrow, which has no type stubs."""

HEADER = "transcript.toml"
INDEX = "parts.jsonl"
AUDITOR = "auditor"
"""The observer of a transcript that holds the messages of all parties."""

KINDS = ("embedding", "gradient", "nodes", "prediction")
TEXT = ("kind", "sender", "receiver", "phase", "split")
COLUMNS = (*TEXT, "step", "row", "value")

LARGEST_HEADER = 1 << 16
LARGEST_INDEX = 1 << 26
WIDEST = 1 << 20
"""The most numbers in a vector."""

HELD_OUT = ("val", "test")
"""Splits whose rows are not trained on; all others are."""
NODES = 1 << 15
"""Above the number of every node of a tree: 14 levels of splits."""

MOST_TREES = 1 << 14
"""The most trees in a vector of nodes."""

LAST_STEP = 1 << 53

LONGEST_TEXT = 64
"""The most characters of the name of a party, a phase or a split."""

LONGEST_ID = 1000
"""The most characters of the id of a row."""

BATCH = 1 << 14
"""Lines that are read at once."""

LONGEST = 1 << 20
"""Lines of the longest message."""


class TranscriptHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contents of ``transcript.toml``.

    Attributes:
        format: ``vflsec-transcript``.
        version: of the format.
        observer: the party that sent or received all messages, or ``auditor`` for the messages of all parties.
        parties: the side of each party by its name: ``active`` (has the labels), ``passive`` or ``server``.
        classes: the number of classes of the task, if it is known.
        software: what wrote the transcript.
    """

    format: Literal["vflsec-transcript"] = "vflsec-transcript"
    version: Literal[1] = 1
    observer: str
    parties: dict[str, Literal["active", "passive", "server"]]
    classes: int | None = None
    software: str = ""

    def check(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        if self.observer not in (*self.parties, AUDITOR):
            raise ValueError(
                f"observer: expected one of {', '.join(self.parties)} or {AUDITOR}, found {self.observer!r}"
            )
        if list(self.parties.values()).count("active") != 1:
            raise ValueError("parties: expected exactly one active party")
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"classes: expected at least 2, found {self.classes}")
        if any(plain(name) != name or not 0 < len(name) <= LONGEST_TEXT for name in self.parties):
            raise ValueError(f"parties: expected names of 1 to {LONGEST_TEXT} plain characters")


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of ``parts.jsonl``: a finished file, its number of vectors and its SHA-256."""

    file: str
    rows: int
    sha256: str


class Sent(NamedTuple):
    """One message: a vector for each of B rows.

    Attributes:
        rows: (B,) ids, as text.
        values: (B, d) float32.
    """

    kind: str
    sender: str
    receiver: str
    phase: str
    split: str
    step: int
    rows: np.ndarray
    values: np.ndarray


class Block(NamedTuple):
    """Several messages, one after another.

    Attributes:
        heads: kind, sender, receiver, phase, split and step of each message.
        sizes: the number of rows of each message.
        widths: the number of numbers in a row of each message.
        rows: (n,) the ids of all of them, whole numbers or text.
        numbers: (m,) float32, their vectors, one after another.
    """

    heads: Sequence[tuple[str, str, str, str, str, int]]
    sizes: Sequence[int]
    widths: Sequence[int]
    rows: np.ndarray
    numbers: np.ndarray


class _Earlier(NamedTuple):
    """What earlier lines of a transcript say.

    Attributes:
        widths: of the vectors of each kind, sender, receiver and phase: phases may send those of other layers.
        paths: of rows through trees.
    """

    widths: dict[tuple[str, ...], int]
    paths: NodePaths


class TranscriptWriter:
    """Writes a transcript, one file after another; a kill loses at most the vectors of the file in progress.

    Args:
        folder: a new folder, or one with a transcript that has the same header, which is continued.
        header: parties and task.

    Raises:
        UsageError: the folder holds something else, or another header.
    """

    def __init__(self, folder: Path | str, header: TranscriptHeader) -> None:
        arrow()
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
            _cut_torn_line(self.folder / INDEX)
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"expected a folder for a transcript, found the file {self.folder}: choose another")
        if self.folder.exists() and any(one.name != INDEX or one.stat().st_size for one in self.folder.iterdir()):
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
        found: dict[tuple[str, str], int] = {}
        for sent in self._earlier.messages() if self._earlier is not None else ():
            who = f"prediction {sent.receiver}" if sent.kind == "prediction" else sent.sender
            found[who, sent.phase] = max(found.get((who, sent.phase), -1), sent.step)
        return found

    def write(self, messages: Iterable[Sent]) -> None:
        """Write ``messages`` as one file."""
        filled = [message for message in messages if len(message.rows)]
        if filled:
            self.write_block(_block(filled))

    def write_block(self, block: Block) -> None:
        """Write the messages of a block as one file."""
        pa, parquet = arrow()
        table = _table(block)
        name = f"{self.parts:06d}.parquet"
        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, compression="lz4", use_dictionary=[*TEXT, "step"], write_statistics=False)
        content = memoryview(sink.getvalue())
        files.replace(self.folder / name, content)
        part = Part(name, table.num_rows, hashlib.sha256(content).hexdigest())
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
        arrow()
        self.folder = Path(folder)
        self.notes: list[str] = []
        self.header = self._read_header()
        self.parts = self._read_index()
        listed = {part.file for part in self.parts}
        unfinished = sorted(p.name for p in self.folder.iterdir() if p.suffix == ".parquet" and p.name not in listed)
        if unfinished:
            self.notes.append(
                f"{count(len(unfinished), 'unfinished file')} dropped: {', '.join(map(plain, unfinished[:3]))}"
            )

    def messages(self) -> Iterator[Sent]:
        """Yield the messages in order; consecutive lines that differ in row and value alone are one message.

        A message of more than ``LONGEST`` lines comes in several pieces.

        Raises:
            DataError: a file is missing or damaged, or a line contradicts the header or an earlier line; names file
                and row.
        """
        earlier = _Earlier({}, NodePaths())
        pieces: list[Sent] = []
        for piece in (piece for part in self.parts for piece in self._read_part(part, earlier)):
            if pieces and (piece[:6] != pieces[0][:6] or sum(len(one.rows) for one in pieces) >= LONGEST):
                yield _joined(pieces)
                pieces = []
            pieces.append(piece)
        if pieces:
            yield _joined(pieces)

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
        content = _small(path, LARGEST_HEADER, f"expected a transcript in {self.folder}, found no {HEADER}")
        try:
            header = msgspec.convert(files.parse_toml(content.decode()), TranscriptHeader)
            header.check()
        except (ValueError, MemoryError) as error:  # a ValidationError is a ValueError
            raise DataError(f"{path}: {plain(str(error))[:500]}; write the header again") from None
        return header

    def _read_index(self) -> list[Part]:
        path = self.folder / INDEX
        content = _small(path, LARGEST_INDEX, f"expected a list of finished files in {self.folder}, found no {INDEX}")
        *lines, torn = content.split(b"\n")
        if torn:
            self.notes.append(f"a torn line at the end of {INDEX} dropped")
        parts: list[Part] = []
        for number, line in enumerate(lines, start=1):
            try:
                part = msgspec.json.decode(line, type=Part)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: {plain(str(error))}; remove the line and what follows"
                ) from None
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}\.parquet", part.file) or part.rows < 1:
                raise DataError(f"{path}, line {number}: expected the name of a .parquet file and its rows")
            parts.append(part)
        names = [part.file for part in parts]
        if len(set(names)) < len(names):
            raise DataError(f"{path}: expected each file once, found {max(names, key=names.count)} twice")
        return parts

    def _read_part(self, part: Part, earlier: _Earlier) -> Iterator[Sent]:
        _, parquet = arrow()
        path = self.folder / part.file
        with _opened(path) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                raise DataError(
                    f"{path}: expected the hash in {INDEX}, found another: the file is damaged or was changed"
                )
            file.seek(0)
            try:
                opened = parquet.ParquetFile(
                    file, thrift_string_size_limit=LARGEST_HEADER, thrift_container_size_limit=LARGEST_HEADER
                )
                _check_schema(opened.schema_arrow, path)
                if opened.metadata.num_rows != part.rows:
                    raise DataError(
                        f"{path}: expected {part.rows} rows as in {INDEX}, found {opened.metadata.num_rows}"
                    )
                first = 0
                for batch in opened.iter_batches(BATCH, columns=list(COLUMNS), use_threads=False):
                    yield from self._checked(batch, path, first, earlier)
                    first += batch.num_rows
                if first != part.rows:
                    raise DataError(f"{path}: expected {part.rows} rows as in {INDEX}, found {first}")
            except DataError:
                raise
            except MemoryError:
                raise DataError(f"{path}: too large for the memory of this machine: use one with more") from None
            except Exception as error:  # noqa: BLE001  (a damaged file may end in any error of the library)
                raise DataError(
                    f"{path}: cannot be read as Parquet: {plain(' '.join(str(error).split())[:200])}"
                ) from None

    def _checked(self, batch: Arrow, path: Path, first: int, earlier: _Earlier) -> Iterator[Sent]:
        """Yield the messages of a batch whose first row is number ``first`` of its file."""

        def wrong(position: int | np.integer[Any], what: str) -> DataError:
            return DataError(f"{path}, row {first + int(position) + 1}: {what}")

        for name in COLUMNS:
            column = batch.column(name)
            if column.null_count:
                raise wrong(int(np.flatnonzero(np.asarray(column.is_null()))[0]), f"expected a {name}, found nothing")
        codes, texts = zip(*(_coded(batch.column(name)) for name in TEXT), strict=True)
        allowed = (KINDS, self.header.parties, self.header.parties, None, None)
        for name, code, values, known in zip(TEXT, codes, texts, allowed, strict=True):
            for k, value in enumerate(values):
                if known is not None and value not in known:
                    raise wrong(
                        int(np.argmax(code == k)),
                        f"expected one of {', '.join(known)} as {name}, found {plain(value)!r}",
                    )
                if name == "split" and value not in HELD_OUT and value.strip().lower() in HELD_OUT:
                    raise wrong(
                        int(np.argmax(code == k)), f"expected {' or '.join(HELD_OUT)} as split, found {plain(value)!r}"
                    )
                if not value or plain(value) != value or len(value) > LONGEST_TEXT:
                    raise wrong(int(np.argmax(code == k)), f"expected a {name} of 1 to {LONGEST_TEXT} plain characters")
        steps = batch.column("step").to_numpy(zero_copy_only=False)
        if (steps < 0).any():
            raise wrong(int(np.argmax(steps < 0)), "expected a step of at least 0, found a negative one")
        if (steps > LAST_STEP).any():
            raise wrong(
                int(np.argmax(steps > LAST_STEP)), f"expected a step of at most {LAST_STEP}, found a larger one"
            )
        ids = batch.column("row").to_pylist()
        longest = max(range(len(ids)), key=lambda k: len(ids[k]) if isinstance(ids[k], str) else 0, default=0)
        if ids and len(str(ids[longest])) > LONGEST_ID:
            raise wrong(longest, f"expected a row of at most {LONGEST_ID} characters, found {len(str(ids[longest]))}")
        if ids and any("\0" in str(one) for one in ids):
            raise wrong(next(k for k, one in enumerate(ids) if "\0" in str(one)), "expected no NUL in the id of a row")
        rows = np.asarray(ids, dtype=object).astype(str)
        flat, lengths = _vectors(batch.column("value"))
        if not len(lengths):
            return
        if (lengths < 1).any() or (lengths > WIDEST).any():
            raise wrong(int(np.argmax((lengths < 1) | (lengths > WIDEST))), f"expected 1 to {WIDEST} numbers as value")
        ends = np.cumsum(lengths)
        bad = ~np.isfinite(flat)
        if bad.any():
            raise wrong(int(np.searchsorted(ends, np.argmax(bad), side="right")), "expected finite numbers as value")
        if "nodes" in texts[0]:
            nodes = codes[0] == texts[0].index("nodes")
            if (lengths[nodes] > MOST_TREES).any():
                line = int(np.argmax(nodes & (lengths > MOST_TREES)))
                raise wrong(line, f"expected nodes of at most {MOST_TREES} trees, found {lengths[line]}")
            of_trees = np.repeat(nodes, lengths)
            odd = of_trees & ((flat < 0) | (flat >= NODES) | (flat % 1 != 0))
            if odd.any():
                line = int(np.searchsorted(ends, np.argmax(odd), side="right"))
                raise wrong(
                    line, f"expected numbers of nodes, whole ones from 0 to {NODES - 1}, found {flat[odd][0]:g}"
                )
        stacked = np.stack([*codes, steps], axis=1)
        starts = np.flatnonzero(np.r_[True, (stacked[1:] != stacked[:-1]).any(axis=1)])
        for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
            kind, sender, receiver, phase, split = (
                values[code[start]] for values, code in zip(texts, codes, strict=True)
            )
            if sender == receiver:
                raise wrong(start, f"expected two parties, found {plain(sender)!r} as sender and receiver")
            if self.header.observer not in (sender, receiver, AUDITOR):
                raise wrong(
                    start, f"expected a message of {self.header.observer}, found one from {sender} to {receiver}"
                )
            width = int(lengths[start])
            if phase in AFTERWARDS and kind != "nodes":  # prediction reads all trees at once
                trained = {w for (*route, _), w in earlier.widths.items() if route == [kind, sender, receiver]}
                width = trained.pop() if len(trained) == 1 else width
            width = earlier.widths.setdefault((kind, sender, receiver, phase), width)
            other = lengths[start:stop] != width
            if other.any():
                at = start + int(np.argmax(other))
                raise wrong(
                    at, f"expected {width} numbers as in earlier rows from {sender} to {receiver}, found {lengths[at]}"
                )
            values = flat[ends[start] - width : ends[stop - 1]].reshape(-1, width)
            if kind == "nodes":
                afterwards = phase in AFTERWARDS
                try:
                    odd = earlier.paths.contradiction(
                        int(steps[start]), rows[start:stop], values, afterwards=afterwards
                    )
                except ValueError as error:
                    raise wrong(start, str(error)) from None
                if odd:
                    at = start + odd.line
                    raise wrong(
                        at,
                        f"expected a node of tree {odd.tree} on one path from the root with {odd.other}, which an "
                        f"earlier line says of row {plain(str(rows[at]))!r}, found {odd.node}",
                    )
            yield Sent(kind, sender, receiver, phase, split, int(steps[start]), rows[start:stop], values)


def arrow() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and its Parquet module, which are imported when a transcript is used.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise UsageError("transcripts are Parquet files, which need pyarrow: pip install 'vflsec[parquet]'") from None
    return pyarrow, parquet


def _joined(pieces: list[Sent]) -> Sent:
    """Return the pieces of one message, which the borders of batches and files have divided, as one."""
    if len(pieces) == 1:
        return pieces[0]
    rows = np.concatenate([piece.rows for piece in pieces])
    return pieces[0]._replace(rows=rows, values=np.concatenate([piece.values for piece in pieces]))


def row_ids(rows: Iterable[np.ndarray]) -> np.ndarray:
    """Return the ids of several messages as whole numbers of 64 bits, or as text if any are not: 7 and "7" are one."""
    found = list(rows)
    whole = all(
        np.issubdtype(kind, np.integer) and np.can_cast(kind, np.int64) for kind in {one.dtype for one in found}
    )
    return np.concatenate([one.astype(np.int64 if whole else str, copy=False) for one in found])


def _block(messages: list[Sent]) -> Block:
    """Return messages as a block."""
    for message in messages:
        if message.values.ndim != 2 or len(message.rows) != len(message.values):
            raise UsageError(
                f"expected (B, d) values and B ids, got {message.values.shape} and {len(message.rows)} ids"
            )
    return Block(
        [message[:6] for message in messages],
        [len(message.rows) for message in messages],
        [message.values.shape[1] for message in messages],
        row_ids(np.asarray(message.rows) for message in messages),
        np.concatenate([np.asarray(message.values, dtype=np.float32).reshape(-1) for message in messages]),
    )


def _table(block: Block) -> Arrow:
    """Return messages as a table of one vector per line."""
    pa, _ = arrow()
    *texts, steps = zip(*block.heads, strict=True)
    fields: dict[str, Any] = {}
    for name, values in zip(TEXT, texts, strict=True):
        known: dict[str, int] = {}
        codes = np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int32)
        fields[name] = pa.DictionaryArray.from_arrays(np.repeat(codes, block.sizes), pa.array(list(known)))
    fields["step"] = np.repeat(np.array(steps, dtype=np.int64), block.sizes)
    fields["row"] = block.rows
    widths = np.repeat(np.array(block.widths, dtype=np.int32), block.sizes)
    ends = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(widths, dtype=np.int32)])
    fields["value"] = pa.ListArray.from_arrays(ends, block.numbers)
    return pa.table(fields)


def _coded(column: Arrow) -> tuple[np.ndarray, list[str]]:
    """Return a column of texts as codes (n,) and the text of each code."""
    pa, _ = arrow()
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _vectors(column: Arrow) -> tuple[np.ndarray, np.ndarray]:
    """Return all numbers of a column of lists as float32, and the length of each list."""
    lengths = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
    flat = column.flatten().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        return flat.astype(np.float32, copy=False), lengths


def _check_schema(schema: Arrow, path: Path) -> None:
    pa, _ = arrow()

    def text(kind: Arrow) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    def vector(kind: Arrow) -> bool:
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        return bool(lists and pa.types.is_floating(kind.value_type))

    expected: Mapping[str, tuple[Any, str]] = {
        **dict.fromkeys(TEXT, (text, "text")),
        "step": (pa.types.is_integer, "whole numbers"),
        "row": (lambda kind: text(kind) or pa.types.is_integer(kind), "text or whole numbers"),
        "value": (vector, "lists of floating-point numbers"),
    }
    for name, (fits, words) in expected.items():
        if schema.names.count(name) != 1:
            raise DataError(f"{path}: expected one column {name!r}, found {schema.names.count(name)}")
        kind = schema.field(name).type
        if not fits(kind):
            raise DataError(f"{path}, column {name!r}: expected {words}, found {plain(str(kind))[:100]}")


def _opened(path: Path) -> Any:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DataError(f"{path}: expected a plain file")
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _small(path: Path, largest: int, missing: str) -> bytes:
    if not path.is_file():
        raise DataError(missing)
    with _opened(path) as file:
        content: bytes = file.read(largest + 1)
    if len(content) > largest:
        raise DataError(f"{path}: expected at most {largest} bytes, found more")
    return content


def _cut_torn_line(path: Path) -> None:
    if path.is_file():
        content = path.read_bytes()
        files.truncate(path, content.rfind(b"\n") + 1)
