"""Sweeps: each point equals the evaluation with its settings, points share results, and the axes are what was asked."""

import copy
import json
import re
import shutil

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

import vflsec
from vflsec.base.errors import StoreError, UsageError
from vflsec.cli import cli
from vflsec.report.report import Report
from vflsec.report.sweep import SweepReport
from vflsec.results.analysis.trainings import compare
from vflsec.run import job
from vflsec.run.grammar import is_several, parse_axes

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SMALL = {
    "dataset": "toy", "data": {"options": {"rows": 300}}, "train": {"epochs": 2}, "attack": "mc:epochs=5",
    "aux": {"n": 20, "folds": 0}, "seeds": 2, "jobs": 1, "progress": False,
}  # fmt: skip
WORDS = [
    "eval", "--dataset", "toy", "--set", "data.options.rows=300", "--set", "train.epochs=2", "--attack", "mc:epochs=5",
    "--set", "aux.n=20", "--set", "aux.folds=0", "--seeds", "2", "--jobs", "1",
]  # fmt: skip


def run(*words):
    return CliRunner().invoke(cli, [*WORDS, *words], prog_name="vflsec")


def records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept") / "run"
    axes = {"data.n_labeled": [60, 150], "model.cut": [2, 8]}
    return folder, vflsec.sweep(axes, defense="iso:lambda=5", out=folder, **SMALL)


@pytest.mark.long
def test_every_point_is_the_evaluation_with_its_settings(swept, tmp_path):
    _, report = swept
    assert [list(point.values.values()) for point in report.sweep.points] == [[60, 2], [60, 8], [150, 2], [150, 8]]
    alone = vflsec.evaluate(
        **{**SMALL, "data": {**SMALL["data"], "n_labeled": 150}, "model": {"cut": 2}},
        defense="iso:lambda=5",
        out=tmp_path,
    )
    at_that_point = report.reports[2]
    for found, expected in zip(at_that_point.points, alone.points, strict=True):
        assert found.leak == expected.leak
        assert found.utility == expected.utility


def test_a_point_is_a_results_folder_like_any_other(swept):
    folder, report = swept
    again = vflsec.Report.read(folder / "points" / "1-n_labeled=60,cut=8")
    assert again.to_dict()["points"] == report.reports[1].to_dict()["points"]
    assert (folder / "curve.svg").exists()


@pytest.mark.long
def test_points_share_what_they_have_in_common(tmp_path):
    first = vflsec.sweep({"aux.n": [10, 20]}, out=tmp_path / "run", **{**SMALL, "seeds": 1})
    cells = {path.name for path in (tmp_path / "run" / "cells").iterdir()}
    assert len(cells) == 1  # what the adversary knows changes no training
    before = len(records(tmp_path / "run"))
    more = vflsec.sweep({"aux.n": [10, 20, 40]}, out=tmp_path / "run", **{**SMALL, "seeds": 1})
    assert {path.name for path in (tmp_path / "run" / "cells").iterdir()} == cells
    assert before < len(records(tmp_path / "run"))
    assert more.reports[0].to_dict()["points"] == first.reports[0].to_dict()["points"]


def test_alarms_of_points_stand_below_the_table_and_in_json(swept):
    """Twenty known labels are a third of 60, and 13 % of 150."""
    _, report = swept
    own = [one.summary.alarms for one in report.reports]
    assert all(any("knows the labels" in alarm for alarm in alarms) for alarms in own)
    found = report.alarms()
    assert {f"NOTE {line}" for line in found} <= set(report.remarks())
    assert report.to_dict()["alarms"] == found
    few = [line for line in found if "n_labeled=60, cut=2; n_labeled=60, cut=8" in line]
    assert len(few) == 1, "an alarm of two points comes once"
    assert len(found) == len({alarm for alarms in own for alarm in alarms})


def test_the_verdict_of_each_point_stands_below_the_table(swept):
    lines = swept[1].remarks()
    for report in swept[1].reports:
        assert report.summary.verdict
        for sentence in report.summary.verdict:
            assert sum(line.startswith("VERDICT (") and line.endswith(f") {sentence}") for line in lines) == 1


def test_a_sweep_names_the_defense_that_every_training_has(swept):
    reports = [
        Report(msgspec.structs.replace(one.summary, undefended="label-dp 1"), one.manifest) for one in swept[1].reports
    ]
    report = SweepReport(swept[1].sweep, reports)
    shown = {row[cells.header.index("defense")] for cells in report.tables()[:1] for row in cells.rows}
    assert "label-dp 1" in shown
    assert not shown & {"none", "no defense"}


def test_the_frame_has_a_column_for_each_axis(swept):
    frame = swept[1].to_frame()
    assert list(frame.columns[:2]) == ["data.n_labeled", "model.cut"]
    assert len(frame) == sum(len(report.to_frame()) for report in swept[1].reports)
    counts = frame.groupby(["data.n_labeled", "model.cut"]).size()
    assert counts.nunique() == 1


@pytest.mark.long
def test_pairs_are_taken_in_their_order(tmp_path):
    report = vflsec.sweep(
        {"data.n_labeled": [60, 150], "train.epochs": [3, 1]},
        paired=True,
        out=tmp_path / "run",
        **{**SMALL, "seeds": 1},
    )
    assert [point.values for point in report.sweep.points] == [
        {"data.n_labeled": 60, "train.epochs": 3}, {"data.n_labeled": 150, "train.epochs": 1},
    ]  # fmt: skip
    assert len(report.plot().axes) == 2  # utility and leak; pairs lie on one line


@pytest.mark.long
def test_the_command_line_sweeps_by_set_and_by_sweep(tmp_path):
    words = ["--set", "data.n_labeled=60,150", "--sweep", "model.cut=2", "--out", str(tmp_path / "run")]
    done = run(*words, "--format", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["axes"] == {"model.cut": [2], "data.n_labeled": [60, 150]}
    assert len(found["points"]) == 2
    again = run(*words)
    assert "0 results to compute" in again.stderr
    for width, hidden in ((200, False), (80, True)):
        text = SweepReport.read(tmp_path / "run").table(width)
        assert "n_labeled" in text
        assert max(map(len, text.splitlines())) <= width
        assert ("NOT SHOWN rows, status" in text) == hidden
    shown = CliRunner().invoke(cli, ["report", str(tmp_path / "run"), "--max-leak", "worst=0.1"])
    assert shown.exit_code == 1
    assert shown.stdout.count("GATE max-leak worst 0.1: FAILED") == 2


def test_options_of_the_only_method_need_not_name_it(tmp_path):
    spec = job.read_point({"methods": ["fedhssl-simsiam"], "dataset": "toy"}, {"method.gamma": 0.5})
    assert spec.method == {"fedhssl-simsiam": {"gamma": 0.5}}
    with pytest.raises(UsageError, match=r"method\.NAME\.gamma .*fedsplitnn, fedhssl-simsiam"):
        job.read_point({"methods": ["fedsplitnn", "fedhssl-simsiam"], "dataset": "toy"}, {"method.gamma": 0.5})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("data.n_labeled=200,400", [200, 400]),
        ("model.head=linear,mlp", ["linear", "mlp"]),
        ("data.overlap=.5, 1", [0.5, 1]),
        ('methods=["a:x=1,2", "b"]', ["a:x=1,2", "b"]),
        ("train.epochs=3", [3]),
    ],
)
def test_values_of_an_axis(text, values):
    assert [*parse_axes([text]).values()] == [values]


@pytest.mark.parametrize(
    ("assignment", "several"),
    [("data.n_labeled=200,400", True), ("a.b=[1,2]", False), ("a.b='x,y'", False), ("a.b=1", False)],
)
def test_a_list_without_quotes_and_brackets_is_several_values(assignment, several):
    assert is_several(assignment) is several


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sweep", "data.n_labeled"], "expected --sweep path.to.key=value,value, got 'data.n_labeled'"),
        (["--sweep", "data.n_labeld=1,2"], "unknown setting 'n_labeld'"),
        (["--sweep", "data.n_labeled=60,60"], "data.n_labeled, got [60, 60]"),
        (["--sweep", "data.n_labeled=60,9999999"], "n_labeled"),
        (["--sweep", "model.cut=1,x"], "model.cut"),
        (["--sweep", "model.cut=2,3", "--paired", "--sweep", "data.n_labeled=60"], "as many values of each"),
        (["--paired"], "expected --sweep with --paired"),
        (["--sweep", "model.cut=1,2", "--set", "model.cut=3,4"], "values of model.cut once"),
        (["--sweep", "model.cut.x=1,2"], "model"),
        (["--sweep", "train.epochs=3,4"], "train.epochs=2 and several values"),
        (["--sweep", "model.cut=2,100000000"], "units, got 100000000 in model"),
        (["--sweep", "method.gamma=1,2"], "gamma"),
    ],
)
def test_wrong_axes_are_refused_in_one_line_before_anything_is_written(tmp_path, words, expected):
    done = run(*words, "--out", str(tmp_path / "run"))
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert expected in line
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_folder_is_of_a_sweep_or_of_an_evaluation(swept, tmp_path):
    folder, _ = swept
    with pytest.raises(UsageError, match="with a sweep"):
        vflsec.evaluate(**SMALL, out=folder)
    vflsec.evaluate(**{**SMALL, "seeds": 1}, out=tmp_path)
    with pytest.raises(UsageError, match="with an evaluation"):
        vflsec.sweep({"aux.n": [10, 20]}, out=tmp_path, **SMALL)


def test_a_point_is_no_place_for_another_evaluation(swept, tmp_path):
    folder, report = swept
    with pytest.raises(UsageError, match="a point of the sweep"):
        vflsec.evaluate(**SMALL, out=folder / "points" / "0-n_labeled=60,cut=2")
    link = tmp_path / "link"
    link.symlink_to(folder / "points" / "1-n_labeled=60,cut=8")
    assert vflsec.Report.read(link).to_dict()["points"] == report.reports[1].to_dict()["points"]
    copy = tmp_path / "points" / "one"
    shutil.copytree(folder / "points" / "1-n_labeled=60,cut=8", copy)
    with pytest.raises(StoreError, match="the sweep of the point"):
        vflsec.Report.read(copy)


@pytest.mark.long
def test_values_that_nearly_agree_are_different_points(tmp_path):
    report = vflsec.sweep({"train.lr": [0.10000001, 0.10000002]}, out=tmp_path / "run", **{**SMALL, "seeds": 1})
    assert len(report.places()) == 2


@pytest.mark.long
def test_data_sets_with_other_measures_are_named_above(tmp_path):
    report = vflsec.sweep({"dataset": ["toy", "digits"]}, out=tmp_path / "run", **{
        **{k: v for k, v in SMALL.items() if k not in ("dataset", "data")}, "seeds": 1,
    })  # fmt: skip
    assert "toy · adversary passive_1 · utility: AUC" in report.heading
    assert "digits · adversary passive_1 · utility: accuracy" in report.heading


@pytest.mark.parametrize("axes", [{"aux.n": 40}, [], None, {1: [2]}, {"aux.n": "10,20"}, {}, {"aux.n": []}])
def test_axes_that_no_sweep_can_have(tmp_path, axes):
    with pytest.raises(UsageError):
        vflsec.sweep(axes, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_numbers_of_numpy_are_numbers(tmp_path):
    report = vflsec.sweep({"aux.n": np.array([10, 20])}, out=tmp_path / "run", **{**SMALL, "seeds": 1})
    assert report.sweep.axes == {"aux.n": [10, 20]}


def test_no_curve_of_cap_looks_like_one_of_another_measure(swept):
    leak, cap = swept[1].plot().axes[1:3]
    colors = {line.get_color() for line in leak.lines}
    assert not colors & {line.get_color() for line in cap.lines}


@pytest.mark.long
def test_every_target_is_in_the_table(tmp_path):
    report = vflsec.sweep(
        {"aux.n": [20, 40]}, out=tmp_path / "run", **{**SMALL, "seeds": 1, "attack": ["membership", "mc:epochs=5"]}
    )
    shown = report.table(200)
    assert {place.point.target.split(" ")[0] for place in report.places()} == {"labels", "membership"}
    assert shown.count("membership") >= 3
    assert "NOT DRAWN membership" in shown
    assert "(labels)" in report.plot().get_suptitle()


def test_a_damaged_file_is_named(swept, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    content = (swept[0] / "sweep.json").read_bytes()
    for k in range(0, len(content), 7):
        changed = bytearray(content)
        changed[k] ^= 1
        (folder / "sweep.json").write_bytes(bytes(changed))
        with pytest.raises(StoreError, match=r"sweep\.json is damaged"):
            SweepReport.read(folder)


def test_the_axis_is_logarithmic_where_values_differ_much(swept):
    assert swept[1].plot().axes[0].get_xscale() == "linear"
    report = swept[1]
    values = {"n": [1, 10, 100]}
    wide = SweepReport(type(report.sweep)(axes=values, paired=False, points=[
        type(report.sweep.points[0])(name=str(k), values={"n": v}) for k, v in enumerate(values["n"])
    ]), report.reports[:3])  # fmt: skip
    axes = wide.plot().axes
    assert axes[0].get_xscale() == "log"
    assert [text.get_text() for text in axes[-1].get_xticklabels()] == ["1", "10", "100"]


# Whether the leak still rises


def moved(summary, by):
    """Return a summary whose leaks by ``mc`` are larger, by another number for each seed."""

    def larger(point):
        by_seed = {seed: value + by[seed] for seed, value in point.leak.by_seed.items()}
        return msgspec.structs.replace(point, choice="mc", leak=msgspec.structs.replace(point.leak, by_seed=by_seed))

    points, worst = ([larger(point) for point in part] for part in (summary.points, summary.worst))
    return msgspec.structs.replace(summary, points=points, worst=worst)


@pytest.mark.long
@pytest.mark.parametrize(("by", "rising"), [((0.1, 0.11), True), ((0.1, -0.1), False), ((-0.1, -0.11), False)])
def test_a_rise_is_the_paired_difference_and_counts_beyond_noise(swept, by, rising):
    summary = swept[1].reports[0].summary
    found = compare(summary, moved(summary, by), {})
    places = [("none", "worst"), ("iso", "worst"), ("none", "mc"), ("iso", "mc")]
    assert [(one.defense, one.attack) for one in found] == places
    for one in found:
        assert one.rise == pytest.approx(np.mean(by))
        assert one.after - one.before == pytest.approx(one.rise)
        half = stats.t.ppf(0.975, 1) * np.std(by, ddof=1) / 2**0.5
        assert one.ci95 == pytest.approx((np.mean(by) - half, np.mean(by) + half))
        assert one.still_rising is rising


@pytest.mark.parametrize("width", [80, 140])
def test_no_two_columns_have_one_title(swept, width):
    report = copy.copy(swept[1])
    axes = {"method.secureboost.alone": [60, 150], "model.cut": [2, 8]}
    report.sweep = msgspec.structs.replace(report.sweep, axes=axes)
    header = report.tables()[0].header
    assert len(set(header)) == len(header)
    assert header[:2] == ["secureboost.alone", "cut"]
    assert "secureboost" in report.table(width)


def test_a_headline_that_is_alone_does_not_rise_by_an_attack(swept):
    summary = swept[1].reports[0].summary
    after = moved(summary, (0.1, 0.11))
    worst = [msgspec.structs.replace(point, choice="alone") for point in after.worst]
    found = compare(summary, msgspec.structs.replace(after, worst=worst), {})
    assert {one.attack for one in found} == {"mc"}


def test_evaluations_with_other_attacks_have_no_rise(swept):
    summary = swept[1].reports[0].summary
    renamed = [msgspec.structs.replace(point, attack="other") for point in summary.points]
    assert compare(summary, msgspec.structs.replace(summary, points=renamed), {}) == []


def test_only_means_of_the_adversary_can_be_exhausted(swept):
    assert swept[1].rises() == []
    assert "RISING" not in swept[1].table()


@pytest.mark.long
def test_a_sweep_of_the_budget_says_whether_more_trials_leak_more(tmp_path):
    """Of an attack that stops after one epoch, more epochs leak more; as many leak the same."""
    settings = SMALL | {"seeds": 3, "aux": {"n": 40, "pick": True, "folds": 2}, "out": tmp_path}
    settings["data"] = {"options": {"rows": 300, "signal": "hidden"}}
    del settings["attack"]
    axes = {"attacks": [["mc:epochs=1"], ["mc:epochs=2"]], "aux.budget": ["paper", "small"]}
    report = vflsec.sweep(axes, **settings)
    found = report.rises()
    assert [one.where for one in found if one.attack == "mc"] == [{"aux.budget": "paper"}, {"aux.budget": "small"}]
    assert json.loads(report.to_json())["rises"][0]["still_rising"] in (True, False)
    assert len(re.findall("RISING from attacks=", " ".join(report.table().split()))) == 1
    assert SweepReport.read(tmp_path).rises() == found
    trials = [one.budget.get("trials") for point in report.reports for one in point.points]
    assert trials == [None, 4, None, 4]
