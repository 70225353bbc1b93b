"""Criteo: which display advertisements are clicked? 45 million displays, from the user's own copy.

Source: Criteo's Display Advertising Challenge (Kaggle 2014), whose terms do not allow to bundle it.
"""

from pathlib import Path

import pandas as pd

from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.papers.datasets import FOLDER, sampling

NAME = "criteo"
CLASSES = ("no click", "click")
PAGE = "https://www.kaggle.com/c/criteo-display-ad-challenge"
FILES = ("train.txt", "train.txt.gz")
NUMBERS = tuple(f"I{k}" for k in range(1, 14))
CATEGORIES = tuple(f"C{k}" for k in range(1, 27))
LAYOUT = sampling.TextLayout(("label", *NUMBERS, *CATEGORIES), "\t", header=False)


def load(*, data_dir: str | None = None, rows: int = 100_000, categories: int = 100) -> VerticalDataset:
    """Advertisements of Criteo, which are clicked? 100,000 of 45 million rows, 2 parties; file not bundled.

    The active party has the labels and 26 categories, the passive party 13 counts, as in VFLHLP.

    Args:
        data_dir: the folder of ``train.txt``.
        rows: displays, drawn at random, always the same ones; fewer are a subset of more.
        categories: the most frequent values of a category in training that are told apart.

    Raises:
        UsageError: numbers below their least.
        DataError: the file is missing or has unexpected content.
    """
    sampling.check_sizes(rows, categories)
    path = source_files(data_dir)[0]
    frame = sampling.draw_rows(path, LAYOUT, rows, derive(0, NAME, "rows"))
    ids = pd.Index(frame.index.to_numpy(), name="id")
    labels = sampling.read_labels(path, frame, "label", ids)
    coded = {name: sampling.read_categories(frame[name]) for name in CATEGORIES}
    counts = sampling.read_numbers(path, frame, NUMBERS)
    active = PartyTable(
        "active", pd.DataFrame(coded, index=ids), frozenset(CATEGORIES), rare=dict.fromkeys(CATEGORIES, categories)
    )
    passive = PartyTable("passive_1", pd.DataFrame(counts, index=ids), signed_log=frozenset(NUMBERS), impute="median")
    return VerticalDataset(NAME, (active, passive), labels, CLASSES, card=bundle.get_card(NAME, FOLDER))


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the file that ``load`` reads. If it changes, stored results are invalid."""
    return bundle.find_files(NAME, data_dir, [FILES], PAGE)
