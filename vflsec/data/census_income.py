"""Census-Income (KDD): 299,285 people of the 1994 and 1995 surveys, who earns above 50,000 dollars?

The column groups are those of PrADA (Kang et al.); columns in no group belong to no party.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from vflsec.core.checks import one_of
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


def load(*, parties: int = 2, adults_only: bool = False) -> VerticalDataset:
    """People of a census survey, who earns above 50,000 dollars? 299,285 rows, 2 to 6 parties.

    Args:
        parties: 2 to 6. The active party holds 5 columns, the others share 28: every passive party holds one group
            (employment, demographics, household, residence, origin), the last one all remaining groups.
        adults_only: keep people of 16 years and more; most duplicate rows are of children.

    Raises:
        UsageError: another number of parties.
    """
    one_of([str(count) for count in range(2, len(GROUPS) + 2)], parties=str(parties))
    arrays = bundle.arrays(NAME)
    columns = {name: _column(arrays, name) for name in [*ACTIVE, *CATEGORICAL]}
    table = pd.DataFrame(columns, index=pd.RangeIndex(len(arrays["label"]), name="id"))
    table["label"], table["is_test"] = arrays["label"], arrays["is_test"]
    if adults_only:
        table = table[table["age"] >= ADULT_AGE]

    last = parties - 2
    held = [ACTIVE, *GROUPS[:last], [column for group in GROUPS[last:] for column in group]]
    names = ["active", *bundle.passive_names(parties - 1)]
    tables = tuple(
        bundle.party_table(NAME, name, table[own], CATEGORICAL, MONEY) for name, own in zip(names, held, strict=True)
    )
    test_ids = table.index[table["is_test"]]
    return VerticalDataset(NAME, tables, table["label"].astype("int64"), CLASSES, test_ids, bundle.card(NAME))


def _column(arrays: dict[str, np.ndarray], name: str) -> np.ndarray | pd.Categorical:
    categories = arrays.get(f"{name}.categories")
    return arrays[name] if categories is None else pd.Categorical.from_codes(arrays[name], pd.Index(categories))
