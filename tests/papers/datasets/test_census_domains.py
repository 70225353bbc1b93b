"""The task of PrADA on Census-Income: who is in which role, which categories are one, how columns are grouped."""

import numpy as np
import pandas as pd
import pytest

from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.data import bundle, census_income
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.papers.datasets import FOLDER
from vflsec.papers.datasets.census_domains import AGES, MERGED, YEARS, load


@pytest.fixture(scope="module")
def dataset():
    return load()


@pytest.fixture(scope="module")
def raw():
    """Census-income as it is, one table."""
    return pd.concat([party.frame.sort_index() for party in census_income.load().parties], axis=1)


@pytest.fixture(scope="module")
def split(dataset):
    return split_dataset(dataset, DataSpec(), 0)


def test_the_card_is_true(dataset):
    card = bundle.get_card("census-domains", FOLDER)
    assert dataset.card == card
    assert card.sha256 == bundle.get_card("census-income").sha256
    assert card.columns == sum(len(party.frame.columns) for party in dataset.parties)
    roles = dataset.draw(0)
    people = dataset.parties[0].frame.index.append(roles.source)
    assert people.is_unique
    assert len(people) == card.rows
    assert registry.list_all("datasets")["census-domains"].target == "vflsec.papers.datasets.census_domains:load"


def test_people_with_a_postgraduate_degree_are_the_active_partys_and_all_others_the_sources(dataset, raw):
    for table, expected in ((dataset.parties[0], True), (dataset.source, False)):
        degree = raw.loc[table.frame.index, "education"].str.startswith(("Masters", "Prof school", "Doctorate"))
        assert (degree == expected).all()
    assert len(dataset.parties[0].frame) == 9_597 + 4_802  # of the official training and test set
    official = census_income.load().test_ids
    assert not dataset.source.frame.index.isin(official).any()


@pytest.mark.parametrize(("ratio", "positives"), [(0.01, 40), (0.02, 80), (0.04, 160)])
def test_sizes_and_shares_of_each_role(dataset, ratio, positives):
    own, labels = load(ratio=ratio), dataset.labels
    roles = own.draw(3)
    assert len(roles.train) == 4_000
    assert labels[roles.train].sum() == positives
    assert len(roles.source) == 87_180  # the paper's 80,000
    assert labels[roles.source].sum() == 8_718 == labels[own.source.frame.index].sum(), "all positives"
    assert len(roles.adaptation) == 9_597  # the paper's 9,000: all training rows of the target
    left = 5_933 - 4_000  # negatives, and half as many positives
    assert len(roles.val) + len(roles.test) == 4_802 + left + left // 2
    assert abs(len(roles.val) - len(roles.test)) <= 1
    assert labels[roles.test].mean() == pytest.approx(0.365, abs=0.02)


@pytest.mark.parametrize("clean_split", [False, True])
def test_roles_are_disjoint_but_for_rows_that_are_adapted_to(dataset, clean_split):
    official = census_income.load().test_ids
    roles = load(clean_split=clean_split).draw(1)
    apart = [roles.train, roles.unlabeled, roles.val, roles.test, roles.source]
    together = apart[0].append(apart[1:])
    assert together.is_unique
    assert roles.train.append(roles.unlabeled).isin(roles.adaptation).all()
    assert not roles.adaptation.isin(official).any()
    evaluated = roles.val.append(roles.test)
    assert evaluated.isin(official).all() == clean_split
    assert official.intersection(dataset.parties[0].frame.index).isin(evaluated).all()


def test_more_positives_keep_the_fewer_and_no_row_is_trained_on_here_and_evaluated_there():
    few, more = (load(ratio=ratio).draw(2) for ratio in (0.01, 0.04))
    labels = load().labels
    assert few.train[labels[few.train] == 1].isin(more.train).all()
    assert few.test.equals(more.test)
    assert few.source.equals(more.source)
    assert not few.test.isin(more.train).any()


def test_the_seed_drives_the_draw(dataset):
    first, again, other = dataset.draw(0), dataset.draw(0), dataset.draw(1)
    assert all(one.equals(two) for one, two in zip(first, again, strict=True))
    assert not first.train.equals(other.train)
    assert not first.source.equals(other.source)
    assert not first.test.equals(other.test)


def test_the_active_columns_are_numbers_of_the_source_table(dataset, raw):
    frame = dataset.parties[0].frame
    own = raw.loc[frame.index]
    assert list(frame.columns) == ["age", "gender", "education_year", "capital_gain", "capital_loss"]
    assert (frame["gender"] == (own["gender"] == "Male")).all()
    assert set(frame["education_year"]) == {18, 20, 21}
    first = dataset.source.frame.loc[0]  # the first person in UCI's training file
    assert first.to_dict() == {"age": 73, "gender": 0, "education_year": 12, "capital_gain": 0, "capital_loss": 0}
    assert set(YEARS) == set(raw["education"])


VOCABULARY = {  # algorithms of the authors' code: (vocabulary, width); what Census-Income has of the former
    "class_worker": (9, 9, 4), "major_ind_code": (24, 24, 8), "major_occ_code": (15, 14, 6),
    "unemp_reason": (6, 6, 4), "full_or_part_emp": (8, 8, 4), "own_or_self": (3, 3, 2),
    "education": (12, 12, 6), "race": (5, 5, 3), "age_index": (11, 11, 6), "gender_index": (2, 2, 1),
    "marital_stat": (5, 5, 3), "union_member": (3, 3, 2), "vet_benefits": (3, 3, 2), "vet_question": (3, 3, 2),
    "region_prev_res": (6, 6, 4), "state_prev_res": (24, 23, 8), "mig_chg_msa": (19, 9, 6),
    "mig_chg_reg": (19, 9, 6), "mig_move_reg": (19, 10, 6), "mig_same": (4, 3, 3), "mig_prev_sunbelt": (4, 4, 3),
    "hisp_origin": (9, 9, 5), "country_father": (6, 6, 4), "country_mother": (6, 6, 4), "country_self": (6, 6, 4),
    "citizenship": (5, 5, 3),
    "tax_filer_stat": (6, 6, 4), "det_hh_fam_stat": (44, 38, 10), "det_hh_summ": (44, 8, 10),
    "fam_under_18": (5, 5, 3),
}  # fmt: skip


def test_vocabularies_and_widths_are_those_of_the_authors_code(dataset):
    passive = dataset.parties[1]
    assert set(passive.frame.columns) == set(VOCABULARY) == passive.categorical
    for name, (vocabulary, found, width) in VOCABULARY.items():
        assert passive.frame[name].nunique() == found <= vocabulary, name
        assert passive.grouping.embeddings[name] == width


def test_merged_categories_are_one_and_no_other_is(dataset, raw):
    frame = dataset.parties[1].frame
    own = raw.loc[frame.index]
    for name in MERGED:
        pairs = pd.DataFrame({"raw": own[name].astype(str), "new": frame[name].astype(str)}).drop_duplicates()
        assert pairs["raw"].is_unique, "each raw category has one new one"
        together = {new: set(rows["raw"]) for new, rows in pairs.groupby("new") if len(rows) > 1}
        assert sorted(map(sorted, together.values())) == sorted(sorted(text.split(",")) for text in MERGED[name])
    age = own["age"].to_numpy()
    assert (frame["age_index"] == np.sum([age >= threshold for threshold in AGES], axis=0)).all()
    assert (frame["gender_index"] == (own["gender"] == "Male")).all()


def test_groups_pairs_and_their_widths_are_those_of_table_ii(dataset):
    grouping = dataset.parties[1].grouping
    inputs = {g.name: sum(grouping.embeddings[c] for c in g.columns) for g in (*grouping.single, *grouping.pairs)}
    assert inputs == {
        "emp": 28, "demo": 25, "migr": 56, "house": 27, "emp-demo": 53, "emp-migr": 84, "emp-house": 55,
        "demo-migr": 81, "demo-house": 52, "migr-house": 83,
    }  # fmt: skip
    assert sum(grouping.embeddings[c] for c in grouping.whole.columns) == 136
    assert grouping.whole.widths == (150, 60, 20)
    assert {g.name: g.widths for g in grouping.pairs}["emp-migr"] == (120, 84, 20)
    assert sorted(c for g in grouping.single for c in g.columns) == sorted(VOCABULARY), "each column is in one group"


def test_what_each_party_is_given(split):
    passive, source = split.parties["passive_1"].features, split.source.features
    assert len(passive["source"]) == len(source["source"]) == len(split.labels["source"]) == 87_180
    assert "source" not in split.parties["active"].features
    assert len(passive["adaptation"]) == 9_597
    assert [len(own.features["local"]) for own in split.parties.values()] == [0, 0]
    scaled = [(column.name, source["source"][:, column.start]) for column in split.source.layout.columns]
    means = [x[x < x.max()].mean() if name == "capital_gain" else x.mean() for name, x in scaled]
    assert means == pytest.approx(np.zeros(5), abs=1e-4), "scaled by its own rows, of which top codes are clipped"
    assert split.labels["train"].sum() == 160


def test_the_sources_rows_may_be_the_active_partys():
    merged = load(source="merged")
    split = split_dataset(merged, DataSpec(), 0)
    assert merged.source is None is split.source
    assert len(split.labels["train"]) == 91_180
    assert split.labels["train"].sum() == 8_718 + 160
    assert "source" not in split.parties["passive_1"].features
    assert len(split.labels["local"]) == 0, "whom the task leaves out has no part in it"


def test_the_task_says_who_is_in_which_role(dataset):
    with pytest.raises(UsageError, match="but options with census-domains"):
        split_dataset(dataset, DataSpec(n_labeled=100), 0)
    with pytest.raises(UsageError, match="source 'both'.*apart, merged"):
        load(source="both")
    with pytest.raises(UsageError, match=r"0\.00025 and 0\.5, got 0"):
        load(ratio=0)
