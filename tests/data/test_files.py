"""A user's own files: both layouts, both formats, and one clear line for everything that can be wrong in them."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from vflsec.base.errors import DataError
from vflsec.data.description import Format
from vflsec.data.files import load_toml
from vflsec.data.partition import DataSpec, partition
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


def test_two_files_can_be_split(two: Path):
    split = partition(load_toml(two), DataSpec(test=0.5), 0)
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
        ("bank.csv", "c3,40", "c3,old", "bank.csv, column 'age', line 4: expected a finite number, got 'old'; correct"),
        ("bank.csv", "c3,40", "c3,", "bank.csv, column 'age', line 4: expected a finite number, got nothing; fill it"),
        ("bank.csv", "c3,40", "c3,NaN", "bank.csv, column 'age', line 4: expected a finite number, got 'NaN'; fill it"),
        ("bank.csv", "c3,40", "c3,-inf", "column 'age', line 4: expected a finite number, got '-inf'; correct"),
        ("bank.csv", "c3,40", "c3,1e999", "column 'age', line 4: expected a finite number, got '1e999'; correct"),
        ("bank.csv", "c3,40", "c3,1e200", "column 'age', line 4: expected a number below 1e+30, got '1e200'; correct"),
        (
            "bank.csv",
            "c3,40",
            " ,40",
            "bank.csv, column 'customer', line 4: expected an id, got nothing; fill it or dr",
        ),
        ("bank.csv", "c3,40", "c1,40", "column 'customer', line 4: expected each id once, got 'c1' again; active must"),
        ("bureau.csv", "c3", "c4", "bureau.csv, column 'customer', line 3: expected each id once, got 'c4' again; pas"),
        ("bank.csv", "-50,no", "-50,", "bank.csv, column 'defaulted', line 4: expected a label, got nothing; fill it"),
        ("bank.csv", "yes", "no", "bank.csv, column 'defaulted': expected two classes or more, got 'no' in every row"),
        (
            "bureau.csv",
            OVERLAP,
            "4,c8,2\n",
            "expected ids that all parties hold, got none: active has ['c1', 'c2'], passive_1 h",
        ),
        # columns
        ("bank.csv", "defaulted", "dflt", "bank.csv: expected the label, got an unknown column 'defaulted'"),
        (
            "bureau.csv",
            "customer",
            "kunde",
            "bureau.csv: expected the id, got an unknown column 'customer'. Known: kun",
        ),
        ("bureau.csv", "late", "defaulted", "bureau.csv, column 'defaulted': expected the label with the active party"),
        ("bank.csv", "age", "job", "bank.csv, line 1: expected different column names, got 'job' twice; rename one"),
        ("mine.toml", '["job"]', '["jbo"]', "parties.active.categorical: unknown column 'jbo'. Did you mean job? Kno"),
        (
            "mine.toml",
            '["income"]',
            '["in"]',
            "parties.active.signed_log: unknown column 'in'. Did you mean income? Known: ",
        ),
        ("mine.toml", '["income"]', '["job"]', "active: expected signed_log columns to be numbers, got categories ['j"),
        ("mine.toml", '"bureau.csv"', '"bureau.csv"\ncolumns = []', "bureau.csv: expected a column for passive_1 bes"),
        (
            "mine.toml",
            '"bureau.csv"',
            '"bureau.csv"\ncolumns = ["lat"]',
            "expected a column of passive_1, got an unknown",
        ),
        (
            "mine.toml",
            '"bureau.csv"',
            '"bureau.csv"\ncolumns = ["customer"]',
            "parties.passive_1.columns: expected feat",
        ),
        # files
        (
            "bank.csv",
            "c3,40,baker,-50,no",
            "c3,40,baker,-50",
            "bank.csv, line 4: expected 5 fields as in the header, g",
        ),
        ("bank.csv", "c4,50,cook,0,yes\n", "c4,5", "bank.csv, line 5: expected 5 fields as in the header, got 2; is "),
        ("bank.csv", "c3,40,baker", "c3,40,baker,x", "bank.csv, line 4: expected 5 fields as in the header, got 6; is"),
        (
            "bank.csv",
            "c3,40",
            "\nc3,40",
            "bank.csv, line 4: expected 5 fields as in the header, got 0; is the file cut",
        ),
        ("bank.csv", "baker", '"baker', "bank.csv, line 5: unexpected end of data; is the file cut off?"),
        ("bank.csv", BANK, "", "bank.csv: expected a header line with column names, got an empty file"),
        ("bank.csv", BANK, BANK.splitlines()[0], "bank.csv: expected data rows, got none; is the export complete?"),
        ("mine.toml", '"bank.csv"', '"."', ", got a folder; name a file in it"),
        ("mine.toml", '"bank.csv"', '"bonk.csv"', "bonk.csv, found none; paths are relative to the TOML file"),
        (
            "mine.toml",
            '"bank.csv"',
            '"bank.csv"\nencoding = "x"',
            "bank.csv: expected a known encoding, got 'x'; for e",
        ),
        ("mine.toml", '"bank.csv"', '"bank.csv"\nseparator = "::"', "expected a separator of one character, got '::'"),
        # the TOML file
        ("mine.toml", "label =", "label", "mine.toml: expected TOML in utf-8: "),
        ("mine.toml", 'label = "defaulted"\n', "", "Object missing required field `label`; vflsec data init"),
        ("mine.toml", "signed_log", "log", "mine.toml: unknown key in [parties.*] 'log'. Known: "),
        ("mine.toml", "label =", "labl =", "mine.toml: unknown key 'labl'. Did you mean label? Known: "),
        ("mine.toml", '["job"]', '"job"', "mine.toml: Expected `array`, got `str` - at `$.parties[...].categorical`"),
        ("mine.toml", "passive_1", "server", "expected a party's name of letters, digits, - and _, got 'server'; call"),
        ("mine.toml", "label =", 'active = "bnk"\nlabel =', "unknown active 'bnk'. Known: active, passive_1"),
        ("mine.toml", "label =", 'active = "passive_1"\nlabel =', "expected names that fit the roles, got active"),
        ("mine.toml", 'id = "customer"', "id = []", "mine.toml: expected id to name one column or several, got []"),
        (
            "mine.toml",
            'file = "bureau.csv"',
            "",
            "mine.toml: expected one file for parties.passive_1, got none; give f",
        ),
        (
            "mine.toml",
            "label",
            'file = "all.csv"\nlabel',
            "expected one file for parties.active, got two; give file ei",
        ),
    ],
)
def test_whatever_is_wrong_in_two_files_gives_one_clear_line(two: Path, file, old, new, expected):
    replace(two.with_name(file), old, new)
    assert expected in message(two)


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("one.toml", 'columns = ["a"]', "", "one.toml: expected columns = [...] for parties.active, got none, and all"),
        (
            "one.toml",
            '"c", "b"',
            '"a", "b"',
            "expected one party for column 'a', got active and passive_1; drop it from",
        ),
        (
            "one.toml",
            '"c", "b"',
            '"y", "b"',
            "parties.passive_1.columns: expected features, got the label 'y'; drop it",
        ),
        ("one.toml", '["a"]', '["id"]', "parties.active.columns: expected features, got the id 'id'; drop it there"),
        (
            "one.toml",
            '["a"]',
            '["aa"]',
            "all.csv: expected a column of active, got an unknown column 'aa'. Did you mean",
        ),
        ("one.toml", '["a"]', '["a"]\nseparator = ";"', "expected encoding and separator beside file at the top, got"),
        ("one.toml", 'label = "y"', 'label = "z"', "all.csv: expected the label, got an unknown column 'z'"),
        ("one.toml", '"all.csv"', '"al.csv"', "al.csv, found none; paths are relative to the TOML file"),
        ("all.csv", "1,10\n2", "x,10\n2", "all.csv, column 'c', line 2: expected a finite number, got 'x'; correct it"),
        (
            "all.csv",
            "5,w,2",
            "5,w,1",
            "all.csv, column 'c': expected values that differ, got 1.0 only; drop it, or leav",
        ),
    ],
)
def test_whatever_is_wrong_in_one_file_gives_one_clear_line(one: Path, file, old, new, expected):
    replace(one.with_name(file), old, new)
    assert expected in message(one)


def test_a_constant_category_is_refused(two: Path):
    for job in ("baker", "cook"):
        replace(two.with_name("bank.csv"), job, "")
    assert message(two).startswith("bank.csv, column 'job': expected values that differ, got (missing) only; drop it")


@pytest.mark.parametrize(("late", "categorical"), [("5,-5,5,-5,0", False), ("x,y,x,y,z", True)])
def test_a_recoded_label_at_a_passive_party_is_refused(two: Path, late: str, categorical: bool):
    frame = pd.read_csv(two.with_name("bureau.csv")).assign(late=late.split(","))
    frame.to_csv(two.with_name("bureau.csv"), index=False)
    if categorical:
        replace(two, '"bureau.csv"', '"bureau.csv"\ncategorical = ["late"]')
    assert "bureau.csv, column 'late': expected features of passive_1, got a copy of the label on the 4" in message(two)


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
        (
            "[1, 3, 3]",
            "parties.passive_1.image: expected 9 columns for 1 x 3 x 3 pixels, got 6; correct it, or name th",
        ),
        (
            "[-1, -3, 2]",
            "parties.passive_1.image: expected [channels, height, width], got [-1, -3, 2]; a gray image of",
        ),
        (
            "[3, 2]",
            "parties.passive_1.image: expected [channels, height, width], got [3, 2]; a gray image of 28 x 14 p",
        ),
        ("[]", "parties.passive_1.image: expected [channels, height, width], got []; a gray image of 28 x 14 p"),
        ("3", "scans.toml: Expected `array | null`, got `int` - at `$.parties[...].image`; vflsec data"),
        ('[1, 3, 2]\ncategorical = ["p_1_0"]', "passive_1: expected pixels to be numbers, got categories ['p_1_0']"),
    ],
)
def test_an_image_that_its_columns_cannot_make(pixels: Path, new: str, expected: str):
    replace(pixels, "[1, 3, 2]", new)
    assert expected in message(pixels)


def test_wrong_encoding(two: Path):
    two.with_name("bank.csv").write_text(BANK.replace("baker", "bäcker"), "latin-1")
    assert message(two).startswith("bank.csv: expected utf-8 text, got byte 0xe4; set encoding in the TOML file, for")


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
        ([1, np.nan, 2, 3], "bureau.parquet, column 'late', row 2: expected a finite number, got nothing; fill it"),
        ([1, 2, np.inf, 3], "bureau.parquet, column 'late', row 3: expected a finite number, got 'inf'; correct it"),
        (["1", "2", "3", "x"], "bureau.parquet, column 'late', row 4: expected a finite number, got 'x'; correct it"),
        (pd.to_datetime(["2020-01-01"] * 4), "column 'late': expected numbers, got datetime64"),
    ],
)
def test_wrong_values_in_parquet(parquet: Path, late: object, expected: str):
    frame = pd.DataFrame({"customer": ["c1", "c2", "c3", "c4"], "late": late})
    frame.to_parquet(parquet.with_name("bureau.parquet"))
    assert expected in message(parquet)


def test_a_cut_off_parquet_file(parquet: Path):
    file = parquet.with_name("bureau.parquet")
    pd.DataFrame({"customer": ["c1"], "late": [1]}).to_parquet(file)
    file.write_bytes(file.read_bytes()[:-20])
    assert message(parquet).startswith("bureau.parquet: expected a Parquet file, got ")


def test_parquet_without_pyarrow_names_the_install_line(parquet: Path, monkeypatch: pytest.MonkeyPatch):
    parquet.with_name("bureau.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"reading Parquet needs pyarrow: pip install 'vflsec\[parquet\]'"):
        read_table(parquet.with_name("bureau.parquet"), Format())
