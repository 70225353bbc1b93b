"""A user's own files: both layouts, both formats, and one clear line for everything that can be wrong in them."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from vflsec.base.errors import DataError
from vflsec.cli import cli
from vflsec.data.checkup import check
from vflsec.data.description import Format
from vflsec.data.files import load_toml
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.data.tables import read_table

BANK = """\
customer,age,job,income,defaulted
c1,20,cook,1000,no
c2,30,,2000,yes
c3,40,baker,-50,no
c4,50,cook,0,yes
"""
BUREAU = """\
score,customer,late
7,c4,1
5,c3,0
4,c2,2
9,c1,3
3,c9,1
"""
OVERLAP = "7,c4,1\n5,c3,0\n4,c2,2\n9,c1,3\n"
TWO_FILES = """\
label = "defaulted"
id = "customer"
[parties.active]
file = "bank.csv"
categorical = ["job"]
signed_log = ["income"]
[parties.passive_1]
file = "bureau.csv"
"""
ONE_FILE = """\
label = "y"
id = "id"
file = "all.csv"
[parties.active]
columns = ["a"]
[parties.passive_1]
columns = ["c", "b"]
categorical = ["b"]
"""
ALL = "id,a,b,c,y\n1,3,u,1,10\n2,4,v,1,9\n3,5,w,2,10\n"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    (tmp_path / "bank.csv").write_text(BANK, "utf-8")
    (tmp_path / "bureau.csv").write_text(BUREAU, "utf-8")
    (tmp_path / "mine.toml").write_text(TWO_FILES, "utf-8")
    return tmp_path / "mine.toml"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    (tmp_path / "all.csv").write_text(ALL, "utf-8")
    (tmp_path / "one.toml").write_text(ONE_FILE, "utf-8")
    return tmp_path / "one.toml"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def message(toml: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_toml(toml)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_two_files(two: Path):
    dataset = load_toml(two)
    bank, bureau = dataset.parties
    assert dataset.name == "mine"
    assert dataset.classes == ("no", "yes")
    assert dataset.labels.to_dict() == {"c1": 0, "c2": 1, "c3": 0, "c4": 1}
    assert list(bank.frame.columns) == ["age", "job", "income"]
    assert bank.frame["job"].tolist() == ["cook", "(missing)", "baker", "cook"]
    assert (bank.categorical, bank.signed_log) == (frozenset({"job"}), frozenset({"income"}))
    assert bureau.frame.index.tolist() == ["c4", "c3", "c2", "c1", "c9"]
    assert bureau.frame["score"].tolist() == [7, 5, 4, 9, 3]


def test_each_party_may_name_its_ids_otherwise(two: Path):
    expected = load_toml(two)
    two.with_name("bureau.csv").write_text(BUREAU.replace("customer", "client"), "utf-8")
    replace(two, 'id = "customer"\n[parties.active]', '[parties.active]\nid = "customer"')
    with pytest.raises(DataError, match=r"expected id .*\[parties.passive_1\], got none"):
        load_toml(two)
    replace(two, "[parties.passive_1]", '[parties.passive_1]\nid = "client"')
    for party, same in zip(load_toml(two).parties, expected.parties, strict=True):
        pd.testing.assert_frame_equal(party.frame, same.frame, check_names=False)


def test_two_files_can_be_split(two: Path):
    split = split_dataset(load_toml(two), DataSpec(test=0.5), 0)
    assert len(split.ids["train"]) == len(split.ids["test"]) == 2
    assert split.parties["passive_1"].local_ids.tolist() == ["c9"]


def test_one_file_keeps_the_order_of_columns_and_sorts_classes_by_value(one: Path):
    dataset = load_toml(one)
    assert dataset.classes == ("9", "10")
    assert dataset.labels.tolist() == [1, 0, 1]
    assert [list(party.frame.columns) for party in dataset.parties] == [["a"], ["c", "b"]]


def test_parquet_meets_csv_also_where_gaps_made_whole_numbers_floats(two: Path):
    frame = pd.DataFrame({"late": [1.5, 0, 2, 3], "kind": [1.0, np.nan, 2, 1]}, index=pd.Index([4, 3, 2, 1]))
    frame.rename_axis("customer").to_parquet(two.with_name("bureau.parquet"))  # the id is the saved index
    replace(two.with_name("bank.csv"), "\nc", "\n")  # ids 1 to 4
    replace(two, '"bureau.csv"', '"bureau.parquet"\ncategorical = ["kind"]')
    bureau = load_toml(two).parties[1].frame
    assert bureau.index.tolist() == ["4", "3", "2", "1"]
    assert bureau["kind"].tolist() == ["1", "(missing)", "2", "1"]
    assert bureau["late"].tolist() == [1.5, 0, 2, 3]


def test_separator_encoding_columns_and_name(two: Path):
    text = BUREAU.replace(",", ";").replace("late", "verspätet")
    two.with_name("bureau.csv").write_text(text, "latin-1")
    more = 'file = "bureau.csv"\nencoding = "latin-1"\nseparator = ";"\ncolumns = ["verspätet"]'
    replace(two, 'file = "bureau.csv"', more)
    replace(two, "label =", 'name = "loans"\nlabel =')
    dataset = load_toml(two)
    assert dataset.name == "loans"
    assert list(dataset.parties[1].frame.columns) == ["verspätet"]


def test_the_mark_of_spreadsheet_programs_and_blank_lines_at_the_end_do_no_harm(two: Path):
    two.with_name("bank.csv").write_text(BANK + "\n\n", "utf-8-sig")
    assert len(load_toml(two).labels) == 4


def test_quoted_fields_and_outer_blanks(two: Path):
    replace(two.with_name("bank.csv"), "c3,40,baker", 'c3, 40 ," baker, master"')
    assert load_toml(two).parties[0].frame.loc["c3"].tolist() == [40, "baker, master", -50]


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        # values
        ("bank.csv", "c3,40", "c3,old", "bank.csv.*'age', line 4:.*'old'"),
        ("bank.csv", "c3,40", "c3,", "bank.csv.*'age', line 4:.*nothing; fill"),
        ("bank.csv", "c3,40", "c3,NaN", "bank.csv.*'age', line 4:.*'NaN'; fill"),
        ("bank.csv", "c3,40", "c3,-inf", "'age', line 4:.*'-inf'; correct"),
        ("bank.csv", "c3,40", "c3,1e999", "'age', line 4:.*'1e999'; correct"),
        ("bank.csv", "c3,40", "c3,1e200", r"'age', line 4:.*1e\+30, got '1e200'"),
        ("bank.csv", "c3,40", " ,40", "bank.csv.*'customer', line 4:.*nothing; fill"),
        ("bank.csv", "c3,40", "c1,40", "'customer', line 4:.*'c1' again; active"),
        ("bureau.csv", "c3", "c4", "bureau.csv.*'customer', line 3:.*'c4' again"),
        ("bank.csv", "-50,no", "-50,", "'defaulted', line 4:.*label, got nothing"),
        ("bank.csv", "yes", "no", "bank.csv.*'defaulted':.*'no' in every"),
        ("bureau.csv", OVERLAP, "4,c8,2\n", r"\['c1', 'c2'\], passive_1 h"),
        # columns
        ("bank.csv", "defaulted", "dflt", "bank.csv: .*label, .*unknown column 'defaulted'"),
        ("bureau.csv", "customer", "kunde", "bureau.csv: .*id, .*'customer'.*kun"),
        ("bureau.csv", "late", "defaulted", "bureau.csv.*'defaulted': .*active party"),
        ("bank.csv", "age", "job", "bank.csv, line 1: .*'job' twice"),
        ("mine.toml", '["job"]', '["jbo"]', "parties.active.categorical: .*'jbo'.*mean job"),
        ("mine.toml", '["income"]', '["in"]', "parties.active.signed_log: .*'in'.*mean income"),
        ("mine.toml", '["income"]', '["job"]', r"active: .*signed_log .*categories \['j"),
        ("mine.toml", '"bureau.csv"', '"bureau.csv"\ncolumns = []', "bureau.csv: .*column for passive_1"),
        ("mine.toml", '"bureau.csv"', '"bureau.csv"\ncolumns = ["lat"]', "column of passive_1, .*unknown"),
        (
            "mine.toml",
            '"bureau.csv"',
            '"bureau.csv"\ncolumns = ["customer"]',
            "parties.passive_1.columns: expected feat",
        ),
        # files
        ("bank.csv", "c3,40,baker,-50,no", "c3,40,baker,-50", "line 4: .*5 fields .*got 4"),
        ("bank.csv", "c4,50,cook,0,yes\n", "c4,5", "bank.csv, line 5: .*got 2"),
        ("bank.csv", "c3,40,baker", "c3,40,baker,x", "bank.csv, line 4: .*got 6"),
        ("bank.csv", "c3,40", "\nc3,40", "bank.csv, line 4: .*got 0"),
        ("bank.csv", "baker", '"baker', "bank.csv, line 5: .*cut off"),
        ("bank.csv", BANK, "", "bank.csv: .*empty file"),
        ("bank.csv", BANK, BANK.splitlines()[0], "bank.csv: .*rows, got none"),
        ("mine.toml", '"bank.csv"', '"."', ", got a folder"),
        ("mine.toml", '"bank.csv"', '"bonk.csv"', "bonk.csv, found none; .*TOML"),
        ("mine.toml", '"bank.csv"', '"bank.csv"\nencoding = "x"', "bank.csv: .*encoding, got 'x'"),
        ("mine.toml", '"bank.csv"', '"bank.csv"\nseparator = "::"', "separator of .*'::'"),
        # the TOML file
        ("mine.toml", "label =", "label", "mine.toml: expected TOML in utf-8: "),
        ("mine.toml", 'label = "defaulted"\n', "", "missing required field `label`"),
        ("mine.toml", "signed_log", "log", r"mine.toml: .*\[parties\.\*\] 'log'"),
        ("mine.toml", "label =", "labl =", "mine.toml: .*'labl'.*mean label"),
        ("mine.toml", '["job"]', '"job"', r"mine.toml: .*`array`.*\[\.\.\.\]\.categorical"),
        ("mine.toml", "passive_1", "server", "party's name .*'server'"),
        ("mine.toml", "label =", 'active = "bnk"\nlabel =', "unknown active 'bnk'.*passive_1"),
        ("mine.toml", "label =", 'active = "passive_1"\nlabel =', "fit the roles, got active"),
        ("mine.toml", 'id = "customer"', "id = []", "mine.toml: .*id .*got none"),
        ("mine.toml", 'file = "bureau.csv"', "", "mine.toml: .*parties.passive_1, got none"),
        ("mine.toml", "label", 'file = "all.csv"\nlabel', "parties.active, got two"),
    ],
)
def test_whatever_is_wrong_in_two_files_gives_one_clear_line(two: Path, file, old, new, expected):
    replace(two.with_name(file), old, new)
    assert re.search(expected, message(two))


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("one.toml", 'columns = ["a"]', "", "one.toml: .*parties.active, got none"),
        ("one.toml", '"c", "b"', '"a", "b"', "column 'a', .*active and passive_1"),
        ("one.toml", '"c", "b"', '"y", "b"', "parties.passive_1.columns: .*label 'y'"),
        ("one.toml", '["a"]', '["id"]', "parties.active.columns: .*id 'id'"),
        ("one.toml", '["a"]', '["aa"]', "all.csv: .*active, .*'aa'.*mean"),
        ("one.toml", '["a"]', '["a"]\nseparator = ";"', "encoding and separator beside file"),
        ("one.toml", 'label = "y"', 'label = "z"', "all.csv: .*label, .*unknown column 'z'"),
        ("one.toml", '"all.csv"', '"al.csv"', "al.csv, found none"),
        ("all.csv", "1,10\n2", "x,10\n2", "all.csv.*'c', line 2:.*'x'; correct"),
        ("all.csv", "5,w,2", "5,w,1", "all.csv.*'c': .*got 1.0 only"),
    ],
)
def test_whatever_is_wrong_in_one_file_gives_one_clear_line(one: Path, file, old, new, expected):
    replace(one.with_name(file), old, new)
    assert re.search(expected, message(one))


def test_a_constant_category_is_refused(two: Path):
    for job in ("baker", "cook"):
        replace(two.with_name("bank.csv"), job, "")
    assert re.match(r"bank.csv.*'job': .*\(missing\) only; drop", message(two))


@pytest.mark.parametrize(("late", "categorical"), [("5,-5,5,-5,0", False), ("x,y,x,y,z", True)])
def test_a_recoded_label_at_a_passive_party_is_refused(two: Path, late: str, categorical: bool):
    frame = pd.read_csv(two.with_name("bureau.csv")).assign(late=late.split(","))
    frame.to_csv(two.with_name("bureau.csv"), index=False)
    if categorical:
        replace(two, '"bureau.csv"', '"bureau.csv"\ncategorical = ["late"]')
    assert re.match("bureau.csv.*'late': .*label on the 4", message(two))


IMAGE = "id,p_0_0,p_0_1,p_1_0,p_1_1,p_2_0,p_2_1\n1,0,9,3,4,5,6\n2,0,7,8,4,1,2\n3,0,5,8,4,1,0\n"


@pytest.fixture
def pixels(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("id,a,y\n1,3,u\n2,4,v\n3,5,u\n", "utf-8")
    (tmp_path / "scans.csv").write_text(IMAGE, "utf-8")
    (tmp_path / "scans.toml").write_text(
        'label = "y"\nid = "id"\n[parties.active]\nfile = "a.csv"\n'
        '[parties.passive_1]\nfile = "scans.csv"\nimage = [1, 3, 2]\n',
        "utf-8",
    )
    return tmp_path / "scans.toml"


def test_columns_that_are_pixels_make_an_image_and_may_be_blank(pixels: Path):
    own, scans = load_toml(pixels).parties
    assert (own.image, scans.image) == (None, (1, 3, 2))
    assert scans.frame.to_numpy().reshape(3, 3, 2)[0].tolist() == [[0, 9], [3, 4], [5, 6]]


def test_pixels_in_an_order_of_the_file_s_own_are_named(pixels: Path):
    replace(pixels, "image = [1, 3, 2]", 'image = [2, 1, 2]\ncolumns = ["p_2_0", "p_2_1", "p_1_0", "p_1_1"]')
    scans = load_toml(pixels).parties[1]
    assert scans.frame.to_numpy().reshape(3, 2, 1, 2)[0].tolist() == [[[5, 6]], [[3, 4]]]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("[1, 3, 3]", "passive_1.image: .*9 columns .*got 6"),
        ("[-1, -3, 2]", r"passive_1.image: .*got \[-1, -3, 2\]"),
        ("[3, 2]", r"passive_1.image: .*got \[3, 2\]"),
        ("[]", r"passive_1.image: .*got \[\]"),
        ("3", r"scans.toml: .*`int`.*\[\.\.\.\]\.image"),
        ('[1, 3, 2]\ncategorical = ["p_1_0"]', r"passive_1: .*pixels .*\['p_1_0'\]"),
    ],
)
def test_an_image_that_its_columns_cannot_make(pixels: Path, new: str, expected: str):
    replace(pixels, "[1, 3, 2]", new)
    assert re.search(expected, message(pixels))


def test_wrong_encoding(two: Path):
    two.with_name("bank.csv").write_text(BANK.replace("baker", "bäcker"), "latin-1")
    assert re.match("bank.csv: .*utf-8 .*0xe4; .*TOML", message(two))


def test_no_toml_file_and_one_that_is_not_text(tmp_path: Path):
    assert message(tmp_path / "none.toml").endswith("none.toml, found none")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert message(tmp_path / "bytes.toml").startswith("bytes.toml: expected TOML in utf-8: ")


@pytest.fixture
def parquet(two: Path) -> Path:
    replace(two, "bureau.csv", "bureau.parquet")
    return two


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ([1, np.nan, 2, 3], "bureau.parquet.*'late', row 2:.*nothing; fill"),
        ([1, 2, np.inf, 3], "bureau.parquet.*'late', row 3:.*'inf'; correct"),
        (["1", "2", "3", "x"], "bureau.parquet.*'late', row 4:.*'x'; correct"),
        (pd.to_datetime(["2020-01-01"] * 4), "'late': .*numbers, got datetime64"),
        ([[1], [2], [3], [4]], "bureau.parquet.*'late': expected one value in each row, got list"),
    ],
)
def test_wrong_values_in_parquet(parquet: Path, late: object, expected: str):
    frame = pd.DataFrame({"customer": ["c1", "c2", "c3", "c4"], "late": late})
    frame.to_parquet(parquet.with_name("bureau.parquet"))
    assert re.search(expected, message(parquet))


def test_parquet_that_is_no_utf_8(parquet: Path):
    text = pa.array([b"\xff", b"b", b"c", b"d"], pa.binary()).cast(pa.string(), safe=False)
    table = pa.table({"customer": ["c1", "c2", "c3", "c4"], "late": text})
    pa.parquet.write_table(table, parquet.with_name("bureau.parquet"))
    assert re.search("bureau.parquet: expected a Parquet file, got .*UTF8", message(parquet))


def test_a_cut_off_parquet_file(parquet: Path):
    file = parquet.with_name("bureau.parquet")
    pd.DataFrame({"customer": ["c1"], "late": [1]}).to_parquet(file)
    file.write_bytes(file.read_bytes()[:-20])
    assert message(parquet).startswith("bureau.parquet: expected a Parquet file")


def test_parquet_without_pyarrow_names_the_install_line(parquet: Path, monkeypatch: pytest.MonkeyPatch):
    parquet.with_name("bureau.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow: pip install 'vflsec\[parquet\]'"):
        read_table(parquet.with_name("bureau.parquet"), Format())


def test_the_active_party_may_have_labels_alone(tmp_path: Path):
    rows = range(200)
    (tmp_path / "bank.csv").write_text("id,y\n" + "".join(f"{k},{k % 2}\n" for k in rows), "utf-8")
    (tmp_path / "bureau.csv").write_text("id,x\n" + "".join(f"{k},{k % 2 + k % 7 / 7}\n" for k in rows), "utf-8")
    text = 'label = "y"\nid = "id"\n[parties.bank]\nfile = "bank.csv"\n[parties.bureau]\nfile = "bureau.csv"\n'
    (tmp_path / "data.toml").write_text(text, "utf-8")
    report = check(tmp_path / "data.toml")
    assert not report.faults
    assert report.parties[0].columns == 0
    assert report.utility["bank"] == 0.5 < report.utility["bureau"]
    result = CliRunner().invoke(cli, [
        "eval", "--dataset", str(tmp_path / "data.toml"), "--method", "fedsplitnn,secureboost", "--attack", "logistic",
        "--set", "train.epochs=2", "--set", "aux.n=10", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "run"),
    ])  # fmt: skip
    assert result.exit_code == 0, result.stderr


def test_what_is_wrong_comes_at_once(two: Path):
    replace(two.parent / "bank.csv", "c2,30,,2000,yes\n", "c2,30,,2000,\nc1,60,cook,10,no\n")
    replace(two.parent / "bureau.csv", OVERLAP, "7,x4,1\n5,x3,0\n4,x2,2\n9,x1,3\n")
    faults = " ".join(check(two).faults)
    for expected in ("expected each id once", "expected a label, got nothing", "expected ids that all parties hold"):
        assert expected in faults


def test_all_classes_of_several_spellings_are_named(two: Path):
    replace(two.parent / "bank.csv", "yes\nc3", "Yes\nc3")
    replace(two.parent / "bank.csv", "50,no", "50,NO")
    (fault,) = check(two).faults
    assert "'NO' and 'no', 'Yes' and 'yes'; correct it in 2 rows" in fault


@pytest.mark.parametrize("score", ["7,5,4,9,3", "7,,4,9,NA", "true,false,true,true,false", " 1e3 ,0.5,-2,.5,007"])
def test_numbers_are_those_of_their_texts(two: Path, score: str):
    frame = pd.read_csv(two.with_name("bureau.csv"), dtype=str).assign(score=score.split(","))
    frame.to_csv(two.with_name("bureau.csv"), index=False)
    file, style = two.with_name("bureau.csv"), Format()
    tables = [read_table(file, style), read_table(file, style, {"customer"})]
    as_text, as_numbers = (table.numbers("score", gaps=True) for table in tables)
    np.testing.assert_array_equal(as_numbers, as_text)
    pd.testing.assert_series_equal(tables[0].keys("customer", "an id"), tables[1].keys("customer", "an id"))


def test_a_table_of_numbers_is_read_without_texts(two: Path):
    table = read_table(two.with_name("bureau.csv"), Format(), {"customer"})
    assert [table.frame[name].dtype.kind for name in ("score", "late")] == ["i", "i"]
