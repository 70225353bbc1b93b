"""Studies: what they measure is what the commands measure, and wrong ones are refused."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import vflsec
from vflsec.base.errors import UsageError
from vflsec.cli import cli
from vflsec.papers import study_grid as studies
from vflsec.papers.measurements import read_measurements
from vflsec.papers.study_grid import StudyGrid, read_study
from vflsec.run.store import Store

OWN = """
title = "Cuts"
source = "nobody"
registered = "2026-01-01"
seeds = 2

[settings]
methods = ["fedsplitnn"]
attacks = ["mc:epochs=3"]
aux.folds = 0
train.epochs = 2
train.target = 0.3

[[data]]
name = "toy"
settings.dataset = "toy"
settings.data.options.rows = 300

[[arms]]
name = "narrow"
settings.model.cut = 2

[[arms]]
name = "wide"
settings.model.cut = 8

[[arms]]
name = "noise"
settings.defenses = ["iso:lambda=1,5"]

[[claims]]
text = "a wide cut is better"
source = "nowhere"
topic = "utility"
measure = "utility"
better = "wide"
than = ["narrow"]
margin = 0.01
"""

MORE = """
[[claims]]
text = "noise protects"
source = "nowhere"
topic = "privacy"
measure = "leak"
attack = "mc"
strength = 5.0
better = "noise"
than = ["alone"]
no_worse = true
margin = 0.02
at_equal_utility = 0.5

[[claims]]
text = "noise has a trade-off"
source = "nowhere"
topic = "privacy"
measure = "{cap}"
attack = "worst"
order = ["noise", "noise 2"]
margin = 0.02
"""

BYTES = """
[[claims]]
text = "a narrow cut sends less"
source = "nowhere"
topic = "cost"
measure = "{measure}"
better = "narrow"
than = ["wide"]
margin = 0.1
"""


@pytest.fixture
def write(tmp_path):
    def written(text=OWN):
        path = tmp_path / "own.toml"
        path.write_text(text)
        return str(path)

    return written


def run(*words):
    return CliRunner().invoke(cli, ["judge", *words], prog_name="vflsec")


def test_every_study_can_be_read_and_has_a_registration():
    claims = [claim for name in studies.list_studies() for claim in read_study(name).claims]
    assert len(claims) >= 40
    assert sum(claim.topic == "privacy" for claim in claims) >= 12
    for name in studies.list_studies():
        one = read_study(name)
        assert one.registered
        assert len({claim.text for claim in one.claims}) == len(one.claims)


@pytest.mark.long
@pytest.mark.parametrize("name", ["cut-layer", "ss-vfl"])
def test_a_study_can_be_run(name, tmp_path):
    one = msgspec.structs.replace(read_study(name), seeds=1)
    assert StudyGrid(name, one, Store(tmp_path / "run")).missing() > 0
    assert not (tmp_path / "run").exists()


def test_utility_and_bytes_are_those_of_a_training(write, tmp_path):
    path = write(OWN + BYTES.format(measure="bytes"))
    out, results = tmp_path / "run", tmp_path / "results"
    words = (path, "--jobs", "1", "--out", str(out), "--results", str(results))
    done = run(*words, "--format", "json")
    assert done.exit_code == 0, done.output
    verdicts = json.loads(done.stdout)["verdicts"]
    assert [one["decision"] for one in verdicts] == ["undecided"] * 2  # two seeds decide nothing
    found = read_measurements(results / "own.json")
    by_name = {(own.arm, own.measure): own for own in found.values}
    settings = {"data": {"options": {"rows": 300}}, "train": {"epochs": 2, "target": 0.3}}
    for arm, cut in (("narrow", 2), ("wide", 8)):
        for seed in range(2):
            trained = vflsec.train(dataset="toy", seed=seed, model={"cut": cut}, **settings)
            labels = trained.federation.active.labels["test"].numpy()
            expected = vflsec.results.metrics.auc(trained.predict("test").numpy(), labels)
            assert by_name[arm, "utility"].by_seed[seed] == pytest.approx(expected, abs=1e-6)
            assert by_name[arm, "utility"].metric == "auc"
    assert by_name["narrow", "bytes"].by_seed[0] == pytest.approx(by_name["wide", "bytes"].by_seed[0] / 4)
    again = run(*words, "--dry-run")
    assert "0 results to compute" in again.stderr


def test_a_study_tunes_each_arm_by_the_same_rule(write, tmp_path):
    text = OWN.replace("train.target = 0.3\n", "tune = 2\n")
    out, results = tmp_path / "run", tmp_path / "results"
    done = run(write(text), "--jobs", "1", "--out", str(out), "--results", str(results))
    assert done.exit_code == 0, done.output
    measured = read_measurements(results / "own.json")
    by_name = {(values.arm, values.measure): values.by_seed for values in measured.values}
    report = vflsec.evaluate(dataset="toy", data={"options": {"rows": 300}}, train={"epochs": 2}, model={"cut": 2},
                             methods=["fedsplitnn"], attack="norm", seeds=2, tune=2, jobs=1,
                             out=tmp_path / "eval")  # fmt: skip
    assert np.mean([*by_name["narrow", "utility"].values()]) == pytest.approx(report.points[0].utility.mean, abs=1e-6)
    trained = [facts.seconds for folder in (out / "cells").iterdir() if (facts := Store(out).cell(folder.name).read())]
    trials = [record.tuning.seconds for record in Store(out).records().values() if record.tuning]
    assert len(trained) == len(trials) == 2 * 2  # of each arm and seed
    assert measured.seconds == pytest.approx(sum(trained) + sum(trials), abs=0.1)


@pytest.mark.long
def test_leaks_and_cap_are_those_of_an_evaluation(write, tmp_path):
    arm = '\n[[arms]]\nname = "noise 2"\nsettings.defenses = ["iso:lambda=2,5"]\n'
    one = read_study(write(OWN + arm + MORE.format(cap="calibrated")))
    job = StudyGrid("own", one, Store(tmp_path / "run"))
    with job.store.lock():
        list(job.compute(jobs=1, device="cpu"))
    found = {(own.arm, own.measure): own for own in job.measure().values}
    report = vflsec.evaluate(
        dataset="toy", data={"options": {"rows": 300}}, attack="mc:epochs=3", defense="iso", strengths=[1, 5], seeds=2,
        aux={"folds": 0}, train={"epochs": 2, "target": 0.3}, jobs=1, out=tmp_path / "eval",
    )  # fmt: skip
    (point,) = [p for p in report.points if p.strength == 5.0]
    leak = found["noise", "leak of mc at 5"]
    assert leak.by_seed == pytest.approx(point.leak.by_seed, abs=1e-6)
    assert leak.alone == pytest.approx(point.leak.alone_by_seed, abs=1e-6)
    assert found["noise", "utility at 5"].by_seed.keys() == {0, 1}
    assert math.fsum(found["noise", "utility at 5"].by_seed.values()) / 2 == pytest.approx(point.utility.mean, abs=1e-6)
    (cap,) = [c for c in report.summary.cap if c.attack == "worst"]
    assert found["noise", "calibrated CAP against worst"].by_seed == pytest.approx(cap.calibrated_by_seed, abs=1e-6)


def test_a_target_that_is_not_met_is_a_lost_seed(write, tmp_path):
    path = write(OWN.replace("target = 0.3", "target = 1.0") + BYTES.format(measure="bytes to target"))
    done = run(path, "--jobs", "1", "--out", str(tmp_path / "run"), "--results", str(tmp_path), "--format", "markdown")
    assert done.exit_code == 3
    assert "lost" in done.stdout
    found = {(own.arm, own.measure): own for own in read_measurements(tmp_path / "own.json").values}
    assert found["narrow", "bytes to target"].lost == {0: "target not met", 1: "target not met"}
    assert found["wide", "bytes to target"].by_seed.keys() == {0, 1}  # its AUC is 1


def test_seeds_are_added_while_a_claim_is_undecided(write, tmp_path):
    text = OWN.replace("seeds = 2", "seeds = 1\nlooks = [2, 3]").replace("rows = 300", "rows = 150")
    places = ["--jobs", "1", "--out", str(tmp_path / "run"), "--results", str(tmp_path / "r")]
    done = run(write(text), *places)
    assert "with 1 of at most 3 seeds" in done.output, done.output
    assert "with 3 of at most 3 seeds" in done.output
    assert read_measurements(tmp_path / "r" / "own.json").seeds == 3
    assert "0 results to compute, with 3 of" in run(write(text), *places).output


def test_other_seeds_leave_the_measurements_alone(write, tmp_path):
    done = run(write(), "--jobs", "1", "--seeds", "1", "--out", str(tmp_path / "run"), "--results", str(tmp_path / "r"))
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "r").exists()
    assert read_measurements(tmp_path / "run" / "own.json").seeds == 1


COMPARED = """
[[arms]]
name = "narrow too"
settings.model.cut = 2

[[arms]]
name = "narrow noise"
settings.model.cut = 2
settings.defenses = ["iso:lambda=1,5"]

[[arms]]
name = "more labels"
settings.model.cut = 2
settings.aux.n = 40

[[arms]]
name = "trees"
settings.methods = ["secureboost"]

[[arms]]
name = "trees of depth 4"
settings.methods = ["secureboost"]
settings.method.secureboost.depth = 4

[[arms]]
name = "trees of depth 3"
settings.methods = ["secureboost"]
settings.method.secureboost.depth = 3

[[claims]]
text = "nothing is lost"
source = "nowhere"
topic = "utility"
better = "{better}"
than = ["{other}"]
no_worse = true
margin = 0.01
{measure}
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("better", "measure", "same"),
    [
        ("trees of depth 4", 'measure = "utility"', True),  # the default
        ("trees of depth 3", 'measure = "utility"', False),
        ("narrow too", 'measure = "utility"', True),
        ("narrow too", 'measure = "bytes"', True),
        ("narrow too", 'measure = "leak"\nattack = "mc"', True),
        ("narrow noise", 'measure = "utility"', True),  # at strength 0
        ("narrow noise", 'measure = "leak"\nattack = "worst"', True),
        ("more labels", 'measure = "utility"', True),  # which the adversary has
        ("more labels", 'measure = "leak"\nattack = "mc"', False),
        ("wide", 'measure = "utility"', False),
    ],
)
def test_a_claim_that_compares_a_measurement_with_itself_is_refused(write, tmp_path, better, measure, same):
    """It would hold without a test: nothing is varied."""
    other = "trees" if "trees" in better else "narrow"
    path = write(OWN + COMPARED.format(better=better, other=other, measure=measure))
    found = run(path, "--dry-run", "--out", str(tmp_path / "run"))
    assert (found.exit_code == 2) == same, found.output
    if same:
        assert f"settings, got {better} and {other}" in found.output
        assert found.output.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('better = "wide"', 'better = "wider"', "'wider'. Did you mean wide?"),
        ("margin = 0.01", "margin = 0", "expected 0 < margin"),
        ("margin = 0.01", 'margin = 0.01\nattack = "mc"', "expected attack with leak"),
        ("margin = 0.01", 'margin = 0.01\norder = ["wide"]', "either better and than"),
        ('than = ["narrow"]', 'than = ["alone"]', "expected measure leak with than"),
        ('measure = "utility"', 'measure = "utility"\nmetric = "aic"', "unknown metric"),
        ("margin = 0.01", 'margin = 0.01\ndata = ["toys"]', "unknown data 'toys'"),
        ("seeds = 2", "seeds = 0", "expected seeds from 1"),
        ('"2026-01-01"', '"yesterday"', "2026-01-31, got 'yesterday'"),
        ('"2026-01-01"', '"2026-02-30"', "2026-01-31, got '2026-02-30'"),
        ('"2026-01-01"', '"20260101"', "2026-01-31, got '20260101'"),
        ('"2026-01-01"', '""', "2026-01-31, got ''"),
        ('"2026-01-01"', "2026-01-01", "Expected `str`, got `date`"),
        ('methods = ["fedsplitnn"]', 'methods = ["fedsplitnn", "local"]', "one method"),
        ('methods = ["fedsplitnn"]', 'methods = "fedsplitnn"', "of names, got 'fedsplitnn'"),
        ('methods = ["fedsplitnn"]', "methods = 5", "at 'methods'"),
        ("train.epochs = 2\ntrain.target = 0.3", "train = 5", "at 'train'"),
        ("train.epochs = 2", "train.epochs = 2\nseeds = 2", "move them"),
        ("train.epochs = 2", "train.epoch = 2", "unknown setting 'epoch'"),
        ('name = "wide"', 'name = "narrow"', "expected different names of arms"),
        ("margin = 0.01", "margin = 0.01\nmargins = 1", "unknown field `margins`"),
    ],
)
def test_a_wrong_study_is_refused_in_one_line(write, tmp_path, before, after, message):
    done = run(write(OWN.replace(before, after)), "--dry-run", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="unknown study"):
        read_study("nothing")
    assert run("all", "dcor").exit_code == 2


def test_studies_are_listed():
    done = run()
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == studies.list_studies()
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.long
def test_the_documented_study_can_be_run(write, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    done = run(write(text), "--dry-run", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output


@pytest.mark.long
@pytest.mark.slow
def test_rounding_otherwise_is_measured_and_kept(write, tmp_path, monkeypatch):
    """Also in a folder with a package of the same name, which is not run."""
    (tmp_path / "vflsec").mkdir()
    (tmp_path / "vflsec" / "__init__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    text = OWN.replace("seeds = 2", "seeds = 1").replace("rows = 300", "rows = 150")
    words = (write(text), "--jobs", "1", "--out", str(tmp_path / "run"), "--results", str(tmp_path))
    assert run(*words, "--rounding").exit_code == 0
    found = read_measurements(tmp_path / "own.json")
    assert found.rounding.keys() == {"utility"}
    assert 0 <= found.rounding["utility"] < 0.2
    assert run(*words).exit_code == 0
    assert read_measurements(tmp_path / "own.json").rounding == found.rounding
