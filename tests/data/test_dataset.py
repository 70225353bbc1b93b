"""The inner join of ids, with answers worked out by hand."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflsec.base.errors import DataError
from vflsec.data.dataset import PartyTable, align


def table(name: str, ids: list) -> PartyTable:
    return PartyTable(name, pd.DataFrame({"x": [float(k) for k in range(len(ids))]}, index=pd.Index(ids)))


def test_keeps_the_ids_of_all_parties_in_sorted_order():
    common = align([table("active", [5, 3, 9, 1]), table("passive_1", [9, 2, 5, 3]), table("passive_2", [3, 9, 4])])
    assert common.tolist() == [3, 9]


def test_text_ids():
    assert align([table("active", ["b", "a"]), table("passive_1", ["a", "c", "b"])]).tolist() == ["a", "b"]


def test_refuses_an_id_twice():
    with pytest.raises(DataError, match="^passive_1: .*got 7 more.*copies$"):
        align([table("active", [7, 8]), table("passive_1", [7, 8, 7])])


def test_refuses_tables_without_a_common_id_and_shows_what_their_ids_look_like():
    with pytest.raises(DataError, match=r"active .*\['007', '8'\], passive_1 .*\['7'\]"):
        align([table("active", ["007", "8"]), table("passive_1", ["7"])])


@given(st.lists(st.lists(st.integers(0, 30), unique=True), min_size=2, max_size=4))
def test_equals_the_intersection_of_sets(held: list[list[int]]):
    tables = [table(f"p{k}", ids) for k, ids in enumerate(held)]
    expected = sorted(set.intersection(*map(set, held)))
    if expected:
        assert align(tables).tolist() == expected
    else:
        with pytest.raises(DataError, match="ids that all parties hold"):
            align(tables)
