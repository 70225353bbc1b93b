"""``report --compare`` names what changed, and does not take noise for a change."""

import json
import math

import msgspec
import pytest
from click.testing import CliRunner

from vflsec.cli import cli
from vflsec.report.comparison import compare
from vflsec.report.report import Report
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess


def evaluated(folder, **changes):
    spec = specs.read({
        "dataset": "toy", "data": {"options": {"rows": 300}}, "train": {"epochs": 2}, "seeds": 2,
        "aux": {"n": 20, "folds": 0}, "attacks": ["norm", "mc"], **changes,
    })  # fmt: skip
    store = Store(folder)
    with store.lock():
        store.write_settings(specs.to_toml(spec), build_manifest(spec, ["vflsec", "eval"]))
        list(engine.evaluate(engine.plan(spec, store), store))
    return Report.read(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two evaluations that differ in epochs and in one attack."""
    root = tmp_path_factory.mktemp("compared")
    evaluated(root / "a")
    evaluated(root / "b", train={"epochs": 3}, attacks=["norm", "direction"])
    return root


def run(*words):
    return CliRunner().invoke(cli, ["report", *map(str, words)], catch_exceptions=False)


def test_one_page_and_one_table_join_two_folders(folders, tmp_path):
    page = tmp_path / "joint.html"
    shown = run(folders / "a", folders / "b", "--html", page)
    assert (shown.exit_code, shown.stdout.count("What each adversary infers of labels, AUC")) == (0, 1)
    text = page.read_text("utf-8")
    assert text.count("<article") == 2
    assert 'data-name="setting">train.epochs</td>' in text
    assert not [*folders.glob("*/report.html")]
    assert "What each" not in run(folders / "a", folders / "b", "--html", page, "--format", "csv").stdout
    for words, message in (((folders / "a",), "found the same in"), ((tmp_path,), "no manifest.json")):
        refused = run(folders / "a", *words, "--html", page)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.count("\n") == 1
        assert message in refused.stderr


def test_the_page_is_printed_too(folders, tmp_path, monkeypatch):
    """And nothing is read, computed or written if nothing can print it."""
    monkeypatch.setattr("vflsec.report.page.print_page", str.encode)
    monkeypatch.setattr("shutil.which", lambda name: name)
    for names in (["a"], ["a", "b"]):
        page, paper = tmp_path / f"{len(names)}.html", tmp_path / f"{len(names)}.pdf"
        assert run(*(folders / name for name in names), "--html", page, "--pdf", paper).exit_code == 0
        assert page.read_bytes() == paper.read_bytes()
    monkeypatch.setattr("shutil.which", lambda name: None)
    refused = run(tmp_path / "nowhere", "--pdf", tmp_path / "new.pdf")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "pip install weasyprint" in refused.stderr


def test_settings_and_lines_that_differ_are_named(folders):
    found = json.loads(run("--compare", folders / "a", folders / "b", "--format", "json").stdout)
    changed = {one["name"]: (one["before"], one["after"]) for one in found["settings"]}
    assert changed["train.epochs"] == ("2", "3")
    assert not any(name.startswith("versions") or name == "dataset" for name in changed)
    assert {move["attack"] for move in found["moves"]} == {"worst", "norm"}
    assert found["only_before"] == ["mc (fedsplitnn, labels)"]
    assert found["only_after"] == ["direction (fedsplitnn, labels)"]


def test_an_evaluation_differs_from_itself_in_nothing(folders):
    done = run("--compare", folders / "a", folders / "a")
    assert done.exit_code == 0
    assert "SAME settings, versions and data" in done.stdout
    assert "more leak" not in done.stdout
    assert "less leak" not in done.stdout
    assert "not told apart" in done.stdout


def moved(report, mean, half):
    """Return ``report`` with another leak of each attack."""
    points = [
        msgspec.structs.replace(p, leak=msgspec.structs.replace(p.leak, mean=mean, ci95=(mean - half, mean + half)))
        for p in report.summary.points
    ]
    return msgspec.structs.replace(report.summary, points=points, worst=[]), report.manifest


@pytest.mark.parametrize(("after", "told"), [(0.62, False), (0.66, True), (0.44, True)])
def test_a_difference_has_both_errors_in_quadrature(folders, after, told):
    report = Report.read(folders / "a")
    move = compare(moved(report, 0.55, 0.06), moved(report, after, 0.08)).moves[0]
    assert move.leak.change == pytest.approx(after - 0.55)
    assert move.leak.ci95 == pytest.approx((after - 0.55 - 0.1, after - 0.55 + 0.1))
    assert move.leak.is_shown is told
    assert math.hypot(0.06, 0.08) == pytest.approx(0.1)


def test_rows_on_which_an_attack_gains_most_are_compared_with_the_same_rows(folders):
    report = Report.read(folders / "a")
    point = next(p for p in report.summary.points if p.attack == "mc")
    test = msgspec.structs.replace(point.leak, mean=0.6, alone=0.6, advantage=0.0, rows="test")
    train = msgspec.structs.replace(test, mean=0.9, advantage=0.3, rows="train")
    before, after = (
        msgspec.structs.replace(
            report.summary, worst=[], points=[msgspec.structs.replace(point, leak=test, leak_train=on)]
        )
        for on in (train, msgspec.structs.replace(train, mean=0.6, advantage=0.0))
    )
    (move,) = compare((before, report.manifest), (after, report.manifest)).moves
    assert (move.rows, move.leak.change) == (("train", "train"), pytest.approx(-0.3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "a"], "expected two folders"),
        (["--compare", "a", "b", "--format", "csv"], "table, json or markdown"),
        (["--compare", "a", "b", "--max-leak", "worst=1"], "no limits with --compare"),
    ],
)
def test_mistakes_are_one_line(folders, words, message, monkeypatch):
    monkeypatch.chdir(folders)
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
