"""``vflsec data``: from files as companies export them to an evaluation, with nothing edited but the label's name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from vflsec.cli import cli
from vflsec.cli.data_ import add_label_warning, limit_labels
from vflsec.data.checkup import Checkup
from vflsec.data.files import load_toml
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.results.analysis.gates import MAX_KNOWN_SHARE
from vflsec.run.adversary import draw_auxiliary
from vflsec.run.score import share_of_class
from vflsec.run.spec import AuxSpec

SEEDS = 1


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


@pytest.fixture
def folder(tmp_path: Path, dirty: Path, monkeypatch) -> Path:
    for name in ("bank.csv", "bureau.csv"):
        shutil.copy(dirty / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def few_rows(folder: Path) -> Path:
    """Return the folder of the same files, with the first of their 20,000 rows."""
    for name in ("bank.csv", "bureau.csv"):
        lines = (folder / name).read_text("utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:2000]), "utf-8")
    return folder


def reference(folder: Path) -> float:
    """Return the mean AUC of a scikit-learn pipeline on the same columns and rows."""
    bank = pd.read_csv(folder / "bank.csv", thousands=",", keep_default_na=False, na_values=["", "NA"])
    table = bank.merge(pd.read_csv(folder / "bureau.csv"), on="customer").set_index("customer")
    opened = pd.to_datetime(table["opened"], format="%d.%m.%Y")
    table = table.assign(opened=opened.astype("int64"), month=opened.dt.month, weekday=opened.dt.day_of_week)
    table[["income", "debt"]] = np.log1p(table[["income", "debt"]])
    numbers = ["age", "income", "opened", "score", "debt", "late"]
    common = {"handle_unknown": "infrequent_if_exist"}
    prepare = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), numbers),
            ("categories", OneHotEncoder(**common), ["job", "month", "weekday"]),
            ("merchant", OneHotEncoder(max_categories=101, **common), ["merchant"]),
            ("truth", "passthrough", ["owner", "checked"]),
        ]
    )
    model = make_pipeline(prepare, LogisticRegression(C=0.1, max_iter=500))
    labels = (table["defaulted"] == "yes").astype(int)
    dataset, found = load_toml(folder / "data.toml"), []
    for seed in range(SEEDS):
        ids = split_dataset(dataset, DataSpec(), seed).ids
        model.fit(table.loc[ids["train"]], labels.loc[ids["train"]])
        found.append(roc_auc_score(labels.loc[ids["test"]], model.predict_proba(table.loc[ids["test"]])[:, 1]))
    return float(np.mean(found))


@pytest.mark.long
def test_dirty_files_give_an_evaluation_as_good_as_scikit_learn(folder: Path):
    drafted = run("data", "init", "bank.csv", "bureau.csv", "--label", "defaulted")
    assert drafted.exit_code == 0, drafted.output
    assert (folder / "data.toml").read_text("utf-8") == drafted.stdout
    page = Path(__file__).parents[2].joinpath("docs", "your_own_data.md").read_text("utf-8")
    assert f"```toml\n{drafted.stdout}```" in page
    checked = run("data", "check", "data.toml")
    assert checked.exit_code == 0, checked.output
    assert "bank     active    bank.csv     20,000      16,000         5        33" in checked.stdout
    assert "next: vflsec eval --dataset data.toml" in checked.stdout
    assert max(map(len, checked.stdout.splitlines())) <= 80
    command = ["eval", "--dataset", "data.toml", "--attack", "norm", "--seeds", SEEDS, "--adversary", "bureau"]
    result = run(*command, "--set", "aux.folds=0", "--jobs", 1, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["dataset"], found["adversary"]) == ("data", "bureau")
    assert abs(found["points"][0]["utility"]["mean"] - reference(folder)) < 0.005
    report = run("report", found["out"])
    assert report.stdout.startswith("data · adversary bureau ·")
    assert "passive_1" not in report.stdout
    assert str(folder) not in Path(found["out"], "report.html").read_text("utf-8")


@pytest.mark.long
def test_all_faults_come_at_once_and_on_stdout(few_rows: Path):
    assert run("data", "init", "bank.csv", "bureau.csv", "--label", "defaulted").exit_code == 0
    frame = pd.read_csv("bank.csv", dtype=str, keep_default_na=False)
    frame.loc[5, "age"], frame.loc[9, "opened"] = "young", "yesterday"
    frame.to_csv("bank.csv", index=False)
    result = run("data", "check", "data.toml")
    assert result.exit_code == 2
    assert [line.partition(": expected")[0] for line in result.stdout.splitlines()] == [
        "FAULT bank.csv, column 'age', line 7",
        "FAULT bank.csv, column 'opened', line 11",
    ]
    assert "1 more: vflsec data check" in run("eval", "--dataset", "data.toml").output
    shown = json.loads(run("data", "check", "data.toml", "--format", "json").stdout)
    assert len(shown["faults"]) == 2


@pytest.mark.parametrize(
    ("train", "expected"),
    [([6860, 140], 28), ([6600, 400], None), ([6600, 399], 78), ([500, 200, 300], 60), ([400, 7], 2)],
)
def test_the_next_command_has_as_many_labels_as_the_alarm_allows(train: list[int], expected: int | None):
    found = Checkup(name="x", train={str(c): rows for c, rows in enumerate(train)})
    assert limit_labels(found) == (expected, 80)
    assert [text for text in add_label_warning(found).warnings if f"set aux.n={expected}" in text] or expected is None
    labels = torch.cat([torch.full((rows,), c) for c, rows in enumerate(train)])

    def share(n: int) -> float:
        return share_of_class(labels, draw_auxiliary(labels, len(train), AuxSpec(n=n), 0))

    assert share(expected or 80) <= MAX_KNOWN_SHARE
    if expected and min(train) >= 50:  # fewer than five known rows of a class are no alarm
        assert share(expected + len(train)) > MAX_KNOWN_SHARE


def test_rare_classes_get_a_next_command_with_fewer_labels(folder: Path):
    rows = np.arange(4000)
    y = np.where(rows % 50 == 0, "yes", "no")
    pd.DataFrame({"id": rows, "y": y, "a": np.random.default_rng(0).normal(size=4000)}).to_csv("bank.csv", index=False)
    pd.DataFrame({"id": rows, "b": np.random.default_rng(1).normal(size=4000)}).to_csv("bureau.csv", index=False)
    Path("m.toml").write_text(
        'label = "y"\nid = "id"\n[parties.bank]\nfile = "bank.csv"\n[parties.bureau]\nfile = "bureau.csv"\n'
    )
    shown = run("data", "check", "m.toml").stdout  # 56 of the 80 rows are for training
    assert "56 training rows of class" in shown
    assert "--dataset m.toml --set aux.n=10" in shown


@pytest.mark.long
def test_a_draft_does_not_replace_a_file(few_rows: Path):
    words = ["data", "init", "bank.csv", "bureau.csv", "--label", "defaulted", "--out", "own.toml"]
    assert run(*words).exit_code == 0
    result = run(*words)
    assert result.exit_code == 2
    assert (
        "expected a new file own.toml, found one: name another with --out, or overwrite it with --force"
        in result.output
    )
    again = run(*words, "--force")
    assert again.exit_code == 0
    assert max(map(len, again.stdout.splitlines())) <= 80, "the width of a terminal"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["init", "bank.csv"], "parties or more, got 1"),
        (["init", "bank.csv", "none.csv"], "file none.csv, found none"),
        (["init", "bank.csv", "bureau.csv", "--label", "y"], "label 'y', got none"),
        (["init", "bank.csv", "bureau.csv", "--active", "x"], "unknown --active 'x'. Known: bank.csv, bureau.csv"),
        (["init", "bank.csv", "bureau.csv", "--out", "no/x.toml"], "folder no for --out"),
        (["check", "none.toml"], "TOML file none.toml, found"),
        (["chek", "none.toml"], "'chek'. Did you mean check?"),
        (["check", "bank.csv"], "bank.csv: expected TOML in utf-8"),
    ],
)
def test_mistakes_give_one_line(folder: Path, words: list[str], expected: str):
    result = run("data", *words)
    assert result.exit_code == 2
    assert expected in result.output
    assert len(result.output.strip().splitlines()) == 1
