"""What a party brings: its own columns alone, of rows that both split alike without a word about labels."""

import numpy as np
import pandas as pd
import pytest

from vflsec.base.errors import DataError, UsageError
from vflsec.companies import party_rows as own
from vflsec.companies.job import JobFile
from vflsec.data.files import PartyFile
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.run.plan import load_dataset

BOTH = JobFile(name="loans", seed=4)


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    ids = [f"k{i}" for i in range(200)]
    bank = pd.DataFrame({"id": ids, "age": rng.integers(20, 70, 200), "bad": rng.choice(["no", "yes"], 200)})
    bureau = pd.DataFrame({"id": ids, "score": rng.normal(size=200), "town": rng.choice(["A", "B"], 200)})
    bank.sample(frac=1, random_state=1).to_csv(tmp_path / "bank.csv", index=False)
    bureau.sample(frac=1, random_state=2).to_csv(tmp_path / "bureau.csv", index=False)
    return tmp_path


def loaded(files, role, job=BOTH):
    if role == "active":
        return own.read_file(files / "bank.csv", job, "active", PartyFile(), key="id", label="bad")
    town = PartyFile(categorical=["town"])
    return own.read_file(files / "bureau.csv", job, "passive", town, key="id", label=None)


def test_both_hold_the_same_rows_in_the_same_order(files):
    here, there = loaded(files, "passive"), loaded(files, "active")
    for split in ("train", "test"):
        assert here.ids[split].equals(there.ids[split])
    assert here.digest == there.digest
    assert len(here.ids["test"]) == 60
    assert here.features["train"].shape == (140, 4)  # a number; two towns, and one for towns never seen
    assert here.labels is None
    assert not here.classes
    assert there.classes == ("no", "yes")


def test_rows_and_labels_stay_together(files):
    found = loaded(files, "active")
    bank = pd.read_csv(files / "bank.csv").set_index("id")
    expected = (bank.loc[found.ids["test"], "bad"] == "yes").to_numpy()
    assert (found.labels["test"] == expected).all()


def test_a_registered_dataset_is_split_as_everywhere_else():
    job = JobFile(name="t", dataset="credit-default", seed=4)
    data = split_dataset(load_dataset("credit-default"), DataSpec(stratify=False), 4)
    for role, party in own.PARTY.items():
        found = own.read_dataset(job, role)
        for split in ("train", "test"):
            assert (found.ids[split].to_numpy() == data.ids[split]).all()
            assert (found.features[split] == data.parties[party].features[split]).all()
    assert (found.labels["test"] == data.labels["test"]).all()


def test_an_official_test_set_is_kept():
    found = own.split(pd.Index(["b", "d", "a", "c"]), BOTH, pd.Index(["c", "b", "of nobody"]))
    assert found["train"].tolist() == ["a", "d"]
    assert found["test"].tolist() == ["b", "c"]


@pytest.mark.parametrize("change", ["drop", "rename", "swap"])
def test_other_rows_have_another_digest(files, change):
    bureau = pd.read_csv(files / "bureau.csv")
    if change == "drop":
        bureau = bureau[1:]
    elif change == "rename":
        bureau.loc[0, "id"] = "k999"
    else:  # the same characters, cut elsewhere
        bureau = bureau.replace({"id": {"k1": "k1k", "k2": "2"}})
    before = loaded(files, "passive").digest
    bureau.to_csv(files / "bureau.csv", index=False)
    assert loaded(files, "passive").digest != before


@pytest.mark.parametrize("role", ["passive", "active"])
@pytest.mark.parametrize(("test", "counts"), [(0.999, "0 and 200"), (0.001, "200 and 0")])
def test_a_split_without_rows_is_refused_on_both_sides(files, role, test, counts):
    with pytest.raises(UsageError, match=f"test = {test}, got {counts} "):
        loaded(files, role, JobFile(name="loans", test=test))


def test_the_seed_decides_the_split(files):
    other = JobFile(name="loans", seed=5)
    assert (
        loaded(files, "passive").digest
        != loaded(files, "passive", other).digest
        == loaded(files, "active", other).digest
    )


def test_what_is_wrong_with_a_file_is_said(files):
    for said, call in {
        "label, got .*'default'": {"key": "id", "label": "default"},
        "id, got .*'key'": {"key": "key", "label": "bad"},
    }.items():
        with pytest.raises(DataError, match=said):
            own.read_file(files / "bank.csv", BOTH, "active", PartyFile(), **call)
    with pytest.raises(DataError, match="expected a file"):
        own.read_file(files / "none.csv", BOTH, "active", PartyFile(), key="id", label="bad")
    with pytest.raises(DataError, match="got a folder"):
        own.read_file(files, BOTH, "active", PartyFile(), key="id", label="bad")
    bank = pd.read_csv(files / "bank.csv")
    bank["bad"] = ["yes", *["no"] * 199]
    bank.to_csv(files / "bank.csv", index=False)
    with pytest.raises(DataError, match="expected every class among"):
        loaded(files, "active")


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        ("none.csv", {}, r"none\.csv, found none;"),
        ("bank.csv", {"columns": ["id"]}, "^--columns: .*the id 'id'"),
        ("bank.csv", {"signed_log": ["agee"]}, "^--signed-log: .*'agee'.*mean age"),
        ("bureau.csv", {}, r"'[AB]'.*--categorical \(and 199 more rows\)$"),
        ("same.csv", {}, r"got 1\.0 only.*--columns$"),
        ("latin.csv", {}, "utf-8 text.*0xe9.*UTF-8$"),
    ],
)
def test_errors_of_a_file_from_the_command_line_say_nothing_of_toml(files, file, options, said):
    (files / "same.csv").write_text("id,a\n1,1\n2,1\n")
    (files / "latin.csv").write_bytes(b"id,a\n1,\xe9\n")
    with pytest.raises(DataError, match=said) as error:
        own.read_file(files / file, BOTH, "passive", PartyFile(**options), key="id", label=None)
    assert not any(word in str(error.value) for word in ("TOML", "parties.", "[...]"))
