"""The lines of a transcript as messages: their limits, and the checks that each batch of them must pass."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from vflsec.base.errors import DataError, UsageError, clean
from vflsec.core.message import AFTERWARDS

Arrow = Any
"""An object of pyarrow, which has no type stubs."""
Ints = NDArray[np.integer]

AUDITOR = "auditor"  # the observer of a transcript that holds the messages of all parties
KINDS = ("embedding", "gradient", "nodes", "prediction")
TEXT = ("kind", "sender", "receiver", "phase", "split")
COLUMNS = (*TEXT, "step", "row", "value")
HELD_OUT = ("val", "test")  # splits whose rows are not trained on; all others are
MAX_VALUES = 1 << 20  # the most numbers in a vector
NODES = 1 << 15  # above the number of every node of a tree: 14 levels of splits
MAX_TREES = 1 << 14  # the most trees in a vector of nodes
MAX_PATHS = 1 << 27  # rows times trees of a transcript, which are kept in memory
LAST_STEP = 1 << 53
LONGEST_TEXT = 64  # the most characters of the name of a party, a phase or a split
LONGEST_ID = 1000  # the most characters of the id of a row


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
        if not all(_is_name(name) for name in self.parties):
            raise ValueError(f"parties: expected names of 1 to {LONGEST_TEXT} plain characters")


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


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and clean(text) == text and 0 < len(text) <= LONGEST_TEXT


def check_name(name: str, text: Any) -> None:
    """Raise UsageError unless ``text`` can be the phase or the split of a message."""
    if not _is_name(text):
        raise UsageError(f"expected {name}= to be 1 to {LONGEST_TEXT} plain characters, got {text!r}")


def import_arrow() -> tuple[ModuleType, ModuleType]:
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


def check_schema(schema: Arrow, path: Path) -> None:
    """Raise DataError unless a file has each column once, of the right type."""
    types = import_arrow()[0].types

    def is_text(kind: Arrow) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return bool(types.is_string(kind) or types.is_large_string(kind))

    def is_vector(kind: Arrow) -> bool:
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return bool(lists and types.is_floating(kind.value_type))

    expected: dict[str, tuple[Callable[[Arrow], bool], str]] = {
        **dict.fromkeys(TEXT, (is_text, "text")),
        "step": (types.is_integer, "whole numbers"),
        "row": (lambda kind: is_text(kind) or types.is_integer(kind), "text or whole numbers"),
        "value": (is_vector, "lists of floating-point numbers"),
    }
    for name, (fits, words) in expected.items():
        if schema.names.count(name) != 1:
            raise DataError(f"{path}: expected one column {name!r}, found {schema.names.count(name)}")
        kind = schema.field(name).type
        if not fits(kind):
            raise DataError(f"{path}, column {name!r}: expected {words}, found {clean(str(kind))[:100]}")


class Lines:
    """Turns batches of lines into messages; refuses a line that contradicts the header or an earlier line.

    Args:
        header: parties and task.
    """

    def __init__(self, header: TranscriptHeader) -> None:
        self.header = header
        self._widths: dict[tuple[str, ...], int] = {}  # by route and phase: phases may send vectors of other layers
        self._paths = NodePaths()

    def messages(self, batch: Arrow, path: Path, first: int) -> Iterator[Sent]:
        """Yield the messages of a batch whose first row is number ``first`` of the file at ``path``.

        Raises:
            DataError: a line is wrong; names file and row.
        """

        def refuse(line: int, what: str, actual: object = None) -> NoReturn:
            suffix = "" if actual is None else f", found {actual}"
            raise DataError(f"{path}, row {first + line + 1}: expected {what}{suffix}")

        def expect(fits: np.ndarray, what: str, actual: Callable[[int], object] | None = None) -> None:
            if not fits.all():
                line = int(np.argmin(fits))
                refuse(line, what, None if actual is None else actual(line))

        for name in COLUMNS:
            expect(~np.asarray(batch.column(name).is_null()), f"a {name}", lambda _: "nothing")
        codes, texts = zip(*(_encode_texts(batch.column(name)) for name in TEXT), strict=True)
        self._check_texts(codes, texts, expect)
        steps = batch.column("step").to_numpy(zero_copy_only=False)
        expect(steps >= 0, "a step of at least 0", lambda _: "a negative one")
        expect(steps <= LAST_STEP, f"a step of at most {LAST_STEP}", lambda _: "a larger one")
        ids = [str(row) for row in batch.column("row").to_pylist()]
        short = np.array([len(row) <= LONGEST_ID for row in ids], dtype=bool)  # before they take memory in an array
        expect(short, f"a row of at most {LONGEST_ID} characters", lambda line: len(ids[line]))
        expect(np.array(["\0" not in row for row in ids], dtype=bool), "no NUL in the id of a row")
        vectors = batch.column("value")
        lengths = np.asarray(vectors.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
        with np.errstate(over="ignore"):
            flat = vectors.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        expect((lengths >= 1) & (lengths <= MAX_VALUES), f"1 to {MAX_VALUES} numbers as value")
        if not len(lengths):
            return
        ends = np.cumsum(lengths)
        expect(_check_lines(np.isfinite(flat), ends), "finite numbers as value")
        of_trees = np.array([text == "nodes" for text in texts[0]])[codes[0]]
        expect(~of_trees | (lengths <= MAX_TREES), f"nodes of at most {MAX_TREES} trees", lengths.__getitem__)
        whole = (flat >= 0) & (flat < NODES) & (flat % 1 == 0) | ~np.repeat(of_trees, lengths)
        numbers = f"numbers of nodes, whole ones from 0 to {NODES - 1}"
        expect(_check_lines(whole, ends), numbers, lambda _: f"{flat[~whole][0]:g}")
        heads, rows = np.stack([*codes, steps], axis=1), np.array(ids, dtype=str)
        starts = np.flatnonzero(np.r_[True, (heads[1:] != heads[:-1]).any(axis=1)])
        for start, stop in zip(starts.tolist(), [*starts.tolist()[1:], len(steps)], strict=True):
            kind, sender, receiver, phase, split = (
                values[code[start]] for values, code in zip(texts, codes, strict=True)
            )
            if sender == receiver:
                refuse(start, "two parties", f"{sender!r} as sender and receiver")
            if self.header.observer not in (sender, receiver, AUDITOR):
                refuse(start, f"a message of {self.header.observer}", f"one from {sender} to {receiver}")
            width = self._width((kind, sender, receiver, phase), int(lengths[start]))
            other = lengths[start:stop] != width
            if other.any():
                line = start + int(np.argmax(other))
                refuse(line, f"{width} numbers as in earlier rows from {sender} to {receiver}", lengths[line])
            values = flat[ends[start] - width : ends[stop - 1]].reshape(-1, width)
            message = Sent(kind, sender, receiver, phase, split, int(steps[start]), rows[start:stop], values)
            if kind == "nodes":
                try:
                    self._paths.check(message)
                except _Contradiction as error:
                    raise DataError(f"{path}, row {first + start + error.line + 1}: {error}") from None
            yield message

    def _check_texts(self, codes: Sequence[Ints], texts: Sequence[list[str]], expect: Callable[..., None]) -> None:
        parties = tuple(self.header.parties)
        for name, code, values, known in zip(TEXT, codes, texts, (KINDS, parties, parties, None, None), strict=True):
            for k, value in enumerate(values):
                others = code != k
                if known is not None and value not in known:
                    expect(others, f"one of {', '.join(known)} as {name}", lambda _: repr(clean(value)))  # noqa: B023
                if name == "split" and value not in HELD_OUT and value.strip().lower() in HELD_OUT:
                    expect(others, f"{' or '.join(HELD_OUT)} as split", lambda _: repr(clean(value)))  # noqa: B023
                if not _is_name(value):
                    expect(others, f"a {name} of 1 to {LONGEST_TEXT} plain characters")

    def _width(self, route: tuple[str, ...], width: int) -> int:
        """Return the width of the vectors of a kind, sender, receiver and phase, of which these are ``width`` long."""
        if route[-1] in AFTERWARDS and route[0] != "nodes":  # prediction reads all trees at once
            trained = {known for earlier, known in self._widths.items() if earlier[:-1] == route[:-1]}
            width = trained.pop() if len(trained) == 1 else width
        return self._widths.setdefault(route, width)


def _encode_texts(column: Arrow) -> tuple[np.ndarray, list[str]]:
    """Return a column of texts as codes (n,) and the text of each code."""
    encoded = column if import_arrow()[0].types.is_dictionary(column.type) else column.dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _check_lines(fits: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return for each line whether all its numbers fit; ``ends`` are those of the lines."""
    return np.logical_and.reduceat(fits, np.r_[0, ends[:-1]])


class _Contradiction(ValueError):
    """A message of nodes is wrong, in a line that is counted from its first."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class NodePaths:
    """Reads messages of nodes one after another, and refuses what contradicts an earlier one.

    A message may leave out rows, trees and levels, and say 0 of any. Node i has the parent i // 2, so that nodes of one
    row and tree agree if all of them are on the path to the deepest one. What is said after training is apart: a system
    may then send a row elsewhere.
    """

    def __init__(self) -> None:
        self._said = {False: _Deepest(), True: _Deepest()}

    def check(self, message: Sent) -> None:
        """Raise _Contradiction if ``message`` says a node off the path that an earlier line, of it or not, says."""
        said, nodes = self._said[message.phase in AFTERWARDS], message.values.astype(np.int16)
        at = said.places(message.rows, range(message.step, message.step + nodes.shape[1]))
        before = said.nodes[at]
        np.maximum.at(said.nodes, at, nodes)
        deepest = said.nodes[at]
        odd = ~(_find_path(nodes, deepest) & _find_path(before, deepest))
        if not odd.any():
            return
        first, tree = (int(number) for number in np.argwhere(odd & (nodes > 0))[0])
        earlier = [int(before[first, tree])] if before[first, tree] else []
        for line in np.flatnonzero((at[0][:, 0] == at[0][first, 0]) & (nodes[:, tree] > 0)).tolist():
            node = int(nodes[line, tree])
            for other in earlier:
                if not _find_path(np.array(min(node, other)), np.array(max(node, other))):
                    raise _Contradiction(
                        line,
                        f"expected a node of tree {message.step + tree} on one path from the root with {other}, which "
                        f"an earlier line says of row {clean(str(message.rows[line]))!r}, found {node}",
                    )
            earlier.append(node)
        raise AssertionError("the deepest node is not related to all others, so that two are not related")


class _Deepest:
    """The deepest node of each row in each tree that was said so far; 0 for none."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._trees: dict[int, int] = {}
        self.nodes = np.zeros((0, 0), dtype=np.int16)

    def places(self, rows: NDArray[np.str_], trees: range) -> tuple[Ints, Ints]:
        """Return the positions (B, 1) and (1, T) of rows and trees, after making room for them."""
        i = np.array([self._rows.setdefault(row, len(self._rows)) for row in rows.tolist()], dtype=np.int64)
        j = np.array([self._trees.setdefault(tree, len(self._trees)) for tree in trees], dtype=np.int64)
        needed = (len(self._rows), len(self._trees))
        if (product := needed[0] * needed[1]) > MAX_PATHS:
            raise _Contradiction(
                0, f"expected at most {MAX_PATHS} rows times trees, found {product}: record fewer trees or rows"
            )
        shape = self.nodes.shape
        if needed[0] > shape[0] or needed[1] > shape[1]:
            room = [max(2 * have, need) if need > have else have for need, have in zip(needed, shape, strict=True)]
            grown = np.zeros(room, dtype=np.int16)
            grown[: shape[0], : shape[1]] = self.nodes
            self.nodes = grown
        return i[:, None], j[None, :]


def _find_path(nodes: Ints, deepest: Ints) -> NDArray[np.bool_]:
    """Return which nodes are 0 or on the path from the root to the deepest ones."""

    def level(numbers: Ints) -> Ints:
        return np.asarray(np.maximum(np.frexp(numbers.astype(np.float32))[1] - 1, 0))

    return np.asarray((nodes == 0) | (deepest >> np.maximum(level(deepest) - level(nodes), 0) == nodes))
