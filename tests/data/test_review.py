"""What looks wrong in the user's own data: each case with its place, and no alarm on data without a fault."""

import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import vflsec
from vflsec.audit import job
from vflsec.base.errors import DataError
from vflsec.cli.eval_ import command
from vflsec.data.checkup import check
from vflsec.data.files import _read_labels, load_toml
from vflsec.data.review import find_odd, group_alike, normalize
from vflsec.results.analysis.summary import summarize
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.plan import load_dataset

ROWS = 400
RNG = np.random.default_rng(0)
X, SMALL = RNG.normal(size=ROWS).round(4), RNG.integers(1, 17, ROWS)
Y = np.where(RNG.normal(size=ROWS) + X > 0, "yes", "no")


@pytest.fixture
def files(tmp_path):
    """Return a function that writes the files of a bank and a bureau, with ``changes``, and their description."""

    def write(*, top="", bureau="", **changes) -> Path:
        columns = {"id": range(ROWS), "ids": range(ROWS), "y": Y, "age": X[::-1], "x": X, **changes}
        own = {name: columns.pop(name) for name in ("id", "y", "age")}
        pd.DataFrame(own).to_csv(tmp_path / "bank.csv", index=False)
        pd.DataFrame({"id": columns.pop("ids"), **columns}).to_csv(tmp_path / "bureau.csv", index=False)
        text = (
            f'label = "y"\nid = "id"\n{top}\n[parties.bank]\nfile = "bank.csv"\n[parties.bureau]\nfile = "bureau.csv"\n'
        )
        (tmp_path / "m.toml").write_text(text + bureau, "utf-8")
        return tmp_path / "m.toml"

    return write


def changed(values, new, rows):
    values = np.array(values, dtype=object)
    values[rows] = new
    return values


SPELLINGS = [
    ("Yes", "yes"),
    ("ja nein", " ja  nein "),
    ("café", unicodedata.normalize("NFD", "café")),
    ("２９７", "297"),
    ("\u22121", "-1"),
    ("297", "297.0"),
    ("297", "2.97e2"),
    ("297", "0297"),
    ("\u200bcook", "cook"),
    ("STRASSE", "straße"),
    ("-0.0", "0"),
]


@pytest.mark.parametrize(("text", "other"), SPELLINGS)
def test_spellings_have_one_form(text, other):
    assert normalize(text) == normalize(other)
    assert group_alike([text, "third", other]) == [[text, other]]


def test_other_texts_have_other_forms():
    texts = ["a", "b", "297", "298", "-297", "29.7", "1e5", "1e6", "12345678901234567890123456789012", "1e99999", "e5"]
    texts += ["12345678901234567890123456789013", ".", "+", "", "co ok", "cook", "+x"]
    assert group_alike(texts) == []


@pytest.mark.parametrize(("text", "other"), [pair for pair in SPELLINGS if pair[1].strip() == pair[1]])
def test_classes_that_differ_only_in_spelling_are_a_fault(files, text, other):
    y = changed(np.where(Y == "yes", text, "no"), other, np.flatnonzero(Y == "yes")[:7])
    (found,) = check(files(y=y)).faults
    assert found.startswith("bank.csv, column 'y': expected")
    assert (repr(text) in found, repr(other) in found) == (True, True)


def test_ids_that_are_lost_to_spelling_are_a_fault_or_few_a_warning(files):
    half = [f"{k}.0" if k % 2 else str(k) for k in range(ROWS)]
    with pytest.raises(DataError, match="^200 ids .*'1' .*'1.0'"):
        load_toml(files(ids=half))
    few = [f"{k}.0" if k in (8, 9) else str(k) for k in range(ROWS)]
    (warning,) = load_toml(files(ids=few)).warnings
    assert warning.startswith("2 ids match only")
    assert warning.endswith("'8' in bank and '8.0' in bureau")
    keys = [f"{k}.0 | a" if k % 2 else f"{k} | a" for k in range(ROWS)]
    with pytest.raises(DataError, match="400 ids"):
        load_toml(files(id=[f"{k} | A" for k in range(ROWS)], ids=keys[::-1]))


def test_categories_that_differ_only_in_spelling_are_named(files):
    job = changed(np.resize(["cook", "Cook", "baker", "b"], ROWS), "BAKER", [3, 5])
    for role in ('categorical = ["job"]', "hash = { job = 2 }"):
        (warning,) = load_toml(files(job=job, bureau=role)).warnings
        assert warning.startswith("bureau: bureau.csv, column 'job': 2")
        assert re.search("'cook'.*'Cook'", warning)


def test_less_than_half_of_the_rows_used_is_said(files):
    (warning,) = load_toml(files(ids=np.arange(ROWS) + 201)).warnings
    assert "rows of bank and 50%" in warning
    assert load_toml(files(ids=np.arange(ROWS) + 200)).warnings == ()


@pytest.mark.sampled
@pytest.mark.parametrize("code", ["-999", "-99", "-9", "-1", "99", "999", "9999", "99999", "1000000", "-12345"])
def test_codes_are_named_and_the_way_out_works(files, code):
    rows = np.arange(3, ROWS, 10)
    path = files(x=changed(SMALL, code, rows))
    (warning,) = load_toml(path).warnings
    assert warning == (
        f"bureau: bureau.csv, column 'x', line 5 (and 39 more rows): {code} looks like a code beside the other values, "
        f'1 to 16; if it stands for a missing value, set missing = ["{code}"] and impute = "mean"'
    )
    assert (
        load_toml(files(x=changed(SMALL, code, rows), bureau=f'missing = ["{code}"]\nimpute = "mean"')).warnings == ()
    )


def test_several_codes_of_a_party_have_one_way_out(files):
    columns = {
        "x": changed(SMALL, "-999", np.arange(3, ROWS, 10)),
        "z": changed(SMALL[::-1], "99999", np.arange(5, ROWS, 10)),
        "w": changed(np.roll(SMALL, 7), "-999", np.arange(7, ROWS, 10)),
    }
    *each, last = load_toml(files(**columns)).warnings
    assert len(each) == 3
    assert not any("missing" in warning for warning in each)
    assert re.match(r'bureau: bureau.csv: .*3 codes .*\["-999", "99999"\]', last)
    settings = last.split("set ")[1].replace(" and ", "\n")
    assert load_toml(files(**columns, bureau=settings)).warnings == ()
    (warning,) = load_toml(files(**columns, bureau='missing = ["-999"]\nimpute = "mean"')).warnings
    assert 'set missing = ["-999", "99999"] and' in warning, "a second code does not replace the first"


def test_ids_and_labels_that_are_misspelled_are_named_together(files):
    path = files(y=changed(Y, "YES", [np.flatnonzero(Y == "yes")[0]]), ids=[f"0{k}" for k in range(ROWS)])
    label, ids = check(path).faults
    assert "expected each class written alike" in label
    assert "400 ids match only if" in ids


def test_wild_values_and_dates_are_named(files):
    x = X.copy()
    x[[20, 77]] = 31415, -27182
    warning = check(files(x=x)).warnings[0]
    assert re.match(r"bureau: bureau.csv.*'x', line 22 \(.*31415", warning)
    dates = pd.Series(pd.date_range("2020-01-01", periods=ROWS)).dt.strftime("%Y-%m-%d").to_numpy()
    (warning,) = load_toml(files(d=changed(dates[::-1], "1900-01-01", [3, 9, 12]), bureau='dates = ["d"]')).warnings
    assert re.search("1900-01-01 .*2020-01-01 to 2021-02-03", warning)


CLEAN = {
    "normal": lambda rng, n: rng.normal(size=n),
    "lognormal": lambda rng, n: rng.lognormal(size=n),
    "exponential": lambda rng, n: rng.exponential(size=n),
    "poisson": lambda rng, n: rng.poisson(2, n),
    "rare poisson": lambda rng, n: rng.poisson(0.05, n),
    "uniform": lambda rng, n: rng.random(n),
    "whole": lambda rng, n: rng.integers(-1, 100, n),
    "binary": lambda rng, n: rng.random(n) < 0.3,
    "rare": lambda rng, n: rng.random(n) < 0.005,
    "t3": lambda rng, n: rng.standard_t(3, n),
    "money": lambda rng, n: rng.lognormal(10, 1, n).round(),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", CLEAN)
def test_at_most_one_clean_column_in_a_hundred_is_named(kind, files):
    rng = np.random.default_rng(7)
    for rows, columns in ((400, 200), (20_000, 10)):
        odd = sum(bool(find_odd(CLEAN[kind](rng, rows).astype(float))) for _ in range(columns))
        assert odd <= 0.01 * columns
    if kind != "rare":  # of which a seed may have none
        columns = {f"x{k}": CLEAN[kind](rng, ROWS).astype(float) for k in range(20)}
        assert load_toml(files(**columns)).warnings == ()


@pytest.mark.long
def test_bundled_datasets_have_only_their_top_codes():
    named = set()
    for name in ("credit-default", "census-income", "flights", "multiple-features", "digits"):
        for table in load_dataset(name).parties:
            for column in set(table.frame.columns) - table.categorical:
                values = table.frame[column].to_numpy(dtype=np.float64)
                named |= {(name, column, odd.value) for odd in find_odd(values)}
    assert named == {("census-income", "capital_gain", 99999.0), ("census-income", "stock_dividends", 99999.0)}


@pytest.mark.parametrize(
    ("values", "role"),
    [
        (RNG.permutation(ROWS) + 1, ""),
        (np.arange(ROWS) * 7 + RNG.integers(0, 7, ROWS), ""),
        (RNG.choice(900_000, ROWS, replace=False) + 100_000, ""),
        (RNG.permutation([f"c{k:04d}" for k in range(ROWS)]), "hash = { number = 20 }"),
    ],
)
def test_a_second_id_is_named(files, values, role):
    (warning,) = load_toml(files(number=values, bureau=role)).warnings
    assert re.search(r"'number': .*400 .*drop = \[.number.\]$", warning)
    assert load_toml(files(number=values, bureau='drop = ["number"]')).warnings == ()


@pytest.mark.parametrize(
    "values", [SMALL, RNG.integers(18, 90, ROWS), RNG.integers(0, 800, ROWS), RNG.lognormal(10, 1, ROWS).round(), X * 9]
)
def test_other_columns_are_not_taken_for_ids(files, values):
    assert load_toml(files(number=values)).warnings == ()


def test_frames_say_the_way_out_in_python():
    bank = pd.DataFrame({"y": Y, "age": X[::-1]})
    bureau = pd.DataFrame({"x": changed(SMALL, -999, [1, 2, 3]).astype(float)})
    (warning,) = vflsec.dataset(active={"bank": bank}, passive={"bureau": bureau}, label="y").warnings
    assert warning.endswith('NaN and impute = "mean"')


def test_warnings_reach_a_run_an_audit_and_their_reports(files, tmp_path):
    path = files(x=changed(SMALL, "-999", range(0, ROWS, 10)), z=X)
    (warning,) = load_toml(path).warnings
    spec = specs.read({"dataset": str(path), "seeds": 1, "attacks": ["norm"]})
    vectors = pd.DataFrame({"id": range(ROWS), "e0": X, "e1": X**2})
    vectors.to_csv(tmp_path / "embeddings.csv", index=False)
    (tmp_path / "ids.txt").write_text("\n".join(map(str, range(300))))
    ids = tmp_path / "ids.txt"
    audit = job.prepare_audit(tmp_path / "embeddings.csv", str(path), party="bureau", train_ids=ids, draws=1)
    for manifest in (build_manifest(spec), audit.manifest):
        assert manifest.data_notes == [warning]
        many = msgspec.structs.replace(manifest, data_notes=[f"note {k}" for k in range(10)])
        notes = summarize(many, {}, out="").notes
        assert notes[:9] == [*many.data_notes[:8], "2 more warnings of the data: see vflsec data check"]
    ran = CliRunner().invoke(command, ["--dataset", str(path), "--adversary", "bureau", "--dry-run"])
    assert f"NOTE {warning}" in ran.stderr


def test_only_the_rows_of_the_rare_spelling_are_to_be_corrected():
    table = SimpleNamespace(
        file="bank.csv", keys=lambda column, what: pd.Series(["no"] * 9 + ["yes"] * 7 + ["Yes"] * 2)
    )
    with pytest.raises(DataError, match="correct it in 2 rows"):
        _read_labels(table, "y", pd.RangeIndex(18))
