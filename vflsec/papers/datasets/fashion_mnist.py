"""Fashion-MNIST (Zalando): 70,000 images of clothes, 28 x 28 pixels, of which each party holds a part.

Source: Xiao, Rasul and Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms,
2017, arXiv:1708.07747. Its files, 31 MB, are not bundled: they come from a folder of the user's or a Debian package.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import check_positive
from vflsec.base.errors import DataError, UsageError
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset
from vflsec.papers.datasets import FOLDER

NAME = "fashion-mnist"
CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian and its derivatives
PAGE = "https://github.com/zalandoresearch/fashion-mnist"
# In the order of the card's sha256; each may end in .gz.
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIDE = 28


def load(*, parties: int = 2, rows: int | None = None, data_dir: str | None = None) -> VerticalDataset:
    """Images of clothes cut into halves or quadrants, 10 classes. 70,000 rows, 2 or 4 parties; files not bundled.

    Args:
        parties: 2 for the left (active) and right half, 28 x 14 pixels each; 4 for the quadrants, 14 x 14 pixels each,
            in reading order.
        rows: training images that are kept, the same for every seed; fewer are a subset of more. None for all 60,000.
            All 10,000 images of the official test set are kept.
        data_dir: the folder of the four idx files, plain or gzipped, with any content; None for that of Debian's
            package dataset-fashion-mnist, with the content of the card.

    Raises:
        UsageError: another number of parties, or more rows than there are.
        DataError: a file is missing, or has unexpected content.
    """
    paths = source_files(data_dir)
    contents = [_unpack(path) for path in paths]
    if data_dir is None:
        bundle.verify(NAME, b"".join(contents), f"Reinstall {PACKAGE}", FOLDER)
    train_images, train_labels = _read_images(paths[:2], contents[:2])
    test_images, test_labels = _read_images(paths[2:], contents[2:])
    kept = _select_rows(rows, len(train_images), paths[0])
    ids = pd.Index(np.append(kept, len(train_images) + np.arange(len(test_images))), name="id")
    tables = bundle.split_images(NAME, np.concatenate([train_images[kept], test_images]), ids, parties)
    classes = np.concatenate([train_labels[kept], test_labels])
    labels = pd.Series(classes, index=ids, name="label", dtype="int64")
    return VerticalDataset(NAME, tables, labels, CLASSES, ids[len(kept) :], bundle.get_card(NAME, FOLDER))


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the four files that ``load`` reads. If one changes, stored results are invalid.

    Raises:
        DataError: one is missing.
    """
    folder = PACKAGE_FOLDER if data_dir is None else Path(data_dir).expanduser()
    paths = []
    for name in FILES:
        path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
        if path is None:
            way_out = f"apt install {PACKAGE}, or download the four idx files from {PAGE} and give --data-dir FOLDER"
            raise DataError(f"{NAME}: expected {name} or {name}.gz in {folder}, found neither: {way_out}")
        paths.append(path)
    return paths


def _unpack(path: Path) -> bytes:
    """Return the content of ``path``, unpacked if it is gzipped.

    The content counts and not the suffix, since some browsers unpack downloads without renaming them.
    """
    content = path.read_bytes()
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file, got a damaged one ({error}); download it again") from None


def _parse(content: bytes, dimensions: int, path: Path) -> np.ndarray:
    """Return the values of an idx file: images (n, height, width) or labels (n,).

    It has the bytes 0, 0, 8 for unsigned bytes, and the number of dimensions; then the size of each in 4 bytes, most
    significant first; then the values, the last dimension fastest.
    """
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic:
        expected = f"an idx file of bytes in {dimensions} dimension(s), which begins {magic.hex(' ')}"
        raise DataError(f"{path}: expected {expected}, got {content[:4].hex(' ') or 'nothing'}; download it again")
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    size = header + math.prod(shape)
    if len(content) != size:
        raise DataError(f"{path}: expected {size} bytes by its own header, got {len(content)}; download it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_images(paths: list[Path], contents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 28, 28) and labels (n,) of the training or the test set."""
    images, labels = (
        _parse(content, dimensions, path) for content, dimensions, path in zip(contents, (3, 1), paths, strict=True)
    )
    _, height, width = images.shape
    if (height, width) != (SIDE, SIDE):
        way_out = f"give the files of {PAGE}"
        raise DataError(f"{paths[0]}: expected images of {SIDE} x {SIDE} pixels, got {height} x {width}; {way_out}")
    if len(labels) != len(images):
        way_out = "take both files from one source"
        expected = f"a label for each of the {len(images)} images in {paths[0].name}"
        raise DataError(f"{paths[1]}: expected {expected}, got {len(labels)}; {way_out}")
    unknown = labels[labels >= len(CLASSES)]
    if len(unknown):
        way_out = f"give the files of {PAGE}"
        raise DataError(f"{paths[1]}: expected labels 0 to {len(CLASSES) - 1}, got {unknown[0]}; {way_out}")
    return images, labels


def _select_rows(rows: int | None, available: int, path: Path) -> np.ndarray:
    """Return the positions of the training images that are kept."""
    if rows is None:
        return np.arange(available)
    check_positive(rows=rows)
    if rows > available:
        raise UsageError(f"expected rows <= {available}, the images in {path}, got {rows}")
    return np.random.default_rng(derive(0, NAME, "rows")).permutation(available)[:rows]
