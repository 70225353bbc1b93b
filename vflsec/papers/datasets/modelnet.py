"""ModelNet40: objects by images from twelve sides, of which each party holds some; from the user's own copy.

Source: Wu et al. 2015, "3D ShapeNets", CVPR; the shaded images of Su et al. 2015, "Multi-view convolutional neural
networks for 3D shape recognition", ICCV, and Su et al. 2018, arXiv 1809.06019. FedHSSL renders its own in the same way.
"""

import re
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import check_positive, expect_known
from vflsec.base.errors import DataError, UsageError
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset
from vflsec.papers.datasets import FOLDER, pictures

NAME = "modelnet"
PAGE = "https://github.com/jongchyisu/mvcnn_pytorch"
VIEWS = 12
PARTS = ("train", "test")
MAX_SIDE = 2048
"""The largest width and height of an image; the originals have 224."""

Row = tuple[str, tuple[Path, ...]]
"""The class of an object, and an image of it for each party."""


def load(
    *, data_dir: str | None = None, parties: int = 4, classes: int = 10, rows: int = 30_000, size: int = 32
) -> VerticalDataset:
    """Objects of ModelNet from 12 sides, 10 of 40 classes, 2 to 12 parties; files not bundled.

    Every party holds as many neighboring views of each object. A row has one view of each party, in gray, and an object
    gives as many rows as a party holds views: in training in a random order of its own for each party, in the test set
    in the order of the views, as in FedHSSL. The test set is the official one.

    Args:
        data_dir: the folder ``modelnet40_images_new_12x``, with one folder for each class.
        parties: 4, with three views each, as in FedHSSL; 12, with one view each, as in SS-VFL; or 2, 3 or 6.
        classes: the first ones by name are taken; 10 as in FedHSSL, 40 for all.
        rows: training rows, drawn at random, always the same ones; fewer are a subset of more.
        size: height and width to which images are scaled.

    Raises:
        UsageError: another number of parties, or numbers below their least.
        DataError: the folder is missing, a view is, or a name or an image is not as expected.
    """
    expect_known(("2", "3", "4", "6", "12"), parties=str(parties))
    check_positive(rows=rows, size=size)
    if classes < 2:
        raise UsageError(f"expected classes >= 2, got {classes}")
    root = pictures.find_folder(NAME, data_dir, PAGE)
    return _load(root, parties, classes, rows, size, pictures.fingerprint(root))


def fingerprint(data_dir: str | None = None) -> str:
    """Return a hash of the names, sizes and times of all files. If it changes, stored results are invalid.

    Raises:
        DataError: the folder is missing.
    """
    return pictures.fingerprint(pictures.find_folder(NAME, data_dir, PAGE))


@lru_cache(maxsize=1)
def _load(root: Path, parties: int, classes: int, rows: int, size: int, _: str) -> VerticalDataset:
    """Return the dataset; cached, since every seed of an evaluation splits the same rows."""
    kinds = pictures.list_folders(root)
    if len(kinds) < classes:
        raise DataError(
            f"{NAME}: expected the folders of {classes} classes in {root}, found {len(kinds)}: download it from {PAGE} "
            f"and give --data-dir FOLDER"
        )
    train: list[Row] = []
    test: list[Row] = []
    for kind in kinds[:classes]:
        known, tested = (_list_objects(kind, part) for part in PARTS)
        both = sorted(known.keys() & tested.keys())
        if both:
            raise DataError(f"{kind}: expected each object in train or test, got {both[0]} in both; remove one")
        train += [(kind.name, row) for name, views in known.items() for row in _shuffle_views(name, views, parties)]
        test += [
            (kind.name, row) for views in tested.values() for row in zip(*_assign_views(views, parties), strict=True)
        ]
    drawn = np.sort(np.random.default_rng(derive(0, NAME, "rows")).permutation(len(train))[:rows])
    kept = [*(train[place] for place in drawn), *test]

    ids = pd.Index(np.append(drawn, len(train) + np.arange(len(test))), name="id")
    shape = (1, size, size)
    tables = []
    for k, party in enumerate(["active", *bundle.name_passive(parties - 1)]):
        paths = [views[k] for _, views in kept]
        images = pictures.stack(paths, partial(_read_view, size=size), shape)
        tables.append(pictures.make_table(NAME, party, images, ids))
    names = tuple(kind.name for kind in kinds[:classes])
    labels = pd.Series([names.index(kind) for kind, _ in kept], index=ids, name="label", dtype="int64")
    return VerticalDataset(NAME, tuple(tables), labels, names, ids[len(drawn) :], bundle.get_card(NAME, FOLDER))


def _read_view(path: Path, size: int) -> np.ndarray:
    """Return an image (1, size, size) in gray."""
    return pictures.resize(pictures.read(path, ("PNG",), ("L", "RGB", "RGBA"), MAX_SIDE), size, "L")


def _assign_views(views: list[Path], parties: int) -> list[list[Path]]:
    """Return the neighboring views that each party holds."""
    each = VIEWS // parties
    return [views[k * each : (k + 1) * each] for k in range(parties)]


def _shuffle_views(name: str, views: list[Path], parties: int) -> list[tuple[Path, ...]]:
    """Return the rows of an object for training; every party has its views in an order of its own."""
    rng = np.random.default_rng(derive(0, NAME, "views", name))
    return list(
        zip(*([held[k] for k in rng.permutation(len(held))] for held in _assign_views(views, parties)), strict=True)
    )


def _list_objects(kind: Path, part: str) -> dict[str, list[Path]]:
    """Return the twelve views of each object of a class.

    Names are ``OBJECT_VIEW.png``, or ``OBJECT_060_DEGREES_VIEW.png`` as FedHSSL's renderer writes them.

    Raises:
        DataError: the folder is missing or empty, a name is another, or a view is missing or there twice.
    """
    parent = kind / part
    if not parent.is_dir():
        raise DataError(f"{NAME}: expected a folder {part} in {kind}, found none; is it complete?")
    pattern = re.compile(rf"({re.escape(kind.name)}_\d+)(?:_\d{{3}}_(\d{{3}}))?_(\d{{3}})\.png")
    objects: dict[str, dict[int, Path]] = {}
    for name in pictures.list_names(parent):
        match = pattern.fullmatch(name)
        view = int(match[3]) if match else 0
        turned = match is not None and match[2] is not None and int(match[2]) != 360 // VIEWS * (view - 1)
        if match is None or turned or not 1 <= view <= VIEWS:
            expected = f"{kind.name}_NUMBER_VIEW.png with views 001 to 0{VIEWS}"
            raise DataError(f"{parent}: expected images named {expected}, got {name!r}; give the original files")
        views = objects.setdefault(match[1], {})
        if view in views:
            raise DataError(f"{parent}: expected view {view} of {match[1]} once, got it twice; remove one")
        views[view] = parent / name
    if not objects:
        raise DataError(f"{parent}: expected images, found none; is it complete?")
    for thing, views in objects.items():
        missing = next((view for view in range(1, VIEWS + 1) if view not in views), None)
        if missing:
            raise DataError(
                f"{parent}: expected {VIEWS} views of {thing}, found no view {missing:03d}; is it complete?"
            )
    return {thing: [views[view] for view in range(1, VIEWS + 1)] for thing, views in sorted(objects.items())}
