"""The files of a results folder beside its cells; reading changes nothing, and opens nothing that they name.

``manifest.json`` and ``records.jsonl`` are always there, ``gates.json`` and ``subgroups.json`` only if they were asked
for. A sweep has ``sweep.json``, ``points/<name>/{manifest.json,spec.toml}``, and records that all points share.
What is damaged, or of another schema, raises StoreError.
"""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from vflsec.base import files
from vflsec.base.errors import StoreError
from vflsec.results.records.manifest import Manifest, RunLimits, Subgroups, Sweep
from vflsec.results.records.schema import SCHEMA, OtherSchema, Record, decode, seal, unseal

RECORDS = "records.jsonl"
MANIFEST = "manifest.json"
GATES = "gates.json"
SUBGROUPS = "subgroups.json"
SWEEP = "sweep.json"
POINTS = "points"

Content = TypeVar("Content")

MAX_RUNS = 100
"""Runs whose limits are kept."""

NAMING = ("adversary", "attacks", "rows", "baselines", "left_out")
"""The fields of a manifest that name parties and techniques to a reader; settings stay as they are written."""


EVALUATE = "run the same command again, which writes it anew"
"""The way out of a damaged manifest or sweep."""


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    runs: Annotated[list[RunLimits], msgspec.Meta(min_length=1, max_length=MAX_RUNS)]


class _Groups(msgspec.Struct, forbid_unknown_fields=True):
    subgroups: list[Subgroups]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of ``folder``."""
    path = folder / MANIFEST
    try:
        manifest = _read(path, Manifest, EVALUATE)
    except FileNotFoundError:
        raise StoreError(
            f"expected results in {folder}, found no {MANIFEST}: run vflsec eval --out {folder} first"
        ) from None
    for fault in manifest.faults():
        raise StoreError(f"{path} is damaged, {fault}: {EVALUATE}")
    return manifest


def read_records(folder: Path, *, skip_damaged: bool = False) -> dict[str, Record]:
    """Return all finished results by key; an incomplete last line, or with ``skip_damaged`` any other, is left out."""
    path = find_home(folder) / RECORDS
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


def find_home(folder: Path) -> Path:
    """Return the folder that holds the records of ``folder``: of a point of a sweep, that of the sweep."""
    place = folder.resolve()
    if place.parent.name != POINTS or (place / RECORDS).exists() or not (place / MANIFEST).exists():
        return folder
    if not is_sweep(place.parent.parent):
        raise StoreError(f"expected the sweep of the point {folder} above it, found none: copy the whole sweep")
    return place.parent.parent


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end in a line feed; none if there is no file."""
    try:
        data = files.read(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    return [line + b"\n" for line in data.split(b"\n")[:-1]]  # no other character ends a line


def write_limits(folder: Path, given: RunLimits) -> None:
    """Make ``given`` the limits of a results folder, if there are any; earlier ones are kept before them."""
    if given != RunLimits():
        runs = [*(earlier for earlier in read_limits(folder) if earlier != given), given]
        files.replace(folder / GATES, seal(_Limits(runs[-MAX_RUNS:])), mode=0o666)


def expect_limits(folder: Path, manifest: Manifest) -> None:
    """Raise StoreError if the limits that a folder was given are lost."""
    path = find_home(folder) / GATES
    if manifest.limited and not path.exists():
        raise StoreError(f"expected {path} with the limits of earlier runs, found none: restore it, or add --fresh")


def read_limits(folder: Path) -> list[RunLimits]:
    """Return the limits in a results folder, the last ones in force; for a point of a sweep, those of the sweep."""
    return _read(
        find_home(folder) / GATES, _Limits, "restore it, or run the command again with --fresh", _Limits([])
    ).runs


def write_subgroups(folder: Path, groups: list[Subgroups]) -> None:
    """Write the leaks of groups into a results folder."""
    files.replace(folder / SUBGROUPS, seal(_Groups(groups)), mode=0o666)


def read_subgroups(folder: Path) -> list[Subgroups]:
    """Return the leaks of groups in a results folder; none if they were not asked for."""
    return _read(folder / SUBGROUPS, _Groups, "run the same vflsec eval --by again", _Groups([])).subgroups


def is_sweep(folder: Path) -> bool:
    """Whether ``folder`` holds a sweep."""
    return (folder / SWEEP).is_file()


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in ``folder``."""
    try:
        return _read(folder / SWEEP, Sweep, EVALUATE)
    except FileNotFoundError as error:
        raise StoreError(f"cannot read {folder / SWEEP}: {error.strerror}") from None


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write ``sweep.json``."""
    files.replace(folder / SWEEP, seal(sweep), mode=0o666)


def with_given_names(manifest: Manifest, records: dict[str, Record]) -> tuple[Manifest, dict[str, Record]]:
    """Return manifest and records with parties as the data name them, and plug-ins as they name themselves.

    Records say ``passive_1`` and ``path/to/file.py:Class``.
    """
    if not (manifest.names or manifest.techniques):
        return manifest, records
    # "active" is also a word: as a name it stands alone, or after "victim=" or "of".
    party = (
        r"(?<![\w-])passive_\d+(?![\w-])|^active$|(?<=victim=)active\b|(?<=\bof )active$|(?<=^attribute of )active\b"
    )
    paths = [rf"(?<![\w/.-]){re.escape(path)}(?!\w)" for path in manifest.techniques]
    pattern, names = re.compile("|".join([party, *paths])), manifest.names | manifest.techniques

    def rename(value: Any) -> Any:
        """Return plain data or records with every match of the pattern in their texts replaced by its name."""
        if isinstance(value, str):
            return pattern.sub(lambda match: names.get(match[0], match[0]), value)
        if isinstance(value, msgspec.Struct):
            return msgspec.convert(rename(msgspec.to_builtins(value)), type(value))
        if isinstance(value, dict):
            return {rename(key): rename(content) for key, content in value.items()}
        return list(map(rename, value)) if isinstance(value, list | tuple) else value

    named = {field: rename(getattr(manifest, field)) for field in NAMING}
    return msgspec.structs.replace(manifest, **named), {key: rename(record) for key, record in records.items()}


def _read(path: Path, kind: type[Content], way_out: str, missing: Content | None = None) -> Content:
    """Return the value in a sealed file; without ``missing``, FileNotFoundError is raised if there is none."""
    try:
        content: Content = unseal(files.read(path), kind)
        return content
    except FileNotFoundError:
        if missing is None:
            raise
        return missing
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    except OtherSchema as error:
        raise StoreError(
            f"{path} has schema {error}, expected {SCHEMA}: another version of vflsec wrote it; run the same "
            f"vflsec eval again with --fresh"
        ) from None
    except ValueError as error:
        raise StoreError(f"{path} is damaged, {error}: {way_out}") from None
