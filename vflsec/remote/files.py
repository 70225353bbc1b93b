"""Writing what nobody else may read, and what a kill may not tear."""

from __future__ import annotations

import os
from pathlib import Path


def create(path: Path, content: bytes) -> None:
    """Write a new file for its owner alone (0600).

    Raises:
        FileExistsError: there is one; it stays as it is.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def replace(path: Path, content: bytes) -> None:
    """Put a file for its owner alone (0600) in the place of ``path``; a kill or a power cut leaves one of them."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
