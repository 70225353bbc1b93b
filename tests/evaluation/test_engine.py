"""Resume, order, processes: the records are the same however they came about."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from vflsec.core.errors import UsageError
from vflsec.evaluation import engine, runner
from vflsec.evaluation import spec as specs
from vflsec.evaluation.plan import rows
from vflsec.evaluation.store import Store

SETTINGS = {
    "dataset": "toy",
    "data": {"options": {"rows": 300}},
    "train": {"epochs": 2},
    "attacks": [{"name": "mc", "options": {"epochs": 5}}],
    "defenses": [{"name": "iso"}],
    "strengths": [1, 5],
    "aux": {"n": 20, "folds": 2},
    "seeds": 2,
}


def timeless(path):
    """Every record but its timings, in the order of the file."""
    return [
        json.dumps({k: v for k, v in json.loads(line).items() if k != "seconds"})
        for line in path.read_text().splitlines()
    ]


def finish(folder, **settings):
    store = Store(folder)
    spec = specs.read({**SETTINGS, **settings})
    list(engine.evaluate(engine.plan(spec, store), store))
    return store


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    finish(folder)
    return timeless(folder / "records.jsonl")


def test_every_record_says_what_it_is(uninterrupted):
    records = [json.loads(line) for line in uninterrupted]
    assert [r["kind"] for r in records] == 2 * ["prior", "prior", "result", "result", "result"]
    assert all(r["status"] in ("ok", "unconverged") for r in records)
    result = records[2]
    assert {"key", "cell", "method", "defenses", "seed", "adversary", "attack", "utility", "leak", "nbytes"} <= set(
        result
    )
    # 300 rows, 30 % of them for the test, two epochs, up and down, two numbers of four bytes each
    assert result["nbytes"] == 2 * 210 * 2 * 2 * 4
    assert result["leak"]["train"]["n"] == 210 - 20
    assert result["leak"]["test"]["n"] == 90


def test_a_second_run_computes_nothing(tmp_path):
    store = finish(tmp_path)
    plan = engine.plan(specs.read(SETTINGS), store)
    assert (plan.missing, plan.cached, plan.tasks) == (0, 10, [])
    assert list(engine.evaluate(plan, store)) == []


def test_two_processes_give_the_same_file(tmp_path, uninterrupted):
    store = Store(tmp_path)
    list(engine.evaluate(engine.plan(specs.read(SETTINGS), store), store, jobs=2))
    assert timeless(tmp_path / "records.jsonl") == uninterrupted


@pytest.mark.filterwarnings("ignore")  # the cluster's own
def test_a_dask_cluster_gives_the_same_file(tmp_path, uninterrupted):
    from distributed import LocalCluster

    store = Store(tmp_path)
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": True, "dashboard_address": None}
    with LocalCluster(host="127.0.0.1", **options) as cluster:
        plan = engine.plan(specs.read(SETTINGS), store)
        list(engine.evaluate(plan, store, engine=f"dask:{cluster.scheduler_address}"))
    assert timeless(tmp_path / "records.jsonl") == uninterrupted


@pytest.mark.filterwarnings("ignore")
def test_no_dask_scheduler(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(UsageError, match=r"expected a dask scheduler at nowhere, found none"):
        list(engine.evaluate(engine.plan(specs.read(SETTINGS), store), store, engine="dask:nowhere"))


def test_dask_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    store = Store(tmp_path)
    with pytest.raises(UsageError, match=r"needs distributed: pip install 'vflsec\[dask\]'"):
        list(engine.evaluate(engine.plan(specs.read(SETTINGS), store), store, engine="dask:tcp://127.0.0.1:1"))


@pytest.mark.parametrize(("after", "jobs"), [(1, 1), (6, 1), (4, 2)])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, uninterrupted, after, jobs):
    config = tmp_path / "spec.toml"
    config.write_text(specs.to_toml(specs.read(SETTINGS)))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vflsec", "eval", "--config", config, "--out", out, "--jobs", str(jobs)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "records.jsonl").exists() and len((out / "records.jsonl").read_bytes().splitlines()) >= after:
            break
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert len(Store(out).records()) < len(uninterrupted)
    Store(out).trim()
    finish(out)
    assert timeless(out / "records.jsonl") == uninterrupted


def test_a_lost_record_is_attacked_again_without_training(tmp_path, monkeypatch):
    store = finish(tmp_path)
    before = timeless(tmp_path / "records.jsonl")
    lost = json.loads(before[-1])["key"]
    store.forget(lambda record: record["key"] != lost)
    monkeypatch.setattr(runner, "train", lambda *_, **__: pytest.fail("trained again"))
    finish(tmp_path)
    assert timeless(tmp_path / "records.jsonl") == before


def test_an_attack_that_reads_messages_gets_them(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text(COUNTS_GRADIENTS)
    store = finish(tmp_path / "run", attacks=[{"name": f"{file}:Counts"}], strengths=[5], seeds=1)
    found = [r for r in store.records().values() if r["kind"] == "result"]
    assert [r["budget"] for r in found] == [{"rows": 2 * 210.0, "senders": 1.0}] * 2


COUNTS_GRADIENTS = """
import torch
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need

class Counts(Attack):
    '''Guesses nothing; says how many gradient rows it saw.'''
    name = "counts"
    needs = frozenset({Need.GRADIENTS})
    reference = verified = "test"

    def run(self, view, *, rng):
        seen = sum(len(message.rows) for message in view.messages)
        senders = len({message.sender for message in view.messages})
        scores = {split: torch.randn(len(x), view.n_classes, generator=rng) for split, x in view.features.items()}
        return Guess(scores, budget={"rows": seen, "senders": senders})
"""


def test_divergence_is_a_status_and_never_a_number(tmp_path):
    store = finish(tmp_path, train={"epochs": 2, "lr": 1e30, "optimizer": "sgd"}, seeds=1)
    results = [r for r in store.records().values() if r["kind"] == "result"]
    assert {r["status"] for r in results} == {"diverged"}
    assert all(r["utility"] is None and r["leak"] is None and "lower train.lr" in r["error"] for r in results)
    again = finish(tmp_path, train={"epochs": 2, "lr": 1e30, "optimizer": "sgd"}, seeds=1, aux={"n": 10, "folds": 0})
    assert {r["status"] for r in again.records().values() if r["kind"] == "result"} == {"diverged"}


VANISHING = {"epochs": 20, "optimizer": "sgd", "momentum": 0.0, "lr": 1e-3, "weight_decay": 999.0}


def test_a_model_that_says_the_same_of_everybody_has_collapsed(tmp_path):
    store = finish(tmp_path, train=VANISHING, seeds=1, strengths=[1])
    results = [r for r in store.records().values() if r["kind"] == "result"]
    assert {r["status"] for r in results} == {"collapsed"}
    assert all(r["utility"] is None and r["leak"] is None for r in results)


def test_a_broken_attack_costs_only_itself(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(COUNTS_GRADIENTS.replace("seen = sum", "raise ValueError('two\\nlines')\n        seen = sum"))
    store = finish(tmp_path / "run", attacks=[{"name": f"{file}:Counts"}, {"name": "logistic"}], seeds=1)
    by_attack = {
        (r["attack"]["name"].rpartition(":")[2], r["status"]) for r in store.records().values() if r["kind"] == "result"
    }
    assert by_attack == {("Counts", "error"), ("logistic", "ok")}
    errors = {r.get("error") for r in store.records().values()} - {None}
    assert errors == {"ValueError: two lines"}


def test_wrong_settings_are_raised_not_recorded(tmp_path):
    with pytest.raises(UsageError, match="expected fewer auxiliary labels than the 210 labeled"):
        finish(tmp_path, aux={"n": 500})
    with pytest.raises(UsageError, match="best_on_val need validation rows"):
        finish(tmp_path, train={"select": "best_on_val"})
    assert not any(r["kind"] == "result" for r in Store(tmp_path).records().values())


def test_a_cell_does_not_depend_on_what_ran_before_it(tmp_path):
    spec = specs.read(SETTINGS)
    last = list(rows(spec))[-1]
    task = runner.Task(last.cell, [last], (), spec.adversary, spec.aux)
    (alone,) = runner.run(task, tmp_path / "alone", "cpu") if Store(tmp_path / "alone") else ()
    whole = finish(tmp_path / "whole").records()[last.key]
    assert alone["leak"] == whole["leak"]
    assert alone["utility"] == whole["utility"]
