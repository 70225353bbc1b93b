"""The benchmarks run: one cell of each, not timed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from vflsec.evaluation.statistics import Interval

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_one_cell_of_the_digits_job():
    job = load("digits_job")
    x, y = job.load()
    found = job.run(x, y, 0.0, 0, full=False)
    assert found["main"] > 0.94
    assert found["test"] > 0.3
    assert job.run_alone(x, y, 0)["test"] > 0.6


@pytest.mark.slow
def test_one_pair_of_the_overhead(monkeypatch):
    overhead = load("overhead")
    monkeypatch.setattr(overhead, "EPOCHS", 1)
    assert all(overhead.split(defense) > 0 for defense in overhead.DEFENSES.values())
    assert overhead.joint() > 0


@pytest.mark.slow
def test_one_pair_and_one_call_of_each_defence_of_marvells_paper(monkeypatch):
    marvell = load("marvell")
    monkeypatch.setattr(marvell, "EPOCHS", 1)
    monkeypatch.setattr(marvell, "REPEATS", 1)
    assert all(marvell.training(name) > 0 for name in (None, "marvell"))
    assert all(marvell.once(call) for call in marvell.calls().values())


def test_the_main_command_is_the_readmes():
    assert " ".join(load("main_command").COMMAND) in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


# The benchmark of methods


@pytest.fixture(scope="module")
def methods():
    return load("methods")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.001, 0.1, "holds"),
        (0.0, 0.1, "undecided"),
        (-0.1, 0.005, "undecided"),
        (-0.1, 0.004, "does not hold here"),
        (-0.2, -0.1, "does not hold here"),
        (0.001, 0.004, "holds"),
        (float("nan"), float("nan"), "undecided"),
    ],
)
def test_a_verdict_follows_from_the_interval(methods, low, high, verdict):
    assert methods.judge(Interval((low + high) / 2, low, high, 5)) == verdict


def test_verdicts_of_several_parts(methods):
    holds, fails, unsure = methods.HOLDS, methods.FAILS, methods.OPEN
    assert methods.together([holds, holds]) == holds
    assert methods.together([holds, unsure]) == unsure
    assert methods.together([unsure, fails]) == fails
    assert methods.only_first([holds, fails]) == holds
    assert methods.only_first([holds, holds]) == fails
    assert methods.only_first([fails, fails]) == fails
    assert methods.only_first([unsure, fails]) == unsure


def record(test, nbytes=10, status="ok"):
    return {"test": test, "val": None, "bytes": nbytes, "status": status}


def test_seeds_are_paired_and_points_averaged(methods):
    rows = {
        "a": {"x": [record(0.5), record(0.7), record(None, status="diverged")], "y": [record(0.9)] * 3},
        "b": {"x": [record(0.4), record(0.5), record(0.1)], "y": [record(0.8), record(0.9), record(0.1)]},
    }
    part = methods.compare(rows, "a", "b", ("x", "x"), ("y", "y"))
    assert (part.text, part.difference.n) == ("a > b", 2)
    assert part.verdict == methods.OPEN, "a seed gave no number"
    assert part.difference.mean == pytest.approx((0.1 + 0.1) / 2)
    assert methods._status(rows["a"]["x"]) == "1/3 diverged"


def test_each_claim_of_the_papers_is_asked_somewhere(methods):
    """With made-up figures, in which all methods do equally well at a hundred bytes."""
    asked = []
    for name, experiment in methods.EXPERIMENTS.items():
        rows = {arm: {p: [record(0.8)] * 5 for p in experiment.columns(arm)} for arm in experiment.arms}
        asked += methods.claims(name, rows)
        assert list(methods.losses(rows)) == []
    texts = " ".join(claim.text for claim in asked)
    for words in ("FedHSSL > FedGSSL", "aggregation helps only", "more aligned", "SS-VFL-I", "VFLHLP leads", "halves"):
        assert words in texts
    assert {claim.verdict for claim in asked} == {methods.FAILS}, "nothing exceeds what is equal"


def test_every_training_can_be_named_and_methods_have_as_many_trials(methods):
    for experiment in methods.EXPERIMENTS.values():
        for name in experiment.arms:
            arm = methods.ARMS[name]
            assert len(arm.trials) == (1 if name == "lr" else 4)
            for point in experiment.columns(name).values():
                cells = {methods.cell(experiment, arm, 0, *point, *trial).key for trial in arm.trials}
                assert len(cells) == len(arm.trials), "each trial is another"


@pytest.mark.slow
def test_a_table_of_methods(methods, monkeypatch, tmp_path):
    tiny = methods.Experiment(
        "toy",
        "A world for tests.",
        ("train.epochs=2", "train.pretrain.epochs=1"),
        {"10 labels": ("data.n_labeled=40",), "all": ()},
        "10 labels",
        ("local", "lr", "fedsplitnn", "vflhlp-p"),
    )
    monkeypatch.setitem(methods.EXPERIMENTS, "tiny", tiny)
    found = methods.compute(["tiny"], 2, tmp_path, jobs=1)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cell.json")}
    assert methods.compute(["tiny"], 2, tmp_path, jobs=1) == found
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cell.json")}, (
        "nothing is computed twice"
    )
    assert all(len(records) == 2 for points in found["tiny"].values() for records in points.values())
    assert all(r["test"] is not None for points in found["tiny"].values() for rs in points.values() for r in rs)
    page = methods.page(found, 2)
    assert "| fedsplitnn |" in page
    assert methods.mean_bytes(found["tiny"]["lr"]["all"]) == 0
    assert methods.mean_bytes(found["tiny"]["fedsplitnn"]["all"]) > 0


@pytest.mark.slow
def test_every_engine_of_the_encrypted_layer_once(monkeypatch):
    job = load("paillier")
    monkeypatch.setattr(job, "ROUNDS", 1)
    monkeypatch.setattr(job, "BATCHES", 1)
    layout = job.Layout(width=10, batch=16, bits=1024)
    keys = job.Keys.generate(1024)
    assert job.naive(keys.private.public_key, keys.private, 2) > 0
    assert all(min(job.ours(layout, mode)) > 0 for mode in job.MODES)
    assert 0 < job.limit(layout, "subgroup") < job.limit(layout, "standard")
    *_, error = job.epoch(1024, "subgroup", 2)
    assert float(error) < 1e-6
