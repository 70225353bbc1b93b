"""``vflsec eval --rows --by``: what is known of whom, kept and written only if asked for."""

import json
import stat

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

from vflsec.cli import cli
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.run.guesses import get_groups
from vflsec.run.plan import load_dataset

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

EVAL = ["eval", "--dataset", "toy", "--attack", "mc:epochs=5,direction", "--defense", "iso", "--lambda", "5"]
SMALL = ["--set", "train.epochs=2", "--set", "aux.folds=0", "--set", "aux.n=20", "--jobs", "1", "--format", "json"]
COLUMN = "active_x1"


def run(*arguments, seeds=2):
    return CliRunner().invoke(cli, [*map(str, (*EVAL, *SMALL, "--seeds", seeds)), *map(str, arguments)])


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run that keeps nothing, and then one in the same folder that does."""
    out = tmp_path_factory.mktemp("rows") / "run"
    plain = run("--out", out)
    assert plain.exit_code == 0, plain.output
    assert not (out / "guesses").exists()
    asked = run("--out", out, "--rows", out / "rows.csv", "--by", COLUMN)
    assert asked.exit_code == 0, asked.output
    return out, json.loads(plain.stdout), asked


@pytest.mark.long
def test_only_results_whose_guesses_are_lacking_are_computed_again_and_alike(asked):
    out, plain, again = asked
    assert "8 to compute" in again.stderr, "those of baselines are not needed"
    points = [[point["leak"] for point in found["points"]] for found in (plain, json.loads(again.stdout))]
    assert points[0] == points[1]
    third = run("--out", out, "--by", COLUMN)
    assert "nothing to compute" in third.stderr
    assert json.loads(third.stdout)["subgroups"] == json.loads(again.stdout)["subgroups"]


def test_each_training_row_is_there_over_the_seeds_that_trained_on_it(asked):
    out, *_ = asked
    found = pd.read_csv(out / "rows.csv", dtype={"id": str})
    assert found["probability"].between(0, 1, inclusive="neither").all()
    assert (found["highest"] >= found["probability"] - 1e-12).all()
    assert set(found["attack"]) == {"mc", "direction"}
    toy = load_dataset("toy")
    trained = np.concatenate([split_dataset(toy, DataSpec(), seed).ids["train"] for seed in range(2)])
    counts = pd.Series(trained).astype(str).value_counts()
    own = found[(found["attack"] == "direction") & (found["strength"] == 0)].set_index("id")["seeds"]
    known = counts.sub(own, fill_value=0)  # auxiliary rows are not scored
    assert known.min() >= 0
    assert known.sum() == 2 * 20


def test_both_are_for_their_owner_alone(asked):
    out, *_ = asked
    for path in (out / "rows.csv", *(out / "guesses").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_leak_of_a_group_is_that_of_its_rows(asked):
    out, _, again = asked
    found = json.loads(again.stdout)
    own = [one for one in found["subgroups"] if one["attack"] == "mc" and one["strength"] == 5]
    assert [one["group"] for one in own] == list(get_groups(load_dataset("toy"), COLUMN).cat.categories)
    assert sum(one["n"] for one in own) == 180, "test rows"
    records = [json.loads(line)["record"] for line in (out / "records.jsonl").read_text().splitlines()]
    keys = {
        r["seed"]: r["key"]
        for r in records
        if r["kind"] == "result" and r["attack"]["name"] == "mc" and r["defenses"] and r["seed"] < 2
    }
    groups = get_groups(load_dataset("toy"), COLUMN)
    one = next(one for one in own if one["leak"]["mean"] is not None)
    assert own[0]["leak"]["mean"] is None, "it has too few rows of a class"
    leaks = []
    for seed, key in keys.items():
        data = split_dataset(load_dataset("toy"), DataSpec(), seed)
        scores = safetensors.numpy.load((out / "guesses" / f"{key}.safetensors").read_bytes())["test"]
        member = (groups.loc[data.ids["test"]] == one["group"]).to_numpy()
        leaks.append(roc_auc_score(data.labels["test"][member], (scores[:, 1] - scores[:, 0])[member]))
    assert one["leak"]["mean"] == pytest.approx(np.mean(leaks))
    assert len({same["p"] for same in own}) == 1
    assert own[0]["p_holm"] >= own[0]["p"]


@pytest.mark.long
def test_a_report_shows_them_without_the_data_and_not_for_other_settings(asked):
    out, _, again = asked
    report = CliRunner().invoke(cli, ["report", str(out), "--format", "json"])
    assert json.loads(report.stdout)["subgroups"] == json.loads(again.stdout)["subgroups"]
    shown = CliRunner().invoke(cli, ["report", str(out), "--format", "markdown"]).stdout
    assert f"Leak by {COLUMN}" in shown
    assert json.loads(run("--out", out, seeds=3).stdout)["subgroups"] == [], "of two seeds, not of three"


def test_mistakes_are_one_line(tmp_path):
    wrong = run("--out", tmp_path / "run", "--by", "active_x")
    assert wrong.exit_code == 2
    assert "'active_x'. Did you mean active_x0" in wrong.stderr
    assert not (tmp_path / "run").exists()
    swept = run("--out", tmp_path / "run", "--by", COLUMN, "--sweep", "data.n_labeled=100,200")
    assert "--rows or --by with --sweep" in swept.stderr


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_computed(tmp_path, more):
    missing = tmp_path / "no" / "rows.csv"
    found = run("--out", tmp_path / "run", "--rows", missing, *more)
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1] == f"Error: expected a folder {missing.parent} for --rows, found none: make it"
    assert list(tmp_path.iterdir()) == []
    assert run("--out", tmp_path / "run", "--rows", tmp_path / "run" / "rows.csv", "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "expected a path, got an empty text"),
        ("data.toml", "no table of rows"),
        ("link.csv", "no table of rows"),
    ],
)
def test_no_file_but_an_earlier_table_of_rows_is_overwritten(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.toml").write_text("name = 'mine'\n")
    (tmp_path / "link.csv").symlink_to("data.toml")
    found = run("--out", "run", "--rows", name)
    assert found.exit_code == 2
    assert said in found.stderr.splitlines()[-1]
    assert (tmp_path / "data.toml").read_text() == "name = 'mine'\n"
    assert not (tmp_path / "run").exists()


def test_a_column_of_text_gives_its_categories_and_gaps_are_a_group():
    data = load_dataset("credit-default")
    assert list(get_groups(data, "SEX").cat.categories) == ["1", "2"]
    ages = get_groups(data, "AGE")
    assert list(ages.cat.categories) == sorted(ages.cat.categories, key=lambda one: float(one.split()[0]))
    assert ages.value_counts().min() > len(ages) / 6
