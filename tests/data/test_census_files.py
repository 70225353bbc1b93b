"""UCI's files of Census-Income: they equal the bundled copy row for row, and damage is named."""

import gzip

import numpy as np
import pytest

import vflsec
from tests.papers.datasets.layouts import write_census
from vflsec.base.errors import DataError
from vflsec.data import bundle, census_income
from vflsec.data.partition import DataSpec, split_dataset

FEW = 997


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return write_census(tmp_path_factory.mktemp("few"), FEW)


@pytest.mark.long
@pytest.mark.slow
def test_the_official_files_equal_the_bundled_copy(tmp_path):
    write_census(tmp_path)
    bundled, found = bundle.read_arrays("census-income"), census_income._read_official(str(tmp_path))
    assert found.keys() == bundled.keys()
    for name, values in bundled.items():
        assert found[name].dtype == values.dtype, name
        np.testing.assert_array_equal(found[name], values)
    one, other = vflsec.load_dataset("census-income"), vflsec.load_dataset("census-income", data_dir=str(tmp_path))
    assert one.labels.equals(other.labels)
    assert one.test_ids.equals(other.test_ids)
    for own, same in zip(one.parties, other.parties, strict=True):
        assert own.frame.equals(same.frame)
        assert own.categorical == same.categorical


@pytest.mark.parametrize("compressed", [False, True])
def test_some_rows_equal_those_of_the_bundled_copy(tmp_path, compressed):
    write_census(tmp_path, FEW, compressed=compressed)
    bundled, found = bundle.read_arrays("census-income"), census_income._read_official(str(tmp_path))
    rows = [np.flatnonzero(bundled["is_test"] == is_test)[::FEW] for is_test in (False, True)]
    for name, values in bundled.items():
        expected = values if name.endswith(".categories") else values[np.concatenate(rows)]
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.long
def test_they_are_split_and_trained_like_the_bundled_copy(few):
    options = {"data_dir": str(few), "parties": 4, "adults_only": True}
    data = vflsec.load_dataset("census-income", **options)
    assert [len(party.frame.columns) for party in data.parties] == [5, 6, 6, 16]
    assert data.parties[0].frame["age"].min() >= 16
    split_dataset(data, DataSpec(), 0)
    trained = vflsec.train(dataset="census-income", data={"options": options}, train={"epochs": 1})
    assert len(trained.predict("test")) == len(data.test_ids)


def test_a_changed_file_is_another_dataset(tmp_path):
    from vflsec.run.plan import find_dataset

    write_census(tmp_path, FEW)
    data = DataSpec(options={"data_dir": str(tmp_path)})
    before = find_dataset("census-income").key(data)
    path = tmp_path / "census-income.test"
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    assert find_dataset("census-income").key(data) != before
    assert find_dataset("census-income").key(DataSpec()) not in (before, find_dataset("census-income").key(data))


def test_errors_say_where_the_files_come_from(tmp_path):
    expected = "census-income.data .*none: .*https://.*FOLDER"
    with pytest.raises(DataError, match=expected):
        vflsec.load_dataset("census-income", data_dir=str(tmp_path))
    write_census(tmp_path, FEW)
    (tmp_path / "census-income.test").unlink()
    with pytest.raises(DataError, match="expected census-income.test or census-income.test.gz"):
        vflsec.load_dataset("census-income", data_dir=str(tmp_path))


def field(column, value, line=3):
    def change(content):
        lines = content.split(b"\n")
        fields = lines[line - 1].split(b", ")
        fields[census_income.COLUMNS.index(column)] = value
        lines[line - 1] = b", ".join(fields)
        return b"\n".join(lines)

    return change


DAMAGE = {
    "category": (field("race", b"Whjte"), "line 3.*'race': .*category, got 'Whjte'"),
    "category in no group": (field("hs_college", b"x"), "'hs_college': .*category, got 'x'"),
    "no category": (field("gender", b""), "'gender': .*category, got ''"),
    "number": (field("age", b"3o"), "line 3.*'age': .*number, got '3o'"),
    "negative": (field("capital_loss", b"-5"), "'capital_loss': .*number, got '-5'"),
    "fraction": (field("stock_dividends", b"1.5"), r"'stock_dividends': .*number, got '1\.5'"),
    "large": (field("age", b"300"), "'age': .*number, got '300'"),
    "huge": (field("capital_gain", b"1" * 400), "'capital_gain': .*number, got '111"),
    "code": (field("vet_benefits", b"7"), "'vet_benefits': .*code, got '7'"),
    "weight": (field("instance_weight", b"17oo.09"), r"'instance_weight': .*number, got '17oo\.09'"),
    "year": (field("year", b"inf"), "'year': .*number, got 'inf'"),
    "label": (field("label", b"- 5000."), r"'label': .*category, got '- 5000\.'"),
    "bytes": (field("education", b"\xff\xfe"), "'education': .*category"),
    "line end within": (field("race", b"White\rBlack"), "line 4.*'age': .*number, got 'Black'"),
    "NUL": (field("race", b"Whi\0te"), r"line 3.*'race': .*category, got 'Whi\\x00te'"),
    "quote": (field("race", b'"White'), "category, got '.White'"),
    "comma lost": (lambda b: b.replace(b", ", b" ", 1), "line 1: expected 42 fields, got 41"),
    "comma more": (lambda b: b.replace(b", ", b", , ", 1), "line 1: expected 42 fields, got 43"),
    "empty line": (lambda b: b.replace(b"\n", b"\n\n", 1), "line 2: expected 42 fields, got 1"),
    "header": (lambda b: b"\n".join([", ".join(census_income.COLUMNS).encode(), b]), "line 1, column 'age'"),
    "cut": (lambda b: b[:-5], "'label': .*category, got"),
    "cut in a line": (lambda b: b[:-50], "expected 42 fields, got"),
    "empty": (lambda b: b"", "expected data rows, got none"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("file", census_income.FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind, file, few, tmp_path):
    change, message = DAMAGE[kind]
    for name in census_income.FILES:
        content = (few / name).read_bytes()
        (tmp_path / name).write_bytes(change(content) if name == file else content)
    with pytest.raises(DataError, match=message) as caught:
        vflsec.load_dataset("census-income", data_dir=str(tmp_path))
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cut_archive_is_named(few, tmp_path):
    for name in census_income.FILES:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((few / name).read_bytes())[:-9])
    with pytest.raises(DataError, match="gzip archive, got Compressed file"):
        vflsec.load_dataset("census-income", data_dir=str(tmp_path))
