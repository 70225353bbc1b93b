"""Census-Income (KDD): 299,285 people of the 1994 and 1995 surveys, who earns above 50,000 dollars?

The column groups are those of PrADA (Kang et al.); columns in no group belong to no party. A copy is bundled, and UCI's
own files can be read instead.
"""

import csv
import gzip
import zlib
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.base.errors import DataError
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset

NAME = "census-income"
CLASSES = ("up to 50000", "above 50000")

ACTIVE = ["age", "gender", "capital_gain", "capital_loss", "stock_dividends"]
MONEY = ["capital_gain", "capital_loss", "stock_dividends"]
EMPLOYMENT = ["class_worker", "major_ind_code", "major_occ_code", "unemp_reason", "full_or_part_emp", "own_or_self"]
DEMOGRAPHICS = ["education", "race", "marital_stat", "union_member", "vet_benefits", "vet_question"]
HOUSEHOLD = ["tax_filer_stat", "det_hh_fam_stat", "det_hh_summ", "fam_under_18"]
RESIDENCE = [
    *("region_prev_res", "state_prev_res", "mig_chg_msa", "mig_chg_reg", "mig_move_reg", "mig_same"),
    "mig_prev_sunbelt",
]
ORIGIN = ["hisp_origin", "country_father", "country_mother", "country_self", "citizenship"]

# In this order five parties merge residence and origin, as PrADA does.
GROUPS = [EMPLOYMENT, DEMOGRAPHICS, HOUSEHOLD, RESIDENCE, ORIGIN]
CATEGORICAL = ["gender", *(column for group in GROUPS for column in group)]
ADULT_AGE = 16

PAGE = "https://archive.ics.uci.edu/dataset/117/census+income+kdd"
FILES = ("census-income.data", "census-income.test")
"""The official training and test set; each may end in .gz."""
# fmt: off
COLUMNS = (
    "age", "class_worker", "det_ind_code", "det_occ_code", "education", "wage_per_hour", "hs_college", "marital_stat",
    "major_ind_code", "major_occ_code", "race", "hisp_origin", "gender", "union_member", "unemp_reason",
    "full_or_part_emp", "capital_gain", "capital_loss", "stock_dividends", "tax_filer_stat", "region_prev_res",
    "state_prev_res", "det_hh_fam_stat", "det_hh_summ", "instance_weight", "mig_chg_msa", "mig_chg_reg", "mig_move_reg",
    "mig_same", "mig_prev_sunbelt", "num_emp", "fam_under_18", "country_father", "country_mother", "country_self",
    "citizenship", "own_or_self", "vet_question", "vet_benefits", "weeks_worked", "year", "label",
)
# fmt: on
LABELS = ("- 50000.", "50000+.")


def load(*, parties: int = 2, adults_only: bool = False, data_dir: str | None = None) -> VerticalDataset:
    """People of a census survey, who earns above 50,000 dollars? 299,285 rows, 2 to 6 parties.

    Args:
        parties: 2 to 6. The active party holds 5 columns, the others share 28: every passive party holds one group
            (employment, demographics, household, residence, origin), the last one all remaining groups.
        adults_only: keep people of 16 years and more; most duplicate rows are of children.
        data_dir: the folder of UCI's ``census-income.data`` and ``census-income.test``, plain or ``.gz``; None for the
            bundled copy, which has the same rows in the same order.

    Raises:
        UsageError: another number of parties.
        DataError: a file is missing or has unexpected content.
    """
    expect_known([str(count) for count in range(2, len(GROUPS) + 2)], parties=str(parties))
    arrays = bundle.read_arrays(NAME) if data_dir is None else _read_official(data_dir)
    values = {name: _get_column(arrays, name) for name in [*ACTIVE, *CATEGORICAL]}
    table = pd.DataFrame(values, index=pd.RangeIndex(len(arrays["label"]), name="id"))
    table["label"], table["is_test"] = arrays["label"], arrays["is_test"]
    if adults_only:
        table = table[table["age"] >= ADULT_AGE]

    last = parties - 2
    held = [ACTIVE, *GROUPS[:last], [column for group in GROUPS[last:] for column in group]]
    names = ["active", *bundle.name_passive(parties - 1)]
    tables = tuple(
        bundle.make_table(NAME, name, table[columns], CATEGORICAL, MONEY)
        for name, columns in zip(names, held, strict=True)
    )
    test_ids = table.index[table["is_test"]]
    return VerticalDataset(NAME, tables, table["label"].astype("int64"), CLASSES, test_ids, bundle.get_card(NAME))


def source_files(data_dir: str | None = None) -> list[Path]:
    """Return the two files that ``load`` reads. If one changes, stored results are invalid.

    Raises:
        DataError: one is missing.
    """
    return bundle.find_files(NAME, data_dir, [(name, f"{name}.gz") for name in FILES], PAGE)


def _read_official(data_dir: str) -> dict[str, np.ndarray]:
    """Return the arrays of UCI's files, coded as in the bundled copy."""
    paths = source_files(data_dir)
    return _read(tuple(paths), tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@lru_cache(maxsize=1)
def _read(paths: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> dict[str, np.ndarray]:
    """Return the arrays; cached, since every seed of an evaluation splits the same rows."""
    bundled = bundle.read_arrays(NAME)
    categories = {name: array for name, array in bundled.items() if name.endswith(".categories")}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in bundled if name not in categories}
    for path in paths:
        table = _read_text(path)
        for name in COLUMNS:
            known = LABELS if name == "label" else categories.get(f"{name}.categories")
            values = _read_values(path, table[name], known, bundled.get(name))
            if name in parts:
                parts[name].append(values)
        parts["is_test"].append(np.full(len(table), path == paths[-1]))
    return {name: np.concatenate(values).astype(bundled[name].dtype) for name, values in parts.items()} | categories


def _read_text(path: Path) -> pd.DataFrame:
    """Return the fields of a file as text.

    Raises:
        DataError: it has no lines or one with another number of fields, or is no whole archive.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a gzip archive, got {error}; is the download complete?") from None
    if not content:
        raise DataError(f"{path}: expected data rows, got none; is the download complete?")
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        if line.count(b",") != len(COLUMNS) - 1:
            got = line.count(b",") + 1
            raise DataError(f"{path}, line {number}: expected {len(COLUMNS)} fields, got {got}; is it complete?")
    return pd.read_csv(
        BytesIO(content), names=list(COLUMNS), dtype=object, skipinitialspace=True, keep_default_na=False,
        quoting=csv.QUOTE_NONE, encoding="latin-1", skip_blank_lines=False,
    )  # fmt: skip


def _read_values(
    path: Path, column: pd.Series, known: tuple[str, ...] | np.ndarray | None, bundled: np.ndarray | None
) -> np.ndarray:
    """Return the codes of categories, or the numbers, of a column as float64.

    Raises:
        DataError: an unknown category, no number, or a number that the bundled column has no room for.
    """
    codes, different = pd.factorize(column)  # a column has few different texts: each is read once
    texts = [str(text).strip() for text in different]
    if known is not None:
        values = pd.Index(known).get_indexer(pd.Index(texts)).astype(np.float64)
        right, expected = values >= 0, "a known category"
    else:
        values = pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce").to_numpy(np.float64, na_value=np.nan)
        right, expected = np.isfinite(values) & (values >= 0), "a number"
        if bundled is not None:  # all but the weight and the year
            whole = np.array([text.isascii() and text.isdigit() for text in texts], dtype=bool)
            right, expected = right & whole & (values <= np.iinfo(bundled.dtype).max), "a whole number"
            if column.name in CATEGORICAL:
                right, expected = np.isin(values, bundled), "a known code"
    wrong = np.flatnonzero(~right[codes] | (codes < 0))
    if len(wrong):
        got = str(column.iloc[wrong[0]])
        raise DataError(
            f"{path}, line {wrong[0] + 1}, column {column.name!r}: expected {expected}, got {got[:80]!r}; give the "
            f"original file"
        )
    return values[codes]


def _get_column(arrays: dict[str, np.ndarray], name: str) -> np.ndarray | pd.Categorical:
    categories = arrays.get(f"{name}.categories")
    return arrays[name] if categories is None else pd.Categorical.from_codes(arrays[name], pd.Index(categories))
