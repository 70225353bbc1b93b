"""Columns of a user's files: gaps, dates, booleans, ways to write numbers, many categories, names and keys."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from vflsec.base.errors import DataError
from vflsec.data.dataset import PartyTable
from vflsec.data.encode import ColumnEncoder
from vflsec.data.files import load_toml, read_all
from vflsec.data.partition import DataSpec, split_dataset

BANK = """\
customer,age,opened,owner,defaulted
c1,20,2020-01-31,True,no
c2,,2021-06-01,false,yes
c3,40,2020-02-29,TRUE,no
c4,50,2022-12-24,False,yes
"""
BUREAU = "customer,score,shop\nc1,1,a\nc2,2,b\nc3,3,a\nc4,5,c\n"
TOML = """\
label = "defaulted"
id = "customer"
[parties.bank]
file = "bank.csv"
impute = "mean"
dates = ["opened"]
[parties.bureau]
file = "bureau.csv"
categorical = ["shop"]
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "bank.csv").write_text(BANK, "utf-8")
    (tmp_path / "bureau.csv").write_text(BUREAU, "utf-8")
    (tmp_path / "mine.toml").write_text(TOML, "utf-8")
    return tmp_path / "mine.toml"


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


def message(toml: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_toml(toml)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_dates_become_days_and_parts_and_true_and_false_become_one_and_zero(toml: Path):
    bank = load_toml(toml).parties[0]
    assert list(bank.frame.columns) == ["age", "opened", "opened.month", "opened.weekday", "owner"]
    assert bank.frame["opened"].tolist() == [18292, 18779, 18321, 19350]  # days since 1970
    assert bank.frame["opened.month"].tolist() == ["01", "06", "02", "12"]
    assert bank.frame["opened.weekday"].tolist() == ["Fri", "Tue", "Sat", "Sat"]
    assert bank.frame["owner"].tolist() == [1, 0, 1, 0]
    assert bank.categorical == {"opened.month", "opened.weekday"}


def test_dates_with_times_have_an_hour_and_may_be_written_otherwise(toml: Path):
    text = BANK
    for old, new in {"2020-01-31": "31.01.2020 06:00", "2021-06-01": "01.06.2021 18:00", "2020-02-29": "",
                     "2022-12-24": "24.12.2022 06:00"}.items():  # fmt: skip
        text = text.replace(old, new)
    toml.with_name("bank.csv").write_text(text, "utf-8")
    edit(toml, ('dates = ["opened"]', 'dates = ["opened"]\ndate_format = "%d.%m.%Y %H:%M"'))
    frame = load_toml(toml).parties[0].frame
    np.testing.assert_array_equal(frame["opened"], [18292.25, 18779.75, np.nan, 19350.25])
    assert frame["opened.hour"].tolist() == ["06", "18", "(missing)", "06"]


def test_dates_of_a_parquet_file_equal_those_of_a_csv(toml: Path):
    before = load_toml(toml).parties[0].frame
    frame = pd.read_csv(toml.with_name("bank.csv"))
    frame["opened"] = pd.to_datetime(frame["opened"]).dt.tz_localize("UTC")
    frame.to_parquet(toml.with_name("bank.parquet"))
    edit(toml, ("bank.csv", "bank.parquet"))
    pd.testing.assert_frame_equal(load_toml(toml).parties[0].frame, before)


@pytest.mark.parametrize("strategy", ["mean", "median", "mode"])
def test_gaps_are_filled_by_training_rows_as_scikit_learn_does(strategy: str):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 5, (60, 2)).astype(float)
    values[rng.random((60, 2)) < 0.3] = np.nan
    frame = pd.DataFrame(values, columns=["a", "b"])
    encode = ColumnEncoder(PartyTable("active", frame, impute=strategy), frame[:40])
    named = "most_frequent" if strategy == "mode" else strategy
    imputer = SimpleImputer(strategy=named, add_indicator=True).fit(values[:40])
    expected = StandardScaler().fit(imputer.transform(values[:40])).transform(imputer.transform(values))
    assert [column.name for column in encode.layout.columns] == ["a", "a (missing)", "b", "b (missing)"]
    np.testing.assert_allclose(encode(frame), expected[:, [0, 2, 1, 3]], atol=1e-5)


def test_nothing_is_fitted_on_test_rows(toml: Path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "c": pd.Categorical(rng.choice(list("abcdef"), 60))})
    frame.loc[rng.random(60) < 0.3, "a"] = np.nan
    table = PartyTable("active", frame, frozenset(["c"]), impute="median", rare={"c": 3})
    changed = frame.copy()
    changed.loc[40:, "a"], changed.loc[40:, "c"] = 1e6, "a"
    before, after = (ColumnEncoder(table, one[:40])(one[:40]) for one in (frame, changed))
    np.testing.assert_array_equal(before, after)


def test_gaps_that_training_rows_do_not_have_need_no_indicator():
    frame = pd.DataFrame({"a": [1.0, 3.0, np.nan]})
    encode = ColumnEncoder(PartyTable("active", frame, impute="mean"), frame[:2])
    assert encode(frame).tolist() == [[-1], [1], [0]]


def test_rare_categories_are_grouped_as_scikit_learn_does():
    rng = np.random.default_rng(0)
    values = rng.choice([f"v{k:02d}" for k in range(40)], 900, p=np.arange(1, 41) / 820)
    frame = pd.DataFrame({"a": pd.Categorical(values)})
    encode = ColumnEncoder(PartyTable("active", frame, frozenset(["a"]), rare={"a": 5}), frame[:600])
    frequent = set(pd.Series(values[:600]).value_counts().index[:5])
    theirs = OneHotEncoder(max_categories=6, handle_unknown="infrequent_if_exist", sparse_output=False)
    expected = theirs.fit(values[:600, None]).transform(values[:, None])
    found = encode(frame)
    assert encode.describe()["a"]["categories"] == sorted(frequent)
    np.testing.assert_array_equal(found, np.roll(expected, 1, axis=1))  # their last column is our first


def test_a_hashed_category_has_the_same_buckets_everywhere(toml: Path):
    edit(toml, ('categorical = ["shop"]', "hash = { shop = 4 }"))
    found = load_toml(toml).parties[1].frame["shop"].tolist()
    assert found == ["3", "1", "3", "3"]  # crc32 modulo 4
    edit(toml, ("shop = 4", "shop = 1"))
    assert message(toml) == "parties.bureau.hash: expected 2 or more, got 1"


@pytest.mark.parametrize(
    ("settings", "texts", "values"),
    [
        ('thousands = ","', ["1,234.5", "12", "-3,000,000", ".5"], [1234.5, 12, -3e6, 0.5]),
        ('decimal = ","', ["1,5", "12", "-0,25", "1e3"], [1.5, 12, -0.25, 1000]),
        ('decimal = ","\nthousands = "."', ["1.234,5", "12.000", "7", "0,1"], [1234.5, 12000, 7, 0.1]),
        ('thousands = " "', ["1 234", "12 000 000", "7", "0.5"], [1234, 12e6, 7, 0.5]),
        ('missing = ["?", "-"]\nimpute = "mean"', ["1", "?", "-", "2"], [1, np.nan, np.nan, 2]),
        ('missing = [-999]\nimpute = "mean"', ["1", "-999", " -999", "2"], [1, np.nan, np.nan, 2]),
        ('impute = "mean"', ["1", "NA", "null", "2"], [1, np.nan, np.nan, 2]),
    ],
)
def test_numbers_may_be_written_otherwise(toml: Path, settings: str, texts: list[str], values: list[float]):
    frame = pd.read_csv(toml.with_name("bureau.csv")).assign(score=texts)
    frame.to_csv(toml.with_name("bureau.csv"), index=False)
    edit(toml, ("[parties.bureau]", f"[parties.bureau]\n{settings}"))
    np.testing.assert_array_equal(load_toml(toml).parties[1].frame["score"], values)


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ('thousands = ","', "1,5", "'1,5'; say how numbers"),
        ("", "1,500", "'1,500'; .*thousands and decimal"),
        ("", "2020-01-01", "'2020-01-01'; .*in dates"),
        ("", "?", r"got '\?'; .*in categorical"),
        ("", "", 'got nothing; .*impute = "mean"'),
        ('decimal = ","', "1.5", r"got '1\.5'; correct"),
        ('decimal = ","\nthousands = ","', "1", "decimal and thousands .*',' for"),
        ('thousands = "1"', "1", "thousands of .*got '1'"),
    ],
)
def test_a_number_that_cannot_be_read_says_how_to_mend_it(toml: Path, settings: str, text: str, expected: str):
    frame = pd.read_csv(toml.with_name("bureau.csv")).assign(score=["1", "2", text, "4"])
    frame.to_csv(toml.with_name("bureau.csv"), index=False)
    edit(toml, ("[parties.bureau]", f"[parties.bureau]\n{settings}"))
    assert re.search(expected, message(toml))


def test_a_date_that_cannot_be_read_says_how_to_mend_it(toml: Path):
    edit(toml.with_name("bank.csv"), ("2020-02-29", "29/02/2020"))
    assert message(toml) == (
        "bank.csv, column 'opened', line 4: expected a date such as 2026-01-31, got '29/02/2020'; correct it, or say "
        "how dates are written with date_format"
    )
    edit(toml.with_name("bank.csv"), ("29/02/2020", ""))
    edit(toml, ('impute = "mean"\n', ""), ('dates = ["opened"]', 'dates = ["opened"]\ndrop = ["age"]'))
    assert re.search("line 4: .*date .*nothing; fill", message(toml))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([f"m{k}" for k in range(150)] * 2, "got 150; .*drop, .*group_rare"),
        ([f"m{k}" for k in range(300)], "got 300; .*id: .*drop"),
        ([f"20{k:02d}-0{m}-11" for k in range(50) for m in range(1, 7)], "got 300; list it in dates"),
    ],
)
def test_a_category_of_many_values_is_refused_with_the_way_out(tmp_path: Path, values: list[str], expected: str):
    rng = np.random.default_rng(0)
    n = len(values)
    own = pd.DataFrame({"id": range(n), "a": rng.normal(size=n), "y": rng.integers(0, 2, n)})
    own.to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"id": range(n), "many": values}).to_csv(tmp_path / "b.csv", index=False)
    text = 'label = "y"\nid = "id"\n[parties.a]\nfile = "a.csv"\n[parties.b]\nfile = "b.csv"\ncategorical = ["many"]\n'
    (tmp_path / "m.toml").write_text(text, "utf-8")
    assert re.match(f"b.csv.*'many': .*100 categories, {expected}", message(tmp_path / "m.toml"))
    edit(tmp_path / "m.toml", ('label = "y"', 'max_categories = 300\nlabel = "y"'))
    assert load_toml(tmp_path / "m.toml").parties[1].frame["many"].nunique() == len(set(values))


def test_all_faults_are_found_at_once(toml: Path):
    edit(toml.with_name("bank.csv"), ("c3,40", "c3,old"), ("2022-12-24", "soon"), ("c4,50", "c1,50"))
    edit(toml.with_name("bureau.csv"), ("c2,2", "c2,two"))
    faults = read_all(toml).faults
    assert [fault.split(":")[0] for fault in faults] == [
        "bank.csv, column 'customer', line 5",
        "bank.csv, column 'age', line 4",
        "bank.csv, column 'opened', line 5",
        "bureau.csv, column 'score', line 3",
    ]
    assert "3 more: vflsec data check" in message(toml)


def test_parties_have_names_of_their_own(toml: Path):
    dataset = load_toml(toml)
    assert [party.name for party in dataset.parties] == ["active", "passive_1"]
    assert dataset.names == {"active": "bank", "passive_1": "bureau"}
    assert repr(dataset) == "VerticalDataset('mine', 2 classes; bank 4 x 5, bureau 4 x 2)"
    assert split_dataset(dataset, DataSpec(test=0.5), 0).names == dataset.names


def test_a_party_with_a_standard_name_keeps_it_beside_others_that_have_their_own(toml: Path):
    edit(toml, ("[parties.bureau]", "[parties.passive_1]"))
    assert load_toml(toml).names == {"active": "bank", "passive_1": "passive_1"}
    edit(toml, ("[parties.bank]", "[parties.active]"))
    assert load_toml(toml).names == {}


def test_the_active_party_is_the_one_with_the_label_or_the_one_that_is_named(toml: Path):
    edit(
        toml, ("[parties.bank]", "[parties.x]"), ("[parties.bureau]", "[parties.bank]"), ("[parties.x]", "[parties.z]")
    )
    assert load_toml(toml).names == {"active": "z", "passive_1": "bank"}
    (toml.with_name("all.csv")).write_text("id,a,b,y\n1,3,1,1\n2,4,1,0\n3,5,2,1\n", "utf-8")
    toml.write_text(
        'label = "y"\nid = "id"\nfile = "all.csv"\n[parties.p]\ncolumns = ["a"]\n[parties.q]\ncolumns = ["b"]\n'
    )
    assert message(toml) == (
        'mine.toml: expected to know which of p, q is the active party, got one file; write active = "p" at the top'
    )
    edit(toml, ('label = "y"', 'active = "q"\nlabel = "y"'))
    assert load_toml(toml).names == {"active": "q", "passive_1": "p"}


def test_keys_of_several_columns_are_not_confused(tmp_path: Path):
    rows = pd.DataFrame({"i": ["a | b", "a", "x |", "x", *"pq"], "j": ["c", "b | c", "y", "| y", *"rs"]})
    rows.assign(a=range(6), y=[0, 1] * 3).to_csv(tmp_path / "a.csv", index=False)
    rows.assign(b=range(6)).to_csv(tmp_path / "b.csv", index=False)
    text = 'label = "y"\nid = ["i", "j"]\n[parties.a]\nfile = "a.csv"\n[parties.b]\nfile = "b.csv"\n'
    (tmp_path / "m.toml").write_text(text, "utf-8")
    assert load_toml(tmp_path / "m.toml").labels.index.is_unique


def test_an_id_may_have_several_columns_and_other_names(toml: Path):
    bank = BANK.replace("customer,", "branch,customer,").replace("\nc", "\nb1,c").replace("b1,c4", "b2,c1")
    toml.with_name("bank.csv").write_text(bank, "utf-8")
    toml.with_name("bureau.csv").write_text("who,where,score\nc1,b1,1\nc1,b2,2\nc2,b1,3\nc3,b1,5\n", "utf-8")
    edit(toml, ('id = "customer"', 'id = ["branch", "customer"]'),
         ('categorical = ["shop"]', 'id = ["where", "who"]'))  # fmt: skip
    dataset = load_toml(toml)
    assert dataset.labels.index.tolist() == ["b1 | c1", "b1 | c2", "b1 | c3", "b2 | c1"]
    assert dataset.parties[1].frame.loc["b2 | c1", "score"] == 2
    edit(toml.with_name("bureau.csv"), ("c1,b2", "c1,b1"))
    assert re.match(r"bureau.csv.*'where, who', line 3: .*b1 \| c1", message(toml))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.linspace(0, 1, 40).round(3), "40 different numbers; "),
        (np.arange(40), "40 different numbers; .*into classes"),
        (["a", "NaN"] * 20, "line 3: .*label, got 'NaN'"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: list, expected: str):
    pd.DataFrame({"id": range(40), "a": np.arange(40.0), "y": labels}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"id": range(40), "b": np.arange(40.0)}).to_csv(tmp_path / "b.csv", index=False)
    text = 'label = "y"\nid = "id"\n[parties.a]\nfile = "a.csv"\n[parties.b]\nfile = "b.csv"\n'
    (tmp_path / "m.toml").write_text(text, "utf-8")
    assert re.search(expected, message(tmp_path / "m.toml"))


def test_a_class_may_be_called_none_and_an_id_has_no_control_characters(toml: Path):
    edit(toml.with_name("bank.csv"), (",no\n", ",none\n"))
    assert load_toml(toml).classes == ("none", "yes")
    edit(toml.with_name("bank.csv"), ("c3,", "c\x013,"))
    assert re.search(r"line 4: .*id, got 'c\\x013'", message(toml))


def test_a_null_character_ends_no_field(toml: Path):
    """As it does in some versions of pandas, which would read two ids as one."""
    edit(toml.with_name("bank.csv"), ("c3,", "c\x003,"))
    assert "line 4: expected no null character" in message(toml)
    edit(toml.with_name("bank.csv"), ("c\x003,", "c3,"), ("customer,", "custom\x00er,"))
    assert "expected a header line with column names, got a null character" in message(toml)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('dates = ["opened"]', 'dates = ["opened"]\ncategorical = ["opened"]'), "role for 'opened', got"),
        (('dates = ["opened"]', 'dates = ["opend"]'), "parties.bank.dates: unknown column 'opend'"),
        (('dates = ["opened"]', 'drop = ["x"]'), "an unknown column 'x'"),
        (('impute = "mean"', 'impute = "max"'), "enum value 'max' - at"),
        (("label =", "max_categories = 1\nlabel ="), "expected max_categories >= 2, got 1"),
        (("[parties.bureau]", "[parties.server]"), "- and _, got 'server'"),
    ],
)
def test_descriptions_that_cannot_be_meant_are_refused(toml: Path, change: tuple[str, str], expected: str):
    edit(toml, change)
    assert expected in message(toml)
