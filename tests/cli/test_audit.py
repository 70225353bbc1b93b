"""``vflsec audit`` of a recording: the same table, JSON, CSV, folder and exit codes as of all that is audited."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from vflsec.cli import cli, options
from vflsec.core import registry
from vflsec.core.view import Need
from vflsec.testing.recordings import EncryptedRun, LinearRun

KNOWN = ("--set", "aux.n=8")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(cli, ["audit", *map(str, arguments)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    c, p = EncryptedRun(run=LinearRun(steps=10, width=3, batch=16, rate=0.5)).record(
        tmp_path_factory.mktemp("recorded")
    )
    return c.path, p.path


def test_every_attack_of_the_role_is_run(recorded):
    c, p = recorded
    attacks = {name: registry.load("attacks", name) for name in registry.list_all("attacks")}
    for own, other in ((c, p), (p, c)):
        result = run(own, "--truth", other, *KNOWN, "--draws", 1, "--format", "json")
        summary = json.loads(result.stdout)
        names = {
            name
            for name, attack in attacks.items()
            if Need.RECORDING in attack.needs and attack.side in (own.name.partition(".")[0], "either")
        }
        assert {point["attack"] for point in summary["points"]} == names
        assert not names & set(summary["left_out"])
        assert {"norm", "score-gram" if own == c else "delta-chain"} <= set(summary["left_out"])
        metrics = {point["attack"]: point["leak"]["metric"] for point in summary["points"]}
        assert own == p or metrics["delta-chain-weights"] == "r2"  # though common-divisor has another one
        assert summary["adversary"] == own.name.partition(".")[0]


@pytest.mark.parametrize("draws", [4, 5])
def test_options_are_those_of_all_audits(recorded, draws, tmp_path):
    c, p = recorded
    result = run(
        c, "--truth", p, *KNOWN, "--attack", "delta-chain", "--draws", draws, "--format", "csv", "--out", "out"
    )
    assert result.exit_code == 0, result.output
    header, line = (row.split(",") for row in result.stdout.strip().splitlines()[:2])
    found = dict(zip(header, line, strict=False))
    assert (found["attack"], found["leak_metric"], float(found["leak"])) == ("delta-chain", "auc", 1.0)
    assert (tmp_path / "out" / "records.jsonl").read_text().count("\n") == draws
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["record"]["audited"] == "passive.recording"


def test_a_tracker_gets_the_numbers_of_json(recorded, monkeypatch):
    c, p = recorded
    sent = {}
    mlflow = SimpleNamespace(
        start_run=lambda **_: nullcontext(), log_params=lambda _: None, log_metrics=sent.update,
        log_artifacts=lambda _: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    words = ["--attack", "delta-chain", "--draws", 1, "--track", "mlflow", "--format", "json"]
    points = json.loads(run(c, "--truth", p, *KNOWN, *words).stdout)["points"]
    leaks = {point["attack"]: point["leak"]["mean"] for point in points if point["leak"]["mean"] is not None}
    assert {name.split("/")[-2]: value for name, value in sent.items() if name.endswith("/leak")} == {
        "no defense": leaks["delta-chain"], **leaks,
    }  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (["delta-chain=0.9"], 1, "FAILED"),
        (["delta-chain=1"], 0, "holds"),
        (["wire=0.2"], 3, "UNDECIDED"),
        (["shifted-scores=0.5"], 3, "UNDECIDED"),
        (["shifted-scores=0.5", "delta-chain=0.9"], 1, "FAILED"),
    ],
)
def test_limits_decide_the_exit_code(recorded, limits, code, said):
    c, p = recorded
    words = [word for limit in limits for word in ("--max-leak", limit)]
    attacks = ",".join(limit.partition("=")[0] for limit in limits)
    result = run(c, "--truth", p, *KNOWN, "--draws", 1, "--attack", attacks, *words)
    assert result.exit_code == code, result.output
    assert said in result.stdout


def test_without_the_truth_consistency_can_fail_a_limit_and_never_hold_one(recorded):
    c, _ = recorded
    for attack, code in (("delta-chain", 1), ("small-masks", 3)):
        result = run(c, "--draws", 1, "--attack", attack, "--max-leak", f"{attack}=0.9")
        assert result.exit_code == code, result.output
        assert "not scored" in result.stderr


def test_what_is_not_measured_is_said_and_holds_no_limit(recorded):
    c, p = recorded
    words = ("--attack", "shifted-scores", "--draws", 1, *KNOWN)
    result = run(c, "--truth", p, *words, "--max-leak", "shifted-scores=1")
    assert result.exit_code == 3
    assert "unmeasured" in result.stdout
    assert "party shifted scores" in " ".join(result.stdout.split())
    (point,) = json.loads(run(c, "--truth", p, *words, "--format", "json").stdout)["points"]
    assert (point["status"], point["leak"]["mean"]) == ("unmeasured", None)


@pytest.mark.long
def test_wire_holds_under_subgroup_keys_and_names_what_it_could_not_test(tmp_path):
    run_ = LinearRun(steps=20, width=3, batch=64)
    c, p = EncryptedRun(run=run_, mode="subgroup", delta="outer").record(tmp_path)
    for recording in (c, p):
        result = run(recording.path, "--attack", "wire", "--draws", 1, "--max-leak", "wire=0.2", "--format", "json")
        (note,) = [note for note in json.loads(result.stdout)["notes"] if note.startswith("wire: no fault")]
        notes = json.loads(result.stdout)["notes"]
        untested = any("re-randomization of MaskedScores: all Jacobi" in line for line in notes)
        assert untested == (recording is c)  # p knows its exponents
        assert result.exit_code == (3 if any("not measured" in line for line in notes) else 0), (note, result.output)


def test_mistakes_are_one_line(recorded, tmp_path):
    c, p = recorded
    other = EncryptedRun(run=LinearRun(steps=1, width=3, batch=16)).record(tmp_path)[1].path
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").write_bytes(c.read_bytes()[:400] + b"x" * 400)
    for words, said in (
        ((tmp_path / "none",), "found none: check the path"),
        ((tmp_path / "empty", "--data", "toy"), "a folder without it"),
        ((__file__, "--data", "toy"), "expected a transcript"),
        ((tmp_path / "broken",), "broken"),
        ((c, "--truth", c), "two of role passive"),
        ((c, "--truth", other), "of one run"),
        ((c, "--data", "toy", "--truth", p), "expected no --data with"),
        ((__file__, "--truth", p), "encrypted layer with --truth"),
        ((c, "--attack", "score-gram"), "this is one of role passive"),
        ((c, "--attack", "norm"), "reads no recording"),
        ((c, "--attack", "delta-chian"), "did you mean delta-chain?"),
        ((c, "--max-leak", "score-gram=1"), "unknown attack 'score-gram'"),
        ((c, "--max-leak", "delta-chain"), "expected NAME=LIMIT"),
    ):
        result = run(*words)
        assert result.exit_code == 2, (words, result.output)
        assert said.lower() in result.stderr.lower(), (words, result.stderr)
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()[-1:]) == 1


@pytest.mark.parametrize("limit", ["2", "-0.1"])
def test_a_limit_outside_0_and_1_is_refused(recorded, limit):
    result = run(recorded[0], "--max-leak", f"forward-passes={limit}")
    assert result.exit_code == 2
    assert "forward-passes from 0 to 1" in result.stderr
