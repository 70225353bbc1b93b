"""Recipes: what they measure is what the commands measure, and the table beside it is the paper's."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import vflsec
from tests.papers.datasets.layouts import write_avazu, write_bhi, write_modelnet
from vflsec.base.errors import UsageError
from vflsec.cli import cli
from vflsec.core import registry
from vflsec.papers import recipe as recipes
from vflsec.papers.recipe import Quick, read_recipe
from vflsec.papers.recipe_grid import CellValues, RecipeGrid
from vflsec.papers.reproduction import Reproduction
from vflsec.run import spec as specs
from vflsec.run.store import CellFacts, Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

OWN = """
title = "Cuts"
source = "nobody, table 1"
measure = "{measure}"
compared = "columns"
metric = "{metric}"

[settings]
{more}
[settings.data.options]
rows = 300
[settings.train]
epochs = 2

[quick]
seeds = 1
columns = ["2"]

[[columns]]
name = "2"
settings.model.cut = 2

[[columns]]
name = "8"
settings.model.cut = 8

[[groups]]
name = "theirs"
original = "{original}"
settings.dataset = "toy"

[[rows]]
group = "theirs"
name = "split"
printed = [0.5, nan]
settings.methods = ["fedsplitnn"]
"""


@pytest.fixture
def own(tmp_path):
    def write(measure="utility", metric="auc", more="", original=""):
        path = tmp_path / "own.toml"
        path.write_text(OWN.format(measure=measure, metric=metric, more=more, original=original))
        return str(path)

    return write


def run(*words):
    return CliRunner().invoke(cli, ["reproduce", *words], prog_name="vflsec")


@pytest.mark.sampled
@pytest.mark.parametrize("name", recipes.list_recipes())
def test_every_recipe_can_be_run(name, tmp_path):
    recipe = recipes.apply_seeds(read_recipe(name), 1, quick=True)
    job = RecipeGrid(recipe, Store(tmp_path / "run"))
    assert job.missing() > 0
    assert not (tmp_path / "run").exists()
    assert recipe.rows
    assert recipe.columns
    whole = read_recipe(name)
    for row in whole.rows:
        for column in whole.columns:
            assert whole.get_settings(row, column)["methods"]
            assert whole.get_settings(row, column)["dataset"]


def numbers(recipe):
    return [value for row in recipe.rows for value in row.printed]


def test_printed_values_are_those_of_the_papers():
    """Two of each table, copied by hand from the papers."""
    table = {
        ("fedhssl-table4", "NUSWIDE", "FedHSSL-MoCo", 4): 0.670,
        ("fedhssl-table4", "Modelnet", "FedSplitNN", 0): 0.612,
        ("fedhssl-table5", "Avazu", "FedLocalBYOL w/ PMA", 0): 0.575,
        ("fedhssl-table5", "BHI", "FedGSSL-MoCo*", 0): 0.787,
        ("fedhssl-table10", "Modelnet", "FedHSSL-BYOL, 40 %", 0): 0.681,
        ("fedhssl-table10", "NUSWIDE", "LR", 0): 0.530,
        ("fedhssl-table7", "BHI", "CAP", 1): 0.221,
        ("fedhssl-table9", "Avazu", "FedCSSL-SimSiam", 2): 0.627,
        ("fedhssl-table12", "NUSWIDE", "FedHSSL-SimSiam (40%)", 0): 0.277,
        ("vflhlp-table2", "Avazu", "VFLHLP", 0): 0.694,
        ("vflhlp-table3", "Criteo", "VFL", 5): 0.614,
        ("vflhlp-table4", "Avazu", "FedHSSL-BYOL", 1): 0.633,
        ("prada-table1", "", "PrADA", 5): 0.4927,
        ("prada-table1", "", "AB-VFL SecureLR", 0): 0.7288,
        ("prada-table1", "", "A-VFL SecureBoost", 3): 0.4161,
        ("fedhssl-table6", "NUSWIDE", "FedHSSL-SimSiam", 0): 0.511,
        ("fedhssl-table6", "Avazu", "FedHSSL-SimSiam, λp=0.1", 1): 0.617,
        ("fedhssl-table11", "BHI", "FedHSSL-SimSiam (40%), λf=5", 0): 0.687,
        ("fedhssl-table11", "NUSWIDE", "FedLocalSimSiam, λf=25", 1): 0.458,
        ("fedhssl-fig5", "Avazu", "FedCVT", 3): 0.637,
        ("fedhssl-fig6", "Modelnet", "FedHSSL-MoCo", 4): 0.830,
        ("ss-vfl-table1", "ModelNet10", "5%, 75%", 0): 175.55,
        ("ss-vfl-table1", "ImageNet100", "25%, 85%", 2): 396.21,
        ("vflhlp-fig5", "Criteo", "VFL", 1): 0.575,
        ("prada-table3", "Loan Default", "A-VFL SecureBoost", 4): 0.7068,
        ("prada-table3", "Loan Default", "PrADA", 5): 0.4348,
        ("prada-table5", "", "PrADA", 1): 8.24,
    }
    without = {name for name in recipes.list_recipes() if all(map(math.isnan, numbers(read_recipe(name))))}
    without.add("controls")  # has what is expected
    assert {name for name, *_ in table} == set(recipes.list_recipes()) - without
    pictures = {"ss-vfl-fig2", "ss-vfl-fig3", "prada-fig3", "prada-fig4", "prada-fig5"}
    assert without == {"controls", "fedhssl-fig-leak", "fedhssl-fig7", "fedhssl-fig8", "cross-risk", "trees", *pictures}
    for (name, group, row, column), value in table.items():
        (found,) = [one for one in read_recipe(name).rows if (one.group, one.name) == (group, row)]
        assert found.printed[column] == value


TABLE_X = """
NUSWIDE
LR 0.530 0.558 0.580 0.589 0.606
LGB 0.425 0.465 0.526 0.556 0.587
FedSplitNN 0.495 0.535 0.560 0.573 0.591
FedLocalSimSiam 0.505 0.536 0.596 0.603 0.612
FedLocalBYOL 0.514 0.527 0.585 0.599 0.606
FedLocalMoCo 0.566 0.596 0.625 0.634 0.639
FedHSSL-SimSiam 0.574 0.607 0.624 0.641 0.636 0.651 0.643 0.662 0.654 0.670
FedHSSL-BYOL 0.551 0.598 0.592 0.624 0.617 0.645 0.633 0.659 0.640 0.664
FedHSSL-MoCo 0.611 0.615 0.636 0.642 0.653 0.658 0.662 0.668 0.665 0.670
Avazu
LR 0.554 0.574 0.596 0.602 0.575
LGB 0.563 0.568 0.595 0.621 0.620
FedSplitNN 0.588 0.581 0.599 0.595 0.615
FedLocalSimSiam 0.575 0.585 0.591 0.608 0.629
FedLocalBYOL 0.560 0.597 0.600 0.601 0.605
FedLocalMoCo 0.573 0.591 0.584 0.596 0.601
FedHSSL-SimSiam 0.616 0.623 0.625 0.636 0.631 0.649 0.644 0.648 0.657 0.663
FedHSSL-BYOL 0.610 0.615 0.617 0.634 0.626 0.631 0.630 0.630 0.641 0.648
FedHSSL-MoCo 0.614 0.616 0.623 0.632 0.635 0.638 0.637 0.641 0.646 0.658
BHI
FedSplitNN 0.731 0.738 0.754 0.752 0.760
FedLocalSimSiam 0.760 0.764 0.788 0.785 0.798
FedLocalBYOL 0.760 0.769 0.781 0.786 0.796
FedLocalMoCo 0.763 0.771 0.784 0.793 0.800
FedHSSL-SimSiam 0.803 0.805 0.799 0.816 0.816 0.822 0.824 0.823 0.823 0.830
FedHSSL-BYOL 0.788 0.791 0.793 0.806 0.808 0.821 0.811 0.822 0.817 0.825
FedHSSL-MoCo 0.797 0.806 0.800 0.817 0.815 0.822 0.817 0.829 0.818 0.831
Modelnet
FedSplitNN 0.612 0.684 0.733 0.765 0.771
FedLocalSimSiam 0.622 0.698 0.761 0.779 0.797
FedLocalBYOL 0.635 0.707 0.760 0.775 0.794
FedLocalMoCo 0.659 0.722 0.784 0.798 0.815
FedHSSL-SimSiam 0.678 0.707 0.763 0.772 0.793 0.806 0.806 0.826 0.826 0.833
FedHSSL-BYOL 0.678 0.681 0.740 0.752 0.778 0.800 0.799 0.807 0.812 0.825
FedHSSL-MoCo 0.696 0.705 0.760 0.764 0.787 0.804 0.809 0.822 0.826 0.830
"""
"""As the paper prints it: FedHSSL has two numbers for each number of labels, with 20 % and 40 % aligned."""


def test_table_x_has_every_number_of_labels_with_both_shares_of_aligned_rows():
    recipe, expected, group = read_recipe("fedhssl-table10"), {}, ""
    for line in TABLE_X.split("\n")[1:-1]:
        name, *values = line.split()
        if not values:
            group = name
        elif len(values) == 5:
            expected[group, name] = ([*map(float, values)], None)
        else:
            expected[group, f"{name}, 20 %"] = ([*map(float, values[::2])], 0.2)
            expected[group, f"{name}, 40 %"] = ([*map(float, values[1::2])], 0.4)
    labels = [column.settings["data"]["n_labeled"] for column in recipe.columns]
    assert labels == [200, 400, 600, 800, 1000]
    shares = {row.name: row.settings.get("data", {}).get("aligned") for row in recipe.rows}
    assert {(row.group, row.name): (row.printed, shares[row.name]) for row in recipe.rows} == expected


def list_noise(recipe):
    """Return the strength of the noise in pre-training by data, method and aligned share."""
    found = {}
    for row in recipe.rows:
        for column in recipe.columns:
            settings = recipe.get_settings(row, column)
            spec = specs.read(settings)
            for defense in spec.fixed:
                assert {str(kind) for kind in defense.at} == {"pretrain.embedding", "pretrain.parameters"}
            strengths = [defense.strength for defense in spec.fixed]
            found[row.group, spec.methods[0], spec.data.aligned] = strengths
    return found


@pytest.mark.parametrize("name", ["fedhssl-table7", "fedhssl-table11", "fedhssl-table12"])
def test_pretraining_carries_the_noise_of_table_xi(name):
    """It is 0.4 on NUS-WIDE, 5 with 40 % aligned, and 0.1 elsewhere; baselines send nothing in pre-training."""
    noise = list_noise(read_recipe(name))
    assert {method for _, method, _ in noise} >= {"fedlocal-simsiam", "fedhssl-simsiam"}
    for (group, method, aligned), strengths in noise.items():
        expected = 0.1 if group != "NUSWIDE" else 5.0 if aligned == 0.4 else 0.4
        assert strengths == ([expected] if method == "fedhssl-simsiam" else [])


PAPERS_DATA = {
    "nus-wide": {"batch": 512, "optimizer": "sgd", "weight_decay": 3e-5, "pretrain": {"epochs": 10}},
    "avazu": {"batch": 512, "optimizer": "adagrad"},
    "bhi": {"batch": 128, "optimizer": "sgd", "weight_decay": 3e-5},
    "modelnet": {"batch": 128, "optimizer": "sgd", "weight_decay": 3e-5},
}
"""Appendix B of FedHSSL, and what its code adds: batches, iterations (40 by default), optimizers."""

ON_FOUR = [name for name in recipes.list_recipes() if len(read_recipe(name).groups) == len(PAPERS_DATA)]


@pytest.mark.parametrize("name", ON_FOUR)
def test_the_papers_data_have_the_papers_settings(name, tmp_path):
    for dataset in PAPERS_DATA:
        (tmp_path / dataset).mkdir()
    recipe = recipes.apply_data(read_recipe(name), tmp_path)
    common = {"lr": 0.01, "schedule": "cosine", "clip": 5.0}
    for group in recipe.groups:
        dataset = group.settings["dataset"]
        assert group.settings["train"] == {**common, **PAPERS_DATA[dataset]}
        images = dataset in ("bhi", "modelnet")
        assert group.settings["model"] == ({"encoder": "resnet18"} if images else {"bottom": [512, 512]})
    for row, column in ((row, column) for row in recipe.rows for column in recipe.columns):
        settings = recipe.get_settings(row, column)
        assert settings["train"]["pretrain"]["paper"], "rates and momenta of the authors' code"
        assert settings["data"].get("aligned", 1.0) in (0.2, 0.4) or name == "fedhssl-table9"


@pytest.mark.parametrize("name", ON_FOUR)
def test_the_rate_is_the_best_of_three_on_the_papers_data_alone(name, tmp_path):
    (tmp_path / "nus-wide").mkdir()
    recipe = recipes.apply_data(read_recipe(name), tmp_path)
    for row, column in ((row, column) for row in recipe.rows for column in recipe.columns):
        plain, trials = recipe.get_settings(row, column), recipe.list_trials(row, column)
        has_rate = plain["methods"][0] not in ("lr", "lightgbm")
        if row.group != "NUSWIDE" or not has_rate:
            assert trials == [plain]
            continue
        assert [trial["train"]["lr"] for trial in trials] == [0.005, 0.01, 0.03]
        for trial in trials:
            data, labels = trial["data"], plain["data"]["n_labeled"]
            assert round(data["n_labeled"] * (1 - data["validation"])) == labels, "the paper's number to learn from"


def test_rates_need_a_number_of_labels(own):
    path = Path(own())
    path.write_text("rates = [0.01, 0.03]\n" + path.read_text())
    recipe = read_recipe(str(path))
    with pytest.raises(UsageError, match="expected a number of labels in data.n_labeled with rates, got None"):
        recipe.list_trials(recipe.rows[0], recipe.columns[0])


@pytest.mark.long
def test_the_utility_is_that_of_a_training(own, tmp_path):
    done = run(own(), "--seeds", "2", "--jobs", "1", "--out", str(tmp_path / "run"), "--format", "json")
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout)["cells"]
    for cell, cut in zip(cells, (2, 8), strict=True):
        common = {"data": {"options": {"rows": 300}}, "train": {"epochs": 2}, "model": {"cut": cut}}
        for seed in range(2):
            trained = vflsec.train(dataset="toy", seed=seed, **common)
            labels = trained.federation.active.labels["test"].numpy()
            expected = vflsec.results.metrics.auc(trained.predict("test").numpy(), labels)
            assert cell["by_seed"][str(seed)] == pytest.approx(expected)
    assert [cell["printed"] for cell in cells] == [0.5, None]
    assert cells[0]["difference"] == pytest.approx(cells[0]["measured"] - 0.5)
    again = run(own(), "--seeds", "2", "--out", str(tmp_path / "run"))
    assert "0 trainings to compute" in again.stderr


def test_an_interruption_says_how_many_trainings_are_kept(own, tmp_path, monkeypatch):
    computed = RecipeGrid.compute

    def interrupted(self, **how):
        yield next(iter(computed(self, **how)))
        raise KeyboardInterrupt

    monkeypatch.setattr(RecipeGrid, "compute", interrupted)
    done = run(own(), "--seeds", "2", "--jobs", "1", "--out", str(tmp_path / "run"))
    assert done.exit_code == 130
    assert "interrupted: 1 training and 1" in done.stderr


@pytest.mark.long
def test_cap_is_that_of_an_evaluation(own, tmp_path):
    more = 'attacks = ["mc:epochs=5"]\ndefenses = ["iso:lambda=1,5"]\naux = { n = 20, folds = 0 }'
    path = own("cap", "", more, original="THEIRS")
    done = run(path, "--seeds", "2", "--jobs", "1", "--out", str(tmp_path / "run"), "--format", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    report = vflsec.evaluate(
        dataset="toy", attack="mc:epochs=5", defense="iso:lambda=1,5", aux={"n": 20, "folds": 0}, seeds=2, jobs=1,
        data={"options": {"rows": 300}}, train={"epochs": 2}, model={"cut": 8}, out=tmp_path / "one", progress=False,
    )  # fmt: skip
    expected = next(cap for cap in report.cap if cap.attack == "mc")
    assert found["cells"][1]["measured"] == pytest.approx(expected.value)
    path = own("cap", "accuracy", more, original="THEIRS")
    again = run(path, "--seeds", "2", "--jobs", "1", "--out", str(tmp_path / "run"), "--format", "json")
    assert "0 results to compute" in again.stderr
    measured = json.loads(again.stdout)["cells"][1]["measured"]
    assert measured == pytest.approx(expected.accuracy_value) != expected.value
    assert found["cells"][0]["difference"] is None  # on a stand-in
    assert found["notes"][0].startswith("STAND-IN theirs: measured on toy")


def test_a_quick_run_has_fewer_columns_and_seeds(own, tmp_path):
    done = run(own(), "--quick", "--jobs", "1", "--out", str(tmp_path / "run"), "--format", "csv")
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2
    assert lines[1].split(",")[lines[0].split(",").index("seeds")] == "1"


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["table", "markdown", "latex", "csv", "json"])
def test_every_format_has_the_values(own, tmp_path, form):
    done = run(own(), "--quick", "--jobs", "1", "--out", str(tmp_path / "run"), "--format", form)
    assert done.exit_code == 0, done.output
    assert re.search(r"0?\.5(?:00)?\b", done.stdout)
    assert (tmp_path / "run" / "curve.png").exists()


def grid(values, printed):
    """Return a reproduction of one column, with a row for each list of values by seed."""
    table = read_recipe("vflhlp-table2")
    rows = [msgspec.structs.replace(table.rows[0], name=str(k), printed=[p]) for k, p in enumerate(printed)]
    recipe = msgspec.structs.replace(table, rows=rows, columns=table.columns[:1], seeds=3, quick=Quick())
    found = [CellValues(row=k, column=0, by_seed=dict(enumerate(v)), metric="auc") for k, v in enumerate(values)]
    return Reproduction("one", recipe, found)


def test_orders_are_judged_by_paired_differences():
    far, near, noisy = [0.8, 0.7, 0.9], [0.7, 0.6, 0.8], [0.9, 0.5, 0.8]
    (order,) = grid([far, near, noisy], [0.6, 0.5, 0.7]).orders()
    assert (order.same, order.other, order.open) == (1, 0, 2)
    (order,) = grid([near, far], [0.6, 0.5]).orders()
    assert (order.same, order.other, order.open) == (0, 1, 0)
    assert grid([near, far], [0.6, math.nan]).orders() == []
    assert grid([near, far], [0.6, 0.6]).orders() == []


def test_intervals_end_at_one_and_lost_seeds_are_told():
    found = grid([[0.99, 0.5]], [0.6])
    assert found.entries[0].high == 1.0
    assert found.entries[0].low == 0.0
    assert any(line.startswith("LOST seeds at 1 cells") for line in found.remarks())
    assert grid([[]], [0.6]).entries[0].measured is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("printed = [0.5, nan]", "printed = [0.5]"), "2 printed values, got 1"),
        (('group = "theirs"', 'group = "ours"'), "row split: unknown group 'ours'"),
        (('measure = "utility"', 'measure = "x"'), "Invalid enum value"),
        (("settings.model.cut = 8", "settings.model.cutt = 8"), "unknown setting 'cutt'"),
        (('metric = "auc"', 'metric = "x"'), "unknown metric 'x'"),
        (('title = "Cuts"', ""), "missing required field `title`"),
        (('columns = ["2"]', 'columns = ["3"]'), "quick: unknown column '3'"),
        (("seeds = 1", "seeds = 0"), "expected seeds from 1 to 1000"),
        (('name = "8"', 'name = "2"'), "of each column, got 2"),
        (("printed = [0.5, nan]", "printed = [0.5, inf]"), "expected printed values below 1e+06"),
        (("[settings.train]", "[settings]\nseeds = 3\n[settings.train]"), "is not TOML"),
        (("settings.model.cut = 8", "settings.seeds = 8"), "expected seeds beside settings"),
        (('measure = "utility"', 'measure = "cap"'), "expected a defense with strengths"),
        (('measure = "utility"', 'measure = "cap"\nattack = "worst"'), "one attack for CAP in auc, got worst"),
        (("settings.model.cut = 8", "settings.model.cut = 100000000"), "at most 65536 units"),
        (('original = ""', "own.dataset = 5"), "a name, got 5"),
        (('original = ""', 'own.dataset = ["toy"]'), "a name, got ['toy']"),
        (('original = ""', 'own.methods = "local"'), "of names, got 'local'"),
        (("printed = [0.5, nan]", "printed = [0.5, nan]\ntrials = [{ methods = 5 }]"), "methods to be a list"),
    ],
)
def test_wrong_recipes_get_one_line(own, tmp_path, change, message):
    path = Path(own())
    path.write_text(path.read_text().replace(*change))
    done = run(str(path), "--quick" if "metric" in message else "--dry-run", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2, done.output
    assert message in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("columns", ["columns = 4", 'columns = "auc"', ""])
def test_rows_of_every_defense_need_a_list_of_columns(tmp_path, columns):
    path = tmp_path / "own.toml"
    path.write_text(f'title = "t"\nsource = "s"\nmeasure = "leak"\nevery = "defense of labels"\n{columns}\n')
    done = run(str(path), "--dry-run", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert "columns" in line


def test_the_papers_own_data_take_the_place_of_stand_ins(tmp_path):
    write_avazu(tmp_path / "data" / "avazu", 900)
    recipe = recipes.apply_data(read_recipe("vflhlp-table2"), tmp_path / "data")
    (group,) = recipe.groups
    assert group.original == ""
    assert group.settings["data"]["options"] == {"data_dir": str(tmp_path / "data" / "avazu"), "split": "vflhlp"}
    kept = recipes.apply_data(read_recipe("fedhssl-table4"), tmp_path / "data").groups
    assert [one.original for one in kept] == ["NUS-WIDE", "", "BHI", "ModelNet"]
    with pytest.raises(UsageError, match="expected a folder criteo, got"):
        recipes.apply_data(read_recipe("vflhlp-table3"), tmp_path)
    with pytest.raises(UsageError, match="no --data-dir with this"):
        recipes.apply_data(read_recipe("prada-table1"), tmp_path)


ORIGINALS = {name: {group.original for group in read_recipe(name).groups} for name in recipes.list_recipes()}
WITH_IMAGES = [name for name, originals in ORIGINALS.items() if {"BHI", "ModelNet"} <= originals]


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_of_the_paper_take_the_place_of_stand_ins(name, tmp_path):
    for folder in ("bhi", "modelnet"):
        (tmp_path / folder).mkdir()
    *_, bhi, modelnet = recipes.apply_data(read_recipe(name), tmp_path).groups
    assert bhi.original == modelnet.original == ""
    assert (bhi.settings["dataset"], modelnet.settings["dataset"]) == ("bhi", "modelnet")
    expected = {"data_dir": str(tmp_path / "bhi"), "rows": 200000, "pairs": "ordered"}
    assert bhi.settings["data"]["options"] == expected
    assert modelnet.settings["data"]["options"] == {"data_dir": str(tmp_path / "modelnet")}


@pytest.mark.long
def test_a_recipe_runs_on_images(tmp_path):
    """F1 on BHI, and accuracy on ten classes and four parties of ModelNet."""
    write_bhi(tmp_path / "data" / "bhi", patients=15, patches=(20, 12))
    kinds = [f"kind{k}" for k in range(10)]
    write_modelnet(tmp_path / "data" / "modelnet", kinds, objects=(8, 2), side=32)
    path = tmp_path / "small.toml"
    text = (recipes.FOLDER / "fedhssl-table10.toml").read_text(encoding="utf-8")
    for before, after in (
        ('groups = ["NUSWIDE"]', 'groups = ["BHI", "Modelnet"]\nsettings.train.epochs = 1'),
        ('rows = ["LR", "FedSplitNN", "FedHSSL-SimSiam, 20 %", "FedHSSL-SimSiam, 40 %"]', 'rows = ["FedSplitNN"]'),
        ('columns = ["200", "1000"]', 'columns = ["200"]'),
        ("n_labeled = 200", "n_labeled = 30"),
    ):
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    options = ("--quick", "--seeds", "1", "--jobs", "1", "--data-dir", str(tmp_path / "data"))
    done = run(str(path), *options, "--out", str(tmp_path / "run"), "--format", "json")
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["group"], cell["metric"]) for cell in cells] == [("BHI", "f1"), ("Modelnet", "accuracy")]
    assert all(0 <= cell["measured"] <= 1 for cell in cells)


def test_an_unknown_recipe_is_suggested():
    with pytest.raises(UsageError, match="'fedhssl-tabl7'. Did you mean fedhssl-table7"):
        read_recipe("fedhssl-tabl7")


def test_the_recipes_are_listed():
    done = run()
    assert [line.split()[0] for line in done.stdout.splitlines()] == recipes.list_recipes()


def test_what_is_in_the_store_is_what_is_shown(own, tmp_path):
    recipe = recipes.apply_seeds(read_recipe(own()), None, quick=True)
    job = RecipeGrid(recipe, Store(tmp_path / "run"))
    assert [one.by_seed for one in job.measure()] == [{}]
    assert len(list(job.compute(jobs=1, device="cpu"))) == 1
    assert job.missing() == 0
    assert len(job.measure()[0].by_seed) == 1


ATTACKED = """
title = "Leak against utility"
source = "nobody, figure 1"
measure = "leak"
picture = "tradeoff"
attack = "mc"
{more}

[settings]
dataset = "toy"
methods = ["fedsplitnn"]
attacks = ["mc:epochs=5"]
defenses = ["iso:lambda=5"]
aux = {{ n = 20, folds = 0 }}
[settings.data.options]
rows = 300
[settings.train]
epochs = 2

[[columns]]
name = "utility"
measure = "utility"

[[columns]]
name = "A"
{column}

[[rows]]
name = "plain"
curve = "split"
printed = [0.7, 0.6]

[[rows]]
name = "noisy"
curve = "split"
strength = 5
printed = [nan, nan]
"""


@pytest.fixture
def attacked(tmp_path):
    def write(more="", column=""):
        path = tmp_path / "attacked.toml"
        path.write_text(ATTACKED.format(more=more, column=column))
        return str(path)

    return write


def reproduced(path, folder, seeds=2):
    recipe = recipes.apply_seeds(read_recipe(path), seeds, quick=False)
    job = RecipeGrid(recipe, Store(folder))
    list(job.compute(jobs=1, device="cpu"))
    return Reproduction("one", recipe, job.measure(), job)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """The evaluation that the recipe of ``attacked`` reproduces."""
    return vflsec.evaluate(
        dataset="toy", attack="mc:epochs=5", defense="iso:lambda=5", aux={"n": 20, "folds": 0}, seeds=2, jobs=1,
        data={"options": {"rows": 300}}, train={"epochs": 2}, out=tmp_path_factory.mktemp("one"), progress=False,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("attack", ["mc", "worst"])
def test_utility_and_leak_are_those_of_an_evaluation(attacked, evaluation, tmp_path, attack):
    """Both columns of a row are of the same trainings, at the strength of the row."""
    found = reproduced(attacked(column=f'attack = "{attack}"'), tmp_path / "run")
    points = {p.strength: p for p in (evaluation.worst if attack == "worst" else evaluation.points)}
    for utility, leak, strength in zip(found.entries[::2], found.entries[1::2], (0, 5), strict=True):
        assert utility.measured == pytest.approx(points[strength].utility.mean)
        assert leak.measured == pytest.approx(points[strength].leak.mean)
        assert leak.alone == points[strength].leak.alone_by_seed
    assert found.entries[0].printed == 0.7
    assert any(line.startswith("ALONE in A: ") for line in found.remarks())
    (axes,) = found.plot().axes
    markers = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    drawn = [[utility.measured, leak.measured] for utility, leak in zip(*[iter(found.entries)] * 2, strict=True)]
    assert [list(line.get_xydata()[0]) for line in markers] == [[0.7, 0.6], *drawn]


@pytest.mark.long
def test_a_column_may_be_of_training_rows_or_of_what_is_inferred_alone(attacked, evaluation, tmp_path):
    path = Path(attacked(column='guessed = "train"\n\n[[columns]]\nname = "B"\nmeasure = "alone"\nguessed = "train"'))
    path.write_text(path.read_text().replace("0.6]", "0.6, nan]").replace("[nan, nan]", "[nan, nan, nan]"))
    found = reproduced(str(path), tmp_path / "run")
    points = {point.strength: point for point in evaluation.points}
    for leak, alone, strength in zip(found.entries[1::3], found.entries[2::3], (0, 5), strict=True):
        assert leak.by_seed == pytest.approx(points[strength].leak_train.by_seed)
        assert alone.by_seed == pytest.approx(points[strength].leak_train.alone_by_seed)
    assert "what is inferred alone" in found.heading


@pytest.mark.long
def test_a_leak_has_the_metric_that_its_column_names(attacked, tmp_path):
    found = reproduced(attacked(column='metric = "accuracy"'), tmp_path / "run", seeds=1)
    records = Store(tmp_path / "run").records().values()
    (plain,) = [r for r in records if getattr(r, "defenses", None) == [] and r.attack.name == "mc"]
    assert found.entries[1].by_seed == {0: plain.leak["test"].metrics["accuracy"]}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("more", "column", "message"),
    [
        ("strength = 2", "", "expected strength among [0.0, 5.0], got 2"),
        ("", 'attack = "fusion"', "unknown attack 'fusion'"),
        ("", 'measure = "hours"', "utility and one of leak"),
        ('like = "nobody"', "", "unknown recipe 'nobody'"),
    ],
)
def test_what_an_evaluation_cannot_give_is_refused(attacked, tmp_path, more, column, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        RecipeGrid(read_recipe(attacked(more, column)), Store(tmp_path / "run"))


def test_validation_rows_alone_choose_among_trials(own, tmp_path, monkeypatch):
    job = RecipeGrid(read_recipe(own()), Store(tmp_path / "run"))
    monkeypatch.setattr(RecipeGrid, "_validate", lambda self, cell: cell)
    better, worse, failed = (SimpleNamespace(cell=score) for score in (0.7, 0.6, -math.inf))
    assert job.choose([worse, better]) is better
    assert job.choose([worse, failed]) is worse
    assert job.choose([worse]) is worse
    assert job.choose([]) is None


def test_the_best_trial_on_validation_rows_counts(own, tmp_path):
    path = Path(own())
    trials = "trials = [{ train = { lr = 1e-9 } }, { train = { lr = 0.03 } }]\nsettings.data.validation = 0.3"
    path.write_text(path.read_text() + trials)
    found = reproduced(str(path), tmp_path / "run", seeds=1)
    scores = {}
    for lr in (1e-9, 0.03):
        trained = vflsec.train(
            dataset="toy",
            data={"options": {"rows": 300}, "validation": 0.3},
            train={"epochs": 2, "lr": lr},
            model={"cut": 2},
        )
        labels = trained.federation.active.labels
        scores[lr] = [
            vflsec.results.metrics.auc(trained.predict(s).numpy(), labels[s].numpy()) for s in ("val", "test")
        ]
    assert found.entries[0].measured == pytest.approx(max(scores.values())[1])
    path.write_text(path.read_text().replace("validation = 0.3", "validation = 0.0"))
    with pytest.raises(UsageError, match="choose between trials, got none"):
        reproduced(str(path), tmp_path / "other", seeds=1)


@pytest.mark.long
def test_of_attacks_the_rate_is_that_of_the_training_without_compared_defenses(attacked, tmp_path, monkeypatch):
    """All cells of a row at one strength are of one rate, and each seed has a rate of its own."""
    path = Path(attacked())
    data = "[settings.data]\nn_labeled = 80\noptions.rows = 300"
    text = path.read_text().replace("[settings.data.options]\nrows = 300", data)

    def measure(rates, out):
        path.write_text(f"rates = {rates}\n{text}")
        return [(cell.by_seed, cell.alone) for cell in reproduced(str(path), out).entries]

    slow, fast = (measure([rate], tmp_path / f"{rate}") for rate in (0.0001, 0.05))
    better = {0: 0.05, 1: 0.0001}
    monkeypatch.setattr(RecipeGrid, "_validate", lambda _, cell: cell.train.lr == better[cell.seed])
    for both, *single in zip(measure([0.0001, 0.05], tmp_path / "both"), slow, fast, strict=True):
        for values, of_slow, of_fast in zip(both, *single, strict=True):
            assert values == ({0: of_fast[0], 1: of_slow[1]} if of_slow else {})
    assert slow != fast


def test_megabytes_are_those_of_the_embeddings_sent_until_the_target(own, tmp_path):
    """SS-VFL-I sends 60 embeddings of width 8 of each of two parties once: 60 x 8 x 2 x 4 bytes."""
    path = Path(own("megabytes", more="[settings.data]\nn_labeled = 60\n"))
    text = path.read_text().replace("epochs = 2", "epochs = 2\ntarget = 0.01\npretrain.epochs = 1")
    path.write_text(text.replace('["fedsplitnn"]', '["ss-vfl-i"]'))
    found = reproduced(str(path), tmp_path / "run", seeds=1)
    assert found.entries[1].measured == pytest.approx(60 * 8 * 2 * 4 / 2**20)


def test_hours_are_those_of_all_phases_or_of_one(own, tmp_path):
    path = Path(own("hours"))
    text = path.read_text().replace('["fedsplitnn"]', '["ss-vfl-c"]').replace("settings.model.cut = 8", "")
    text = text.replace("epochs = 2", "epochs = 2\npretrain.epochs = 1")
    path.write_text(text.replace("settings.model.cut = 2", 'phase = "pretrain"'))
    found = reproduced(str(path), tmp_path / "run", seeds=1)
    read = [Store(tmp_path / "run").cell(path.parent.name).read() for path in tmp_path.glob("run/cells/*/cell.json")]
    (spent,) = (facts.phase_seconds for facts in read if isinstance(facts, CellFacts))
    assert [one.measured for one in found.entries] == [spent["pretrain"] / 3600, sum(spent.values()) / 3600]
    assert [one.difference for one in found.entries] == [None, None]  # of another machine


def test_a_recipe_can_start_from_another():
    table, figure = read_recipe("fedhssl-table4"), read_recipe("fedhssl-fig5")
    assert figure.rows == table.rows
    assert figure.picture == "curves"
    assert figure.title == table.title
    assert figure.source != table.source


def test_all_methods_of_a_recipe_have_the_same_encoder():
    recipe = read_recipe("fedhssl-table7")
    encoders = {recipe.get_settings(recipe.rows[0], column)["model"]["encoder"] for column in recipe.columns}
    assert encoders == {"auto"}
    other = read_recipe("prada-table1")
    assert "model" not in other.get_settings(other.rows[0], other.columns[0])


def test_options_of_other_methods_are_left_out():
    recipe = read_recipe("fedhssl-fig8")
    settings = recipe.get_settings(recipe.rows[0], recipe.columns[1])
    assert settings["methods"] == ["fedgssl-simsiam:encoders=local"]
    assert settings["method"] == {"fedgssl-simsiam": {"gamma": 0.5}}


def test_curves_have_a_line_for_each_row_and_a_diagram_for_each_panel():
    recipe = read_recipe("fedhssl-fig6")
    found = [
        CellValues(row=i, column=j, by_seed={0: 0.1 * j, 1: 0.2 * j}, metric="accuracy")
        for i in range(len(recipe.rows))
        for j in range(len(recipe.columns))
    ]
    figure = Reproduction("fig6", recipe, found).plot()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:3] == [f"multiple-features for NUSWIDE, {ssl}" for ssl in ("SimSiam", "BYOL", "MoCo")]
    lines = [line for line in figure.axes[0].lines if len(line.get_xydata()) == len(recipe.columns)]
    assert len(lines) == 4
    assert list(lines[0].get_ydata()) == pytest.approx([0.15 * j for j in range(len(recipe.columns))])
    assert list(lines[0].get_xdata()) == pytest.approx([200, 400, 600, 800, 1000], abs=20)


@pytest.mark.long
def test_a_dry_run_tells_the_time_by_past_results(own, tmp_path):
    out = ("--out", str(tmp_path / "run"))
    assert "time: unknown; run --quick first" in run(own(), "--dry-run", *out).stderr
    assert run(own(), "--seeds", "1", "--jobs", "1", *out).exit_code == 0
    told = run(own(), "--seeds", "3", "--dry-run", "--jobs", "2", *out).stderr
    assert re.search(r"4 trainings .*\ntime: .*\d+:\d\d:\d\d with --jobs 2", told)


def test_all_stands_for_every_attack_on_labels(attacked, tmp_path):
    path = Path(attacked(column='attack = "worst"'))
    path.write_text(path.read_text().replace('["mc:epochs=5"]', '["all"]'))
    job = RecipeGrid(recipes.apply_seeds(read_recipe(str(path)), 1, quick=False), Store(tmp_path / "run"))
    found = {attack.name for attack in job.parts[0, 1][0].spec.attacks}
    assert {"mc", "fusion", "norm", "self-training"} <= found
    assert not found & {"column-fusion", "membership", "attribute"}


# Changes against one row, and the rows of every defense

CHANGES = """
title = "Other risks"
source = "nobody, table 1"
measure = "leak"
attack = "worst"
against = "none"
picture = "changes"
seeds = 2

[settings]
dataset = "toy"
methods = ["fedsplitnn"]
attacks = ["mc:epochs=5", "membership", "backdoor"]
defenses = ["iso:lambda=5", "compress:lambda=0.5"]
aux = { n = 20, folds = 0 }
data.options.rows = 200
train.epochs = 2

[[columns]]
name = "utility"
measure = "utility"

[[columns]]
name = "labels"

[[columns]]
name = "membership"
target = "membership"

[[columns]]
name = "backdoor"
target = "integrity"
attack = "backdoor"

[[rows]]
name = "none"
printed = [nan, nan, nan, nan]

[[rows]]
name = "iso"
printed = [nan, nan, nan, nan]
defense = "iso"
strength = 5

[[rows]]
name = "compress"
printed = [nan, nan, nan, nan]
defense = "compress"
strength = 0.5
"""


@pytest.mark.long
def test_changes_are_those_of_the_advantages_in_an_evaluation(tmp_path):
    path = tmp_path / "changes.toml"
    path.write_text(CHANGES)
    done = run(str(path), "--jobs", "1", "--out", str(tmp_path / "run"), "--format", "json")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "curve.svg").exists()
    cells = {(cell["row"], cell["column"]): cell for cell in json.loads(done.stdout)["cells"]}
    report = vflsec.evaluate(
        dataset="toy",
        attack=["mc:epochs=5", "membership", "backdoor"],
        defense=["iso:lambda=5", "compress:lambda=0.5"],
        aux={"n": 20, "folds": 0},
        data={"options": {"rows": 200}},
        train={"epochs": 2},
        seeds=2,
        jobs=1,
        out=tmp_path / "eval",
    )
    expected = {("none", "utility"): {}}
    for point in report.worst:
        leak, row = point.leak, point.defense if point.strength else "none"
        alone = leak.alone_by_seed or dict.fromkeys(leak.by_seed, leak.chance)
        expected[row, point.target] = {str(seed): leak.by_seed[seed] - alone[seed] for seed in range(2)}
    for one in report.summary.integrity:
        gained = {str(seed): one.success_by_seed[seed] - one.chance_by_seed[seed] for seed in range(2)}
        expected[one.defense if one.strength else "none", "backdoor"] = gained
        assert sum(gained.values()) / 2 == pytest.approx(one.success.mean - one.chance)
    del expected["none", "utility"]
    assert len(expected) == 9
    for place, by_seed in expected.items():
        assert cells[place]["by_seed"] == pytest.approx(by_seed)
    for (row, column), cell in cells.items():
        change = [cell["by_seed"][s] - cells["none", column]["by_seed"][s] * (row != "none") for s in "01"]
        assert cell["measured"] == pytest.approx(sum(change) / 2)
        assert cell["against"] == ("none" if row != "none" else "")
    utility = {p.defense: p.utility.mean for p in report.points if p.strength}
    for name in utility:
        assert sum(cells[name, "utility"]["by_seed"].values()) / 2 == pytest.approx(utility[name])


def matrix(changes):
    """Return a matrix of one defense, whose leak and utility change by these numbers, by seed."""
    recipe = msgspec.toml.decode(CHANGES, type=recipes.Recipe)
    base = {seed: 0.2 + 0.1 * seed for seed in range(len(changes))}
    moved = {seed: base[seed] + change for seed, change in enumerate(changes)}
    places = [(row, column, base if row == 0 else moved) for row in (0, 1) for column in range(4)]
    found = [CellValues(row=row, column=column, by_seed=by_seed) for row, column, by_seed in places]
    return Reproduction("own", msgspec.structs.replace(recipe, seeds=len(changes)), found)


@pytest.mark.parametrize(
    ("changes", "worse"), [((0.1, 0.11, 0.12), True), ((-0.1, -0.11, -0.12), False), ((-0.1, 0.1, 0.05), None)]
)
def test_a_change_is_marked_where_its_paired_interval_excludes_zero(changes, worse):
    found = matrix(changes)
    by_place = {(entry.row, entry.column): entry for entry in found.entries}
    assert by_place["none", "labels"].worse is None
    assert by_place["iso", "labels"].measured == pytest.approx(sum(changes) / 3)
    assert by_place["iso", "labels"].worse is worse
    assert by_place["iso", "utility"].worse is (None if worse is None else not worse), "less utility is worse"
    text = " ".join(found.remarks())
    assert ("WORSE labels (▲): iso" in text) == (worse is True)
    assert ("WORSE nowhere" in text) == (worse is not True)
    axes = found.plot().axes[0]
    assert [one.get_text() for one in axes.get_xticklabels()] == ["labels", "membership", "backdoor"], "not utility"
    assert {one.get_text() for one in axes.texts} == {f"{sum(changes) / 3:+.3f}"}
    assert np.unique(axes.images[0].get_array()).tolist() == [{True: 1, False: -1, None: 0}[worse]]


def test_the_matrix_fits_into_eighty_columns():
    lines = matrix((0.1, 0.11, 0.12)).table(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(re.search(r"iso .*\+\.110 ▽? *\+\.110 ▲", line) for line in lines)


def test_a_row_to_compare_with_must_exist(tmp_path):
    (tmp_path / "own.toml").write_text(CHANGES.replace('against = "none"', 'against = "nobody"'))
    with pytest.raises(UsageError, match="unknown row in against 'nobody'"):
        read_recipe(str(tmp_path / "own.toml"))


def test_every_defense_of_labels_has_a_row_for_each_strength():
    known = registry.list_all("defenses").keys()
    of_others = {"custext", "dp-sgd", "id-lmid", "phe", "santext", "snd"}  # which hide no labels of networks
    assert known - recipes.list_defenses().keys() == {*of_others, "sealed"}  # which changes a protocol, as phe does
    recipe = read_recipe("cross-risk")
    rows = {(row.defense, row.strength) for row in recipe.rows[1:]}
    spec = specs.read(recipe.get_settings(recipe.rows[0], recipe.columns[0]))
    assert rows == {(defense.label, strength) for defense in spec.defenses for strength in defense.strengths}
    assert {name for name, _ in rows} == recipes.list_defenses().keys()
    for name, strength in rows:
        assert strength in registry.load("defenses", name).strengths


def test_the_recipe_of_the_page_takes_other_data(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "cross_risk.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "own.toml").write_text(block)
    own, base = read_recipe(str(tmp_path / "own.toml")), read_recipe("cross-risk")
    assert own.rows == base.rows
    for row, column in zip(own.rows, base.columns, strict=False):
        settings = own.get_settings(row, column)
        assert settings["dataset"] == "mine.toml"
        assert settings["attacks"] == base.get_settings(row, column)["attacks"]
        assert settings["defenses"] == recipes.list_sweeps()
