"""Resume, order, processes: the records are the same however they came about."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import vflsec
from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.inference import fused
from vflsec.results.analysis.summary import summarize
from vflsec.results.records.schema import BaselineResult, Result, decode
from vflsec.run import engine, runner
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.plan import list_trials
from vflsec.run.store import StageDone, Store

SETTINGS = {
    "dataset": "toy",
    "data": {"options": {"rows": 300}},
    "train": {"epochs": 2},
    "attacks": [{"name": "mc", "options": {"epochs": 5}}],
    "defenses": [{"name": "iso"}],
    "strengths": [1, 5],
    "aux": {"n": 20, "folds": 0},
    "seeds": 2,
}
FOLDED = {**SETTINGS, "strengths": [5], "aux": {"n": 20, "pick": True, "folds": 2}}
WITHOUT_BASELINES = {"n": 0}
"""Known rows of an adversary whose attack needs none: what it could do alone is then not run."""


def timeless(path):
    """Every record but its timings, in the order of their keys, since processes end in any order."""
    records = (json.loads(line)["record"] for line in path.read_text().splitlines())
    return [
        json.dumps({k: v for k, v in record.items() if k != "seconds"})
        for record in sorted(records, key=lambda record: record["key"])
    ]


def finish(folder, **settings):
    store = Store(folder)
    spec = specs.read({**SETTINGS, **settings})
    list(engine.evaluate(engine.plan(spec, store), store))
    return store


def test_seconds_are_of_cpu_time_so_that_other_work_on_the_machine_does_not_change_them(tmp_path, monkeypatch):
    measure = runner.training._Run.measure
    monkeypatch.setattr(runner.training._Run, "measure", lambda run: time.sleep(3) or measure(run))
    seconds = [r.seconds.get("train", 0.0) for r in finish(tmp_path, strengths=[1], seeds=1).records().values()]
    assert 0 < max(seconds) < 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    finish(folder, **FOLDED)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(whole):
    return timeless(whole / "records.jsonl")


def test_every_record_says_what_it_is(uninterrupted):
    records = [json.loads(line) for line in uninterrupted]
    assert Counter(r["kind"] for r in records) == {"prior": 10, "result": 4}
    assert all(r["status"] in ("ok", "unconverged") for r in records)
    result = next(r for r in records if r["kind"] == "result")
    assert {"key", "cell", "method", "defenses", "seed", "adversary", "attack", "utility", "leak", "nbytes"} <= set(
        result
    )
    # 300 rows, 30 % of them for the test, two epochs, up and down, two numbers of four bytes each
    assert result["nbytes"] == 2 * 210 * 2 * 2 * 4
    assert result["leak"]["train"]["n"] == 210 - 20
    assert result["leak"]["test"]["n"] == 90


def test_a_second_run_computes_nothing(whole):
    store = Store(whole)
    plan = engine.plan(specs.read(FOLDED), store)
    assert (plan.missing, plan.cached, plan.tasks) == (0, 14, [])
    assert list(engine.evaluate(plan, store)) == []


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_give_the_same_file(tmp_path, uninterrupted):
    store = Store(tmp_path)
    list(engine.evaluate(engine.plan(specs.read(FOLDED), store), store, jobs=2))
    assert timeless(tmp_path / "records.jsonl") == uninterrupted


def evaluate_frames(folder):
    """Return an evaluation of data frames, which workers lack, its results here, and a store for others."""
    rng = np.random.default_rng(0)
    bank = pd.DataFrame({"a": rng.normal(size=300), "y": rng.integers(0, 2, 300)})
    loans = vflsec.dataset(active=bank, passive=pd.DataFrame({"c": rng.normal(size=300)}), label="y")
    frames = specs.read({**SETTINGS, "dataset": loans, "data": {}, "strengths": [5], "seeds": 1})
    here, there = Store(folder / "here"), Store(folder / "there")
    list(engine.evaluate(engine.plan(frames, here), here))
    return frames, here, there


def make_loky():
    from joblib.externals.loky import get_reusable_executor

    return get_reusable_executor(max_workers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: ProcessPoolExecutor(2, get_context("forkserver")),
        pytest.param(lambda: ProcessPoolExecutor(1, get_context("spawn")), marks=pytest.mark.long),
        pytest.param(make_loky, marks=pytest.mark.long),
    ],
    ids=["forkserver", "spawn", "loky"],
)
def test_an_executor_gives_the_same_file_of_data_frames(tmp_path, make):
    frames, here, there = evaluate_frames(tmp_path)
    with make() as executor:
        list(engine.evaluate(engine.plan(frames, there), there, engine=executor))
    assert timeless(there.folder / "records.jsonl") == timeless(here.folder / "records.jsonl")


class Exiting(ProcessPoolExecutor):
    """Has processes that exit at the third task."""

    tasks = 0

    def submit(self, function, *args):
        self.tasks += 1
        return super().submit(os._exit, 1) if self.tasks == 3 else super().submit(function, *args)


@pytest.mark.slow
def test_a_worker_of_an_executor_that_dies_costs_its_task_alone(tmp_path, uninterrupted):
    store = Store(tmp_path)
    todo = engine.plan(specs.read(FOLDED), store)
    with (
        Exiting(1, get_context("forkserver")) as executor,
        pytest.raises(
            UsageError, match="a worker of the executor has died: results of finished tasks are kept; start again"
        ),
    ):
        list(engine.evaluate(todo, store, engine=executor))
    rest = engine.plan(specs.read(FOLDED), store)
    assert 0 < rest.missing < todo.missing
    list(engine.evaluate(rest, store))
    assert timeless(tmp_path / "records.jsonl") == uninterrupted


def test_an_engine_is_a_name_or_an_executor():
    with pytest.raises(UsageError, match=r"dask:ADDRESS or a concurrent\.futures\.Executor, got 3"):
        vflsec.evaluate(dataset="toy", engine=3)


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")  # the cluster's own
def test_a_dask_cluster_gives_the_same_file_of_data_frames(tmp_path):
    """The frames have to reach the workers. A cluster of which a worker is killed evaluates a registered dataset."""
    from distributed import LocalCluster

    frames, here, there = evaluate_frames(tmp_path)
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": True, "dashboard_address": None}
    with LocalCluster(host="127.0.0.1", **options) as cluster:
        list(engine.evaluate(engine.plan(frames, there), there, engine=f"dask:{cluster.scheduler_address}"))
    assert timeless(there.folder / "records.jsonl") == timeless(here.folder / "records.jsonl")


def started(folder, *words, cwd=None):
    """Start a part of a dask cluster as its user does."""
    log = (folder / f"{words[0]}-{len(list(folder.glob('*.log')))}.log").open("w")
    command = [sys.executable, "-m", "dask", *words, "--scheduler-file", str(folder / "scheduler.json")]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=cwd or folder)


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")  # the cluster's own
def test_a_cluster_whose_worker_is_killed_gives_the_same_file(tmp_path, uninterrupted):
    """The commands of the page on scaling out: a scheduler and two workers."""
    store = Store(tmp_path / "run")
    processes = [started(tmp_path, "scheduler", "--port", "0", "--no-dashboard")]
    workers = []
    for number in (1, 2):
        own = tmp_path / f"worker-{number}"
        own.mkdir()
        words = ("worker", "--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(own))
        workers.append(started(tmp_path, *words, cwd=own))
    try:
        for _ in range(300):
            if (tmp_path / "scheduler.json").exists():
                break
            time.sleep(0.1)
        address = json.loads((tmp_path / "scheduler.json").read_text("utf-8"))["address"]
        todo = engine.plan(specs.read(FOLDED), store)
        records = []
        for record in engine.evaluate(todo, store, engine=f"dask:{address}"):
            records.append(record)
            if len(records) == 2:
                workers[0].kill()
        assert sum(not isinstance(one, StageDone) for one in records) == 14
        assert workers[0].wait(10) == -signal.SIGKILL
    finally:
        for process in (*workers, *processes):
            process.kill()
            process.wait()
    assert timeless(store.folder / "records.jsonl") == uninterrupted


def test_a_worker_that_cannot_write_the_folder_keeps_its_models_in_its_own(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    (tmp_path / "file").write_text("not a folder")
    own = tmp_path / "own"
    events = []
    worker = SimpleNamespace(local_directory=str(own), log_event=lambda *event: events.append(event))
    monkeypatch.setattr(distributed, "get_worker", lambda: worker)
    store = Store(tmp_path / "run")
    (task, *_) = (one for one in engine.plan(specs.read(SETTINGS), store).tasks if one.rows)
    records = engine._run_on_worker({}, task, tmp_path / "file" / "run", "cpu", "topic")
    assert records[0].status in ("ok", "unconverged")
    assert [(topic, decode(line)) for topic, line in events] == [("topic", record) for record in records]
    assert list((own / "vflsec" / "run" / "cells").iterdir())


@pytest.mark.filterwarnings("ignore")
def test_no_dask_scheduler(tmp_path):
    pytest.importorskip("distributed")
    store = Store(tmp_path)
    with pytest.raises(UsageError, match="dask scheduler at nowhere"):
        list(engine.evaluate(engine.plan(specs.read(SETTINGS), store), store, engine="dask:nowhere"))


def test_dask_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    store = Store(tmp_path)
    with pytest.raises(UsageError, match=r"pip install 'vflsec\[dask\]'"):
        list(engine.evaluate(engine.plan(specs.read(SETTINGS), store), store, engine="dask:tcp://127.0.0.1:1"))


@pytest.mark.chaos
@pytest.mark.parametrize(("after", "jobs"), [(6, 1), (4, 2)])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, uninterrupted, after, jobs):
    config = tmp_path / "spec.toml"
    config.write_text(specs.to_toml(specs.read(FOLDED)))
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
    finish(out, **FOLDED)
    assert timeless(out / "records.jsonl") == uninterrupted


@pytest.mark.long
def test_a_lost_record_is_attacked_again_without_training(tmp_path, monkeypatch):
    store = finish(tmp_path)
    before = timeless(tmp_path / "records.jsonl")
    lost = json.loads(before[-1])["key"]
    store.forget(lambda record: record.key != lost)
    monkeypatch.setattr(runner.training, "train", lambda *_, **__: pytest.fail("trained again"))
    finish(tmp_path)
    assert timeless(tmp_path / "records.jsonl") == before


def test_an_attack_that_reads_messages_gets_them(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text(COUNTS_GRADIENTS)
    more = {"strengths": [5], "seeds": 1, "aux": WITHOUT_BASELINES}
    store = finish(tmp_path / "run", attacks=[{"name": f"{file}:Counts"}], **more)
    found = [r for r in store.records().values() if isinstance(r, Result)]
    assert [r.budget for r in found] == [{"rows": 2 * 210.0, "senders": 1.0}] * 2


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


@pytest.mark.long
def test_divergence_is_a_status_and_never_a_number(tmp_path):
    store = finish(tmp_path, train={"epochs": 2, "lr": 1e30, "optimizer": "sgd"}, seeds=1)
    results = [r for r in store.records().values() if isinstance(r, Result)]
    assert {r.status for r in results} == {"diverged"}
    assert all(r.utility is None and r.leak == {} and "lower train.lr" in r.error for r in results)
    again = finish(tmp_path, train={"epochs": 2, "lr": 1e30, "optimizer": "sgd"}, seeds=1, aux={"n": 10, "folds": 0})
    assert {r.status for r in again.records().values() if isinstance(r, Result)} == {"diverged"}


VANISHING = {"epochs": 20, "optimizer": "sgd", "momentum": 0.0, "lr": 1e-3, "weight_decay": 999.0}


@pytest.mark.long
def test_a_model_that_says_the_same_of_everybody_has_collapsed(tmp_path):
    store = finish(tmp_path, train=VANISHING, seeds=1, strengths=[1])
    results = [r for r in store.records().values() if isinstance(r, Result)]
    assert {r.status for r in results} == {"collapsed"}
    assert all(r.utility is None and r.leak == {} for r in results)


def test_a_broken_attack_costs_only_itself(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(COUNTS_GRADIENTS.replace("seen = sum", "raise ValueError('two\\nlines')\n        seen = sum"))
    store = finish(tmp_path / "run", attacks=[{"name": f"{file}:Counts"}, {"name": "logistic"}], seeds=1)
    by_attack = {
        (r.attack.name.rpartition(":")[2], r.status) for r in store.records().values() if isinstance(r, Result)
    }
    assert by_attack == {("Counts", "error"), ("logistic", "ok")}
    errors = {r.error for r in store.records().values()} - {None}
    assert errors == {"ValueError: two lines (broken.py, line 13)"}


def write_attack(folder, body, needs="Need.FEATURES", extra=""):
    """An attack in a file, whose ``run`` is ``body``."""
    file = folder / "mine.py"
    file.write_text(
        "import torch\nfrom vflsec.core.attack import Attack\nfrom vflsec.core.view import Guess, Need\n"
        f"class Mine(Attack):\n    name = 'mine'\n    needs = frozenset({{{needs}}})\n"
        "    reference = verified = 'test'\n"
        f"{extra}    def run(self, view, *, rng):\n        {body}\n"
    )
    return [{"name": f"{file}:Mine"}]


def results(store):
    return [record for record in store.records().values() if isinstance(record, Result)]


def test_a_guess_that_cannot_be_scored_is_a_status(tmp_path):
    attacks = write_attack(tmp_path, "return Guess({s: x[:, :2] / 0 for s, x in view.features.items()})")
    store = finish(tmp_path / "run", attacks=attacks, seeds=1, strengths=[1], aux=WITHOUT_BASELINES)
    assert {r.status for r in results(store) if not r.leak} == {"error"}
    assert all(r.error.startswith("BadGuess: expected finite") for r in results(store))


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_attack_may_guess_one_split_only(tmp_path, split):
    attacks = write_attack(tmp_path, f"return Guess({{'{split}': view.features['{split}'][:, :2]}})")
    store = finish(tmp_path / "run", attacks=attacks, seeds=1, strengths=[1], aux=WITHOUT_BASELINES)
    assert [list(r.leak) for r in results(store)] == [[split]] * 2
    assert {r.status for r in results(store)} == {"ok"}


def test_an_attack_sees_only_what_it_needs_whatever_runs_beside_it(tmp_path):
    body = "return Guess({s: x[:, :2] for s, x in view.features.items()}, budget={'seen': len(view.messages)})"
    (tmp_path / "counts.py").write_text(COUNTS_GRADIENTS)
    beside = [*write_attack(tmp_path, body), {"name": f"{tmp_path / 'counts.py'}:Counts"}]
    store = finish(tmp_path / "run", attacks=beside, seeds=1, strengths=[1], aux=WITHOUT_BASELINES)
    seen = {r.budget.get("seen") for r in results(store)}
    assert seen == {0, None}


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_attacks_that_share_a_guess_are_as_by_themselves(tmp_path, monkeypatch):
    """Self-training starts from the guess of fusion, which is made once for both, and once for both alone."""
    made = []
    monkeypatch.setattr(fused, "_fuse_classes", lambda *a, of=fused._fuse_classes: made.append(of(*a)) or made[-1])
    leaks, small = [], {"data": {"options": {"rows": 150}}, "defenses": [], "strengths": [], "seeds": 1}
    options = {"fusion": {}, "self-training": {"iterations": 1}}
    for names in (["fusion", "self-training"], ["self-training"], ["fusion"]):
        attacks = [{"name": name, "options": options[name]} for name in names]
        store = finish(tmp_path / "+".join(names), attacks=attacks, **small)
        leaks.append({r.attack.name: r.leak for r in store.records().values() if isinstance(r, Result) and r.attack})
        assert len(made) == 2, "one with the federation, and one without it"
        made.clear()
    together, *apart = leaks
    assert together == apart[0] | apart[1]


def test_the_view_holds_the_adversarys_unlabeled_and_local_rows(tmp_path):
    body = "return Guess({s: x[:, :2] for s, x in view.features.items()}, budget={'more': len(view.unlabeled)})"
    data = {"options": {"rows": 300}, "n_labeled": 100, "aligned": 0.8}
    more = {"data": data, "seeds": 1, "strengths": [1], "aux": WITHOUT_BASELINES}
    store = finish(tmp_path / "run", attacks=write_attack(tmp_path, body), **more)
    assert {r.budget["more"] for r in results(store)} == {210 - 100}


def test_an_attack_of_the_active_party_runs(tmp_path):
    body = "return Guess({s: x[:, :2] for s, x in view.features.items()}, budget={'seen': len(view.messages)})"
    attacks = write_attack(tmp_path, body, needs="Need.EMBEDDINGS", extra="    side = 'active'\n")
    more = {"adversary": "active", "seeds": 1, "strengths": [1], "aux": WITHOUT_BASELINES}
    store = finish(tmp_path / "run", attacks=attacks, **more)
    assert {r.status for r in results(store)} == {"ok"}
    assert all(r.budget["seen"] > 0 for r in results(store))


@pytest.mark.long
def test_a_broken_baseline_is_a_status_too(tmp_path):
    body = "return Guess({s: x[:, :2] for s, x in view.features.items()})"
    broken = "    def alone(self):\n        return Broken()\n"
    attacks = write_attack(tmp_path, body, extra=broken)
    file = tmp_path / "mine.py"
    file.write_text(
        file.read_text() + "class Broken(Mine):\n    def run(self, view, *, rng):\n        raise ValueError\n"
    )
    store = finish(tmp_path / "run", attacks=attacks, seeds=1, strengths=[1])
    assert sorted(r.status for r in store.records().values() if isinstance(r, BaselineResult)) == ["error", *4 * ["ok"]]


def test_one_auxiliary_label_is_enough_to_run(tmp_path):
    store = finish(tmp_path, aux={"n": 1, "pick": True, "folds": 2}, seeds=1, strengths=[1])
    assert all(r.fold is None for r in store.records().values())


def test_an_edited_attack_is_run_anew_in_the_same_process(tmp_path):
    right = "return Guess({s: torch.stack([-x.sum(1), x.sum(1)], 1) for s, x in view.features.items()})"
    small = {"seeds": 1, "strengths": [1], "aux": WITHOUT_BASELINES}
    first = finish(tmp_path / "run", attacks=write_attack(tmp_path, right), **small)
    before = {result.key: result.leak["test"].metrics["auc"] for result in results(first)}
    wrong = right.replace("-x.sum(1), x", "x.sum(1), -x")
    again = finish(tmp_path / "run", attacks=write_attack(tmp_path, wrong), **small)
    after = [result.leak["test"].metrics["auc"] for result in results(again) if result.key not in before]
    assert after == pytest.approx([1 - value for value in before.values()])


@pytest.mark.long
def test_an_edited_table_is_read_anew_in_the_same_process(tmp_path):
    def write(columns):
        lines = [f"{i},{columns(i)},{i % 2}" for i in range(200)]
        (tmp_path / "all.csv").write_text("id,a,b,y\n" + "\n".join(lines) + "\n")
        (tmp_path / "own.toml").write_text(
            'label = "y"\nid = "id"\nfile = "all.csv"\n[parties.active]\ncolumns = ["a"]\n'
            '[parties.passive_1]\ncolumns = ["b"]\n'
        )
        settings = {"dataset": str(tmp_path / "own.toml"), "data": {}, "attacks": [{"name": "logistic"}]}
        store = finish(tmp_path / "run", **settings, seeds=1, strengths=[1])
        return results(store)[-1].leak["test"].metrics["auc"]

    assert write(lambda i: f"{i % 7},{i % 2 + (i % 5) / 3}") > 0.85
    assert write(lambda i: f"{i % 7},{(i * 7919) % 13}") < 0.75


@pytest.mark.long
def test_an_edited_dataset_file_is_another_dataset(tmp_path):
    file = tmp_path / "federation.py"
    settings = {"dataset": f"{file}:load", "data": {}, "attacks": [{"name": "logistic"}], "seeds": 1, "strengths": [1]}
    leaks = []
    for kind in ("planted", "none"):
        file.write_text(
            "from vflsec.testing.federations import make_toy\n"
            f"def load():\n    return make_toy(rows=300, signal='{kind}')\n"
        )
        store = finish(tmp_path / "run", **settings)
        leaks.append(results(store)[-1].leak["test"].metrics["auc"])
    assert leaks[0] > 0.9
    assert leaks[1] < 0.7


def test_a_record_says_where_it_was_computed(uninterrupted):
    assert {json.loads(line).get("device") for line in uninterrupted} == {"cpu", None}


@pytest.mark.long
def test_wrong_settings_are_raised_not_recorded(tmp_path):
    with pytest.raises(UsageError, match="than the 210 labeled"):
        finish(tmp_path, aux={"n": 500}, seeds=1)
    with pytest.raises(UsageError, match="best_on_val need validation rows"):
        finish(tmp_path, train={"select": "best_on_val"}, seeds=1)
    assert not any(isinstance(r, Result) for r in Store(tmp_path).records().values())


@pytest.mark.long
def test_a_cell_does_not_depend_on_what_ran_before_it(tmp_path):
    spec = specs.read(SETTINGS)
    last = list(list_trials(spec))[-1]
    task = runner.Task(last.cell, [last], ())
    (alone,) = runner.run(task, tmp_path / "alone", "cpu") if Store(tmp_path / "alone") else ()
    whole = finish(tmp_path / "whole").records()[last.key]
    assert alone.leak == whole.leak
    assert alone.utility == whole.utility


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changed", "chosen", "left_out"),
    [
        ({}, {"mc", "norm", "direction", "spectral"}, {"direct": "needs model.head=none, got linear"}),
        ({"data": {"options": {"classes": 3}}}, {"mc", "direction"}, {"norm": "is for 2 classes, got 3"}),
        ({"model": {"head": "none", "aggregation": "sum"}}, {"mc", "direct"}, {}),
        ({"aux": {"n": 0}}, {"norm", "spectral"}, {"mc": "needs auxiliary labels"}),
        ({"methods": ["ss-vfl-i"]}, {"mc"}, {"norm": "needs received gradients"}),
        ({"adversary": "active"}, {"inversion-blackbox", "attribute"}, {"norm": "is for the passive side"}),
        ({"methods": ["fedsplitnn", "ss-vfl-i"]}, {"mc"}, {"norm": "needs received gradients"}),
    ],
)
def test_all_is_what_can_be_mounted_and_the_others_have_a_reason(changed, chosen, left_out):
    spec = specs.read({"dataset": "toy", "attacks": ["all"], **changed})
    found, reasons = engine.expand_attacks(spec)
    names = [attack.name for attack in found.attacks]
    assert set(names) >= chosen
    assert set(names) | set(reasons) == set(registry.list_all("attacks"))
    assert not set(names) & set(reasons)
    assert "part of *alone*" in reasons.pop("logistic")
    for name, reason in left_out.items():
        assert reason in reasons[name]
    engine.check(found)


@pytest.mark.long
def test_a_record_says_which_attacks_its_adversary_could_mount(tmp_path):
    """They are those of ``all``: what a report without them names as not run."""
    settings = {**SETTINGS, "attacks": [{"name": "norm"}], "strengths": [1], "seeds": 1}
    records = finish(tmp_path, **settings).records()
    found, _ = engine.expand_attacks(specs.read({**settings, "attacks": ["all"]}))
    expected = sorted(attack.name for attack in found.attacks)
    assert [record.mountable for record in records.values() if isinstance(record, Result)] == [expected] * 2
    summary = summarize(build_manifest(specs.read(settings)), records, out="")
    assert summary.not_run == [name for name in expected if name != "norm"]


@pytest.mark.long
def test_a_sign_by_few_labels_says_how_sure_it_is(tmp_path):
    """``norm`` needs no label and uses them for its sign alone; ``mc`` is fitted on them."""
    attacks = [{"name": "norm"}, {"name": "mc", "options": {"epochs": 5}}]
    settings = {**SETTINGS, "attacks": attacks, "strengths": [1]}
    records = finish(tmp_path, **settings).records()
    summary = summarize(build_manifest(specs.read(settings)), records, out="")
    assert [p.sureness for p in summary.points if p.attack == "mc"] == [None, None]
    sure = [p.sureness for p in summary.points if p.attack == "norm"]
    assert all(0.5 <= one <= 1 for one in sure), "the sign is the one that the labels prefer"


def test_a_variant_beside_all_does_not_take_the_place_of_the_attack():
    """A weakened variant must not keep ``all`` from running the attack itself."""
    spec = specs.read({"dataset": "toy", "attacks": ["direction:releases=1", "mc", "all"]})
    found, reasons = engine.expand_attacks(spec)
    assert found.attacks[:2] == (specs.parse_attack("direction:releases=1"), specs.parse_attack("mc"))
    names = [attack.label for attack in found.attacks]
    assert [names.count(name) for name in ("direction:releases=1", "direction", "mc")] == [1, 1, 1]
    assert not {"direction", "mc"} & set(reasons)


THREE = {"dataset": "multiple-features", "data": {"options": {"parties": 3}}, "adversary": "active", "seeds": 1}


def test_all_attacks_every_party_that_it_could_be_on():
    found, reasons = engine.expand_attacks(specs.read({**THREE, "attacks": ["all"]}))
    names = [attack.label for attack in found.attacks]
    for name in ("inversion-blackbox", "column-fusion"):
        assert names.count(name) == names.count(f"{name}:victim=passive_2") == 1
    for name in ("attribute", "attribute-fusion"):  # the party has more than 30 columns: of each the first
        own = [label for label in names if label.startswith(f"{name}:")]
        assert [":victim=passive_2,column=" in label for label in own] == [False, True]
    assert "grn:victim=passive_2" in reasons
    assert not any("passive_1" in name for name in names), "it is the first, for which the name alone stands"


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_a_party_that_was_not_attacked_is_named_as_not_run(tmp_path):
    data = {**THREE["data"], "n_labeled": 200}
    settings = {**THREE, "data": data, "train": {"epochs": 1}, "aux": {"folds": 0}, "attacks": ["column-fusion"]}
    store = finish(tmp_path, **settings)
    summary = summarize(build_manifest(specs.read(settings)), store.records(), out="")
    assert "column-fusion:victim=passive_2" in summary.not_run
    assert "column-fusion" not in summary.not_run


def test_all_strikes_at_the_end_beside_what_is_named_after_a_phase():
    spec = specs.read({"dataset": "toy", "methods": ["ss-vfl-c"], "attacks": ["mc@pretrain", "all"]})
    found, _ = engine.expand_attacks(spec)
    assert [attack.after for attack in found.attacks if attack.name == "mc"] == ["pretrain", None]


def test_without_all_nothing_is_added():
    spec = specs.read(SETTINGS)
    assert engine.expand_attacks(spec) == (spec, {})


EXITS = "raise SystemExit(5)"
REFUSES = "from vflsec.base.errors import UsageError; raise UsageError('no')"


@pytest.mark.parametrize("body", [EXITS, REFUSES])
def test_an_attack_that_gives_up_does_not_cost_the_others(tmp_path, body):
    attacks = [*write_attack(tmp_path, body), "spectral-embedding"]
    store = finish(tmp_path / "run", attacks=attacks, seeds=1, strengths=[1], aux=WITHOUT_BASELINES)
    by_name = {r.attack.name: r.status for r in store.records().values() if isinstance(r, Result)}
    assert by_name.pop("spectral-embedding") == "ok"
    assert set(by_name.values()) == {"error"}


@pytest.mark.long
@pytest.mark.parametrize("field", ["halves", "ci95_rows"])
def test_a_damaged_record_is_one_line_with_the_way_out(tmp_path, field):
    from vflsec.base.errors import StoreError
    from vflsec.report.report import Report

    store = finish(tmp_path, seeds=1, strengths=[1])
    spec = specs.read({**SETTINGS, "seeds": 1, "strengths": [1]})
    store.write_settings(specs.to_toml(spec), build_manifest(spec))
    path = tmp_path / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for block in line["record"]["leak"].values():
            block.pop(field)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(StoreError, match="line 1 is damaged, .*--retry-errors"):
        Report.read(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x" * 50), lambda path: path.unlink()])
def test_models_that_are_damaged_or_lost_are_trained_again(tmp_path, damage):
    """The results are lost with them: the same training gives the same numbers."""
    store = finish(tmp_path, seeds=1, strengths=[1])
    before = store.records()
    store.forget(lambda record: not isinstance(record, Result))
    for path in tmp_path.glob("cells/*/active.safetensors"):
        damage(path)
    again = finish(tmp_path, seeds=1, strengths=[1]).records()
    assert {key: record.leak for key, record in again.items()} == {key: record.leak for key, record in before.items()}


@pytest.mark.long
def test_a_joint_model_that_is_worse_than_the_active_party_alone_is_named(tmp_path):
    rng = np.random.default_rng(0)
    own = rng.normal(size=(600, 2))
    y = np.where(own[:, 0] * own[:, 1] > 0, "yes", "no")  # which a linear joint model cannot learn
    bank = pd.DataFrame({"a": own[:, 0], "b": own[:, 1], "y": y})
    bureau = pd.DataFrame({"c": rng.normal(size=600)})
    loans = vflsec.dataset(active={"bank": bank}, passive={"bureau": bureau}, label="y")
    small = {"attack": "mc:epochs=5", "seeds": 2, "aux": {"n": 20, "folds": 0}, "jobs": 1, "progress": False}
    report = vflsec.evaluate(dataset=loans, methods="vertical-lr", **small, out=tmp_path / "lr")
    (note,) = (note for note in report.summary.alarms if "alone" in note)
    assert re.fullmatch(
        r"vertical-lr: the joint model is worse than bank alone: auc 0\.[45]\d\d, and (0\.9\d\d|1\.000) by a quick "
        r"model of its own columns(, 0.500 by chance)?: check labels and ids, or train a better model",
        note,
    )
    assert f"NOTE {note}" in " ".join(report.table().split())
    toy = vflsec.evaluate(dataset="toy", **small, out=tmp_path / "toy").summary
    assert not [line for line in (*toy.notes, *toy.alarms) if "alone" in line]
