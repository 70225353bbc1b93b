"""Writing what nobody else may read, and what a kill may not tear or a disk damage in silence."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SEAL = b"vflsec sealed 1\n"
UNFINISHED = ".writing-"
"""How the name of a file starts while it is being written."""


def create(path: Path, content: bytes) -> None:
    """Write a new file for its owner alone (0600).

    Raises:
        FileExistsError: there is one; it stays as it is.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def replace(path: Path, content: bytes) -> None:
    """Put a file for its owner alone (0600) in the place of ``path``; a kill or a power cut leaves one of them.

    A kill can also leave an unfinished file beside it, which ``sweep`` removes. One process at a time may write to a
    folder.
    """
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sweep(folder: Path) -> None:
    """Remove what ``replace`` left unfinished in ``folder`` when it was killed: it can hold a private key."""
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        unfinished.unlink()


def sync(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(content: bytes) -> bytes:
    """Return ``content`` behind its SHA-256, so that ``unseal`` notices any damage."""
    return SEAL + hashlib.sha256(content).digest() + content


def unseal(data: bytes) -> bytes:
    """Return what was sealed.

    Raises:
        ValueError: the data is damaged, or was never sealed.
    """
    start = len(SEAL) + hashlib.sha256().digest_size
    content = data[start:]
    if data[:start] != SEAL + hashlib.sha256(content).digest():
        raise ValueError("a file whose checksum does not match")
    return content
