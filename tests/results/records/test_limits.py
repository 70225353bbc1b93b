"""The limits of a run belong to its folder: a report of the folder alone shows the same gates, byte for byte."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vflsec.base.errors import StoreError
from vflsec.cli import cli
from vflsec.results.records.folder import read_limits, write_limits
from vflsec.results.records.manifest import RunLimits
from vflsec.results.records.schema import seal
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

QUICK = [
    "eval", "--attack", "logistic", "--defense", "iso", "--lambda", "1", "--seeds", "1", "--jobs", "1",
    "--set", "train.epochs=10", "--set", "data.n_labeled=3000",
]  # fmt: skip
FAILED = "GATE max-leak logistic 0.1: FAILED"


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def page(folder):
    return (Path(folder) / "report.html").read_text()


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A run whose gate fails, and what it printed."""
    out = tmp_path_factory.mktemp("gates") / "run"
    result = run(*QUICK, "--max-leak", "logistic=0.1", "--min-utility", "0", "--out", out)
    assert result.exit_code == 1
    assert FAILED in result.stdout
    assert FAILED in page(out)
    return out, result


@pytest.fixture
def copied(failed, tmp_path):
    return shutil.copytree(failed[0], tmp_path / "elsewhere")


@pytest.mark.long
def test_several_reports_have_the_same_gates_and_the_same_bytes(failed, copied):
    first = page(failed[0])
    for k in range(3):
        (copied / "report.html").unlink()
        result = run("report", os.path.relpath(copied) if k % 2 else copied)
        assert (result.exit_code, result.stdout) == (1, failed[1].stdout)
        assert page(copied) == first
    assert str(failed[0].parent) not in first  # the command named the folder by its absolute path


@pytest.mark.long
def test_neither_place_nor_time_zone_nor_hashes_change_a_byte(failed, copied):
    """Another process, in another folder, time zone and locale, that may not write to the folder."""
    before = sorted(copied.iterdir())
    other = copied.parent / "other.html"
    changed = {"TZ": "Asia/Tokyo", "LC_ALL": "de_DE.UTF-8", "PYTHONHASHSEED": "7", "COLUMNS": "80", "HOME": "/nowhere"}
    command = [sys.executable, "-m", "vflsec", "report", str(copied), "--html", str(other)]
    done = subprocess.run(command, check=False, capture_output=True, env={**os.environ, **changed}, cwd="/")
    assert done.returncode == 1, done.stderr
    assert other.read_bytes() == (failed[0] / "report.html").read_bytes()
    assert sorted(copied.iterdir()) == before


def test_limits_of_a_report_are_printed_and_leave_the_page_alone(failed, copied):
    looser = run("report", copied, "--max-leak", "logistic=1")
    assert looser.exit_code == 1
    assert FAILED in looser.stdout
    assert "GATE max-leak logistic 1: holds" in looser.stdout
    assert page(copied) == page(failed[0])


def test_a_run_without_limits_keeps_those_of_the_folder(failed, copied):
    again = run(*QUICK, "--out", copied)
    assert again.exit_code == 1
    assert FAILED in page(copied)


@pytest.mark.long
def test_a_run_with_other_limits_replaces_them_and_says_what_failed_before(copied):
    relaxed = run(*QUICK, "--max-leak", "logistic=1", "--out", copied)
    assert relaxed.exit_code == 0
    for shown in (relaxed.stdout, page(copied), run("report", copied).stdout):
        assert "GATE max-leak logistic 1: holds" in shown
        assert "logistic 0.1 (an earlier limit" in shown
    assert run("report", copied).exit_code == 0


def test_a_fresh_start_has_no_limits(copied):
    Store(copied).clear()
    assert read_limits(copied) == []


@pytest.mark.long
def test_a_limit_on_an_attack_that_is_no_longer_run_is_undecided(copied):
    other = [word if word != "logistic" else "norm" for word in QUICK]
    assert run(*other, "--out", copied).exit_code == 3
    assert "GATE max-leak logistic 0.1: UNDECIDED" in page(copied)


@pytest.mark.long
def test_every_point_of_a_sweep_has_its_limits(tmp_path):
    swept = run(*QUICK, "--sweep", "model.cut=1,2", "--max-leak", "logistic=0.1", "--out", tmp_path / "sweep")
    again = run("report", tmp_path / "sweep")
    assert (swept.exit_code, again.exit_code) == (1, 1), swept.stderr
    assert swept.stdout == again.stdout
    assert again.stdout.count(FAILED) == 2
    points = sorted((tmp_path / "sweep" / "points").iterdir())
    for point in points:
        assert run("report", point).exit_code == 1
        assert FAILED in page(point)


def test_what_is_written_is_read(tmp_path):
    first, second = RunLimits(max_leak={"mc": 0.7}), RunLimits(min_utility=0.0, max_undetected=0.05)
    assert read_limits(tmp_path) == []
    for limits in (RunLimits(), first, second, first):
        write_limits(tmp_path, limits)
    assert read_limits(tmp_path) == [second, first]


@pytest.mark.parametrize("change", [b"", b"{}", b'{"schema":1,"check":"0","record":{"runs":[]}}\n'])
def test_damaged_limits_are_one_line_and_never_no_limits(copied, change):
    (copied / "gates.json").write_bytes(change)
    with pytest.raises(StoreError, match=r"gates\.json.* restore .*--fresh"):
        read_limits(copied)
    assert run("report", copied).exit_code == 2


@pytest.mark.parametrize("runs", [[], [{"min_utility": -5.0}], [{"max_leak": {"mc": 1e9}}], [{}] * 101])
def test_limits_that_no_run_writes_are_refused(tmp_path, runs):
    (tmp_path / "gates.json").write_bytes(seal({"runs": runs}))
    with pytest.raises(StoreError, match="restore it"):
        read_limits(tmp_path)


@pytest.mark.long
def test_the_limits_of_the_last_100_runs_are_kept(tmp_path):
    for k in range(102):
        write_limits(tmp_path, RunLimits(min_utility=k / 200))
    assert [limits.min_utility for limits in read_limits(tmp_path)] == [k / 200 for k in range(2, 102)]


@pytest.mark.parametrize("words", [["--max-leak", "mc=2"], ["--min-utility", "-1"], ["--max-undetected", "1.5"]])
def test_a_limit_beyond_0_to_1_is_a_usage_error(words):
    assert run("eval", *words).exit_code == 2


def test_limits_that_are_lost_are_one_line(copied):
    (copied / "gates.json").unlink()
    for words in (["report", copied], [*QUICK, "--out", copied]):
        lost = run(*words)
        assert lost.exit_code == 2
        assert "gates.json with the limits of" in lost.stderr
    assert run(*QUICK, "--max-leak", "logistic=1", "--out", copied).exit_code == 0


def test_a_limit_is_a_number(tmp_path):
    (tmp_path / "gates.json").write_bytes(seal(RunLimits()))
    with pytest.raises(StoreError):
        read_limits(tmp_path)
    with pytest.raises(ValueError, match="finite"):
        RunLimits(min_utility=float("nan"))
