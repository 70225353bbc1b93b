"""Drafts of descriptions: they load as they are, and guess what a person would."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from vflsec.base.errors import DataError, UsageError
from vflsec.data.draft import draft
from vflsec.data.files import load_toml


def drafted(folder: Path, *files: str, **given) -> dict:
    text = draft([folder / name for name in files], folder, **given)
    (folder / "data.toml").write_text(text, "utf-8")
    return tomllib.loads(text)


@pytest.mark.long
def test_a_draft_of_dirty_files_loads_as_it_is(tmp_path: Path, dirty: Path):
    for name in ("bank.csv", "bureau.csv"):
        (tmp_path / name).symlink_to(dirty / name)
    found = drafted(tmp_path, "bureau.csv", "bank.csv")
    assert (found["label"], found["id"], found["active"]) == ("defaulted", "customer", "bank")
    bank, bureau = found["parties"]["bank"], found["parties"]["bureau"]
    assert bank == {
        "file": "bank.csv",
        "thousands": ",",
        "date_format": "%d.%m.%Y",
        "categorical": ["job"],
        "dates": ["opened"],
        "signed_log": ["income"],
        "impute": "mean",
    }
    assert bureau == {
        "file": "bureau.csv",
        "signed_log": ["debt"],
        "group_rare": {"merchant": 100},
        "impute": "mean",
    }
    dataset = load_toml(tmp_path / "data.toml")
    assert dataset.names == {"active": "bank", "passive_1": "bureau"}
    assert set(dataset.parties[0].frame["owner"]) == {0, 1}


def table(folder: Path, file: str, **columns) -> None:
    pd.DataFrame(columns).to_csv(folder / file, index=False)


def test_columns_without_use_are_dropped_and_codes_are_categories(tmp_path: Path):
    rng = np.random.default_rng(0)
    n = 400
    ids = np.arange(n)
    table(
        tmp_path, "a.csv", id=ids, y=ids % 2, constant=1, name=[f"person {k}" for k in ids], zip=rng.integers(0, 9, n)
    )
    table(tmp_path, "b.csv", id=ids, x=rng.normal(size=n), gone=[""] * n, spend=np.exp(rng.normal(6, 2, n)).round(1))
    found = drafted(tmp_path, "a.csv", "b.csv")
    assert found["parties"]["a"] == {"file": "a.csv", "drop": ["constant", "name"], "categorical": ["zip"]}
    assert found["parties"]["b"] == {"file": "b.csv", "drop": ["gone"], "signed_log": ["spend"]}
    assert [list(party.frame.columns) for party in load_toml(tmp_path / "data.toml").parties] == [
        ["zip"],
        ["x", "spend"],
    ]


def test_separators_encodings_keys_and_paths_are_found(tmp_path: Path):
    n = 60
    keys = {"branch": np.arange(n) // 10, "account": np.arange(n) % 10}
    first = pd.DataFrame({**keys, "größe": np.linspace(1, 2, n), "y": np.arange(n) % 3 == 0})
    first.to_csv(tmp_path / "a b.csv", index=False, sep=";", encoding="latin-1", decimal=",")
    (tmp_path / "sub").mkdir()
    pd.DataFrame({**keys, "b": np.arange(n) % 7}).to_parquet(tmp_path / "sub" / "2.parquet")
    found = drafted(tmp_path, "a b.csv", "sub/2.parquet")
    assert found["id"] == ["branch", "account"]
    assert found["parties"]["a_b"] == {"file": "a b.csv", "encoding": "latin-1", "separator": ";", "decimal": ","}
    assert found["parties"]["party_2"] == {"file": "sub/2.parquet"}
    assert load_toml(tmp_path / "data.toml").parties[0].frame["größe"].iloc[-1] == 2.0


@pytest.mark.sampled
@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "dot.ted", "line\nbreak", "#hash", "ümlaut", " "])
def test_odd_names_of_columns_stay_valid_toml(tmp_path: Path, name: str):
    n = 40
    pd.DataFrame({"id": range(n), "y": np.arange(n) % 2, name: ["u\nv", "w"] * 20}).to_csv(
        tmp_path / "a.csv", index=False
    )
    pd.DataFrame({"id": range(n), "b": np.arange(n) % 5}).to_csv(tmp_path / "b.csv", index=False)
    assert drafted(tmp_path, "a.csv", "b.csv")["parties"]["a"]["categorical"] == [name]
    assert load_toml(tmp_path / "data.toml").parties[0].frame[name].nunique() == 2


def test_what_cannot_be_guessed_is_asked_for(tmp_path: Path):
    n = 40
    table(tmp_path, "a.csv", id=range(n), p=[0, 1] * 20, q=[0, 1] * 20, r=range(n))
    table(tmp_path, "b.csv", id=range(n), s=range(n))
    table(tmp_path, "c.csv", who=range(n), p=range(n))
    with pytest.raises(DataError, match="--label COLUMN; .*values are p"):
        drafted(tmp_path, "a.csv", "b.csv")
    assert drafted(tmp_path, "a.csv", "b.csv", label="q")["label"] == "q"
    with pytest.raises(DataError, match="all files have .*found p"):
        drafted(tmp_path, "a.csv", "c.csv", label="q")
    with pytest.raises(UsageError, match="label 'p', .*a.csv and c.csv"):
        drafted(tmp_path, "a.csv", "c.csv", label="p", keys=[["p"]])
    with pytest.raises(UsageError, match=r"--id: .*'idd'.*mean id\?.*in a\.csv"):
        drafted(tmp_path, "a.csv", "b.csv", label="p", keys=[["idd"]])
    with pytest.raises(UsageError, match="two parties .*got 1"):
        drafted(tmp_path, "a.csv", label="p")


def test_ids_of_different_names_are_found_by_their_values(tmp_path: Path):
    rng = np.random.default_rng(0)
    ids = rng.permutation(80)
    table(tmp_path, "a.csv", id=ids, age=rng.permutation(80) + 1000, y=ids % 2)
    table(
        tmp_path, "b.csv", rank=rng.permutation(80) + 5000, patient=rng.permutation(80), x=rng.normal(size=80).round(2)
    )
    for keys in ((), [["id"], ["patient"]]):
        made = drafted(tmp_path, "a.csv", "b.csv", keys=keys)
        assert "id" not in made
        assert [party["id"] for party in made["parties"].values()] == ["id", "patient"]
        assert len(load_toml(tmp_path / "data.toml").labels) == 80
    with pytest.raises(UsageError, match="--id once, or once for each of 2 files, got 3"):
        drafted(tmp_path, "a.csv", "b.csv", keys=[["id"]] * 3)


def test_dates_of_one_file_may_be_written_in_several_ways(tmp_path: Path):
    days = pd.to_datetime("2020-01-01") + pd.to_timedelta(np.arange(80), unit="D")
    table(tmp_path, "a.csv", id=range(80), x=range(80), y=np.arange(80) % 2)
    opened, closed = days.strftime("%d.%m.%Y"), days.strftime("%Y-%m-%d")
    table(tmp_path, "b.csv", id=range(80), opened=opened, closed=closed)
    made = drafted(tmp_path, "a.csv", "b.csv", label="y")
    assert made["parties"]["b"]["dates"] == {"opened": "%d.%m.%Y", "closed": ""}
    frame = load_toml(tmp_path / "data.toml").parties[1].frame
    assert (frame["opened"] == frame["closed"]).all()


def test_ids_of_other_names_are_matched_behind_many_columns(tmp_path: Path):
    rng, n = np.random.default_rng(0), 60
    bank = pd.DataFrame(rng.normal(size=(n, 15)), columns=[f"a{k}" for k in range(15)])
    bank.assign(customer=[f"c{k}" for k in range(n)], y=np.arange(n) % 2).to_csv(tmp_path / "a.csv", index=False)
    clinic = pd.DataFrame(rng.normal(size=(n, 15)), columns=[f"b{k}" for k in range(15)])
    clinic.assign(patient=[f"c{k}" for k in rng.permutation(n)]).to_csv(tmp_path / "b.csv", index=False)
    parties = drafted(tmp_path, "a.csv", "b.csv")["parties"]
    assert [parties["a"]["id"], parties["b"]["id"]] == ["customer", "patient"]
