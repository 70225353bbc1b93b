"""Census-Income as text: each working person of the survey is a short sentence, which a passive party holds."""

import re
from functools import cache

import numpy as np
import pandas as pd

from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive
from vflsec.data import bundle
from vflsec.data.census_income import CLASSES, MONEY
from vflsec.data.census_income import NAME as TABLE
from vflsec.data.dataset import VerticalDataset
from vflsec.language.text import FOLDER, Tokenizer, make_text_table

NAME = "census-text"
ACTIVE = ["age", *MONEY]
WORKERS = 148_318
"""People with an occupation."""

LENGTH = 22
"""Tokens of a sentence with [start]; of the longest sentences the last words are cut off."""

SENTENCE = {
    "marital_stat": "", "gender": "", "education": "with", "major_occ_code": "in", "major_ind_code": "at",
    "class_worker": "for", "country_self": "born in",
}  # fmt: skip
"""The words before what a sentence says of a column."""

SHORT = {
    "Female": "woman", "Male": "man", "Married-civilian spouse present": "married", "United-States": "", "?": "",
}  # fmt: skip
"""How a sentence calls some categories; it says nothing of one that is empty."""


def load(*, rows: int = 2000) -> VerticalDataset:
    """Sentences about working people, who earns above 50,000 dollars? 2,000 of 148,318 rows, 2 parties.

    The active party has the labels and 4 columns: age, capital gains, capital losses and dividends. The passive party
    has a sentence about each person, such as "never married woman with bachelors degree in sales at retail trade for
    private".

    Args:
        rows: people, drawn at random, always the same ones; fewer are a subset of more.

    Raises:
        UsageError: more rows than there are.
    """
    if not 1 <= rows <= WORKERS:
        raise UsageError(f"expected rows between 1 and {WORKERS}, got {rows}")
    arrays = bundle.read_arrays(TABLE)
    works = np.flatnonzero(
        arrays["major_occ_code"] != list(arrays["major_occ_code.categories"]).index("Not in universe")
    )
    chosen = np.sort(np.random.default_rng(derive(0, NAME, "rows")).permutation(works)[:rows])
    ids = pd.RangeIndex(len(chosen), name="id")
    phrases = [np.array(_list_phrases(column))[arrays[column][chosen]] for column in SENTENCE]
    sentences = pd.Series([" ".join(row) for row in zip(*phrases, strict=True)], ids)
    numbers = pd.DataFrame({name: arrays[name][chosen] for name in ACTIVE}, ids)
    tables = (
        bundle.make_table(NAME, "active", numbers, (), MONEY),
        make_text_table(NAME, "passive_1", sentences, build_tokenizer(), LENGTH),
    )
    labels = pd.Series(arrays["label"][chosen].astype("int64"), ids, name="label")
    return VerticalDataset(NAME, tables, labels, CLASSES, card=bundle.get_card(NAME, FOLDER))


@cache
def build_tokenizer() -> Tokenizer:
    """Return the tokenizer of all words that a sentence can have, which both parties know."""
    return Tokenizer.from_texts(phrase for column in SENTENCE for phrase in _list_phrases(column))


@cache
def _list_phrases(column: str) -> list[str]:
    """Return what a sentence says of each category of a column, without what is in parentheses."""
    names = map(str, bundle.read_arrays(TABLE)[f"{column}.categories"])
    texts = [SHORT.get(name, re.sub(r"\(.*?\)", "", name)) for name in names]
    return [f"{SENTENCE[column]} {text}" if text else "" for text in texts]
