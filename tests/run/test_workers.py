"""Results are stored when they are computed; workers run no file of the current folder and leave no data anywhere."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import vflsec
from vflsec.base.errors import UsageError
from vflsec.report.report import Report
from vflsec.results.records.schema import Result
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.store import Store

ATTACK = """
import os, pathlib, signal, time
import torch
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need

class Logs(Attack):
    name = "logs"
    needs = frozenset({Need.FEATURES})
    reference = verified = "test"

    def __init__(self, *, number: int = 0, seconds: float = 0.3, dies: bool = False):
        self.number, self.seconds, self.dies = number, seconds, dies

    def run(self, view, *, rng):
        folder = pathlib.Path(__file__).parent
        with (folder / "begun").open("a") as log:
            log.write(f"{self.number}\\n")
        if self.dies and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return Guess({split: x[:, :2] for split, x in view.features.items()})
"""
SMALL = {"data": {"options": {"rows": 150}}, "train": {"epochs": 1}, "aux": {"n": 0}, "seeds": 1}


@pytest.fixture
def attack(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ATTACK)
    return f"{file}:Logs"


def begun(folder):
    path = folder / "begun"
    return Counter(path.read_text().split() if path.exists() else [])


def lines(folder):
    path = folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(command, until, **options):
    """Run a command until a condition holds, kill it and what it has started, and return its process."""
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    deadline = time.monotonic() + 300
    while not until(run.pid) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    run.wait()
    return run


def attacks_of(attack, count, **options):
    return [{"name": attack, "options": {"number": number, "seconds": 0, **options}} for number in range(count)]


def test_a_result_is_stored_before_the_next_attack_on_its_cell_begins(tmp_path, attack):
    store = Store(tmp_path / "run")
    spec = specs.read({**SMALL, "dataset": "toy", "attacks": attacks_of(attack, 3)})
    attacked = 0
    for number, record in enumerate(engine.evaluate(engine.plan(spec, store), store), start=1):
        attacked += isinstance(record, Result)
        assert lines(store.folder) == number
        assert begun(tmp_path).total() == attacked
    assert attacked == 3


@pytest.mark.parametrize("stopped_at", range(4))
def test_an_interrupted_cell_goes_on_where_it_was_stopped(tmp_path, attack, stopped_at):
    store = Store(tmp_path / "run")
    spec = specs.read({**SMALL, "dataset": "toy", "attacks": attacks_of(attack, 4)})
    records = engine.evaluate(engine.plan(spec, store), store)
    while begun(tmp_path).total() < stopped_at:
        next(records)
    records.close()
    rest = [record for record in engine.evaluate(engine.plan(spec, store), store) if isinstance(record, Result)]
    assert len(rest) == 4 - stopped_at
    assert begun(tmp_path) == Counter("0123")


@pytest.mark.chaos
@pytest.mark.parametrize(("jobs", "stops"), [(1, (4,)), (2, (5,))])
def test_a_killed_run_repeats_at_most_the_attack_that_it_was_at(tmp_path, attack, jobs, stops):
    """Ten attacks on a cell; with two processes two cells, so that each process may repeat one."""
    out, kills = tmp_path / "run", 0
    names = ",".join(f"{attack}:number={number}" for number in range(10))
    settings = ["--set", "data.options.rows=150", "--set", "train.epochs=1", "--set", "aux.n=0", "--seeds", str(jobs)]
    command = [sys.executable, "-m", "vflsec", "eval", "--dataset", "toy", "--attack", names, "--jobs", str(jobs)]
    for stop in (*stops, 99):
        run = kill_after(
            [*command, *settings, "--out", out], lambda _, stop=stop: begun(tmp_path).total() >= stop * jobs
        )
        kills += run.returncode == -signal.SIGKILL
    assert (kills, run.returncode) == (len(stops), 0)
    assert sum(isinstance(record, Result) for record in Store(out).records().values()) == 10 * jobs
    assert begun(tmp_path).total() - 10 * jobs <= kills * jobs


def test_a_report_is_the_same_in_whatever_order_results_came(tmp_path, attack):
    plan = {**SMALL, "dataset": "toy", "attack": [f"{attack}:number={k}" for k in range(3)], "seeds": 3}
    report = vflsec.evaluate(**plan, jobs=1, out=tmp_path / "run", progress=False)
    records = tmp_path / "run" / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    assert len(lines) > 9
    for order in (lines[::-1], lines[1::2] + lines[::2]):
        records.write_bytes(b"".join(order))
        again = Report.read(tmp_path / "run")
        assert again.to_json() == report.to_json()
        assert again.table(200) == report.table(200)


@pytest.mark.long
def test_a_killed_worker_is_one_line_and_the_same_command_goes_on(tmp_path, attack):
    store = Store(tmp_path / "run")
    attacks = [{"name": attack, "options": {"number": 1}}, {"name": attack, "options": {"number": 2, "dies": True}}]
    spec = specs.read({**SMALL, "dataset": "toy", "attacks": attacks, "seeds": 2})
    with pytest.raises(UsageError, match=r"a worker process has died at fedsplitnn, seed [01]: .* are kept"):
        list(engine.evaluate(engine.plan(spec, store), store, jobs=2))
    todo = engine.plan(spec, store)
    assert todo.cached > 0
    assert len(list(engine.evaluate(todo, store, jobs=2))) == todo.missing
    assert [record.status for record in store.records().values() if isinstance(record, Result)] == 4 * ["ok"]


SHARED = "/dev/shm"  # noqa: S108
NAMES = ("random", "queue", "numpy", "signal", "pickle", "torch", "click", "subprocess")


@pytest.mark.long
@pytest.mark.parametrize("command", [[sys.executable, "-m", "vflsec"], [Path(sys.executable).with_name("vflsec")]])
def test_no_file_of_the_current_folder_is_run_but_the_one_that_is_named(tmp_path, attack, command):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\nraise SystemExit(7)\n")
    words = ["eval", "--dataset", "toy", "--attack", "mine.py:Logs:seconds=0", "--jobs", "2", "--seeds", "2"]
    settings = ["--set", "data.options.rows=150", "--set", "train.epochs=1", "--set", "aux.n=0", "--out", "run"]
    ended = subprocess.run([*command, *words, *settings], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not [name for name in NAMES if (tmp_path / name).exists()]
    assert begun(tmp_path).total() == 2


FRAMES = """
import sys
import numpy as np, pandas as pd, vflsec
rng = np.random.default_rng(0)
frame = pd.DataFrame(rng.normal(size=(60_000, 5)), columns=list("abcde"))
loans = vflsec.dataset(active=frame[["a", "b"]].assign(y=frame["a"] > 0), passive=frame[["c", "d", "e"]], label="y")
small = {"aux": {"n": 0}, "train": {"epochs": 1}, "seeds": 2, "jobs": 2}
vflsec.evaluate(dataset=loans, attack=sys.argv[1], out=sys.argv[2], **small)
"""


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def descendants(pid):
    """The process, and those that it has started, or that these have."""
    shown = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)  # noqa: S607
    return [pid, *(each for child in shown.stdout.split() for each in descendants(int(child)))]


def shared_memory(pids):
    """What processes have open or mapped in the shared memory of the system."""
    places = []
    for pid in pids:
        try:
            places += [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            places += Path(f"/proc/{pid}/maps").read_text().split()
        except OSError:
            continue
    return [place for place in places if SHARED in place]


@pytest.mark.chaos
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
def test_data_frames_are_on_no_disk_and_in_no_shared_memory(tmp_path, attack):
    temporary, out, seen = tmp_path / "temporary", tmp_path / "run", []
    temporary.mkdir()
    (tmp_path / "script.py").write_text(FRAMES)
    before = set(os.listdir(SHARED))

    def look(pid):
        seen.extend([*shared_memory(descendants(pid)), *files(temporary)])
        return begun(tmp_path).total() >= 2

    words = [sys.executable, tmp_path / "script.py", f"{attack}:seconds=1", out]
    run = kill_after(words, look, env={**os.environ, "TMPDIR": str(temporary)})
    assert run.returncode == -signal.SIGKILL
    assert not seen
    assert not files(temporary)
    assert not [name for name in set(os.listdir(SHARED)) - before if str(run.pid) in name]
    raw = np.random.default_rng(0).normal(size=5)[:1].tobytes()
    assert not [path for path in files(out) if raw in path.read_bytes()]


def write_table(folder):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"id": range(200), "a": rng.normal(size=200), "b": rng.normal(size=200)})
    table.assign(y=(table["b"] > 0).astype(int)).to_csv(folder / "all.csv", index=False)
    (folder / "loans.toml").write_text(
        'label = "y"\nid = "id"\nfile = "all.csv"\n[parties.active]\ncolumns = ["a"]\n'
        '[parties.passive_1]\ncolumns = ["b"]\n'
    )


def test_a_table_is_loaded_once_for_all_seeds(tmp_path, attack, monkeypatch):
    write_table(tmp_path)
    loads = []
    monkeypatch.setattr(
        "vflsec.run.cell.load_toml", lambda path, of=vflsec.run.cell.load_toml: loads.append(path) or of(path)
    )
    small = {"train": {"epochs": 1}, "aux": {"n": 0}, "seeds": 5, "jobs": 1, "progress": False}
    vflsec.evaluate(dataset=str(tmp_path / "loans.toml"), attack=f"{attack}:seconds=0", **small, out=tmp_path / "run")
    assert len(loads) == 1
    vflsec.load_dataset(str(tmp_path / "loans.toml"))
    assert len(loads) == 2, "a caller may change what it gets"


@pytest.mark.long
def test_each_process_loads_a_table_once_for_all_seeds(tmp_path, attack):
    write_table(tmp_path)
    (tmp_path / "loans.py").write_text(
        "import os, pathlib\nfrom vflsec.data.files import load_toml\n"
        "def load():\n    here = pathlib.Path(__file__).parent\n"
        "    with (here / 'loads').open('a') as log:\n        log.write(f'{os.getpid()}\\n')\n"
        "    return load_toml(here / 'loans.toml')\n"
    )
    small = {"train": {"epochs": 1}, "aux": {"n": 0}, "seeds": 5, "jobs": 2, "progress": False}
    vflsec.evaluate(dataset=f"{tmp_path}/loans.py:load", attack=f"{attack}:seconds=0", **small, out=tmp_path / "run")
    loads = Counter((tmp_path / "loads").read_text().split())
    assert set(loads.values()) == {1}
    assert 2 <= len(loads) <= 3
