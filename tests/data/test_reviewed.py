"""What a reviewer broke: files that were misread without a word, ended in a traceback, or hid other faults."""

import re
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import vflsec
from vflsec.base.errors import DataError, UsageError, VflsecError
from vflsec.data.checkup import check
from vflsec.data.files import load_toml, read_all
from vflsec.data.partition import DataSpec, split_dataset

ROWS = 60
TOML = """label = "y"
id = "id"
{top}
[parties.bank]
file = "a.csv"
[parties.bureau]
file = "{file}"
{bureau}
"""


@pytest.fixture
def files(tmp_path):
    """Return a function that writes two files and their description, with a column ``x`` in the second."""

    def write(x, *, top="", bureau="", name="b.csv", ids=None):
        rng = np.random.default_rng(0)
        own = pd.DataFrame({"id": range(ROWS), "age": rng.normal(size=ROWS), "y": np.arange(ROWS) % 2})
        own.to_csv(tmp_path / "a.csv", index=False)
        table = pd.DataFrame({"id": range(ROWS) if ids is None else ids, "score": rng.normal(size=ROWS), "x": x})
        if name.endswith(".parquet"):
            table.to_parquet(tmp_path / name)
        else:
            table.to_csv(tmp_path / name, index=False, compression=None)
        (tmp_path / "m.toml").write_text(TOML.format(top=top, bureau=bureau, file=name))
        return tmp_path / "m.toml"

    return write


def fault(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_toml(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["b.csv", "b.parquet"])
def test_a_number_may_stand_for_a_missing_value(files, name):
    x = np.where(np.arange(ROWS) % 5 == 0, -999, np.arange(ROWS))
    data = load_toml(files(x, bureau='missing = ["-999"]\nimpute = "mean"', name=name))
    values = data.parties[1].frame["x"].to_numpy(dtype=float)
    assert np.isnan(values).sum() == 12
    assert np.nanmin(values) == 1


@pytest.mark.parametrize("value", ["9999-12-31", "0001-01-01"])
def test_years_that_stand_for_no_date_are_told(files, value):
    days = [f"2020-01-{1 + k % 28:02d}" for k in range(ROWS)]
    found = fault(files([value, value, *days[2:]], bureau='dates = ["x"]'))
    assert re.match(f"b.csv.*'x', line 2: .*2200, got '{value}'", found)
    assert found.endswith("(and 1 more row)")
    data = load_toml(files([value, *days[1:]], bureau=f'dates = ["x"]\nmissing = ["{value}"]\nimpute = "mean"'))
    assert np.isnan(data.parties[1].frame["x"].to_numpy(dtype=float)[0])


@pytest.mark.parametrize("written", ["2020-01-01T00:30:00+09:00", "2020-01-01 00:30:00Z", "2020-01-01 00:30"])
def test_times_are_those_of_the_clock(files, written):
    data = load_toml(files([written, *["2020-02-02T12:00:00"] * (ROWS - 1)], bureau='dates = ["x"]'))
    frame = data.parties[1].frame
    assert frame["x.month"].iloc[0] == "01"
    assert frame["x.weekday"].iloc[0] == "Wed"
    assert frame["x.hour"].iloc[0] == "00"


def test_times_of_frames_are_those_of_the_clock():
    times = pd.date_range("2020-01-01 00:30", periods=ROWS, freq="9D", tz="Asia/Tokyo")
    bank = pd.DataFrame({"age": np.arange(ROWS) * 1.5, "y": np.arange(ROWS) % 2})
    data = vflsec.dataset(active=bank, passive=pd.DataFrame({"t": times}), label="y")
    assert data.parties[1].frame["t.weekday"].iloc[0] == "Wed"


def test_dates_of_parquet_have_no_format(files):
    x = [date(2020, 1 + k % 12, 3) for k in range(ROWS)]
    data = load_toml(files(x, top='date_format = "%d.%m.%Y"', bureau='dates = ["x"]', name="b.parquet"))
    assert data.parties[1].frame["x.month"].iloc[1] == "02"


def test_decimals_of_parquet_are_numbers(files):
    data = load_toml(files([Decimal(k) / 4 for k in range(ROWS)], bureau='decimal = ","', name="b.parquet"))
    assert data.parties[1].frame["x"].iloc[3] == 0.75


@pytest.mark.parametrize("number", [1e300, 1e20])
def test_large_whole_numbers_of_parquet(files, number):
    x = [number, *np.arange(ROWS - 1) * 1.0]
    if number > 1e30:
        assert "expected a number below 1e+30" in fault(files(x, name="b.parquet"))
    else:
        assert load_toml(files(x, name="b.parquet")).parties[1].frame["x"].max() == number


@pytest.mark.parametrize("suffix", ["gz", "zip", "xz", "bz2", "zst", "tar"])
def test_a_suffix_of_compression_does_not_make_a_plain_file_another(files, suffix):
    assert load_toml(files(np.arange(ROWS), name=f"b.csv.{suffix}")).parties[1].frame["x"].max() == ROWS - 1


def test_a_compressed_file_is_to_be_unpacked(files, tmp_path):
    path = files(np.arange(ROWS), name="b.csv.gz")
    pd.read_csv(tmp_path / "b.csv.gz", compression=None).to_csv(tmp_path / "b.csv.gz", compression="gzip")
    assert "it is compressed: unpack it" in fault(path)


@pytest.mark.parametrize("size", [1e-200, 1e-310, 1e-10])
def test_tiny_numbers_are_standardized(files, size):
    split = split_dataset(load_toml(files((np.arange(ROWS) % 7) * size)), DataSpec(), 0)
    features = split.parties["passive_1"].features["train"]
    assert np.isfinite(features).all()
    assert size == 1e-310 or features[:, 1].std() == pytest.approx(1, abs=1e-5)


def test_a_number_far_from_all_others_is_named(files):
    x = (np.arange(ROWS) % 7) * 1e-10
    x[:] = np.where(np.arange(ROWS) == 5, 9e29, x)
    messages = {str(seed): check_split(files(x), seed) for seed in range(30)}
    assert any(re.search("'x': .*scale of the training", one) for one in messages.values())


def check_split(path, seed):
    try:
        split_dataset(load_toml(path), DataSpec(), seed)
    except DataError as error:
        return str(error)
    return ""


def test_a_row_of_several_lines_is_counted_by_lines(files, tmp_path):
    path = files(["fine"] * ROWS)
    (tmp_path / "b.csv").write_text(
        "id,score,x\n" + "".join(f'{k},{"oops" if k == 50 else k},"two\nlines{k % 3}"\n' for k in range(ROWS))
    )
    path.write_text(TOML.format(top="", file="b.csv", bureau='categorical = ["x"]'))
    assert re.match("b.csv.*'score', line 102: .*'oops'", fault(path))


def test_one_fault_does_not_hide_those_of_other_files(files, tmp_path):
    path = files([*["oops"] * 3, *range(ROWS - 3)], bureau='dates = ["nope"]\nsigned_log = ["neither"]')
    own = pd.read_csv(tmp_path / "a.csv").astype({"y": object})
    own.loc[4, "y"] = None
    own.to_csv(tmp_path / "a.csv", index=False)
    faults = read_all(path).faults
    assert len(faults) == 4, faults
    assert "(and 2 more rows)" in next(one for one in faults if "oops" in one)
    (tmp_path / "b.csv").unlink()
    assert len(read_all(path).faults) == 2


def test_a_column_that_is_filled_only_in_one_class_is_a_copy(files):
    x = np.where(np.arange(ROWS) % 2, 1.0, np.nan)
    found = fault(files(x, bureau='impute = "mean"'))
    assert "label on the 60 common" in found


def test_a_large_class_makes_no_column_a_copy(files, tmp_path):
    rng = np.random.default_rng(0)
    n = 900
    y = np.where(np.arange(n) < 4, "rare", np.where(np.arange(n) < 8, "few", "most"))
    pd.DataFrame({"id": range(n), "age": rng.normal(size=n), "y": y}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"id": range(n), "x": rng.normal(size=n)}).to_csv(tmp_path / "b.csv", index=False)
    (tmp_path / "m.toml").write_text(TOML.format(top="", file="b.csv", bureau=""))
    assert not [line for line in check(tmp_path / "m.toml").warnings if "alone predicts the label" in line]


def test_ids_that_differ_by_zeros_are_told(files):
    ids = [f"{k:03d}" for k in range(ROWS)]
    assert check(files(np.arange(ROWS), ids=ids)).faults[0].startswith("60 ids match only if")
    shared = [*range(40), *(f"00{k}" for k in range(40, ROWS))]
    assert check(files(np.arange(ROWS), ids=shared)).faults[0].startswith("20 ids match only if")


@pytest.mark.parametrize(
    ("bureau", "expected"),
    [
        (r'separator = "\n"', "b.csv: expected a separator"),
        (r"separator = '\t'", "b.csv: expected a separator"),
        ('encoding = "undefined"', "b.csv: expected a known encoding"),
        ('encoding = "utf-7"', "b.csv: expected a known encoding"),
        ('encoding = "base64"', "b.csv: expected a known encoding"),
        ('encoding = "unicode_escape"', "b.csv: expected a known encoding"),
        ('encoding = "a\\u0000b"', "b.csv: expected a known encoding"),
        ('decimal = "xx"', "b.csv: expected decimal"),
        ("hash = { x = 1 }", "parties.bureau.hash: expected 2 or more, got 1"),
    ],
)
def test_settings_that_no_file_can_have(files, bureau, expected):
    assert fault(files(np.arange(ROWS), bureau=bureau)).startswith(expected)


def test_a_name_of_5000_characters(files, tmp_path):
    path = files(np.arange(ROWS))
    path.write_text(TOML.format(top="", file="b" * 5000, bureau=""))
    assert "found none" in fault(path)
    assert len(fault(path)) < 400


def test_a_table_with_its_index(files, tmp_path):
    path = files(np.arange(ROWS))
    pd.read_csv(tmp_path / "b.csv").to_csv(tmp_path / "b.csv")
    assert re.match("b.csv, line 1: .*column 1", fault(path))


def test_labels_that_are_one_number_in_two_forms(files, tmp_path):
    path = files(np.arange(ROWS))
    own = pd.read_csv(tmp_path / "a.csv", dtype=str)
    own.loc[0, "y"] = "0.0"
    own.to_csv(tmp_path / "a.csv", index=False)
    assert "got '0' and '0.0'" in fault(path)
    own["y"] = ["1" * 5000, *["0"] * (ROWS - 1)]
    own.to_csv(tmp_path / "a.csv", index=False)
    load_toml(path)


def test_numbered_names_are_for_all_passive_parties_or_none(files, tmp_path):
    path = files(np.arange(ROWS))
    path.write_text(
        'label = "y"\nid = "id"\n[parties.active]\nfile = "a.csv"\n[parties.shop]\nfile = "b.csv"\n'
        '[parties.passive_1]\nfile = "b.csv"\n'
    )
    assert "for each passive party" in fault(path)


def test_bytes_of_parquet(files):
    assert "expected text, got bytes" in fault(files([b"\xff"] * ROWS, name="b.parquet"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"impute": "zero"},
        {"impute": "Mean"},
        {"id": []},
        {"max_categories": 1},
        {"max_categories": "x"},
        {"group_rare": {"c": "x"}},
        {"active": {1: pd.DataFrame({"age": range(ROWS), "y": np.arange(ROWS) % 2})}},
        {"passive": pd.DataFrame({"(index)": range(ROWS)})},
        {"label": 0},
        {"id": 3},
    ],
)
def test_arguments_that_no_dataset_can_have(wrong):
    bank = pd.DataFrame({"age": range(ROWS), "y": np.arange(ROWS) % 2})
    bureau = pd.DataFrame({"score": np.arange(ROWS) * 1.5, "c": list("ab") * (ROWS // 2)})
    with pytest.raises(VflsecError) as caught:
        vflsec.dataset(**{"active": bank, "passive": bureau, "label": "y", **wrong})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, DataError | UsageError)


def test_columns_may_be_named_by_numbers():
    bank = pd.DataFrame({0: np.arange(ROWS) % 2, 1: np.arange(ROWS) * 1.5})
    assert vflsec.dataset(active=bank, passive=pd.DataFrame({2: range(ROWS)}), label=0).classes == ("0", "1")


def test_numbers_as_objects_are_numbers():
    bank = pd.DataFrame({"age": np.arange(ROWS) * 1.0, "y": np.arange(ROWS) % 2})
    objects = pd.Series([np.float32(k) for k in range(ROWS)], dtype=object)
    data = vflsec.dataset(active=bank, passive=pd.DataFrame({"x": objects}), label="y")
    assert not data.parties[1].categorical
    assert data.parties[1].frame["x"].max() == ROWS - 1


def test_frames_may_be_cut_down_and_their_dates_written_otherwise():
    bank = pd.DataFrame({"age": np.arange(ROWS) * 1.0, "y": np.arange(ROWS) % 2})
    bureau = pd.DataFrame({"when": [f"{1 + k % 28}.{1 + k % 12}.2023" for k in range(ROWS)], "text": range(ROWS)})
    data = vflsec.dataset(active=bank, passive=bureau, label="y", dates=["when"], date_format="%d.%m.%Y", drop=["text"])
    assert list(data.parties[1].frame) == ["when", "when.month", "when.weekday"]
