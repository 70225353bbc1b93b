"""Writes files atomically, detects damage by checksums, and follows no link."""

import errno
import hashlib
import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from vflsec.base.errors import UsageError

SEAL = b"vflsec sealed 1\n"
UNFINISHED = ".writing-"
"""Prefix of the name of a file while it is being written."""

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # not on Windows


def make_path(name: Path | str) -> Path:
    """Return a path, or raise UsageError for what names none; an empty text would be the current folder."""
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise UsageError(f"expected a path, got {name!r}")
    return Path(name)


def create(path: Path, content: bytes) -> None:
    """Write a new file for its owner alone (0600).

    Raises:
        FileExistsError: the file exists; it is not changed.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def read(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is no file, but a folder, a device or a pipe, or it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "expected a file, found something else")
    return path.read_bytes()


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises:
        ValueError: it is not TOML, is nested too deeply, or has a number that is too large.
    """
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # the byte order mark of some editors
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def replace(path: Path, content: bytes | memoryview, *, mode: int = 0o600) -> None:
    """Replace ``path`` by a new file with this ``content``; a kill or a power cut leaves the old or the new one.

    A link is replaced and not followed. A kill can also leave an unfinished file beside it, which ``sweep`` removes.
    One process at a time may write to a folder. By default only the owner may read the file.
    """
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    discard(unfinished)
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:  # a full disk, say
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sweep(folder: Path) -> None:
    """Remove the files that a killed ``replace`` left unfinished in ``folder``."""
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        discard(unfinished)


def discard(path: Path) -> None:
    """Remove a file, a folder with its content, or a link, which is not followed; a missing path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Write the directory entries of ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, line: bytes) -> None:
    """Write ``line`` at the end of a file, on the disk before this returns.

    Raises:
        OSError: the file is a link, or cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666), "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def truncate(path: Path, size: int) -> None:
    """Cut a file off after ``size`` bytes.

    Raises:
        OSError: the file is a link, or cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | _NO_LINK), "r+b") as file:
        file.truncate(size)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(content: bytes) -> bytes:
    """Return ``content`` with its SHA-256 in front, so that ``unseal`` detects any damage."""
    return SEAL + hashlib.sha256(content).digest() + content


def unseal(data: bytes) -> bytes:
    """Return the content that was sealed.

    Raises:
        ValueError: the data is damaged, or was never sealed.
    """
    start = len(SEAL) + hashlib.sha256().digest_size
    content = data[start:]
    if data[:start] != SEAL + hashlib.sha256(content).digest():
        raise ValueError("a file whose checksum does not match")
    return content


def dump(table: Mapping[str, Any]) -> str:
    """Return a table as TOML, without its values of None, for which TOML has nothing."""
    return tomli_w.dumps(_drop_none(table))


def _drop_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value] if isinstance(value, list | tuple) else value
