"""Reads idx files, the format of MNIST and similar datasets, plain or gzipped.

    4 bytes     0, 0, the type of the values (8: unsigned bytes), the number n of dimensions
    4 n bytes   the size of each dimension, most significant byte first
    the rest    the values, the last dimension fastest

Only unsigned bytes are accepted.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from vflsec.base.errors import DataError

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTES = 8


def unpack(path: Path) -> bytes:
    """Return the content of ``path``, unpacked if it is gzipped.

    The content counts and not the suffix, since some browsers unpack downloads without renaming them.

    Raises:
        DataError: a gzip file that is cut off or damaged.
    """
    content = path.read_bytes()
    if not content.startswith(_GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file, got a damaged one ({error}); download it again") from None


def parse(content: bytes, dimensions: int, path: Path) -> np.ndarray:
    """Return the values in an unpacked idx file as a read-only uint8 array.

    Args:
        content: of the file.
        dimensions: 3 for images (n, height, width), 1 for labels (n,).
        path: of the file, for messages.

    Raises:
        DataError: no idx file of bytes with this number of dimensions, or one that is cut off.
    """
    magic = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        expected = f"an idx file of bytes in {dimensions} dimension(s), which begins {magic.hex(' ')}"
        raise DataError(f"{path}: expected {expected}, got {content[:4].hex(' ') or 'nothing'}; download it again")
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    size = header + math.prod(shape)
    if len(content) != size:
        raise DataError(f"{path}: expected {size} bytes by its own header, got {len(content)}; download it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
