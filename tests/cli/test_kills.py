"""A run that is killed, or that finds no room on the disk, leaves nothing that a later run takes for a result."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from vflsec.results.records.folder import read_records

EVAL = [sys.executable, "-m", "vflsec", "eval", "--dataset", "toy", "--set", "aux.n=20", "--set", "aux.folds=0"]
SHORT = ["--set", "data.options.rows=300", "--set", "train.epochs=1", "--set", "train.pretrain.epochs=1"]
ROOM = 6_000
"""Bytes that a file may have: enough for the settings, and not for a model that keeps its state."""


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)  # noqa: PLW1510, S607
    direct = [int(one) for one in found.stdout.split()]
    return [*direct, *(further for child in direct for further in children(child))]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.chaos
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads /proc")
def test_workers_end_with_a_killed_run(tmp_path):
    run = subprocess.Popen(
        [*EVAL, "--set", "train.epochs=120", "--jobs", "2", "--seeds", "2", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 120
    while not list(tmp_path.glob("records.jsonl")) and time.monotonic() < until:
        time.sleep(0.2)
    workers = children(run.pid)
    assert len(workers) >= 2
    run.send_signal(signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.2)
    assert not [pid for pid in workers if alive(pid)]


@pytest.mark.chaos
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_full_disk_is_no_result(tmp_path, jobs):
    """The limit on the size of a file stands for the disk: the model's state does not fit."""
    run = subprocess.run(
        [*EVAL, *SHORT, "--method", "fedhssl-simsiam", "--jobs", jobs, "--seeds", "1", "--out", str(tmp_path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM)),
        check=False,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 2
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"Error: cannot write {tmp_path}/cells/")
    assert last.endswith("choose another --out")
    assert not [record for record in read_records(tmp_path).values() if record.status == "error"]


@pytest.mark.long
def test_a_model_that_has_no_room_is_said_before_training(tmp_path):
    """With so many epochs the training would not end."""
    run = subprocess.run(
        [sys.executable, "-m", "vflsec", "train", "--dataset", "toy", "--set", "train.epochs=1000000", "--set",
         "model.bottom=[256]", "--out", tmp_path / "model"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM)),
        check=False, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 2
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"Error: cannot write to {tmp_path}/model: ")
    assert "File too large" in last
    assert not list(tmp_path.iterdir())
