"""``vflsec party``: keys, mistakes in one line, and two processes that train on two companies' files."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from vflsec.cli import cli

JOB = """
name = "loans"
[model]
encoder = "mlp"
hidden = [8]
width = 3
[train]
epochs = 6
batch = 64
lr = 0.5
[paillier]
bits = 1024
"""


def run(*arguments):
    return CliRunner().invoke(cli, ["party", *map(str, arguments)])


@pytest.fixture(scope="module")
def companies(tmp_path_factory):
    """A folder with keys, a job, a bureau's file without labels and a bank's with them, in other orders."""
    folder = tmp_path_factory.mktemp("companies")
    assert run("keys", folder / "keys").exit_code == 0
    (folder / "job.toml").write_text(JOB)
    rng = np.random.default_rng(0)
    score, age = rng.normal(size=(2, 300))
    frame = pd.DataFrame({"key": range(300), "score": score, "age": age, "noise": rng.normal(size=300)})
    frame["bad"] = np.where(score + 0.3 * age + 0.3 * rng.normal(size=300) > 0.5, "yes", "no")
    frame[["key", "score", "noise"]].sample(frac=1, random_state=1).to_csv(folder / "bureau.csv", index=False)
    frame[["bad", "age", "key"]].to_csv(folder / "bank.csv", index=False)
    return folder


def options(folder, role, *more):
    own = {"passive": ["--data", folder / "bureau.csv"], "active": ["--data", folder / "bank.csv", "--label", "bad"]}[
        role
    ]
    where = ["--listen", "127.0.0.1:0"] if role == "passive" else []
    job, keys, out = folder / "job.toml", folder / "keys", folder / f"out-{role}"
    return ["--role", role, "--job", job, "--keys", keys, "--out", out, "--id", "key", *own, *where, *more]


def test_help_teaches():
    text = run("--help").output
    for words in ("vflsec party keys KEYS", "--listen 0.0.0.0:7700", 'encoder = "mlp"', "same command"):
        assert words in text
    assert "private key" in run("keys", "--help").output


def test_keys_of_one_party_alone(tmp_path):
    made = run("keys", tmp_path, "--role", "passive")
    assert made.exit_code == 0
    assert "own there as peer.pem" in made.output
    assert re.search(r"sha256 [0-9a-f]{64}", made.output)
    assert {path.name for path in (tmp_path / "passive").iterdir()} == {"key.pem", "certificate.pem"}
    again = run("keys", tmp_path, "--role", "passive")
    assert again.exit_code == 2
    assert "never overwritten" in again.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--role": None}, "expected --role, got none"),
        ({"--keys": None}, "expected --keys, got none"),
        ({"--data": None}, "expected --data, got none"),
        ({"--listen": None}, "expected either --listen or --connect"),
        ({"--connect": "127.0.0.1:1"}, "expected either --listen or --connect"),
        ({"--listen": "7700"}, "expected HOST:PORT, got '7700'"),
        ({"--listen": f"{'a' * 70}:7700"}, "63 characters, got 'aaa"),
        ({"--listen": None, "--connect": "a..b:7700"}, "dot-separated parts of 1 to"),
        ({"--label": "score"}, "--label from the active party"),
        ({"--id": "id"}, "an unknown column 'id'"),
        ({"--columns": "scor"}, "Did you mean score?"),
        ({"--keys": "nowhere"}, "vflsec party keys"),
        ({"--job": "nowhere"}, "expected a job in nowhere"),
        ({"--data": "nowhere.csv"}, "expected a file nowhere.csv"),
    ],
)
def test_a_mistake_is_one_line(companies, change, said):
    given = dict(zip(options(companies, "passive")[::2], options(companies, "passive")[1::2], strict=True)) | change
    found = run(*[word for key, value in given.items() if value is not None for word in (key, value)])
    assert found.exit_code == 2
    assert said in found.output
    assert found.output.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["keys", "KEYS", "--days", "3000000"], ["--workers", "100000"]],
)
def test_a_number_out_of_range_is_refused(tmp_path, words):
    found = run(*(tmp_path / word if word == "KEYS" else word for word in words))
    assert found.exit_code == 2
    assert f"'{words[-2]}': {words[-1]} is not in" in found.output


@pytest.mark.parametrize("name", ["state-00000003.bin", "key.bin", "journal.bin"])
def test_a_folder_in_the_place_of_a_state_is_one_line(companies, tmp_path, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    found = run(*options(companies, "passive", "--out", tmp_path / "out", "--patience", "0.1"))
    assert found.exit_code == 2
    assert f"{name}, got a folder" in found.output.splitlines()[-1]
    assert "listening" not in found.output
    (tmp_path / "out" / name).rmdir()
    assert (
        run(*options(companies, "passive", "--out", tmp_path / "out", "--patience", "0.1")).exit_code == 3
    )  # not locked


def test_a_folder_in_the_place_of_the_result_is_one_line(companies, tmp_path):
    (tmp_path / "result.json").mkdir()
    found = run(*options(companies, "passive", "--out", tmp_path, "--patience", "0.1"))
    assert found.exit_code == 2
    assert "result.json: Is a directory" in found.output.splitlines()[-1]


def test_a_file_that_only_looks_like_a_state_is_none(companies, tmp_path):
    (tmp_path / "state-0000000003.bin").touch()
    assert run(*options(companies, "passive", "--out", tmp_path, "--patience", "0.1")).exit_code == 3


def test_a_file_beside_a_named_dataset_is_refused(companies, tmp_path):
    (tmp_path / "job.toml").write_text('name = "x"\ndataset = "toy"\n')
    found = run(*options(companies, "passive", "--job", tmp_path / "job.toml"))
    assert found.exit_code == 2
    assert "the job's dataset toy" in found.output


@pytest.mark.parametrize(("limit", "code"), [("0.5", 1), ("1", 3)])
def test_too_much_exposure_ends_before_anything_is_sent(companies, tmp_path, limit, code):
    out = tmp_path / "out"
    found = run(*options(companies, "passive", "--out", out, "--patience", "0.3", "--max-exposure", limit))
    line = "exposure 1.00: 6 passes x"
    assert line in found.output
    assert found.exit_code == code
    assert ("nothing was sent" in found.output) == (code == 1)
    assert ("listening" in found.output) == (code == 3)


def test_p_cannot_check_a_width_that_it_does_not_know(companies, tmp_path):
    (tmp_path / "job.toml").write_text('name = "x"\n')
    words = [*options(companies, "active", "--job", tmp_path / "job.toml"), "--connect", "127.0.0.1:1"]
    found = run(*words, "--max-exposure", "0.5")
    assert found.exit_code == 2
    assert "--max-exposure from the passive party" in found.output


def test_a_peer_that_never_comes_ends_with_3_and_the_way_to_go_on(companies):
    found = run(*options(companies, "passive", "--out", companies / "alone", "--patience", "0.3"))
    assert found.exit_code == 3
    assert "0 of 24 batches" in found.output
    assert "run the same command again" in found.output


def test_each_message_is_one_line_of_a_log(companies, tmp_path):
    where = f"[{'0000:' * 7}0001]:1"  # a long name of this machine, where nobody listens
    found = run(*options(companies, "active", "--out", tmp_path, "--patience", "0.3", "--connect", where))
    assert found.exit_code == 3
    lines = [line for line in found.stderr.splitlines() if line.startswith("cannot reach")]
    assert lines
    assert all(len(line) > 80 and line.endswith("; trying again") for line in lines)


def begin(folder, role, *more):
    words = map(str, options(folder, role, *more))
    command = [sys.executable, "-m", "vflsec", "party", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.chaos
def test_two_processes_train_and_resume_after_a_kill(companies):
    c = begin(companies, "passive")
    assert c.stderr.readline().startswith("exposure ")
    port = re.search(r"listening on 127.0.0.1:(\d+)", c.stderr.readline())[1]
    connect = ["--connect", f"127.0.0.1:{port}", "--record", companies / "active.recording"]
    p = begin(companies, "active", *connect)
    deadline = time.monotonic() + 120
    while not (companies / "out-active" / "state-00000003.bin").exists():
        assert time.monotonic() < deadline
        assert p.poll() is None
        time.sleep(0.01)
    p.send_signal(signal.SIGKILL)
    p.communicate()
    p = begin(companies, "active", *connect)
    (said, told), (said_c, told_c) = p.communicate(timeout=120), c.communicate(timeout=120)
    assert p.returncode == c.returncode == 0, (told, told_c)
    utility = dict(line.split()[:2] for line in said.splitlines())
    assert float(utility["auc"]) > 0.8
    assert said_c == ""
    assert "auc" not in told_c
    assert "24 batches" in told_c
    history = [re.search(r"history (\w+)", text)[1] for text in (told, told_c)]
    assert history[0] == history[1]
    predictions = pd.read_csv(companies / "out-active" / "predictions.csv")
    assert len(predictions) == 90
    result = json.loads((companies / "out-passive" / "result.json").read_text())
    assert result["utility"] == {}
