"""ImageNet-100: photographs of 100 classes, of which each party holds a half; from the user's own copy.

Source: Russakovsky et al. 2015, "ImageNet large scale visual recognition challenge", IJCV; the 100 classes of Tian et
al. 2020, "Contrastive multiview coding", arXiv 1906.05849, as in SS-VFL.
"""

import re
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import check_positive
from vflsec.base.errors import DataError, UsageError
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset
from vflsec.papers.datasets import FOLDER, pictures

NAME = "imagenet-100"
PAGE = "https://image-net.org/download-images"
CLASSES = 100
MAX_SIDE = 10_000
"""The largest width and height of a photograph."""
WORD = re.compile(r"n\d{8}")
FILE = re.compile(r"[\w.-]+\.JPEG")


def load(*, data_dir: str | None = None, rows: int = 20_000, size: int = 64, classes: int = CLASSES) -> VerticalDataset:
    """Photographs of ImageNet cut into halves, 100 classes. 20,000 of 127,000 training rows, 2 parties; not bundled.

    The middle square of a photograph is scaled; the active party has its left half, the passive party its right half.
    The test set is ImageNet's validation set.

    Args:
        data_dir: the folder with ``train`` and ``val``, in each a folder for each of the 100 classes, named like
            n01558993, with its photographs. Links to folders of a full copy of ImageNet will do.
        rows: training photographs, drawn at random, always the same ones; fewer are a subset of more. All photographs
            of the test set are kept.
        size: height and width of the whole; even.
        classes: the first ones by name are taken.

    Raises:
        UsageError: an odd size, or numbers out of range.
        DataError: the folder is missing, or a name or an image is not as expected.
    """
    check_positive(rows=rows)
    if size < 2 or size % 2:
        raise UsageError(f"expected an even size >= 2, got {size}")
    if not 2 <= classes <= CLASSES:
        raise UsageError(f"expected 2 <= classes <= {CLASSES}, got {classes}")
    root = pictures.find_folder(NAME, data_dir, PAGE)
    return _load(root, rows, size, classes, pictures.fingerprint(root))


def fingerprint(data_dir: str | None = None) -> str:
    """Return a hash of the names, sizes and times of all files. If it changes, stored results are invalid.

    Raises:
        DataError: the folder is missing.
    """
    return pictures.fingerprint(pictures.find_folder(NAME, data_dir, PAGE))


@lru_cache(maxsize=1)
def _load(root: Path, rows: int, size: int, classes: int, _: str) -> VerticalDataset:
    """Return the dataset; cached, since every seed of an evaluation splits the same rows."""
    words = _list_words(root)[:classes]
    train, test = ([path for word in words for path in _list_pictures(root / part / word)] for part in ("train", "val"))
    drawn = np.sort(np.random.default_rng(derive(0, NAME, "rows")).permutation(len(train))[:rows])
    kept = [*(train[place] for place in drawn), *test]
    ids = pd.Index(np.append(drawn, len(train) + np.arange(len(test))), name="id")
    images = pictures.stack(kept, partial(_read_square, size=size), (3, size, size))
    tables = (
        pictures.make_table(NAME, "active", images[..., : size // 2], ids),
        pictures.make_table(NAME, "passive_1", images[..., size // 2 :], ids),
    )
    places = {word: place for place, word in enumerate(words)}
    labels = pd.Series([places[path.parent.name] for path in kept], index=ids, name="label", dtype="int64")
    return VerticalDataset(NAME, tables, labels, tuple(words), ids[len(drawn) :], bundle.get_card(NAME, FOLDER))


def _read_square(path: Path, size: int) -> np.ndarray:
    """Return the middle square (3, size, size) of a photograph; one of ImageNet's is a PNG, and some are CMYK."""
    image = pictures.read(path, ("JPEG", "PNG"), ("RGB", "L", "CMYK", "RGBA"), MAX_SIDE)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return pictures.resize(image.crop((left, top, left + side, top + side)), size, "RGB")


def _list_words(root: Path) -> list[str]:
    """Return the names of the classes.

    Raises:
        DataError: a folder is missing, there are not 100 classes, or others in the test set than in training.
    """
    known = []
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise DataError(
                f"{NAME}: expected a folder {part} in {root}, found none: download it from {PAGE} and give --data-dir "
                f"FOLDER"
            )
        words = [folder.name for folder in pictures.list_folders(root / part)]
        other = next((word for word in words if not WORD.fullmatch(word)), None)
        if other:
            raise DataError(f"{root / part}: expected folders named like n01558993, got {other!r}; remove it")
        if len(words) != CLASSES:
            raise DataError(
                f"{root / part}: expected the folders of {CLASSES} classes, got {len(words)}; keep or link those of "
                f"ImageNet-100"
            )
        known.append(words)
    train, test = known
    differing = sorted(set(train) ^ set(test))
    if differing:
        raise DataError(
            f"{root}: expected the same classes in train and val, got {differing[0]} in one; is it complete?"
        )
    return train


def _list_pictures(parent: Path) -> list[Path]:
    """Return the files of a class.

    Raises:
        DataError: there is none, or one has another name.
    """
    names = pictures.list_names(parent)
    other = next((name for name in names if not FILE.fullmatch(name)), None)
    if other:
        raise DataError(f"{parent}: expected files named NAME.JPEG, got {other!r}; remove it")
    if not names:
        raise DataError(f"{parent}: expected photographs, found none; is it complete?")
    return [parent / name for name in names]
