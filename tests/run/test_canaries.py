"""Labels that are tossed, and what guesses of them show of epsilon."""

import json
import math

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats

import vflsec
from vflsec.base.errors import UsageError
from vflsec.cli import cli
from vflsec.report.report import Report
from vflsec.results.analysis.groups import bound_by_guesses
from vflsec.results.canaries import bound_epsilon, toss
from vflsec.results.records import schema
from vflsec.run import spec as specs
from vflsec.run.adversary import draw_auxiliary
from vflsec.run.federation import build_federation
from vflsec.run.plan import build_cell
from vflsec.run.spec import AuxSpec

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SETTINGS = {
    "attack": ["direction", "mc:epochs=5"], "defense": "label-dp:epsilon=1", "dataset": "toy", "seeds": 2, "jobs": 1,
    "train": {"epochs": 3}, "aux": {"n": 100, "folds": 0},
}  # fmt: skip


def data(canaries, rows=1500):
    return {"options": {"rows": rows}, "canaries": canaries}


@pytest.mark.parametrize("classes", [2, 5])
def test_a_fair_coin_decides_between_the_own_label_and_another(classes):
    rng = np.random.default_rng(0)
    labels = rng.choice(classes, p=[0.9, *[0.1 / (classes - 1)] * (classes - 1)], size=20_000)
    tossed, (rows, pairs) = toss(labels, 8000, classes, rng)
    assert len(set(rows.tolist())) == 8000
    others = np.setdiff1d(np.arange(20_000), rows)
    np.testing.assert_array_equal(tossed[others], labels[others])
    assert np.all(pairs[:, 0] < pairs[:, 1])
    assert np.all((pairs == labels[rows, None]).sum(axis=1) == 1)
    assert np.all((pairs == tossed[rows, None]).sum(axis=1) == 1)
    kept = int((tossed[rows] == labels[rows]).sum())
    assert stats.binomtest(kept, 8000, 0.5).pvalue > 0.01  # whatever the true label is
    assert stats.binomtest(int((tossed[rows] == pairs[:, 1]).sum()), 8000, 0.5).pvalue > 0.01


@pytest.mark.parametrize("classes", [2, 5])
def test_who_knows_the_labels_guesses_all_of_them_and_who_knows_nothing_none(classes):
    rng = np.random.default_rng(1)
    labels = rng.integers(classes, size=3000)
    tossed, canaries = toss(labels, 1000, classes, rng)
    knowing = np.eye(classes)[tossed]
    assert canaries.count_guesses(knowing, tossed) == (750, 750, 750)
    assert bound_epsilon(750, 750, 750) == pytest.approx(math.log(750 / 3), abs=0.01)  # what the documentation says
    found = bound_epsilon(*canaries.count_guesses(np.eye(classes)[labels] + 0.1 * rng.random((3000, classes)), tossed))
    assert found < 0.3  # the labels before they were tossed


def test_no_auxiliary_row_is_a_canary():
    rng = np.random.default_rng(2)
    labels = rng.integers(2, size=400)
    tossed, canaries = toss(labels, 300, 2, rng)
    known = draw_auxiliary(torch.tensor(tossed), 2, AuxSpec(n=40), 0, canaries)
    assert len(known) == 40
    assert not set(known.tolist()) & set(canaries.rows.tolist())
    with pytest.raises(UsageError, match="100 labeled .*no canaries"):
        draw_auxiliary(torch.tensor(tossed), 2, AuxSpec(n=100), 0, canaries)


def cell(canaries, method="fedsplitnn", **options):
    spec = specs.read({"dataset": "toy", "data": {**data(canaries), **options}, "methods": [method]})
    return build_cell(spec, method, 0)


def test_results_with_tossed_labels_have_keys_of_their_own():
    keys = [cell(n).key for n in (0, 100, 200)]
    assert len(set(keys)) == 3
    assert len({cell(n).data_key for n in (0, 100, 200)}) == 3
    without = cell(0)._list_settings()["data"]
    assert "canaries" not in without  # keys are those of the time before there was this setting
    stages = {cell(n, "fedcssl-simsiam").stage_key("pretrain") for n in (0, 100)}
    assert len(stages) == 1  # pre-training reads no label


def test_only_labels_of_canaries_change():
    plain, tossed = (build_federation(cell(n), "cpu") for n in (0, 200))
    changed = torch.nonzero(plain.active.labels["train"] != tossed.active.labels["train"])[:, 0]
    assert 60 < len(changed) < 140
    assert set(changed.tolist()) <= set(tossed.canaries.rows.tolist())
    assert plain.canaries is None
    for split in ("train", "test"):
        assert torch.equal(plain.active.features[split], tossed.active.features[split])
    assert torch.equal(plain.active.labels["test"], tossed.active.labels["test"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("canaries") / "run"
    vflsec.evaluate(**SETTINGS, data=data(800), out=folder)
    return folder


def test_epsilon_is_shown_beside_the_promise(folder):
    report = Report.read(folder)
    found = {(point.strength, point.attack): point.empirical for point in (*report.points, *report.worst)}
    open_labels, defended = found[0.0, "direction"], found[1.0, "direction"]
    assert open_labels.promised is None
    assert open_labels.tossed == 2 * 600  # of 800 of each seed a quarter chooses
    assert open_labels.epsilon > 4
    assert defended.promised == 1.0
    assert 0.2 < defended.epsilon <= 1.0
    assert found[1.0, "worst"].attack == "direction"
    assert found[1.0, "worst"].epsilon < defended.epsilon  # two attacks were tried
    assert found[0.0, "mc"].epsilon < 0.5  # it reads no message


def test_tables_and_files_have_it(folder):
    report = Report.read(folder)
    shown = report.to_markdown()
    assert "ε at least" in shown
    assert "EPSILON (at least)" in shown
    assert "EPSILON EXCEEDED" not in shown
    assert "NOTE labels of 800 training" in shown
    points = json.loads(report.to_json())["points"]
    assert {point["empirical"]["delta"] for point in points} == {0.0}
    frame = report.to_frame()
    assert frame["epsilon_at_least"].max() > 4


@pytest.mark.long
def test_without_canaries_nothing_of_it_is_shown(folder):
    report = vflsec.evaluate(**{**SETTINGS, "seeds": 1}, data=data(0), out=folder.parent / "plain")
    assert all(point.empirical is None for point in report.points)
    assert "at least" not in report.to_markdown()
    assert "tossed" not in report.to_markdown()


def result(promised, right, delta=0.0, **more):
    spent = [{"defense": "d", "epsilon": promised, "delta": delta, **more}] if promised else []
    return schema.Result(
        key="a", cell="b", method="m", defenses=[], seed=0, adversary="passive_1", attack=None, status="ok",
        spent=spent, guessed=schema.Guessed(right, 500, 750),
    )  # fmt: skip


def test_the_guesses_of_all_seeds_add_up():
    one = bound_by_guesses("direction", [result(2.0, 400), result(3.0, 410)])
    assert (one.right, one.made, one.tossed, one.promised) == (810, 1000, 1500, 3.0)
    assert one.epsilon == bound_epsilon(810, 1000, 1500)
    with_delta = bound_by_guesses("direction", [result(2.0, 400, 1e-5)])
    assert with_delta.epsilon == bound_epsilon(400, 500, 750, 1e-5) < bound_epsilon(400, 500, 750)
    assert bound_by_guesses("direction", [result(2.0, 400, of="models")]).promised is None  # it is not of messages


@pytest.mark.long
def test_a_broken_promise_is_named(folder):
    report = Report.read(folder)
    at = next(k for k, point in enumerate(report.summary.worst) if point.strength == 1.0)
    points = list(report.summary.worst)
    points[at] = msgspec.structs.replace(
        points[at], empirical=msgspec.structs.replace(points[at].empirical, epsilon=1.7)
    )
    report.summary = msgspec.structs.replace(report.summary, worst=points)
    line = "EPSILON EXCEEDED fedsplitnn, label-dp 1: direction shows at least 1.7, and 1 is promised"
    assert line in report.to_markdown()


def test_records_from_before_are_read_and_impossible_ones_refused():
    record = result(None, 400)
    fields = msgspec.to_builtins(record)
    del fields["guessed"]
    assert msgspec.convert(fields, schema.Result).guessed is None
    assert schema.decode(schema.encode(record)) == record
    with pytest.raises(ValueError, match="750 tossed labels .*501 right"):
        schema.decode(schema.encode(msgspec.structs.replace(record, guessed=schema.Guessed(501, 500, 750))))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": data(5000)}, r"data\.canaries, got 5000"),
        ({"data": data(-1)}, "data.canaries >= 0"),
        ({"data": data(100), "attack": "membership", "adversary": "active"}, "labels with --audit-epsilon"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_anything_is_trained(tmp_path, settings, told):
    with pytest.raises(UsageError, match=told):
        vflsec.evaluate(**{**SETTINGS, "defense": (), **settings}, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("given", "canaries"), [([], 0), (["--audit-epsilon"], 1000), (["--audit-epsilon", "300"], 300)]
)
def test_the_option_sets_the_number_of_canaries(tmp_path, monkeypatch, given, canaries):
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "toy", "--set", "data.options.rows=3000", "--attack", "direction", "--dry-run"]
    found = CliRunner().invoke(cli, ["eval", *given, *options])
    assert f"canaries = {canaries}\n" in found.stdout
    assert ("direction-audit-epsilon" in found.stderr) == bool(canaries)  # a folder of its own
