"""Properties of the split: disjoint, complete, nested, stratified, and no held-out row in any statistic."""

from dataclasses import replace

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.base.errors import DataError, UsageError
from vflsec.data.dataset import PartyTable, Roles, VerticalDataset
from vflsec.data.partition import DataSpec, split_dataset

ROWS = 300


def world(
    *, parties: int = 3, official: bool = False, rows: int = ROWS, extra: int = 0, every: int = 5
) -> VerticalDataset:
    """Each party's one column is the row's id, so that features tell whose rows they are.

    One row in ``every`` is positive. The last party also holds ``extra`` rows that no one else has.
    """
    rng = np.random.default_rng(5)
    tables = []
    for k in range(parties):
        ids = rng.permutation(rows + (extra if k == parties - 1 else 0))
        name = f"passive_{k}" if k else "active"
        tables.append(PartyTable(name, pd.DataFrame({"id": ids.astype(float)}, index=pd.Index(ids))))
    labels = pd.Series((np.arange(rows) % every == 0).astype(int), index=pd.RangeIndex(rows))
    test_ids = pd.Index(range(rows - 60, rows + extra // 2)) if official else None
    return VerticalDataset("world", tuple(tables), labels, ("no", "yes"), test_ids)


specs = st.builds(
    DataSpec,
    n_labeled=st.none() | st.integers(30, 60),
    aligned=st.sampled_from([0.5, 0.8, 1.0]),
    overlap=st.sampled_from([0.6, 0.9, 1.0]),
    test=st.sampled_from([0.1, 0.3]),
    validation=st.sampled_from([0.0, 0.2]),
    stratify=st.just(True),
)
quick = settings(max_examples=40)


@quick
@given(spec=specs, seed=st.integers(0, 2**31))
def test_places_say_which_aligned_rows_are_training_rows(spec: DataSpec, seed: int):
    split = split_dataset(world(), spec, seed)
    assert (split.ids["aligned"][split.places["aligned"]] == split.ids["train"]).all()


@quick
@given(spec=specs, seed=st.integers(0, 2**31), official=st.booleans())
def test_splits_are_disjoint_and_complete(spec: DataSpec, seed: int, official: bool):
    split = split_dataset(world(official=official, extra=20), spec, seed)
    shared = np.concatenate([ids for name, ids in split.ids.items() if name != "aligned"])
    assert len(shared) == len(set(shared))
    assert set(split.ids["aligned"]) == set(shared) - set(split.ids["test"])
    local = [set(own.local_ids) for own in split.parties.values()]
    assert all(rows.isdisjoint(shared) for rows in local)
    dropped = set(range(300, 310)) if official else set()  # official test rows that not all parties hold
    assert set(shared).union(*local) == set(range(320)) - dropped


@quick
@given(spec=specs, seed=st.integers(0, 2**31))
def test_the_number_of_rows_is_what_the_spec_asks_for(spec: DataSpec, seed: int):
    split = split_dataset(world(), spec, seed)
    pool = ROWS - round(spec.test * ROWS)
    held = round(spec.overlap * pool)
    aligned = round(spec.aligned * held)
    labeled = aligned if spec.n_labeled is None else spec.n_labeled
    train = round((1 - spec.validation) * labeled)
    assert {name: len(ids) for name, ids in split.ids.items()} == {
        "train": train,
        "val": labeled - train,
        "unlabeled": aligned - labeled,
        "aligned": aligned,
        "test": ROWS - pool,
    }
    local = [set(own.local_ids) for own in split.parties.values()]
    assert len(set.intersection(*local)) == held - aligned
    dealt = [rows - set.intersection(*local) for rows in local]
    assert sum(map(len, dealt)) == len(set.union(*dealt)) == pool - held
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.long
@quick
@given(
    seed=st.integers(0, 2**31),
    field=st.sampled_from(["n_labeled", "aligned", "overlap"]),
    spec=specs,
    stratify=st.booleans(),
)
def test_less_is_a_subset_of_more_and_the_test_rows_stay(seed: int, field: str, spec: DataSpec, stratify: bool):
    small, large = {"n_labeled": (40, 55), "aligned": (0.5, 0.9), "overlap": (0.6, 0.95)}[field]
    if field != "n_labeled":
        spec = msgspec.structs.replace(spec, n_labeled=None)
    less, more = (
        split_dataset(world(every=2), msgspec.structs.replace(spec, stratify=stratify, **{field: value}), seed)
        for value in (small, large)
    )
    assert set(less.ids["train"]) < set(more.ids["train"])
    np.testing.assert_array_equal(less.ids["test"], more.ids["test"])
    labeled_less, labeled_more = (set(p.ids["train"]) | set(p.ids["val"]) for p in (less, more))
    assert labeled_less < labeled_more
    if field == "overlap":
        for name, own in more.parties.items():
            dealt_more = set(own.local_ids) - set.intersection(*(set(p.local_ids) for p in more.parties.values()))
            assert dealt_more <= set(less.parties[name].local_ids)


@quick
@given(spec=specs, seed=st.integers(0, 2**31), official=st.booleans())
def test_statistics_come_from_training_rows_only(spec: DataSpec, seed: int, official: bool):
    split = split_dataset(world(official=official, extra=20), spec, seed)
    for own in split.parties.values():
        fit = np.concatenate([split.ids["aligned"], own.local_ids])
        for rows, ids in {**split.ids, "local": own.local_ids}.items():
            expected = (ids - fit.mean()) / fit.std()
            np.testing.assert_allclose(own.features[rows][:, 0], expected, rtol=1e-4, atol=1e-5)


def test_changing_held_out_values_changes_no_training_feature():
    dataset, spec = world(), DataSpec(validation=0.2, n_labeled=100)
    split = split_dataset(dataset, spec, 0)
    held_out = split.ids["test"]
    table = dataset.parties[0]
    changed = table.frame.copy()
    changed.loc[held_out] = 1e9
    parties = (PartyTable("active", changed), *dataset.parties[1:])
    other = split_dataset(VerticalDataset("world", parties, dataset.labels, dataset.classes), spec, 0)
    for rows in ("train", "unlabeled", "aligned", "local"):
        np.testing.assert_array_equal(split.parties["active"].features[rows], other.parties["active"].features[rows])
    assert not np.array_equal(split.parties["active"].features["test"], other.parties["active"].features["test"])


def test_labels_and_features_follow_the_ids_at_every_party():
    split = split_dataset(world(), DataSpec(n_labeled=80, validation=0.25, aligned=0.9), 3)
    assert set(split.labels) == {"train", "val", "test", "local"}  # none for the rows whose label is not used
    assert len(split.labels["local"]) == 0
    for rows in ("train", "val", "test"):
        labels = split.labels[rows]
        np.testing.assert_array_equal(labels, split.ids[rows] % 5 == 0)
        assert labels.dtype == np.int64
    for rows, ids in split.ids.items():
        assert (np.diff(ids) > 0).all()
        for own in split.parties.values():
            assert (np.diff(own.features[rows][:, 0]) > 0).all()


def test_all_labels_of_the_active_party_are_there_where_labels_are_not_scarce():
    split = split_dataset(world(), DataSpec(aligned=0.5, overlap=0.8), 3)
    np.testing.assert_array_equal(split.labels["local"], split.parties["active"].local_ids % 5 == 0)


def test_what_pre_training_reads_does_not_depend_on_the_label_budget():
    few, many = (
        split_dataset(world(), DataSpec(n_labeled=n, validation=v, overlap=0.8), 3) for n, v in ((40, 0), (90, 0.2))
    )
    for name, own in few.parties.items():
        for rows in ("aligned", "local", "test"):
            np.testing.assert_array_equal(own.features[rows], many.parties[name].features[rows])


@pytest.mark.parametrize("official", [False, True])
def test_every_split_keeps_the_class_shares(official):
    split = split_dataset(world(official=official), DataSpec(n_labeled=100, validation=0.2), 1)
    assert [split.labels[rows].mean() for rows in ("train", "val", "test")] == [0.2, 0.2, 0.2]


def test_without_stratify_the_shares_vary_from_seed_to_seed():
    positives = {split_dataset(world(), DataSpec(stratify=False), seed).labels["test"].sum() for seed in range(8)}
    assert len(positives) > 1
    assert {split_dataset(world(), DataSpec(), seed).labels["test"].sum() for seed in range(8)} == {18}


def test_the_seed_decides_the_draw_and_the_row_order_of_the_files_does_not():
    dataset = world()
    first, again, other = (split_dataset(dataset, DataSpec(), seed) for seed in (1, 1, 2))
    assert first.ids["test"].tolist() == again.ids["test"].tolist() != other.ids["test"].tolist()
    reordered = tuple(PartyTable(t.name, t.frame[::-1]) for t in dataset.parties)
    shuffled = split_dataset(VerticalDataset("world", reordered, dataset.labels, dataset.classes), DataSpec(), 1)
    assert first.ids["test"].tolist() == shuffled.ids["test"].tolist()


def test_local_rows_keep_the_order_of_the_party():
    dataset = world(parties=2, extra=30)
    split = split_dataset(dataset, DataSpec(aligned=0.5), 0)
    for table in dataset.parties:
        local = split.parties[table.name].local_ids
        assert local.tolist() == [row for row in table.frame.index if row in set(local)]
        assert (np.diff(local) < 0).any()


def test_an_official_test_set_is_taken_whole_whatever_the_test_fraction():
    for fraction in (0.1, 0.5):
        assert split_dataset(world(official=True), DataSpec(test=fraction), 0).ids["test"].tolist() == list(
            range(240, 300)
        )


def test_a_dataset_declares_its_headline():
    declared = replace(world(), headline="f1")
    assert split_dataset(declared, DataSpec(), 0).metric == "f1"
    assert split_dataset(declared, DataSpec(columns="even", parties=2), 0).metric == "f1"
    with pytest.raises(DataError, match="expected two classes for f1, got 3"):
        replace(declared, classes=("a", "b", "c"))


def test_the_metric_and_the_parties_are_passed_on():
    split = split_dataset(world(), DataSpec(), 0)
    assert (split.dataset, split.metric, split.classes) == ("world", "auc", ("no", "yes"))
    assert list(split.parties) == ["active", "passive_1", "passive_2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_labeled": 0}, "expected data.n_labeled > 0, got 0"),
        ({"aligned": 0}, "expected 0 < data.aligned <= 1, got 0"),
        ({"overlap": 1.5}, r".*data.overlap .*got 1\.5"),
        ({"test": 0}, "expected 0 < data.test < 1, got 0"),
        ({"test": 1}, "expected 0 < data.test < 1, got 1"),
        ({"test": float("nan")}, "expected 0 < data.test < 1, got nan"),
        ({"validation": 1}, "expected 0 <= data.validation < 1, got 1"),
        ({"validation": -0.1}, r"expected 0 <= data.validation < 1, got -0\.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        DataSpec(**settings)


def test_more_labels_than_aligned_rows_are_refused():
    with pytest.raises(UsageError, match="n_labeled <= 105.*got 106"):
        split_dataset(world(), DataSpec(n_labeled=106, aligned=0.5), 0)


def test_a_class_without_training_row_is_refused():
    with pytest.raises(DataError, match="1 train rows.*'(no|yes)'.*n_labeled"):
        split_dataset(world(), DataSpec(n_labeled=1), 1)


def test_a_class_without_test_row_is_refused():
    dataset = world(rows=10)
    with pytest.raises(DataError, match="1 test rows.*'(no|yes)'.*raise test"):
        split_dataset(dataset, DataSpec(test=0.1), 0)


def test_datasets_that_cannot_be_split_are_refused():
    dataset = world()
    with pytest.raises(DataError, match=r"\['active', 'passive_1'\], got \['active'\]"):
        VerticalDataset("one", dataset.parties[:1], dataset.labels, dataset.classes)
    with pytest.raises(DataError, match=r"expected parties .*, got \['passive_1', 'active'\]"):
        VerticalDataset("swapped", dataset.parties[1::-1], dataset.labels, dataset.classes)
    with pytest.raises(DataError, match=r"two classes, got \['no'\]"):
        VerticalDataset("bored", dataset.parties, dataset.labels, ("no",))
    with pytest.raises(DataError, match="active, got none for 10"):
        VerticalDataset("bare", dataset.parties, dataset.labels[10:], dataset.classes)


# A source: another active party with people of its own


def with_source(*, common: int = 0, columns: str = "id", **changes) -> VerticalDataset:
    """``world()`` with 40 rows of a source, of which the last passive party holds all and the first all but 10."""
    dataset = world(extra=40)
    active, first, last = dataset.parties
    ids = pd.Index(range(ROWS - common, ROWS + 40))
    held = pd.DataFrame({"id": ids[common:-10].astype(float)}, index=ids[common:-10])
    source = PartyTable("source", pd.DataFrame({columns: ids.astype(float)}, index=ids))
    parties = (active, PartyTable(first.name, pd.concat([first.frame, held])), last)
    labels = pd.Series((np.arange(ROWS + 40) % 5 == 0).astype(int), index=pd.RangeIndex(ROWS + 40))
    return VerticalDataset("world", parties, labels, ("no", "yes"), source=source, **changes)


@pytest.mark.parametrize("aligned", [1.0, 0.5])
def test_rows_of_a_source_are_in_no_other_role(aligned):
    split = split_dataset(with_source(), DataSpec(aligned=aligned), 0)
    assert split.ids["source"].tolist() == list(range(ROWS, ROWS + 30)), "those that all passive parties hold"
    shared = np.concatenate([ids for name, ids in split.ids.items() if name not in ("aligned", "adaptation", "source")])
    local = np.concatenate([own.local_ids for own in split.parties.values()])
    assert not np.isin(split.ids["source"], np.concatenate([shared, local])).any()
    assert np.concatenate([shared, local]).max() < ROWS
    assert np.array_equal(split.ids["adaptation"], split.ids["aligned"])
    assert split.labels["source"].tolist() == [int(k % 5 == 0) for k in split.ids["source"]]


def test_rows_of_a_source_are_the_same_people_at_every_party():
    """Each scaled by its holder's own rows: the same order is the same rank."""
    split = split_dataset(with_source(), DataSpec(), 0)
    assert set(split.source.features) == {"source"}
    assert "source" not in split.parties["active"].features
    for own in (split.source, split.parties["passive_1"], split.parties["passive_2"]):
        assert np.all(np.diff(own.features["source"][:, 0]) > 0)
    assert split.source.features["source"].mean() == pytest.approx(0, abs=1e-6), "by the source's own statistics"
    assert len(split.parties["passive_1"].features["adaptation"]) == len(split.ids["aligned"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"common": 3}, "source and active .*got 3"),
        ({"columns": "age"}, r"\['id'\] of active, got \['age'\]"),
    ],
)
def test_a_source_that_is_none_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        with_source(**changes)


def test_a_dataset_may_say_itself_who_is_in_which_role():
    ids = pd.Index(range(ROWS))
    roles = Roles(ids[200:], ids[:50], ids[50:90], ids[90:200], ids[:10], pd.Index(range(ROWS, ROWS + 20)))
    dataset = with_source(draw=lambda seed: roles)
    split = split_dataset(dataset, DataSpec(), 7)
    assert {name: len(found) for name, found in split.ids.items()} == {
        "train": 100, "unlabeled": 50, "val": 40, "test": 110, "aligned": 190, "adaptation": 10, "source": 20,
    }  # fmt: skip
    assert all(len(own.local_ids) == 0 for own in split.parties.values())
    assert sorted(split.ids["aligned"]) == [*range(90), *range(200, 300)]
    with pytest.raises(UsageError, match="but options with world"):
        split_dataset(dataset, DataSpec(validation=0.1), 7)


def test_a_row_is_in_the_same_group_with_each_seed():
    """So that what two seeds have in common can be measured; splits of one seed share no row, but do share groups."""
    data = world()
    by_seed = [split_dataset(data, DataSpec(n_labeled=40), seed) for seed in (0, 1)]
    first, second = (
        {pair for split in ("train", "test") for pair in zip(own.ids[split], own.groups[split], strict=True)}
        for own in by_seed
    )
    common = {row for row, _ in first} & {row for row, _ in second}
    assert len(common) > 20
    assert len(first & second) == len(common)
