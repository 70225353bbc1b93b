"""Datasets of data frames: equal to those of files, checked like them, and evaluated without being written."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import vflsec
from vflsec.base.errors import DataError, UsageError
from vflsec.data.files import load_toml
from vflsec.data.frames import keep
from vflsec.run import spec as specs


def frames(rows: int = 300) -> tuple[pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng(0)
    score = rng.normal(size=rows)
    bank = pd.DataFrame(
        {
            "age": rng.integers(20, 70, rows).astype(float),
            "job": rng.choice(["cook", "baker"], rows),
            "opened": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, rows), unit="D"),
            "owner": rng.random(rows) < 0.5,
            "defaulted": np.where(score + rng.normal(size=rows) > 0, "yes", "no"),
        },
        index=pd.Index(np.arange(rows), name="customer"),
    )
    bank.loc[bank.index % 7 == 0, "age"] = np.nan
    bureau = pd.DataFrame({"score": score, "kind": rng.integers(0, 3, rows)}, index=bank.index).sample(
        frac=1, random_state=1
    )
    return bank, bureau


def loans(**changes) -> vflsec.data.dataset.VerticalDataset:
    bank, bureau = frames()
    given = {"active": {"bank": bank}, "passive": {"bureau": bureau}, "label": "defaulted", "name": "loans"}
    return vflsec.dataset(**{**given, "categorical": ["kind"], "impute": "mean", **changes})


def test_frames_equal_the_files_that_they_are_saved_as(tmp_path: Path):
    bank, bureau = frames()
    bank.to_csv(tmp_path / "bank.csv")
    bureau.to_csv(tmp_path / "bureau.csv")
    (tmp_path / "loans.toml").write_text(
        'label = "defaulted"\nid = "customer"\nimpute = "mean"\n[parties.bank]\nfile = "bank.csv"\n'
        'categorical = ["job"]\ndates = ["opened"]\n[parties.bureau]\nfile = "bureau.csv"\ncategorical = ["kind"]\n',
        "utf-8",
    )
    own, saved = loans(), load_toml(tmp_path / "loans.toml")
    assert own.names == saved.names
    assert own.classes == saved.classes
    pd.testing.assert_series_equal(own.labels, saved.labels)
    for mine, theirs in zip(own.parties, saved.parties, strict=True):
        pd.testing.assert_frame_equal(mine.frame, theirs.frame)
        assert mine.categorical == theirs.categorical


@pytest.mark.long
def test_evaluation_of_frames_names_the_parties_and_writes_no_data(tmp_path: Path):
    small = {"attack": "mc:epochs=5", "seeds": 2, "train": {"epochs": 2}, "aux": {"n": 20, "folds": 0}}
    report = vflsec.evaluate(dataset=loans(), adversary="bureau", **small, jobs=1, out=tmp_path / "one", progress=False)
    assert (report.summary.dataset, report.summary.adversary) == ("loans", "bureau")
    assert report.table().startswith("loans · adversary bureau ·")
    assert report.summary.verdict[0].startswith("With 20 known labels, bureau infers")
    assert {sender for _, sender, *_ in report.traffic} == {"bank", "bureau"}
    assert not [path for path in (tmp_path / "one").rglob("*") if path.suffix in (".csv", ".parquet", ".pkl")]
    again = vflsec.evaluate(dataset=loans(), adversary="passive_1", **small, jobs=2, out=tmp_path / "two")
    assert [point.leak.mean for point in again.points] == [point.leak.mean for point in report.points]


def test_equal_frames_have_one_name_and_others_another():
    assert keep(loans()) == keep(loans())
    bank, bureau = frames()
    changed = bureau.assign(score=bureau["score"].where(bureau.index != 5, 0.0))
    assert keep(loans(passive={"bureau": changed})) != keep(loans())
    assert keep(loans(impute="median")) != keep(loans())
    assert keep(loans(active={"bank": bank.assign(defaulted=bank["defaulted"].iloc[::-1].to_numpy())})) != (
        keep(loans())
    )


def test_frames_of_another_process_are_not_there():
    with pytest.raises(UsageError, match="data frames of loans-0"):
        vflsec.load_dataset("memory:loans-0")


def test_train_and_attack_take_frames():
    trained = vflsec.train(dataset=loans(), train={"epochs": 2}, seed=1)
    assert trained.predict("test").shape == (90, 2)
    leaks = [vflsec.attack(trained, "logistic", adversary=name, n_aux=20) for name in ("bureau", "passive_1")]
    assert leaks[0] == leaks[1]
    assert leaks[0]["test"]["n"] == 90


def test_the_repr_of_a_dataset_is_one_line():
    assert repr(loans()) == "VerticalDataset('loans', 2 classes; bank 300 x 6, bureau 300 x 2)"
    assert repr(loans().parties[1]) == "PartyTable('passive_1', 300 rows of score, kind)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"label": "defaultd"}, "bank: .*label, .*'defaultd'.*mean defaulted"),
        ({"categorical": ["kin"]}, "categorical: .*'kin'.*mean kind"),
        ({"group_rare": {"knd": 3}}, "group_rare: .*'knd'.*mean kind"),
        ({"impute": None}, "bank.*'age', row 1: .*nothing; fill"),
        ({"id": "who"}, "bank: .*id, .*'who'"),
        ({"passive": {}}, "expected passive parties .*got none"),
        ({"passive": {"bank": frames()[1]}}, "expected passive parties .*got bank"),
        (
            {"passive": frames()[1].assign(z=1).set_index("z", append=True)},
            r"passive_1: .*\['customer', 'z'\], got several",
        ),
        ({"passive": frames()[1].T.T.assign(z=1j)}, "passive_1.*'z': .*complex128"),
        (
            {"passive": frames()[1].assign(**{"score (missing)": frames()[1]["score"]})},
            r"passive_1: .*'score \(missing\)' beside 'score'",
        ),
        ({"passive": [1, 2]}, "expected .*data frame .*passive_1, got list"),
        ({"active": {"a+b": frames()[0]}}, r"expected .*party's name .*'a\+b'"),
        ({"passive": frames()[1].iloc[:0]}, "passive_1: .*rows, got none"),
        (
            {"passive": frames()[1].assign(kind=[f"k{i}" for i in range(300)])},
            r"passive_1.*'kind': .*group_rare=\{'kind': 50\}.*hash=\{'kind': 32\}",
        ),
    ],
)
def test_whatever_is_wrong_gives_one_clear_line(changes: dict, expected: str):
    with pytest.raises((DataError, UsageError)) as caught:
        loans(**changes)
    assert re.match(expected, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_setting_of_a_table_that_is_given_as_an_argument_says_where_it_belongs():
    for function, call in ((vflsec.train, {"epochs": 3}), (vflsec.evaluate, {"n_labeled": 3})):
        ((key, value),) = call.items()
        table = "train" if key == "epochs" else "data"
        with pytest.raises(UsageError, match=rf"{table}=\{{'{key}': \.\.\.\}} .*{key}= as"):
            function(**{key: value})


def test_settings_with_frames_are_refused_by_dask():
    spec = specs.read({"dataset": loans()})
    assert spec.dataset.startswith("memory:loans-")
    assert spec.name.startswith("loans-")


@pytest.mark.parametrize("kind", ["date32", "date64"])
def test_dates_of_arrow_are_dates(kind: str):
    pyarrow = pytest.importorskip("pyarrow")
    bank, _ = frames()
    plain = loans().parties[0].frame
    bank["opened"] = pd.array(bank["opened"].dt.date, dtype=pd.ArrowDtype(getattr(pyarrow, kind)()))
    pd.testing.assert_frame_equal(loans(active={"bank": bank}).parties[0].frame, plain)


def test_columns_of_dates_may_have_formats_of_their_own():
    bank, bureau = frames()
    bureau["late"] = bank["opened"].dt.strftime("%d.%m.%Y")
    bureau["back"] = bank["opened"].dt.strftime("%m/%d/%Y")
    made = loans(passive={"bureau": bureau}, dates={"late": "%d.%m.%Y", "back": "%m/%d/%Y"}).parties[1].frame
    assert (made["late"] == made["back"]).all()
