"""Paths that no file can have, output that cannot be written, and texts that a report could not show."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vflsec.cli import cli

LONG = "a" * 300
COMMANDS = """
data check PATH
data init PATH bank.csv
data init bank.csv bureau.csv --label y --out PATH
eval --config PATH --dry-run
eval --dataset toy --out PATH --dry-run
eval --dataset toy --rows PATH --dry-run
eval --dataset PATH.toml --dry-run
eval --dataset toy --attack PATH.py:Mine --dry-run
train --dataset toy --set train.epochs=1 --out PATH
report PATH
audit PATH
audit bank.csv --data toy --train-ids PATH
audit bank.csv --data toy --out PATH
show attack PATH.py:Mine
reproduce cross-risk --dry-run --out PATH
judge cut-layer --dry-run --out PATH
party --role passive --job PATH --data bank.csv --keys keys --listen 127.0.0.1:0 --out state
party keys PATH
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "bank.csv").write_text("id,a,y\n" + "".join(f"{k},{k % 7},{k % 2}\n" for k in range(20)), "utf-8")
    (tmp_path / "bureau.csv").write_text("id,b\n" + "".join(f"{k},{k % 5}\n" for k in range(20)), "utf-8")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", [LONG, f"{LONG}/x", "loop", "loop/x"], ids=["long", "in long", "loop", "in loop"])
@pytest.mark.parametrize("words", COMMANDS.strip().splitlines())
def test_a_path_that_no_file_can_have_is_one_line(folder: Path, words: str, path: str):
    result = CliRunner().invoke(cli, shlex.split(words.replace("PATH", path)))
    assert result.exit_code == 2, result.exception
    assert [line for line in result.stderr.splitlines() if line.startswith("Error: ")] or "FAULT" in result.stdout
    assert "Traceback" not in result.stderr


def start(*words: str, **options) -> subprocess.Popen[bytes]:
    code = "from vflsec.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_below_the_output_is_no_failed_gate():
    with Path("/dev/full").open("wb") as full:
        process = start("list", stdout=full)
        _, said = process.communicate()
    assert process.returncode == 2
    assert said.decode().strip() == (
        "Error: cannot write the output: No space left on device; free some space, or print elsewhere"
    )


def test_a_reader_that_leaves_is_no_failed_gate():
    reader, writer = os.pipe()
    process = start("list", stdout=writer)
    os.close(reader)
    os.close(writer)
    _, said = process.communicate()
    assert (process.returncode, said) == (141, b"")


@pytest.mark.long
def test_line_breaks_in_words_and_paths_are_stored_and_read_again(folder: Path):
    few = ["--dataset", "toy", "--set", "train.epochs=1", "--set", "data.options.rows=200", "--seeds", "1"]
    words = ["--attack", "norm,\n direction", "--jobs", "1", "--out", "two\nlines", "--details"]
    for command in (["eval", *few, *words], ["eval", *few, *words], ["report", "two\nlines", "--details"]):
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0, result.stderr
        assert "direction" in result.stdout
        assert "two?lines" in result.stderr, "a name takes one line"
        assert "two\nlines" not in result.stderr
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start("report", "two\nlines", stdout=subprocess.PIPE, env=env)
    shown, _ = process.communicate()
    assert process.returncode == 0, "signs that a locale lacks become question marks"
    assert b"toy ? adversary" in shown


def test_a_line_break_in_the_name_of_data_is_refused_before_training(folder: Path):
    text = (
        'name = "two\\nlines"\nlabel = "y"\nid = "id"\nparties = {a = {file = "bank.csv"}, b = {file = "bureau.csv"}}'
    )
    (folder / "data.toml").write_text(text, "utf-8")
    result = CliRunner().invoke(cli, ["eval", "--dataset", "data.toml", "--dry-run"])
    assert result.exit_code == 2
    assert "expected a name of one line" in result.stderr


def test_a_byte_order_mark_in_toml_is_not_read(folder: Path):
    (folder / "spec.toml").write_text('\ufeffdataset = "toy"\nseeds = 1\n', "utf-8")
    assert CliRunner().invoke(cli, ["eval", "--config", "spec.toml", "--dry-run"]).exit_code == 0
