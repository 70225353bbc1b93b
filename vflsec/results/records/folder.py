"""Reads a results folder without changing it, and without opening or executing anything that it names."""

from __future__ import annotations

from pathlib import Path

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import SCHEMA, OtherSchema, Record, decode, unseal
from vflsec.results.records.sweep import POINTS, is_sweep

RECORDS = "records.jsonl"
MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of ``folder``.

    Raises:
        StoreError: there is none, it is damaged, or it is of another schema.
    """
    path = folder / MANIFEST
    try:
        manifest: Manifest = unseal(files.read(path), Manifest)
        for fault in manifest.faults():
            raise ValueError(fault)
    except FileNotFoundError:
        raise StoreError(
            f"expected results in {folder}, found no {MANIFEST}: run vflsec eval --out {folder} first"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    except OtherSchema as error:
        raise StoreError(
            f"{path} has schema {error}, expected {SCHEMA}: another version of vflsec wrote it; run the same "
            f"vflsec eval again with --fresh"
        ) from None
    except ValueError as error:
        raise StoreError(f"{path} is damaged, {error}: run the same vflsec eval again, which writes it anew") from None
    return manifest


def read_records(folder: Path, *, skip_damaged: bool = False) -> dict[str, Record]:
    """Return all finished results by key; an incomplete last line counts as unfinished.

    Args:
        folder: of results.
        skip_damaged: leave damaged lines out.

    Raises:
        StoreError: a line is damaged, or is of another schema.
    """
    path = home(folder) / RECORDS
    records: dict[str, Record] = {}
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            record = decode(line)
        except OtherSchema as error:
            raise StoreError(
                f"{path} line {number} has schema {error}, expected {SCHEMA}: another "
                f"version of vflsec wrote it; compute it again with --fresh, or choose another --out"
            ) from None
        except ValueError as error:
            if skip_damaged:
                continue
            raise StoreError(
                f"{path} line {number} is damaged, {error}: compute it again with vflsec eval "
                f"--retry-errors, or all with --fresh"
            ) from None
        records[record.key] = record
    return records


def home(folder: Path) -> Path:
    """Return the folder that holds the records of ``folder``: of a point of a sweep, that of the sweep."""
    place = folder.resolve()
    if place.parent.name != POINTS or (place / RECORDS).exists() or not (place / MANIFEST).exists():
        return folder
    if not is_sweep(place.parent.parent):
        raise StoreError(f"expected the sweep of the point {folder} above it, found none: copy the whole sweep")
    return place.parent.parent


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end in a line feed; none if there is no file.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        data = files.read(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    return [line + b"\n" for line in data.split(b"\n")[:-1]]  # no other character ends a line
