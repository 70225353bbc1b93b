"""Embeddings in a table: CSV or Parquet, one line for each row of data."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vflsec.audit.subject import Subject, listed
from vflsec.audit.transcript import WIDEST, arrow
from vflsec.base.checks import count
from vflsec.base.errors import DataError, plain

LARGEST = 1 << 33
"""Bytes of a file."""


def from_table(path: Path, party: str) -> Subject:
    """Return the system whose bottom model of ``party`` has given the embeddings in a table.

    The table has a column ``id`` and columns ``e_0``, ``e_1``, ...; others are not read, but named. Without a column
    ``id``, the only other column has the ids.

    Raises:
        DataError: another form, an id twice, or a number that is not finite.
    """
    content = read_file(path)
    values, others = _vectors(path, content, "e")
    if values.nunique().max() < 2:
        raise DataError(f"{path}: expected embeddings that differ, found the same in all {len(values)} rows")
    notes = [f"{path.name} holds {count(len(values), 'embedding')} of {values.shape[1]} numbers"]
    if others:
        notes.append(f"{path.name} also holds {listed(others)}, which a file of embeddings should not hold; not read")
    return Subject(
        name=path.name,
        adversary=party,
        side="active" if party == "active" else "passive",
        fingerprint=hashlib.sha256(content).hexdigest(),
        embeddings=values,
        notes=notes,
    )


def with_predictions(subject: Subject, path: Path) -> Subject:
    """Return ``subject`` with the predictions that the adversary received: a table ``id``, ``p_0``, ``p_1``, ...

    Raises:
        DataError: as for embeddings.
    """
    content = read_file(path)
    values, _ = _vectors(path, content, "p")
    return replace(
        subject,
        predictions=values,
        fingerprint=hashlib.sha256(subject.fingerprint.encode() + content).hexdigest(),
        notes=(*subject.notes, f"{path.name} holds {count(len(values), 'prediction')} of {values.shape[1]} numbers"),
    )


def _vectors(path: Path, content: bytes, letter: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the columns ``e_0``, ``e_1``, ... indexed by id, for the letter e, and the names of other columns."""
    pattern = re.compile(rf"{letter}_?(0|[1-9][0-9]{{0,6}})")
    table = _read_csv(path, content, pattern) if path.suffix == ".csv" else _read_parquet(path, content)
    table.columns = [str(name) for name in table.columns]
    table = table.rename(columns={_id_column(list(table.columns), pattern): "id"})
    found = {name: int(match[1]) for name in table.columns if (match := pattern.fullmatch(name))}
    columns = sorted(found, key=lambda name: found[name])
    if "id" not in table.columns or [found[name] for name in columns] != list(range(len(columns))) or not columns:
        raise DataError(
            f"{path}: expected columns id, {letter}_0, {letter}_1, ..., found {listed(map(plain, table.columns))}: "
            f"rename them"
        )
    if table["id"].isna().any():
        raise DataError(f"{path}, row {int(table['id'].isna().to_numpy().argmax()) + 1}: expected an id, found nothing")
    ids = pd.Index(table["id"].astype(str).astype(object))
    if ids.has_duplicates:
        at = int(ids.duplicated().argmax())
        raise DataError(f"{path}, row {at + 1}: expected each id once, found {plain(ids[at])!r} again")
    values = table[columns].set_axis(ids).apply(pd.to_numeric, errors="coerce").astype(np.float32)
    bad = ~np.isfinite(values.to_numpy()).all(axis=1)
    if bad.any():
        row = int(bad.argmax()) + 1
        raise DataError(f"{path}, row {row}: expected finite numbers in {letter}_0, {letter}_1, ..., found none")
    return values, [plain(name) for name in table.columns if name not in (*columns, "id")]


def read_file(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: it cannot be read, is too large, or is a pickle.
    """
    try:
        if not path.is_file():
            raise DataError(f"{path}: expected a file, found {'something else' if path.exists() else 'nothing'}")
        if path.stat().st_size > largest:
            raise DataError(f"{path}: expected at most {largest >> 20} MiB, found {path.stat().st_size >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if _is_pickle(content):
        raise DataError(
            f"{path}: expected data, found a pickle, which may run code when it is read. Convert it where it was "
            f"written: safetensors.torch.save_file(model.state_dict(), 'bottom.safetensors')"
        )
    return content


def _id_column(names: Sequence[str], pattern: re.Pattern[str]) -> str:
    """Return the column with the ids: ``id``, or the only one whose name does not fit ``pattern``."""
    others = [name for name in names if not pattern.fullmatch(name)]
    return others[0] if "id" not in others and len(others) == 1 else "id"


def _is_pickle(content: bytes) -> bool:
    """Whether this is a pickle, or an archive with one; the length of a safetensors header may begin alike."""
    bare = content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05" and content[2:8] != bytes(6)
    return bare or (content[:2] == b"PK" and b"data.pkl" in content[:4096])


def _read_csv(path: Path, content: bytes, pattern: re.Pattern[str]) -> pd.DataFrame:
    try:
        names = [str(name) for name in pd.read_csv(io.BytesIO(content), nrows=0).columns]
        return pd.read_csv(io.BytesIO(content), dtype={_id_column(names, pattern): str}, low_memory=False)
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {plain(' '.join(str(error).split())[:200])}") from None


def _read_parquet(path: Path, content: bytes) -> pd.DataFrame:
    pa, parquet = arrow()
    limits = {"thrift_string_size_limit": 1 << 20, "thrift_container_size_limit": 1 << 20}
    try:
        opened = parquet.ParquetFile(pa.BufferReader(content), **limits)
        names = opened.schema_arrow.names
        if len(names) > WIDEST or opened.metadata.num_rows * max(1, len(names)) * 4 > LARGEST:
            raise DataError(f"{path}: expected at most {LARGEST >> 20} MiB of numbers, found more")
        table: Any = opened.read(use_threads=False).to_pydict()
        return pd.DataFrame(table)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {plain(' '.join(str(error).split())[:200])}") from None
