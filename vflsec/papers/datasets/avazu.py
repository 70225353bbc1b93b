"""Avazu: which advertisements on web pages and in apps are clicked? 40 million displays, from the user's own copy.

Source: the training file of Kaggle's competition "Click-Through Rate Prediction" (Avazu 2014), whose terms do not allow
to bundle it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import one_of, positive
from vflsec.base.errors import DataError, UsageError
from vflsec.base.seeds import derive
from vflsec.data import bundle, sampling
from vflsec.data.dataset import PartyTable, VerticalDataset

NAME = "avazu"
FOLDER = Path(__file__).parent
CLASSES = ("no click", "click")
PAGE = "https://www.kaggle.com/c/avazu-ctr-prediction"
FILES = ("train.gz", "train.csv", "train", "train.csv.gz")
COLUMNS = (
    *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain"),
    *("app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{k}" for k in range(14, 22)),
)
LAYOUT = sampling.Layout(COLUMNS, ",", header=True)

FEDHSSL = (
    ("device_ip", "device_model", "C14", "C17", "C19", "C20", "C21", "C15", "C16", "C18"),
    (
        *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id"),
        *("C1", "banner_pos", "device_type", "device_conn_type", "hour"),
    ),
)
VFLHLP = (
    ("hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id"),
    ("app_domain", "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    tuple(f"C{k}" for k in range(14, 22)),
)
SPLITS = {"fedhssl": FEDHSSL, "vflhlp": VFLHLP}
NUMBERS = {
    "fedhssl": ("C1", "banner_pos", "device_type", "device_conn_type", "C15", "C16", "C18", "hour"),
    "vflhlp": (),
}
"""The columns that each paper reads as numbers."""


def load(
    *, data_dir: str | None = None, rows: int = 120_000, split: str = "fedhssl", categories: int = 100
) -> VerticalDataset:
    """Advertisements of Avazu, which are clicked? 120,000 of 40 million rows, 2 or 3 parties; file not bundled.

    Args:
        data_dir: the folder of Kaggle's ``train.gz`` or ``train.csv``.
        rows: displays, drawn at random, always the same ones; fewer are a subset of more. FedHSSL and VFLHLP train on
            100,000 and test on 20,000: ``--set data.test=0.1667``.
        split: ``fedhssl``, two parties, each with half of the categories and of the numbers; or ``vflhlp``, three
            parties with the columns in the order of the file, all of them categories.
        categories: the most frequent values of a category in training that are told apart.

    Raises:
        UsageError: another split, or numbers below their least.
        DataError: the file is missing or has unexpected content.
    """
    one_of(tuple(SPLITS), split=split)
    positive(rows=rows)
    if categories < 2:
        raise UsageError(f"expected categories >= 2, got {categories}")
    path = source_files(data_dir)[0]
    frame = sampling.drawn(path, LAYOUT, rows, derive(0, NAME, "rows"))
    hours = frame["hour"].str.fullmatch(r"\d{8}")
    if not hours.all():
        got = frame["hour"][~hours].iloc[0]
        raise DataError(f"{path}, column 'hour': expected YYMMDDHH, got {got!r}; give the original file")
    frame["hour"] = frame["hour"].str[-2:]
    clicked = frame["click"].to_numpy()
    if not np.isin(clicked, ("0", "1")).all():
        got = frame["click"][~frame["click"].isin(["0", "1"])].iloc[0]
        raise DataError(f"{path}, column 'click': expected 0 or 1, got {got!r}; give the training file")
    ids = pd.Index(frame.index.to_numpy(), name="id")
    tables = [_table(k, path, frame, names, split, categories, ids) for k, names in enumerate(SPLITS[split])]
    labels = pd.Series((clicked == "1").astype(np.int64), index=ids, name="label")
    return VerticalDataset(NAME, tuple(tables), labels, CLASSES, card=bundle.card(NAME, FOLDER))


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the file that ``load`` reads. If it changes, stored results are invalid.

    Raises:
        DataError: it is missing.
    """
    return [sampling.source(NAME, data_dir, FILES, PAGE)]


def _table(
    k: int, path: Path, frame: pd.DataFrame, names: tuple[str, ...], split: str, categories: int, ids: pd.Index
) -> PartyTable:
    own = [name for name in names if name in NUMBERS[split]]
    values = sampling.numbers(path, frame, own)
    for name in own:
        if np.isnan(values[name]).any():
            raise DataError(
                f"{path}, column {name!r}: expected a number in every row, got none; give the original file"
            )
    coded = {name: pd.Categorical(frame[name].replace("", "(missing)")) for name in names if name not in own}
    return PartyTable(
        f"passive_{k}" if k else "active",
        pd.DataFrame({name: values.get(name, coded.get(name)) for name in names}, index=ids),
        frozenset(coded),
        rare=dict.fromkeys(coded, categories),
    )
