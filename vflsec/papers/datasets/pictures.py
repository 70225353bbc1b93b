"""Reads folders of images: their names first, and of the drawn ones the pixels.

An image is decoded whole and checked as far as its format allows: PNG has checksums, JPEG has none, so that a changed
byte within its pixels may go unnoticed.
"""

import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from vflsec.base.errors import DataError
from vflsec.data import bundle
from vflsec.data.dataset import PartyTable
from vflsec.papers.datasets import sampling

MAX_FILE_BYTES = 32 * 2**20
"""The largest file that is read; photographs of ImageNet have up to 15 MB."""
JPEG_END = b"\xff\xd9"
WAY_OUT = "get the original file again"


def find_folder(name: str, data_dir: str | None, page: str) -> Path:
    """Return the user's folder.

    Raises:
        DataError: none was given, or it is no folder; the line says where the data come from.
    """
    way_out = f"download it from {page} and give --data-dir FOLDER"
    if data_dir is None:
        raise DataError(f"{name} does not come with vflsec: {way_out}")
    path = Path(data_dir).expanduser()
    if not path.is_dir():
        raise DataError(f"{name}: expected a folder {data_dir}, found none: {way_out}")
    return path


def list_folders(parent: Path) -> list[Path]:
    """Return the folders in another one by name, without hidden ones."""
    return [parent / name for name, is_folder in _list_entries(parent) if is_folder]


def list_names(parent: Path) -> list[str]:
    """Return the names of what is in a folder but folders, in order, without hidden ones."""
    return [name for name, is_folder in _list_entries(parent) if not is_folder]


def _list_entries(parent: Path) -> list[tuple[str, bool]]:
    try:
        with os.scandir(parent) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{parent}: expected a folder that can be read, got {error.strerror}; check its rights"
        ) from None


def fingerprint(root: Path) -> str:
    """Return a hash of the names, sizes and times of all files in a folder and in those of two levels below.

    It is computed anew where a file has been added, removed or renamed, and once per process: reading the contents of
    hundreds of thousands of images for each result would take longer than the results.
    """
    below = list_folders(root)
    every = [root, *below, *(folder for parent in below for folder in list_folders(parent))]
    return _hash(tuple((str(folder), folder.stat().st_mtime_ns) for folder in every))


@lru_cache(maxsize=4)
def _hash(every: tuple[tuple[str, int], ...]) -> str:
    digest = hashlib.sha256()
    for parent, _ in every:
        with os.scandir(parent) as entries:
            place = os.path.relpath(parent, every[0][0])
            for entry in sorted(filter(os.DirEntry.is_file, entries), key=lambda entry: entry.name):
                name, fact = entry.name, entry.stat()
                digest.update(f"{place}/{name} {fact.st_size} {fact.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read(path: Path, kinds: Sequence[str], modes: Sequence[str], most: int) -> Image.Image:
    """Return an image with all its pixels.

    Args:
        path: of a file.
        kinds: formats in Pillow's words, such as ``PNG``; no other decoder is asked.
        modes: the modes that are accepted, such as ``RGB``.
        most: the largest width and height. It is checked before the pixels are unpacked.

    Raises:
        DataError: it is no such image, is damaged or larger.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FILE_BYTES:
            got = f"{facts.st_size:,} bytes" if stat.S_ISREG(facts.st_mode) else "something else"
            raise DataError(f"{path}: expected a file of at most {MAX_FILE_BYTES:,} bytes, got {got}; {WAY_OUT}")
        content = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(content), formats=list(kinds)) as image:
                if max(image.size) > most:
                    width, height = image.size
                    raise DataError(
                        f"{path}: expected at most {most} x {most} pixels, got {width} x {height}; {WAY_OUT}"
                    )
                if image.mode not in modes:
                    raise DataError(f"{path}: expected the mode {' or '.join(modes)}, got {image.mode}; {WAY_OUT}")
                if image.format == "JPEG" and JPEG_END not in content:
                    raise DataError(f"{path}: expected a whole image, got no end of it; {WAY_OUT}")
                image.verify()  # checksums; afterwards it is closed
            with Image.open(BytesIO(content), formats=list(kinds)) as image:
                image.load()
                return image.copy()
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: expected a {' or '.join(kinds)} image, got something else; {WAY_OUT}") from None
    except Exception as error:  # noqa: BLE001  (decoders fail in many ways on damaged bytes)
        got = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: expected a {' or '.join(kinds)} image, got {got}; {WAY_OUT}") from None


def resize(image: Image.Image, size: int, mode: str) -> np.ndarray:
    """Return the pixels (c, size, size) of an image in another size and mode; bilinear, over all pixels that shrink."""
    pixels = np.asarray(image.convert(mode).resize((size, size), Image.Resampling.BILINEAR))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def stack(paths: Sequence[Path], read_pixels: Callable[[Path], np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """Return the pixels (n, c, h, w) of all ``paths``, each read by ``read_pixels``, with a bar on terminals."""
    pixels = np.empty((len(paths), *shape), dtype=np.uint8)
    with sampling.show_bar() as progress:
        for place, path in enumerate(progress.track(paths, description="images")):
            pixels[place] = read_pixels(path)
    return pixels


def make_table(dataset: str, party: str, images: np.ndarray, ids: pd.Index) -> PartyTable:
    """Return the table of a party that holds images (n, c, h, w), its columns ``red_0_0``, or ``pixel_0_0`` of gray."""
    _, channels, height, width = images.shape
    colors = ("pixel",) if channels == 1 else ("red", "green", "blue")
    columns = [f"{color}_{row}_{column}" for color in colors for row in range(height) for column in range(width)]
    frame = pd.DataFrame(images.reshape(len(images), -1), index=ids, columns=columns)
    return bundle.make_table(dataset, party, frame, image=(channels, height, width))
