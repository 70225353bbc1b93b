"""The check of own data: what it counts, and each warning on data that were made to deserve it."""

from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest

from vflsec.data import checkup
from vflsec.data.checkup import check

ROWS = 600
NOISE = np.random.default_rng(1).normal(size=(30, ROWS)).round(3)


def world(folder: Path, **changes) -> Path:
    """Write two files of which the second tells most about the label, with ``changes`` to single columns."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=ROWS), rng.normal(size=ROWS)
    columns = {
        "y": np.where(a + 2 * b + rng.normal(size=ROWS) > 0, "yes", "no"),
        "a": a.round(4),
        "job": rng.choice(["cook", "baker", ""], ROWS),
        "b": b.round(4),
        "ids": np.arange(ROWS),
        **{key: value(a, b) if callable(value) else value for key, value in changes.items()},
    }
    own = {name: columns[name] for name in ("y", "a", "job")}
    pd.DataFrame({"id": np.arange(ROWS), **own}).to_csv(folder / "bank.csv", index=False)
    others = {name: columns[name] for name in columns if name not in ("y", "a", "job", "ids")}
    pd.DataFrame({"id": columns["ids"], **others}).to_csv(folder / "bureau.csv", index=False)
    text = 'label = "y"\nid = "id"\n[parties.bank]\nfile = "bank.csv"\ncategorical = ["job"]\n'
    (folder / "m.toml").write_text(text + '[parties.bureau]\nfile = "bureau.csv"\nimpute = "mean"\n', "utf-8")
    return folder / "m.toml"


def test_data_without_fault_are_described_and_not_warned_of(tmp_path: Path):
    gaps = np.where(np.arange(ROWS) % 4 == 0, np.nan, np.arange(ROWS) % 11)
    found = check(world(tmp_path, gaps=gaps))
    assert (found.faults, found.warnings, found.metric) == ([], [], "auc")
    assert [(p.name, p.role, p.file, p.rows, p.common, p.columns, p.encoded) for p in found.parties] == [
        ("bank", "active", "bank.csv", 600, 600, 2, 5),
        ("bureau", "passive", "bureau.csv", 600, 600, 2, 3),
    ]
    columns = {one.column: one for one in found.columns}
    assert (columns["job"].kind, columns["job"].values, columns["job"].encoded) == ("category", 3, 4)
    assert columns["job"].missing == pytest.approx(1 / 3, abs=0.06)
    assert (columns["gaps"].missing, columns["gaps"].encoded) == (0.25, 2)
    assert columns["b"].predicts > 0.8 > columns["a"].predicts > 0.6
    assert abs(columns["gaps"].predicts - 0.5) < 0.07
    assert sum(found.classes.values()) == ROWS
    assert found.utility["all"] > found.utility["bureau"] > found.utility["bank"] > 0.5


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"copy": lambda a, b: a * 0 + (a + 2 * b > 0)}, None),
        ({"ids": np.arange(ROWS) + 450}, "rows of bank and 25%"),
        (
            {"b": lambda a, b: b[::-1].round(4), **{f"noise_{k}": NOISE[k] for k in range(30)}},
            "no better than bank alone",
        ),
        ({"y": np.where(np.arange(ROWS) % 20 == 0, "yes", "no")}, "of class 'yes' (30)"),
        (
            {"y": np.tile(["no", "yes"], 300), "a": np.repeat([1, 2], 300), "job": "x", "b": np.tile([1, 2, 3], 200)},
            "training row in all columns",
        ),
    ],
)
def test_what_looks_wrong_is_warned_of(tmp_path: Path, changes: dict, expected: str | None):
    if "job" in changes:
        changes["job"] = np.tile(["x", "y"], ROWS // 2)
    found = check(world(tmp_path, **changes))
    assert found.faults == []
    if expected:
        assert [warning for warning in found.warnings if expected in warning], found.warnings


def test_a_column_that_nearly_copies_the_label_is_warned_of(tmp_path: Path):
    path = world(tmp_path)
    bank = pd.read_csv(tmp_path / "bank.csv")
    noise = np.random.default_rng(1).normal(size=ROWS) * 0.1
    leaking = pd.read_csv(tmp_path / "bureau.csv").assign(fee=(bank["y"] == "yes") + noise.round(3))
    leaking.loc[3, "fee"] = 1 - leaking.loc[3, "fee"]
    leaking.to_csv(tmp_path / "bureau.csv", index=False)
    (warning,) = check(path).warnings
    assert warning.startswith("bureau, column 'fee' alone predicts")


def test_faults_come_instead_of_figures(tmp_path: Path):
    path = world(tmp_path, b=["x", *["1"] * (ROWS - 1)])
    found = check(path)
    assert found.faults == [
        "bureau.csv, column 'b', line 2: expected a finite number, got 'x'; correct it, or list the column in "
        "categorical"
    ]
    assert (found.parties, found.utility) == ([], {})


def test_data_that_cannot_be_split_are_a_fault(tmp_path: Path):
    path = world(tmp_path, y=["a"] * (ROWS - 1) + ["b"])
    assert check(path).faults == [
        "expected every class among the 420 train rows, got no 'b': raise n_labeled, aligned or overlap, or drop the "
        "class"
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_class_of_few_rows_is_described_without_warnings_of_libraries(tmp_path: Path, rows: int):
    labels = ["rare" if k < rows else "ab"[k % 2] for k in range(203)]
    bank = "".join(f"{k},{k % 7},{'uvw'[k % 3]},{label}\n" for k, label in enumerate(labels))
    (tmp_path / "bank.csv").write_text("id,x,job,y\n" + bank, "utf-8")
    (tmp_path / "bureau.csv").write_text("id,z\n" + "".join(f"{k},{k % 5}\n" for k in range(203)), "utf-8")
    text = 'label = "y"\nid = "id"\n[parties.bank]\nfile = "bank.csv"\ncategorical = ["job"]\n'
    (tmp_path / "d.toml").write_text(text + '[parties.bureau]\nfile = "bureau.csv"\n', "utf-8")
    report = check(tmp_path / "d.toml")
    assert not report.faults
    predicts = {entry.column: entry.predicts for entry in report.columns}
    assert not np.isnan(predicts["x"])
    assert np.isnan(predicts["job"]) == (rows == 2), "target encoding needs two rows of each class beside the fold"


def test_a_large_table_is_judged_on_a_sample_and_counted_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng, n = np.random.default_rng(0), 4000
    y = (np.arange(n) % 500 == 0) + (rng.random(n) < 0.3)
    frame = pd.DataFrame({"id": np.arange(n), "a": rng.normal(size=n).round(2), "y": [f"k{k}" for k in y]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.assign(b=y + rng.normal(size=n).round(2))[["id", "b"]][50:].to_csv(tmp_path / "b.csv", index=False)
    text = 'label = "y"\nid = "id"\n[parties.a]\nfile = "a.csv"\n[parties.b]\nfile = "b.csv"\n'
    (tmp_path / "m.toml").write_text(text, "utf-8")
    whole = checkup.check(tmp_path / "m.toml")
    monkeypatch.setattr(checkup, "MAX_ROWS", 1000)
    sampled = checkup.check(tmp_path / "m.toml")
    parties = [[msgspec.structs.replace(party, guess=0.0) for party in facts.parties] for facts in (sampled, whole)]
    assert (parties[0], sampled.classes, sampled.train) == (parties[1], whole.classes, whole.train)
    for some, every in zip(sampled.columns, whole.columns, strict=True):
        assert (some.missing, some.values) == (every.missing, every.values)
        assert abs(some.predicts - every.predicts) < 0.1  # accuracy on 1,000 rows: four standard errors


def test_it_tells_how_well_a_party_guesses_which_of_its_rows_are_common(tmp_path: Path):
    """The bureau has one row in five more, of which one column says it surely; the bank holds no others."""
    path = world(tmp_path)
    bureau = pd.read_csv(tmp_path / "bureau.csv")
    rng = np.random.default_rng(2)
    more = pd.DataFrame({"id": np.arange(150) + ROWS, "b": rng.normal(size=150).round(4)})
    for shift, low, high in ((0.0, 0.38, 0.62), (100.0, 1.0, 1.0)):
        pd.concat([bureau, more.assign(b=more.b + shift)]).to_csv(tmp_path / "bureau.csv", index=False)
        bank, other = check(path).parties
        assert np.isnan(bank.guess)
        assert (other.rows, other.common) == (750, 600)
        assert low <= other.guess <= high
