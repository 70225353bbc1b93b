"""Columns that are dealt again: nobody loses or shares one, sizes and correlations are as the split promises."""

import numpy as np
import pandas as pd
import pytest

import vflsec
from vflsec.base.errors import UsageError
from vflsec.data.columns_split import correlate, deal_again
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.papers.datasets.fashion_mnist import PACKAGE_FOLDER

WAYS = ("even", "random", "dirichlet", "together", "apart")
N = 400


@pytest.fixture(scope="module")
def pairs():
    """Six pairs of columns, nearly equal within a pair and independent of the others; one is a category."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(N, 6))
    columns = {f"{name}{j}": hidden[:, j] + 0.05 * rng.normal(size=N) for j in range(6) for name in "ab"}
    frame = pd.DataFrame(columns).assign(town=np.where(hidden[:, 0] > 0, "x", "y"))
    own = frame.iloc[:, ::2].assign(y=(hidden[:, 1] > 0).astype(int))
    return vflsec.dataset(
        active={"bank": own}, passive={"bureau": frame.iloc[:, 1::2]}, label="y", categorical=["town"], name="pairs"
    )


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("parties", [None, 2, 3, 13])
def test_every_column_has_one_owner_and_keeps_its_role(pairs, how, parties):
    before = {name: table for table in pairs.parties for name in table.frame}
    for seed in range(3):
        dealt = deal_again(pairs, how, parties, 0.3, seed)
        assert [party.name for party in dealt.parties] == ["active", *(f"passive_{k}" for k in range(1, parties or 2))]
        owned = [name for party in dealt.parties for name in party.frame]
        assert sorted(owned) == sorted(before)
        for party in dealt.parties:
            assert len(party.frame.columns)
            for name in party.frame:
                assert (name in party.categorical) == (name in before[name].categorical)
                pd.testing.assert_series_equal(party.frame[name], before[name].frame[name].loc[party.frame.index])
        assert dealt.labels.equals(pairs.labels.loc[dealt.parties[0].frame.index])


@pytest.mark.parametrize("how", ["even", "random", "together", "apart"])
def test_parties_hold_equally_many(pairs, how):
    sizes = [len(party.frame.columns) for party in deal_again(pairs, how, 5, 1.0, 0).parties]
    assert max(sizes) - min(sizes) <= 1


def test_a_random_split_differs_by_seed_and_repeats(pairs):
    columns = [tuple(deal_again(pairs, "random", 2, 1.0, seed).parties[0].frame) for seed in (0, 0, 1, 2)]
    assert columns[0] == columns[1]
    assert len(set(columns)) == 3


def test_a_small_concentration_gives_one_party_most(pairs):
    def largest(concentration):
        return np.mean([
            max(len(party.frame.columns) for party in deal_again(pairs, "dirichlet", 3, concentration, seed).parties)
            for seed in range(40)
        ])  # fmt: skip

    assert largest(0.05) > 9.5  # of 13, two of which the others need
    assert largest(1000.0) < 7


def test_correlated_columns_are_together_or_apart(pairs):
    def between(how):
        parties = deal_again(pairs, how, 2, 1.0, 0).parties
        joined = pd.concat([party.frame for party in parties], axis=1)
        one = len(parties[0].frame.columns)
        categorical = frozenset().union(*(party.categorical for party in parties))
        table = type(parties[0])("active", joined, categorical)
        return np.abs(correlate(table)[:one, one:]).mean()

    assert between("together") < between("random") < between("apart")


def test_one_name_of_two_parties_is_preceded_by_the_party():
    bank = pd.DataFrame({"age": np.arange(N) * 1.0, "y": np.arange(N) % 2})
    data = vflsec.dataset(active={"bank": bank}, passive={"bureau": bank[["age"]] * 2}, label="y")
    dealt = deal_again(data, "even", 2, 1.0, 0)
    assert [list(party.frame) for party in dealt.parties] == [["bank.age"], ["bureau.age"]]


def test_a_name_with_the_party_in_front_may_be_taken():
    rng = np.random.default_rng(0)
    bank = pd.DataFrame({"x": rng.normal(size=N), "bureau.x": rng.normal(size=N), "y": np.arange(N) % 2})
    data = vflsec.dataset(active={"bank": bank}, passive={"bureau": bank[["x"]] * 2}, label="y")
    dealt = deal_again(data, "even", 3, 1.0, 0)
    assert [list(party.frame) for party in dealt.parties] == [["bank.x"], ["bureau.x"], ["bureau.bureau.x"]]


def test_the_split_is_a_setting_of_the_data(pairs):
    split = split_dataset(pairs, DataSpec(columns="even", parties=4), 0)
    assert list(split.parties) == ["active", "passive_1", "passive_2", "passive_3"]
    given = split_dataset(pairs, DataSpec(), 0)
    assert (split.labels["test"] == given.labels["test"]).all()


def test_the_overlap_may_be_a_number_of_rows(pairs):
    split = split_dataset(pairs, DataSpec(overlap=100, aligned=60, n_labeled=20), 0)
    assert len(split.labels["train"]) == 20
    assert len(split.parties["active"].features["aligned"]) == 60
    same = split_dataset(pairs, DataSpec(overlap=100 / 280, aligned=0.6, n_labeled=20), 0)
    assert (split.ids["aligned"] == same.ids["aligned"]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": "even", "parties": 14}, "to the 13 columns.*got 14"),
        ({"columns": "even", "parties": 1}, "from 2 to"),
        ({"overlap": 5000}, "at most the 280 rows"),
    ],
)
def test_what_no_split_can_be(pairs, settings, message):
    with pytest.raises(UsageError, match=message):
        split_dataset(pairs, DataSpec(**settings), 0)


@pytest.mark.parametrize("settings", [{"parties": 3}, {"concentration": 0.0}, {"overlap": 1.5}, {"aligned": 0}])
def test_settings_that_contradict_each_other(settings):
    with pytest.raises(UsageError):
        DataSpec(**settings)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fashion-mnist", "census-domains"])
def test_columns_that_belong_together_are_not_dealt_again(name):
    if name == "fashion-mnist" and not PACKAGE_FOLDER.is_dir():
        pytest.skip("needs apt install dataset-fashion-mnist")
    data = vflsec.load_dataset(name)
    with pytest.raises(UsageError, match=r"plain tables .*data\.columns=even"):
        split_dataset(data, DataSpec(columns="even"), 0)
