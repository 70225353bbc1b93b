"""Draws rows of tables that are larger than memory: read in pieces, of which only the drawn rows are kept."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vflsec.base.checks import check_positive
from vflsec.base.errors import DataError, UsageError

PIECE = 100_000
"""Rows that are in memory at once, besides those that are kept."""


class TextLayout(NamedTuple):
    """How a file of text is written.

    Attributes:
        columns: their names, in the order of the file.
        separator: between fields.
        header: whether the first line has the names.
        encoding: of the other lines; one in which the bytes of separators and line ends mean nothing else.
    """

    columns: tuple[str, ...]
    separator: str
    header: bool
    encoding: str = "utf-8"


def draw_rows(path: Path, layout: TextLayout, rows: int, seed: int) -> pd.DataFrame:
    """Return ``rows`` rows of a file as text, indexed by their place in it: the same ones for the same seed.

    Fewer rows are a subset of more.

    Args:
        path: plain text, or compressed by gzip if its name ends in ``.gz``.
        layout: of the file.
        rows: how many; all if there are fewer.
        seed: of the draw.

    Raises:
        DataError: a line has another number of fields, or the file is damaged.
    """
    facts = path.stat()
    return _draw_rows(path, layout, rows, seed, (facts.st_size, facts.st_mtime_ns)).copy()


@lru_cache(maxsize=2)
def _draw_rows(path: Path, layout: TextLayout, rows: int, seed: int, _: tuple[int, int]) -> pd.DataFrame:
    """Return the rows; cached, since every seed of an evaluation splits the same ones.

    Each line has a random key, and those with the smallest keys are kept. Only these are split into fields.
    """
    rng = np.random.default_rng(seed)
    lines: list[bytes] = []
    places, keys, limit = np.empty(0, dtype=np.int64), np.empty(0), 1.0
    for first, piece in _read_pieces(path, layout):
        key = rng.random(len(piece))
        chosen = np.flatnonzero(key < limit)
        lines += [piece[k] for k in chosen]
        places, keys = np.append(places, first + chosen), np.append(keys, key[chosen])
        if len(lines) > 2 * rows:
            least = np.argsort(keys, kind="stable")[:rows]
            lines, places, keys = [lines[k] for k in least], places[least], keys[least]
            limit = float(keys[-1])
    if not lines:
        raise DataError(f"{path}: expected data rows, got none; is the download complete?")
    kept = np.sort(places[np.argsort(keys, kind="stable")[:rows]])
    texts = dict(zip(places.tolist(), lines, strict=True))
    try:
        fields = [
            texts[place].decode(layout.encoding).rstrip("\r\n").split(layout.separator) for place in kept.tolist()
        ]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected {layout.encoding} text, got {error.reason}; give the original file"
        ) from None
    return pd.DataFrame(fields, index=kept, columns=list(layout.columns), dtype=str)


def _read_pieces(path: Path, layout: TextLayout) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the lines in pieces, each with the place of its first line, with a bar on terminals."""
    mark, expected = layout.separator.encode(), len(layout.columns)
    with path.open("rb") as raw, show_bar() as progress:
        task = progress.add_task(path.name, total=path.stat().st_size)
        text: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]
        try:
            if layout.header:
                _check_header(path, text.readline(), layout)
            first = 0
            while piece := list(islice(text, PIECE)):
                wrong = next((k for k, line in enumerate(piece) if line.count(mark) != expected - 1), None)
                if wrong is not None:
                    got = piece[wrong].count(mark) + 1
                    line = first + wrong + 1 + layout.header
                    raise DataError(f"{path}, line {line}: expected {expected} fields, got {got}; is it complete?")
                progress.update(task, completed=raw.tell())
                yield first, piece
                first += len(piece)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: expected a gzip archive, got {error}; is the download complete?") from None


def _check_header(path: Path, line: bytes, layout: TextLayout) -> None:
    names = line.decode("utf-8-sig", errors="replace").strip().split(layout.separator)
    if names != list(layout.columns):
        raise DataError(
            f"{path}, line 1: expected the names {layout.separator.join(layout.columns)}, got "
            f"{layout.separator.join(names)[:120]!r}; give the original file"
        )


def show_bar() -> Progress:
    """Return a bar that says how far a long reading is; on terminals only."""
    console = Console(stderr=True)
    parts = (TextColumn("reading {task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*parts, console=console, transient=True, disable=not console.is_terminal)


def read_numbers(path: Path, frame: pd.DataFrame, columns: Iterable[str]) -> dict[str, np.ndarray]:
    """Return columns of text as float64, NaN where they are empty.

    Raises:
        DataError: something else than a number.
    """
    numbers = {}
    for name in columns:
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        expect(path, frame[name], np.isfinite(values) | (frame[name] == "").to_numpy(), "a number")
        numbers[name] = values
    return numbers


def read_labels(path: Path, frame: pd.DataFrame, column: str, ids: pd.Index) -> pd.Series:
    """Return a column of 0 and 1 as labels of the rows ``ids``.

    Raises:
        DataError: something else.
    """
    expect(path, frame[column], frame[column].isin(["0", "1"]), "0 or 1")
    return pd.Series((frame[column] == "1").to_numpy(np.int64), index=ids, name="label")


def read_categories(column: pd.Series) -> pd.Categorical[str]:
    """Return a column of text as categories, of which an empty field is one."""
    return pd.Categorical(column.str.strip().replace("", "(missing)"))


def expect(path: Path, column: pd.Series, is_right: pd.Series | np.ndarray, expected: str) -> None:
    """Raise DataError with the first value of a column that is not right, and its row in the file."""
    wrong = np.flatnonzero(~np.asarray(is_right, dtype=bool))
    if len(wrong):
        row, got = column.index[wrong[0]] + 1, column.iloc[wrong[0]]
        raise DataError(
            f"{path}, column {column.name!r}, row {row}: expected {expected}, got {got!r}; give the original file"
        )


def check_sizes(rows: int, categories: int) -> None:
    """Raise UsageError unless a loader can keep so many rows, and tell so many values of a category apart."""
    check_positive(rows=rows)
    if categories < 2:
        raise UsageError(f"expected categories >= 2, got {categories}")
