"""NUS-WIDE: photographs by their low-level features and by their tags, from the user's own copy.

Source: Chua et al. 2009, "NUS-WIDE: a real-world web image database from National University of Singapore", CIVR.
FedHSSL takes the images with exactly one of ten concepts.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.errors import DataError
from vflsec.data import bundle
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.papers.datasets import FOLDER

NAME = "nus-wide"
PAGE = "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html"
CONCEPTS = ("animal", "buildings", "clouds", "grass", "lake", "person", "plants", "sky", "water", "window")
FEATURES = {"CH": 64, "CM55": 225, "CORR": 144, "EDH": 73, "WT": 128}
"""The low-level features and how many numbers each has."""
TAGS = 1000
PARTS = ("Train", "Test")


def load(*, data_dir: str | None = None) -> VerticalDataset:
    """Photographs of NUS-WIDE, 10 concepts; image features (634) and tags (1,000), 2 parties; files not bundled.

    The active party has the labels and the image features, the passive party the tags, as in FedHSSL. The test set is
    the official one. Images with none or several of the ten concepts are left out.

    Args:
        data_dir: the folder with ``Groundtruth``, ``Low_Level_Features`` and ``NUS_WID_Tags``.

    Raises:
        DataError: a file is missing or has unexpected content.
    """
    stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in source_files(data_dir))
    return _load(str(data_dir), stamps)


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the files that ``load`` reads. If one changes, stored results are invalid."""
    names = [name for part in PARTS for name in (*_list_labels(part), *_list_features(part), _name_tags(part))]
    return bundle.find_files(NAME, data_dir, [[name] for name in names], PAGE)


@lru_cache(maxsize=1)
def _load(data_dir: str, _: tuple[tuple[int, int], ...]) -> VerticalDataset:
    """Return the dataset; cached, since every seed of an evaluation splits the same rows."""
    folder = Path(data_dir).expanduser()
    images, tags, labels, sizes = [], [], [], []
    for part in PARTS:
        truth = np.concatenate([_read_table(folder / name, 1, None) for name in _list_labels(part)], axis=1)
        single = truth.sum(axis=1) == 1
        read = [
            _read_table(folder / name, width, len(truth))
            for name, width in zip(_list_features(part), FEATURES.values(), strict=True)
        ]
        images.append(np.concatenate(read, axis=1)[single])
        tags.append(_read_table(folder / _name_tags(part), TAGS, len(truth))[single])
        labels.append(truth[single].argmax(axis=1))
        sizes.append(int(single.sum()))
    ids = pd.RangeIndex(sum(sizes), name="id")
    names = [f"{name}_{k}" for name, width in FEATURES.items() for k in range(width)]
    pixels, words = np.concatenate(images), np.concatenate(tags)
    active = PartyTable("active", pd.DataFrame(pixels, index=ids, columns=names))
    tagged = pd.DataFrame(words, index=ids, columns=[f"tag_{k}" for k in range(TAGS)])
    tables = (active, PartyTable("passive_1", tagged))
    target = pd.Series(np.concatenate(labels).astype(np.int64), index=ids, name="label")
    return VerticalDataset(NAME, tables, target, CONCEPTS, ids[sizes[0] :], bundle.get_card(NAME, FOLDER))


def _list_labels(part: str) -> list[str]:
    return [f"Groundtruth/TrainTestLabels/Labels_{concept}_{part}.txt" for concept in CONCEPTS]


def _list_features(part: str) -> list[str]:
    return [f"Low_Level_Features/{part}_Normalized_{name}.dat" for name in FEATURES]


def _name_tags(part: str) -> str:
    return f"NUS_WID_Tags/{part}_Tags1k.dat"


def _read_table(path: Path, width: int, rows: int | None) -> np.ndarray:
    """Return the numbers (n, width) of a file of lines that are separated by blanks or tabs.

    Raises:
        DataError: another number of lines or fields, or something else than numbers.
    """
    try:
        numbers = pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32, on_bad_lines="error").to_numpy()
    except (ValueError, pd.errors.ParserError, OSError) as error:
        raise DataError(
            f"{path}: expected {width} numbers a line, got {str(error).strip()}; give the original file"
        ) from None
    if numbers.shape[1] != width:
        raise DataError(f"{path}: expected {width} numbers a line, got {numbers.shape[1]}; give the original file")
    if rows is not None and len(numbers) != rows:
        raise DataError(f"{path}: expected {rows} lines as in the other files, got {len(numbers)}; is it complete?")
    bad = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(bad):
        raise DataError(f"{path}, line {bad[0] + 1}: expected {width} finite numbers, got fewer; is it complete?")
    if width in (1, TAGS) and not np.isin(numbers, (0, 1)).all():
        raise DataError(f"{path}: expected 0 or 1 everywhere, got other numbers; give the original file")
    return numbers
