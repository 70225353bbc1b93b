"""PPDai: which online loans are not paid back? 30,000 loans, from the user's own copy.

Source: the first training set of PPDai's competition "Mojing cup" (PPDai, today FinVolution, 2016): PrADA's "Loan
Default".
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.dataset import PartyTable, VerticalDataset
from vflsec.papers.datasets import FOLDER, sampling

NAME = "ppdai"
CLASSES = ("paid back", "default")
PAGE = "https://www.heywhale.com/home/competition/56cd5f02b89b5bd026cb39c9/content/1"
FILE = "PPD_Training_Master_GBK_3_1_Training_Set.csv"
FILES = (FILE, f"Training Set/{FILE}")


def _list_names(name: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{name}{k}" for k in numbers)


PERIODS = tuple(name for k in range(1, 8) for name in _list_names(f"ThirdParty_Info_Period{k}_", range(1, 18)))
COLUMNS = (
    "Idx",
    *_list_names("UserInfo_", range(1, 5)),
    *_list_names("WeblogInfo_", range(1, 19)),
    *_list_names("UserInfo_", range(5, 25)),
    *_list_names("Education_Info", range(1, 9)),
    *_list_names("WeblogInfo_", (19, 20, 21, *range(23, 59))),  # there is no WeblogInfo_22
    *PERIODS,
    *_list_names("SocialNetwork_", range(1, 18)),
    *("target", "ListingInfo"),
)
LAYOUT = sampling.TextLayout(COLUMNS, ",", header=True, encoding="gbk")

# The columns of the groups are those of PrADA's code. It replaces places by coordinates and ranks, and the periods by
# their statistics, with tables that are not public; here these columns are what the file has.
ACTIVE = _list_names("UserInfo_", (10, 14, 15, 18, 22, 23))
LOCATION = _list_names("UserInfo_", (2, 4, 7, 8, 19, 20))
EDUCATION = _list_names("Education_Info", range(1, 9))
SOCIAL = _list_names("SocialNetwork_", (*range(2, 11), *range(12, 18)))
WEBLOG = _list_names(
    "WeblogInfo_", (*range(2, 10), *range(14, 22), *range(24, 31), *range(33, 37), 38, 39, 42, 48, 56, 57)
)
GROUPS = (LOCATION, PERIODS, EDUCATION, SOCIAL, WEBLOG)
CATEGORIES = frozenset(
    (
        *_list_names("UserInfo_", (22, 23)),
        *LOCATION,
        *EDUCATION,
        *_list_names("SocialNetwork_", (2, 7, 12)),
        *_list_names("WeblogInfo_", (19, 20, 21)),
    )
)
WITH_ABSENT = frozenset((*PERIODS, *SOCIAL))
ABSENT = -1
"""Stands for a missing number in these columns."""


def load(
    *, data_dir: str | None = None, parties: int = 2, rows: int = 30_000, categories: int = 100
) -> VerticalDataset:
    """Online loans of PPDai, which are not paid back? 30,000 rows, 2 to 6 parties; file not bundled.

    The active party has the labels and six facts about the borrower. The other columns are in five groups, as in PrADA:
    location, periods of a third party, education, social network and behavior on web pages. PrADA's domains, loans of
    the first three quarters and of the fourth, are not told apart.

    Args:
        data_dir: the folder of ``PPD_Training_Master_GBK_3_1_Training_Set.csv``, or of the folder ``Training Set``.
        parties: 2 to 6: every passive party holds one group, the last one all remaining groups.
        rows: loans, drawn at random, always the same ones; fewer are a subset of more.
        categories: the most frequent values of a category in training that are told apart.

    Raises:
        UsageError: another number of parties, or numbers below their least.
        DataError: the file is missing or has unexpected content.
    """
    expect_known([str(count) for count in range(2, len(GROUPS) + 2)], parties=str(parties))
    sampling.check_sizes(rows, categories)
    path = source_files(data_dir)[0]
    frame = sampling.draw_rows(path, LAYOUT, rows, derive(0, NAME, "rows"))
    dates = pd.to_datetime(frame["ListingInfo"], format="%Y/%m/%d", errors="coerce")
    for name, is_right, expected in (
        ("Idx", frame["Idx"].str.fullmatch(r"[0-9]+"), "a number"),
        ("Idx", ~frame["Idx"].duplicated(), "another number in each row"),
        ("ListingInfo", dates.notna(), "YYYY/M/D"),
    ):
        sampling.expect(path, frame[name], is_right, expected)
    ids = pd.Index(frame["Idx"].astype(np.int64).to_numpy(), name="id")
    labels = sampling.read_labels(path, frame, "target", ids)
    last = parties - 2
    held = [ACTIVE, *GROUPS[:last], tuple(column for group in GROUPS[last:] for column in group)]
    tables = []
    for party, columns in zip(["active", *bundle.name_passive(parties - 1)], held, strict=True):
        coded = CATEGORIES & set(columns)
        numbers = sampling.read_numbers(path, frame, [name for name in columns if name not in coded])
        for name in WITH_ABSENT & numbers.keys():
            numbers[name][numbers[name] == ABSENT] = np.nan
        values = {name: sampling.read_categories(frame[name]) if name in coded else numbers[name] for name in columns}
        table = pd.DataFrame(values, index=ids)
        tables.append(PartyTable(party, table, coded, impute="median", rare=dict.fromkeys(coded, categories)))
    return VerticalDataset(NAME, tuple(tables), labels, CLASSES, card=bundle.get_card(NAME, FOLDER))


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the file that ``load`` reads. If it changes, stored results are invalid."""
    return bundle.find_files(NAME, data_dir, [FILES], PAGE)
