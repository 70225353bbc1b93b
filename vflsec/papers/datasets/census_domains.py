"""Census-Income in two domains: a model is adapted from people without a postgraduate degree to people with one.

Groups, merged categories and embedding widths are those of PrADA (Kang et al. 2022) and its authors' code.
"""

import numpy as np
import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.base.errors import UsageError
from vflsec.base.layout import Group, Grouping
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.census_income import CLASSES
from vflsec.data.census_income import NAME as TABLE
from vflsec.data.dataset import Roles, VerticalDataset
from vflsec.papers.datasets import FOLDER

NAME = "census-domains"
POSTGRADUATE = (
    "Masters degree(MA MS MEng MEd MSW MBA)",
    "Prof school degree (MD DDS DVM LLB JD)",
    "Doctorate degree(PhD EdD)",
)
LABELED = 4000
"""Labeled rows of the target."""

NEGATIVES = 9
"""Negative rows of the source for each positive one."""

ACTIVE = ["age", "gender", "education_year", "capital_gain", "capital_loss"]
EMPLOYMENT = {
    "class_worker": 4, "major_ind_code": 8, "major_occ_code": 6, "unemp_reason": 4, "full_or_part_emp": 4,
    "own_or_self": 2,
}  # fmt: skip
DEMOGRAPHICS = {
    "education": 6, "race": 3, "age_index": 6, "gender_index": 1, "marital_stat": 3, "union_member": 2,
    "vet_benefits": 2, "vet_question": 2,
}  # fmt: skip
MIGRATION = {
    "region_prev_res": 4, "state_prev_res": 8, "mig_chg_msa": 6, "mig_chg_reg": 6, "mig_move_reg": 6, "mig_same": 3,
    "mig_prev_sunbelt": 3, "hisp_origin": 5, "country_father": 4, "country_mother": 4, "country_self": 4,
    "citizenship": 3,
}  # fmt: skip
HOUSEHOLD = {"tax_filer_stat": 4, "det_hh_fam_stat": 10, "det_hh_summ": 10, "fam_under_18": 3}
GROUPS = {"emp": EMPLOYMENT, "demo": DEMOGRAPHICS, "migr": MIGRATION, "house": HOUSEHOLD}
"""Party C's columns by group, with the width of the embedding of a category."""

WIDTHS = {
    "emp": (56, 28, 14),
    "demo": (50, 25, 12),
    "migr": (86, 56, 18),
    "house": (54, 27, 13),
    "emp-demo": (78, 53, 15),
    "emp-migr": (120, 84, 20),
    "emp-house": (81, 55, 15),
    "demo-migr": (120, 81, 20),
    "demo-house": (78, 52, 15),
    "migr-house": (120, 83, 20),
    "all": (150, 60, 20),
}
"""PrADA, table II. It prints 51 columns for emp-house, which has 28 + 27."""

AGES = (18, 25, 30, 35, 40, 45, 50, 55, 60, 65)
# fmt: off
YEARS = {
    "Children": 0, "Less than 1st grade": 0.5, "1st 2nd 3rd or 4th grade": 2.5, "5th or 6th grade": 5.5,
    "7th and 8th grade": 7.5, "9th grade": 9, "10th grade": 10, "11th grade": 11, "12th grade no diploma": 12,
    "High school graduate": 12, "Some college but no degree": 14, "Associates degree-academic program": 14,
    "Associates degree-occup /vocational": 14, "Bachelors degree(BA AB BS)": 16, POSTGRADUATE[0]: 18,
    POSTGRADUATE[1]: 20, POSTGRADUATE[2]: 21,
}
"""Years of education."""

STATES = (
    "Maine,New Hampshire,Vermont,Massachusetts", "Michigan,Wisconsin",
    "Minnesota,Iowa,Missouri,North Dakota,South Dakota,Nebraska,Kansas", "Delaware,Virginia,Maryland,West Virginia",
    "North Carolina,South Carolina,Georgia", "Kentucky,Tennessee", "Alabama,Mississippi",
    "Arkansas,Oklahoma,Louisiana", "Montana,Idaho,Wyoming,Utah,Nevada,Colorado,New Mexico,Arizona",
    "Alaska,Oregon", "?,Not in universe",
)
COUNTRIES = (
    "United-States,Canada,Outlying-U S (Guam USVI etc)",
    "England,Scotland,Ireland,Germany,France,Italy,Greece,Portugal,Poland,Hungary,Holand-Netherlands,Yugoslavia",
    "Puerto-Rico,Mexico,Columbia,Cuba,Dominican-Republic,Ecuador,El-Salvador,Guatemala,Haiti,Honduras,Jamaica,"
    "Nicaragua,Panama,Peru,Trinadad&Tobago",
    "China,Hong Kong,Taiwan,Japan,South Korea,Vietnam", "India,Iran,Philippines,Cambodia,Laos,Thailand",
)
MERGED = {
    "education": ("5th or 6th grade,7th and 8th grade", "9th grade,10th grade,11th grade,12th grade no diploma",
                  "Associates degree-academic program,Associates degree-occup /vocational"),
    "marital_stat": ("Married-civilian spouse present,Married-spouse absent,Married-A F spouse present",),
    "major_occ_code": ("Other service,Not in universe",),
    "hisp_origin": ("NA,Do not know",),
    "mig_chg_msa": ("Not in universe,Not identifiable",),
    "state_prev_res": STATES,
    "country_father": COUNTRIES,
    "country_mother": COUNTRIES,
    "country_self": COUNTRIES,
}
"""Merged categories: each text is a list, named by its first category."""
# fmt: on


def load(*, ratio: float = 0.04, source: str = "apart", clean_split: bool = False) -> VerticalDataset:
    """Census-Income in two domains, who earns above 50,000 dollars? 101,579 rows, 2 parties and a source.

    People of the target domain have a postgraduate degree, people of the source domain have none. The active party is
    the target's (PrADA's A): 4,000 labeled training rows, few of them positive. The source (B) has all positive
    training rows of its domain and nine times as many negative ones. Both hold 5 numeric columns, and the passive party
    (C) holds 30 categorical columns of all people, in four groups. The labels of the target's other training rows are
    unused.

    Evaluation rows are half validation, half test: the target's rows of the official test set and, as in the authors'
    code, the remaining training rows, all negatives and half as many positives. These are among the unlabeled rows for
    adaptation. The seed determines the role of each row.

    Args:
        ratio: of positives among the labeled rows: 0.01, 0.02 and 0.04 in the paper; fewer are a subset of more.
        source: ``apart``, another party; ``merged``, the source's rows are labeled training rows of the active party
            (the paper's AB-VFL).
        clean_split: evaluate on rows of the official test set alone.

    Raises:
        UsageError: an unknown option, or no positive or no negative labeled row.
    """
    expect_known(("apart", "merged"), source=source)
    if not 1 <= round(ratio * LABELED) <= LABELED // 2:
        raise UsageError(f"expected ratio between {1 / LABELED} and 0.5, got {ratio}: the paper has 0.01, 0.02, 0.04")
    table = _read_table()
    labels, target = table["label"].astype("int64"), table["is_target"].to_numpy()
    grouping = _build_grouping()
    held = {"active": table[target] if source == "apart" else table, "source": table[~target]}
    active, other = (bundle.make_table(NAME, name, rows[ACTIVE]) for name, rows in held.items())
    columns = list(grouping.whole.columns)
    passive = bundle.make_table(NAME, "passive_1", table[columns], columns, grouping=grouping)

    def draw(seed: int) -> Roles:
        roles = _draw_roles(labels, table["is_target"], table["is_test"], round(ratio * LABELED), clean_split, seed)
        return roles if source == "apart" else roles._replace(train=roles.train.append(roles.source))

    return VerticalDataset(
        NAME,
        (active, passive),
        labels,
        CLASSES,
        card=bundle.get_card(NAME, FOLDER),
        source=other if source == "apart" else None,
        draw=draw,
    )


def _draw_roles(
    labels: pd.Series, is_target: pd.Series, is_test: pd.Series, positives: int, clean_split: bool, seed: int
) -> Roles:
    """Draw the role of each row; more positives are a superset of fewer."""

    def shuffle_ids(rows: pd.Series, *name: object) -> tuple[pd.Index, pd.Index]:
        """Return the negative and the positive ids among ``rows``, each in a random order."""
        rng = np.random.default_rng(derive(seed, NAME, *name))
        first, second = (labels.index[rows & (labels == label)] for label in (0, 1))
        return first[rng.permutation(len(first))], second[rng.permutation(len(second))]

    negative, positive = shuffle_ids(is_target & ~is_test, "target")
    train = positive[:positives].append(negative[: LABELED - positives])
    # Negatives beyond the labeled ones of every ratio, so that no row is both evaluated and, elsewhere, trained on.
    spare = negative[LABELED:]
    left = positive[len(positive) - len(spare) // 2 :].append(spare)
    evaluated = labels.index[is_target & is_test]
    evaluated = evaluated if clean_split else evaluated.append(left)
    evaluated = evaluated[np.random.default_rng(derive(seed, NAME, "evaluation")).permutation(len(evaluated))]
    val, test = evaluated[: len(evaluated) // 2], evaluated[len(evaluated) // 2 :]

    adaptation = labels.index[is_target & ~is_test]
    unlabeled = adaptation[~adaptation.isin(train.append(evaluated))]
    fewer, more = shuffle_ids(~is_target & ~is_test, "source")
    return Roles(train, unlabeled, val, test, adaptation, more.append(fewer[: NEGATIVES * len(more)]))


def _build_grouping() -> Grouping:
    single = tuple(Group(name, tuple(columns), WIDTHS[name]) for name, columns in GROUPS.items())
    pairs = []
    for number, first in enumerate(single):
        for second in single[number + 1 :]:
            name = f"{first.name}-{second.name}"
            pairs.append(Group(name, first.columns + second.columns, WIDTHS[name]))
    columns = tuple(column for group in single for column in group.columns)
    embeddings = {column: width for widths in GROUPS.values() for column, width in widths.items()}
    return Grouping(single, tuple(pairs), Group("all", columns, WIDTHS["all"]), embeddings)


def _read_table() -> pd.DataFrame:
    """Return all rows, with the task's columns, except the source's rows of the official test set."""
    arrays = bundle.read_arrays(TABLE)
    education = arrays["education.categories"][arrays["education"]]
    is_target = np.isin(education, POSTGRADUATE)
    kept = is_target | ~arrays["is_test"]
    known = YEARS.keys() == set(arrays["education.categories"])
    assert known, "the years of every degree are known"
    columns = {
        "age": arrays["age"],
        "gender": (arrays["gender.categories"] == "Male")[arrays["gender"]].astype("u1"),
        "education_year": np.array([YEARS[name] for name in arrays["education.categories"]])[arrays["education"]],
        "capital_gain": arrays["capital_gain"],
        "capital_loss": arrays["capital_loss"],
        "age_index": np.digitize(arrays["age"], AGES).astype("u1"),
        "gender_index": arrays["gender"],
        "label": arrays["label"],
        "is_target": is_target,
        "is_test": arrays["is_test"],
    }
    for group in GROUPS.values():
        columns |= {name: _merge_categories(arrays, name) for name in group if name not in columns}
    table = pd.DataFrame(columns, index=pd.RangeIndex(len(education), name="id"))
    rows: pd.DataFrame = table[kept]
    return rows


def _merge_categories(arrays: dict[str, np.ndarray], name: str) -> np.ndarray | pd.Categorical:
    """Return a column with the categories of ``MERGED`` merged."""
    categories = arrays.get(f"{name}.categories")
    if categories is None:
        return arrays[name]
    merged = {category: names.split(",")[0] for names in MERGED.get(name, ()) for category in names.split(",")}
    assert merged.keys() <= set(categories), f"{name} has the categories that are merged"
    new = [merged.get(category, category) for category in categories]
    index = pd.Index(sorted(set(new)))
    return pd.Categorical.from_codes(index.get_indexer(new)[arrays[name]], index)
