"""Avazu: which advertisements on web pages and in apps are clicked? 40 million displays, from the user's own copy.

Source: the training file of Kaggle's competition "Click-Through Rate Prediction" (Avazu 2014), whose terms do not allow
to bundle it.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.papers.datasets import FOLDER, sampling

NAME = "avazu"
CLASSES = ("no click", "click")
PAGE = "https://www.kaggle.com/c/avazu-ctr-prediction"
FILES = ("train.gz", "train.csv", "train", "train.csv.gz")
COLUMNS = (
    *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain"),
    *("app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{k}" for k in range(14, 22)),
)
LAYOUT = sampling.TextLayout(COLUMNS, ",", header=True)

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
    expect_known(tuple(SPLITS), split=split)
    sampling.check_sizes(rows, categories)
    path = source_files(data_dir)[0]
    frame = sampling.draw_rows(path, LAYOUT, rows, derive(0, NAME, "rows"))
    sampling.expect(path, frame["hour"], frame["hour"].str.fullmatch(r"\d{8}"), "YYMMDDHH")
    frame["hour"] = frame["hour"].str[-2:]
    ids = pd.Index(frame.index.to_numpy(), name="id")
    tables = []
    for party, names in zip(["active", *bundle.name_passive(2)], SPLITS[split], strict=False):
        numeric = [name for name in names if name in NUMBERS[split]]
        numbers = sampling.read_numbers(path, frame, numeric)
        for name, values in numbers.items():
            sampling.expect(path, frame[name], ~np.isnan(values), "a number")
        columns = {name: numbers[name] if name in numbers else sampling.read_categories(frame[name]) for name in names}
        coded = frozenset(names) - frozenset(numeric)
        table = pd.DataFrame(columns, index=ids)
        tables.append(PartyTable(party, table, coded, rare=dict.fromkeys(coded, categories)))
    labels = sampling.read_labels(path, frame, "click", ids)
    return VerticalDataset(NAME, tuple(tables), labels, CLASSES, card=bundle.get_card(NAME, FOLDER))


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the file that ``load`` reads. If it changes, stored results are invalid."""
    return bundle.find_files(NAME, data_dir, [FILES], PAGE)
