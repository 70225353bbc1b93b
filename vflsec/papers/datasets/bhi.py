"""Breast histopathology images: do patches of tissue show invasive ductal carcinoma? From the user's own copy.

Source: Janowczyk and Madabhushi 2016, "Deep learning for digital pathology image analysis", J. Pathol. Inform. 7:29;
Kaggle's "Breast Histopathology Images". Two patches of a patient make a row, as in FedHSSL.
"""

import re
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import check_positive, expect_known
from vflsec.base.errors import DataError
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset
from vflsec.papers.datasets import FOLDER, pictures

NAME = "bhi"
CLASSES = ("no carcinoma", "carcinoma")
PAGE = "https://www.kaggle.com/datasets/paultimothymooney/breast-histopathology-images"
NESTED = "IDC_regular_ps50_idx5"
"""Kaggle's archive holds all patients twice, the second time in a folder of this name."""
SIDE = 50
"""Of a patch; at the border of a slide it may be smaller."""
PATCH = re.compile(r"(\d+)_idx(\d+)_x(\d+)_y(\d+)_class([01])\.png")
TEST = 0.2
"""The share of test patients."""


def load(*, data_dir: str | None = None, rows: int = 20_000, pairs: str = "drawn", size: int = 32) -> VerticalDataset:
    """Patches of breast tissue, do they show carcinoma? 20,000 of 139,000 pairs, 2 parties; files not bundled.

    A row is two patches of one patient with the same label, one for each party. The test set is the pairs of a fifth of
    the patients, always the same ones. The utility is judged by F1, as in FedHSSL.

    Args:
        data_dir: the folder of Kaggle's archive, with one folder for each patient.
        rows: pairs, drawn at random, always the same ones; fewer are a subset of more. FedHSSL takes all, as
            ``rows=200000`` does.
        pairs: ``drawn`` at random within patient and label; or ``ordered``, each two neighbors in the order of file
            names, as in FedHSSL's code. A patch that is left over is not used.
        size: height and width to which patches are scaled.

    Raises:
        UsageError: other pairs, or numbers below their least.
        DataError: the folder is missing, or a name or an image is not as expected.
    """
    expect_known(("drawn", "ordered"), pairs=pairs)
    check_positive(rows=rows, size=size)
    root = _find_root(data_dir)
    return _load(root, rows, pairs, size, pictures.fingerprint(root))


def fingerprint(data_dir: str | None = None) -> str:
    """Return a hash of the names, sizes and times of all files. If it changes, stored results are invalid.

    Raises:
        DataError: the folder is missing.
    """
    return pictures.fingerprint(_find_root(data_dir))


@lru_cache(maxsize=1)
def _load(root: Path, rows: int, pairs: str, size: int, _: str) -> VerticalDataset:
    """Return the dataset; cached, since every seed of an evaluation splits the same rows."""
    patients = _list_patients(root)
    every_pair = _list_pairs(root, patients, pairs)
    drawn = np.random.default_rng(derive(0, NAME, "rows")).permutation(len(every_pair))[:rows]
    kept = [every_pair[place] for place in np.sort(drawn)]
    order = np.random.default_rng(derive(0, NAME, "test")).permutation(len(patients))
    tested = {patients[place].name for place in order[: max(1, round(TEST * len(patients)))]}

    ids = pd.Index(np.sort(drawn), name="id")
    shape = (3, size, size)
    tables = []
    for party, patches in zip(("active", "passive_1"), zip(*kept, strict=True), strict=True):
        images = pictures.stack(patches, partial(_read_patch, size=size), shape)
        tables.append(pictures.make_table(NAME, party, images, ids))
    labels = pd.Series([int(first.parent.name) for first, _ in kept], index=ids, name="label", dtype="int64")
    test_ids = ids[[first.parent.parent.name in tested for first, _ in kept]]
    return VerticalDataset(NAME, tuple(tables), labels, CLASSES, test_ids, bundle.get_card(NAME, FOLDER), headline="f1")


def _read_patch(path: Path, size: int) -> np.ndarray:
    """Return a patch (3, size, size)."""
    return pictures.resize(pictures.read(path, ("PNG",), ("RGB",), SIDE), size, "RGB")


def _find_root(data_dir: str | None) -> Path:
    """Return the folder of the patients: the given one, or the nested one if it is all there is."""
    given = pictures.find_folder(NAME, data_dir, PAGE)
    inside = pictures.list_folders(given)
    return inside[0] if [folder.name for folder in inside] == [NESTED] else given


def _list_patients(root: Path) -> list[Path]:
    """Return the patients' folders.

    Raises:
        DataError: fewer than two, or a folder of another name.
    """
    patients = [folder for folder in pictures.list_folders(root) if folder.name != NESTED]
    other = next((folder for folder in patients if not re.fullmatch(r"\d+", folder.name)), None)
    if other:
        raise DataError(
            f"{NAME}: expected folders with the number of a patient in {root}, got {other.name!r}; remove it"
        )
    if len(patients) < 2:
        raise DataError(
            f"{NAME}: expected the folders of at least two patients in {root}, found {len(patients)}: download it from "
            f"{PAGE} and give --data-dir FOLDER"
        )
    return patients


def _list_pairs(root: Path, patients: list[Path], pairs: str) -> list[tuple[Path, Path]]:
    """Return all pairs, by patient and label.

    Raises:
        DataError: there is none.
    """
    every_pair: list[tuple[Path, Path]] = []
    for patient in patients:
        for parent, patches in _list_patches(patient).items():
            rng = np.random.default_rng(derive(0, NAME, "pairs", patient.name, parent.name))
            order = rng.permutation(len(patches)) if pairs == "drawn" else np.arange(len(patches))
            paths = [parent / patches[place] for place in order]
            every_pair += zip(paths[::2], paths[1::2], strict=False)
    if not every_pair:
        raise DataError(
            f"{NAME}: expected two images of a patient with one label in {root}, found none; is it complete?"
        )
    return every_pair


def _list_patches(patient: Path) -> dict[Path, list[str]]:
    """Return the names of a patient's images in each folder of a label.

    Raises:
        DataError: a folder or a file of another name, or two images of one place.
    """
    names_of: dict[Path, list[str]] = {}
    places: set[tuple[int, ...]] = set()
    for parent in pictures.list_folders(patient):
        if parent.name not in ("0", "1"):
            raise DataError(f"{patient}: expected the folders 0 and 1, got {parent.name!r}; remove it")
        names_of[parent] = pictures.list_names(parent)
        for name in names_of[parent]:
            match = PATCH.fullmatch(name)
            expected = f"{patient.name}_idx5_xX_yY_class{parent.name}.png"
            if match is None or (match[1], match[5]) != (patient.name, parent.name):
                raise DataError(f"{parent}: expected images named {expected}, got {name!r}; give the original files")
            place = tuple(int(match[k]) for k in (2, 3, 4))
            if place in places:
                raise DataError(f"{parent / name}: expected one image of each place, got a second one; remove one")
            places.add(place)
    if not places:
        raise DataError(f"{patient}: expected images in the folders 0 and 1, found none; is it complete?")
    return names_of
