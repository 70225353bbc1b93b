"""``vflsec audit``: a table, one JSON object, exit codes, and one line for every mistake."""

import json

import pytest
from click.testing import CliRunner

from vflsec.cli import cli
from vflsec.secure.transcripts.run import AUDITS
from vflsec.testing.recordings import EncryptedRun, LinearRun


def run(*arguments):
    return CliRunner().invoke(cli, ["audit", *map(str, arguments)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    c, p = EncryptedRun(run=LinearRun(steps=10, width=3, batch=16, same_batch=True, rate=0.5)).record(
        tmp_path_factory.mktemp("recorded")
    )
    return c.path, p.path


def test_the_table_has_a_line_for_each_audit_of_the_role(recorded):
    c, p = recorded
    for own, other in ((c, p), (p, c)):
        result = run(own, "--truth", other)
        assert result.exit_code == 0, result.output
        names = [audit.name for audit in AUDITS if audit.role in (own.name[0], "either")]
        assert all(f"\n {name} " in result.stdout and f"\n{name}: " in result.stdout for name in names)
    assert "score-gram" in result.stdout
    assert "delta-chain" not in result.stdout


def test_json_is_one_object(recorded):
    c, p = recorded
    result = run(c, "--truth", p, "--format", "json", "--audit", "delta-chain,low-bits")
    found = json.loads(result.stdout)
    assert (found["schema"], found["role"], found["steps"], found["scored"]) == (1, "passive", 10, True)
    assert [(one["audit"], one["verdict"]) for one in found["findings"]] == [
        ("delta-chain", "leaks"),
        ("low-bits", "holds"),
    ]
    assert {"of": "labels", "metric": "accuracy", "value": 1.0}.items() <= found["findings"][0]["figures"][0].items()


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (["delta-chain=0.9"], 1, "GATE max-leak delta-chain 0.9: FAILED, worst 1.000"),
        (["delta-chain=1"], 0, "GATE max-leak delta-chain 1: holds"),
        (["wire=0.2"], 3, "GATE max-leak wire 0.2: UNDECIDED: not measured"),
        (["shifted-scores=0.5"], 3, "GATE max-leak shifted-scores 0.5: UNDECIDED"),
        (["shifted-scores=0.5", "delta-chain=0.9"], 1, "FAILED"),
    ],
)
def test_limits_decide_the_exit_code(recorded, limits, code, said):
    c, p = recorded
    result = run(c, "--truth", p, *[word for limit in limits for word in ("--max-leak", limit)])
    assert result.exit_code == code
    assert said in result.stdout


def test_without_the_truth_consistency_can_fail_a_limit_and_never_hold_one(recorded):
    c, _ = recorded
    assert run(c, "--max-leak", "delta-chain=0.9").exit_code == 1
    assert run(c, "--max-leak", "small-masks=0.9").exit_code == 3
    assert "not scored" in run(c).stdout


def test_what_is_not_measured_is_said_and_holds_no_limit(recorded):
    c, p = recorded
    result = run(c, "--truth", p, "--audit", "shifted-scores", "--max-leak", "shifted-scores=1")
    assert result.exit_code == 3
    assert "not measured" in result.stdout
    assert "UNDECIDED: not measured" in result.stdout
    found = json.loads(run(c, "--audit", "shifted-scores", "--format", "json").stdout)["findings"][0]
    assert (found["verdict"], found["figures"]) == ("unmeasured", [])


def test_wire_holds_under_subgroup_keys_and_names_what_it_could_not_test(tmp_path):
    run_ = LinearRun(steps=20, width=3, batch=64)
    c, p = EncryptedRun(run=run_, mode="subgroup", delta="outer").record(tmp_path)
    for recording in (c, p):
        result = run(recording.path, "--audit", "wire", "--max-leak", "wire=0.2")
        assert "wire: no fault" in result.stdout
        untested = "re-randomization of MaskedScores: all Jacobi" in result.stdout
        assert untested == (recording is c)  # p knows its exponents
        assert result.exit_code == (3 if "wire: not measured" in result.stdout else 0), result.output


def test_mistakes_are_one_line(recorded, tmp_path):
    c, _ = recorded
    other = EncryptedRun(run=LinearRun(steps=1, width=3, batch=16)).record(tmp_path)[1].path
    (tmp_path / "broken").write_bytes(c.read_bytes()[:400] + b"x" * 400)
    for words, said in (
        ((tmp_path / "none",), "found none: check the path"),
        ((tmp_path,), "Is a directory"),
        ((__file__,), "expected a recording of vflsec"),
        ((tmp_path / "broken",), "broken"),
        ((c, "--truth", c), "two of role passive"),
        ((c, "--truth", other), "of one run"),
        ((c, "--audit", "score-gram"), "audit score-gram reads a recording of role active, and passive"),
        ((c, "--audit", "delta-chian"), "Did you mean delta-chain?"),
        ((c, "--max-leak", "score-gram=1"), "audit score-gram reads a recording of role active, and passive"),
        ((c, "--max-leak", "delta-chain"), "expected NAME=LIMIT"),
    ):
        result = run(*words)
        assert result.exit_code == 2, (words, result.output)
        assert said in result.stderr
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()[-1:]) == 1


@pytest.mark.parametrize("limit", ["2", "-0.1"])
def test_a_limit_outside_0_and_1_is_refused(recorded, limit):
    result = run(recorded[0], "--max-leak", f"forward-passes={limit}")
    assert result.exit_code == 2
    assert "expected a limit for forward-passes from 0 to 1" in result.stderr
