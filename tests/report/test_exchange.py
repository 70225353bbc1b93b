"""JUnit, SARIF and the comment on a pull request: the same gates as in the report, whatever names contain."""

import json
import os
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.report.test_columns import LEAK, POINT
from vflsec.cli import cli
from vflsec.report import comparison, exchange
from vflsec.report.report import Report
from vflsec.results.analysis.results import Gate, Summary
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest

HOSTILE = 'a<b>&"]]>\x1b[31m\n\ufffe\uffff| `x`'
FAILED = Gate(gate="max-leak worst", limit=0.7, worst=0.76, at="iso 1", holds=False)
OPEN = Gate(gate="min-utility", limit=0.7, worst=None, at="", holds=None)


def make_report(*leaks, name="toy", half=0.01):
    """A report with a headline for each leak, at strengths 0, 1, 2."""
    points = [
        replace(
            POINT, strength=float(k), attack="worst", choice="fusion",
            leak=replace(LEAK, mean=leak, ci95=(leak - half, leak + half)),
        )
        for k, leak in enumerate(leaks)
    ]  # fmt: skip
    summary = Summary(
        dataset=name, adversary="passive_1", metric="auc", seeds=2, points=points, worst=points, cap=[], c_dcs=[],
        gates=[FAILED, OPEN], notes=[], out="run", verdict=["It leaks."],
    )  # fmt: skip
    return Report(summary, build_manifest(specs.EvalSpec()))


def compare(before, after):
    return comparison.compare((before.summary, before.manifest), (after.summary, after.manifest))


@pytest.mark.parametrize(
    ("after", "limit", "holds"), [(0.75, 0.0, False), (0.75, 0.05, True), (0.71, 0.0, True), (0.6, 0.0, True)]
)
def test_a_rise_fails_only_with_its_whole_interval(after, limit, holds):
    gate = exchange.check_rise(compare(make_report(0.9, 0.7), make_report(0.9, after)), limit)
    assert gate.holds is holds
    if holds is False:  # of two independent intervals of .01
        assert gate.worst == pytest.approx(0.05 - 0.01 * 2**0.5)
        assert gate.at == "fedsplitnn iso 1, labels"


def test_noise_fails_a_headline_in_one_of_forty_comparisons():
    made, pairs = make_report(0.7), np.random.default_rng(0).normal(0.7, 0.01, size=(2000, 2)).tolist()
    (point,) = made.summary.worst
    failed = []
    for pair in pairs:
        leaks = [replace(point.leak, mean=mean, ci95=(mean - 0.0196, mean + 0.0196)) for mean in pair]
        sides = [replace(made.summary, points=[], worst=[replace(point, leak=leak)]) for leak in leaks]
        moved = comparison.compare(*((side, made.manifest) for side in sides))
        failed.append(exchange.check_rise(moved, 0.0).holds is False)
    assert 0.015 < np.mean(failed) < 0.036  # .025, give or take three standard errors


def test_a_rise_is_undecided_without_an_interval():
    none = make_report()
    assert exchange.check_rise(compare(none, make_report(0.9)), 0.0).holds is None


@pytest.mark.parametrize("runs", [((0.9, 0.7), (0.9,)), ((0.9,), (0.9, 0.7))])
def test_a_rise_is_undecided_where_only_one_run_has_a_defense(runs):
    """The row without a defense is in both runs, and must not hide that the defense was removed or replaced."""
    gate = exchange.check_rise(compare(*(make_report(*leaks) for leaks in runs)), 0.02)
    assert gate.holds is None
    assert "iso 1" in gate.why


def test_a_rise_fails_though_only_one_run_has_a_defense():
    assert exchange.check_rise(compare(make_report(0.7, 0.7), make_report(0.9)), 0.02).holds is False


def test_junit_has_a_case_for_each_gate_whatever_names_contain():
    report = make_report(0.9, 0.7, name=HOSTILE)
    failed = replace(report.summary, failures=[f"mc: {HOSTILE}"])
    suite = ElementTree.fromstring(exchange.to_junit(Report(failed, report.manifest), report.summary.gates))[0]  # noqa: S314
    assert {name: suite.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "3", "failures": "1", "errors": "2",
    }  # fmt: skip
    kinds = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert kinds == {"max-leak worst 0.7": ["failure"], "min-utility 0.7": ["error"], "results": ["error"]}
    assert "a<b>" in suite.get("name")
    assert suite.findtext("system-out") == "It leaks."


def test_sarif_names_gates_and_leaks_by_rules_that_exist():
    report = make_report(0.9, 0.7, name=HOSTILE)
    low = replace(report.summary.worst[1], leak=replace(LEAK, advantage_ci95=(-0.1, 0.2)))
    shown = Report(replace(report.summary, worst=[report.summary.worst[0], low]), report.manifest)
    (run,) = json.loads(exchange.to_sarif(shown, report.summary.gates))["runs"]
    levels = [(result["ruleId"], result["level"]) for result in run["results"]]
    assert levels == [("gate", "error"), ("gate", "warning"), ("leak-of-labels", "warning")]
    assert {name for name, _ in levels} == {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert "AUC .900, and .600 without joining" in run["results"][2]["message"]["text"]
    assert len({result["partialFingerprints"]["vflsec/v1"] for result in run["results"]}) == 3


def test_a_leak_is_a_result_however_many_defenses_are_tested():
    """Holm's correction for a table of many defenses would leave it out."""
    report = make_report(0.8)
    leak = replace(LEAK, advantage_ci95=(0.05, 0.2), p=0.01, p_holm=0.2)
    report.summary = replace(report.summary, worst=[replace(report.summary.worst[0], leak=leak)])
    assert not leak.is_shown
    results = json.loads(exchange.to_sarif(report, []))["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == ["leak-of-labels"]


def test_the_comment_names_what_failed_and_what_moved():
    before, after = make_report(0.9, 0.7), make_report(0.9, 0.75)
    text = exchange.to_comment(after, after.summary.gates, compare(before, after))
    assert text.startswith("### vflsec: 1 of 2 gates failed, 1 undecided")
    assert "* GATE max-leak worst 0.7: FAILED" in text
    assert "labels, fedsplitnn iso 1: .700 to .750" in text
    assert "1 of 2 headlines moved" in text
    same = exchange.to_comment(after, [], compare(after, after))
    assert "none of 2 headlines moved" in same


def test_report_writes_the_files_and_exits_with_the_gates(tmp_path):
    few = ["--set", "train.epochs=1", "--set", "data.options.rows=300", "--seeds", "1", "--jobs", "1"]
    out = tmp_path / "run"
    made = CliRunner().invoke(cli, ["eval", "--dataset", "toy", "--attack", "norm", *few, "--out", str(out)])
    assert made.exit_code == 0, made.output
    files = {name: tmp_path / name for name in ("junit", "sarif", "summary")}
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    base = ["report", str(out), *words, "--accepted", str(out)]
    result = CliRunner().invoke(cli, [*base, "--max-rise", "0.02"])
    assert result.exit_code == 0, result.output
    assert "GATE max-rise 0.02: holds" in result.output
    assert ElementTree.parse(files["junit"]).getroot()[0].get("failures") == "0"  # noqa: S314
    assert json.loads(files["sarif"].read_text())["version"] == "2.1.0"
    assert files["summary"].read_text().startswith("### vflsec: no gate failed\n")
    assert CliRunner().invoke(cli, [*base, "--max-rise", "0.02", "--max-leak", "worst=0.1"]).exit_code == 1
    queue = tmp_path / "queue"  # stands for /dev/null, which a test that fails must not replace
    os.mkfifo(queue)
    for path in (queue, out / "manifest.json", out / "records.jsonl", files["junit"]):
        before = path.stat()
        result = CliRunner().invoke(cli, ["report", str(out), "--sarif", str(path)])
        assert result.exit_code == 2, path
        assert "which is something else: name another" in result.output
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a", "--max-rise", "0.1"], "--accepted"),
        (["a", "b", "--junit", "x"], "--junit"),
        (["a", "b", "--compare", "--sarif", "x"], "--compare"),
        (["a", "--max-rise", "nan"], "finite"),
        (["a", "--accepted", "sweep"], "of a sweep DIR/points/NAME"),
    ],
)
def test_what_does_not_fit_is_one_line(words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").touch()
    result = CliRunner().invoke(cli, ["report", *words])
    assert result.exit_code == 2
    assert text in result.output
