"""Opens whatever was trained: by what a file or folder holds, not by what its name promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from vflsec.audit.onnx_models import from_onnx
from vflsec.audit.subject import Subject, from_transcript
from vflsec.audit.tables import from_table, read_file
from vflsec.audit.transcript import HEADER
from vflsec.audit.weights import from_weights
from vflsec.base.errors import DataError, UsageError, plain


def open_subject(
    path: Path, party: str | None = None, model: str | None = None, given: Mapping[str, str] | None = None
) -> Subject:
    """Return what is at ``path``: a transcript, weights, an ONNX model, or a table of embeddings.

    Args:
        path: a folder with ``transcript.toml``, or a file: ``.safetensors``, ``.onnx``, ``.csv`` or ``.parquet``.
        party: the adversary; by default the observer of a transcript, or else ``passive_1``.
        given: what the data call ``active``, ``passive_1``, ...
        model: for weights, ``FILE.py:FUNCTION`` that builds the bottom model.

    Raises:
        UsageError: something else is at ``path``.
        DataError: it is damaged.
    """
    if path.joinpath(HEADER).is_file():
        return from_transcript(path, party, given)
    party = {name: standard for standard, name in (given or {}).items()}.get(party or "", party)
    kinds = {
        ".safetensors": lambda: from_weights(path, party or "passive_1", model),
        ".onnx": lambda: from_onnx(path, party or "passive_1"),
        ".csv": lambda: from_table(path, party or "passive_1"),
        ".parquet": lambda: from_table(path, party or "passive_1"),
    }
    if path.suffix in kinds:
        return kinds[path.suffix]()
    if path.is_file():
        read_file(path)  # a pickle is refused with the way to convert it
    found = "a folder without it" if path.is_dir() else "another file" if path.exists() else "nothing"
    raise UsageError(
        f"expected a transcript (a folder with {HEADER}), a recording, or a file {', '.join(kinds)} at {path}, "
        f"found {found}"
    )


def read_ids(path: Path) -> pd.Index:
    """Return the ids in a text file, one a line; a first line ``id`` is a heading.

    Raises:
        DataError: it cannot be read, is empty, or has an id twice.
    """
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path}: expected ids as text, one a line, found other bytes") from None
    found = [line.strip() for line in lines if line.strip()]
    if found[:1] == ["id"]:
        found = found[1:]
    if not found:
        raise DataError(f"{path}: expected ids, one a line, found none")
    ids = pd.Index(found, dtype=object)
    if ids.has_duplicates:
        raise DataError(f"{path}: expected each id once, found {plain(ids[ids.duplicated()][0])!r} again")
    return ids
