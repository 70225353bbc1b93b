"""The command line, as a person meets it: help, lists, cards, tables, exit codes, one line for every mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vflsec.cli import COMMANDS, cli

SMALL = ["--dataset", "toy", "--set", "train.epochs=2", "--set", "aux.folds=0", "--set", "aux.n=20", "--jobs", "1"]
SWEEP = ["eval", "--attack", "mc:epochs=20", "--defense", "iso", "--lambda", "1,5", "--seeds", "2", *SMALL]


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    result = run(*SWEEP, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


def test_help_and_lists_import_no_torch():
    code = (
        "import sys; from click.testing import CliRunner; from vflsec.cli import cli\n"
        "for words in (['--help'], ['list'], ['list', '--format', 'json'], ['eval', '--help'], ['train', '--help']):\n"
        "    assert CliRunner().invoke(cli, words).exit_code == 0, words\n"
        "print([name for name in ('torch', 'pandas', 'numpy', 'matplotlib', 'sklearn') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_import_of_the_package_imports_no_torch():
    code = "import sys, vflsec; print('torch' in sys.modules, dir(vflsec))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("False")
    assert "evaluate" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_agrees_with_its_summary(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    first = cli.get_command(None, name).help.split("\n")[0]
    assert first.rstrip(".").split(":")[0].split(";")[0][:20] == COMMANDS[name].rstrip(".")[:20]


def test_list_names_everything_with_a_summary():
    found = json.loads(run("list", "--format", "json").output)
    assert {"mc", "logistic"} <= set(found["attacks"])
    assert all(summary for names in found.values() for summary in names.values())
    assert "credit-default" in run("list", "datasets").output


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("attack", "mc", ["Fu et al.", "auxiliary labels", "freeze_bottom = True"]),
        ("defense", "iso", ["none, empirical only", "gradient, embedding, parameters"]),
        ("method", "fedsplitnn", ["He et al."]),
        ("protocol", "plain", ["active learns", "passive learns"]),
        ("dataset", "credit-default", ["CC BY 4.0", "passive_1 (10 columns)", "30000"]),
    ],
)
def test_cards(kind, name, words):
    result = run("show", kind, name)
    assert result.exit_code == 0
    assert all(word in result.output for word in words), result.output


def test_eval_prints_the_table_and_draws_the_curve(finished):
    out, result = finished
    assert "fedsplitnn, iso" in result.stdout
    assert "CAP over the defended strengths" in result.stdout
    assert "10 results: 0 cached, 10 to compute" in result.stderr
    assert {"curve.svg", "curve.png", "spec.toml", "env.json", "records.jsonl", "cells"} <= {
        p.name for p in out.iterdir()
    }


def test_a_second_run_computes_nothing_and_says_so(finished):
    out, first = finished
    before = (out / "records.jsonl").read_bytes()
    again = run(*SWEEP, "--out", out)
    assert "10 results: 10 cached, nothing to compute" in again.stderr
    assert again.stdout == first.stdout
    assert (out / "records.jsonl").read_bytes() == before


def test_its_own_settings_run_again_to_nothing(finished):
    out, first = finished
    again = run("eval", "--config", out / "spec.toml", "--out", out)
    assert "nothing to compute" in again.stderr
    assert again.stdout == first.stdout


def test_one_more_strength_computes_only_that(finished):
    out, _ = finished
    plan = run(*SWEEP, "--lambda", "25", "--out", out, "--dry-run")
    assert "12 results: 10 cached, 2 to compute" in plan.stderr


def test_comma_lists_and_repeated_options_are_the_same():
    listed, repeated = (run("eval", "--defense", "iso", *words, "--dry-run").stdout for words in (
        ["--lambda", "1,5,25"], ["--lambda", "1", "--lambda", "5,25"],
    ))  # fmt: skip
    assert listed == repeated
    assert "strengths = [" in listed


def test_report_prints_it_again(finished):
    out, first = finished
    assert run("report", out).stdout == first.stdout


def test_json_is_one_object_on_stdout(finished):
    out, _ = finished
    found = json.loads(run("report", out, "--format", "json").stdout)
    assert [p["strength"] for p in found["points"]] == [0.0, 1.0, 5.0]
    assert found["out"] == str(out)


@pytest.mark.parametrize("form", ["csv", "markdown"])
def test_other_formats(finished, form):
    out, _ = finished
    assert "mc" in run("report", out, "--format", form).stdout


def test_gates_decide_the_exit_code(finished):
    out, _ = finished
    assert run("report", out, "--max-leak", "mc=1").exit_code == 0
    failed = run("report", out, "--max-leak", "mc=0.1", "--min-utility", "0")
    assert failed.exit_code == 1
    assert "GATE max-leak mc 0.1: FAILED" in failed.stdout
    assert "GATE min-utility 0: holds" in failed.stdout


def test_divergence_is_exit_3_and_can_be_retried(tmp_path):
    words = [
        "eval",
        *SMALL,
        "--set",
        "train.lr=1e30",
        "--set",
        "train.optimizer=sgd",
        "--seeds",
        "1",
        "--out",
        tmp_path,
    ]
    result = run(*words)
    assert result.exit_code == 3
    assert "1/1 diverged" in result.stdout
    assert "nothing to compute" in run(*words).stderr
    assert "3 results: 2 cached, 1 to compute" in run(*words, "--retry-errors").stderr
    assert "3 results: 0 cached, 3 to compute" in run(*words, "--fresh").stderr


def test_interruption_is_exit_130_and_keeps_what_is_done(tmp_path, monkeypatch):
    from vflsec.evaluation import engine

    def interrupted(todo, store, **_):
        store.append({"key": "x"})
        yield {"kind": "prior", "method": "m", "attack": {"name": "a"}, "seed": 0, "status": "ok"}
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "evaluate", interrupted)
    result = run(*SWEEP, "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("interrupted: 1 results are kept in")
    assert "the same command goes on" in result.stderr


def test_train_writes_a_checkpoint_without_pickle(tmp_path):
    out = tmp_path / "model"
    result = run("train", "--dataset", "toy", "--set", "train.epochs=2", "--defense", "iso:lambda=1", "--out", out)
    assert result.exit_code == 0, result.output
    assert "auc" in result.stdout
    assert sorted(p.name for p in out.iterdir()) == ["active.safetensors", "cell.json", "passive_1.safetensors"]
    assert "expected a new folder for --out" in run("train", "--dataset", "toy", "--out", out).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "--attack", "mcc"], "unknown attack 'mcc'. Did you mean mc? Known: logistic, mc"),
        (["eval", "--defense", "izo", "--lambda", "1"], "unknown defense 'izo'. Did you mean iso?"),
        (["eval", "--defense", "iso", "--lambda", "1,x"], "'1,x' is not a comma-separated list of numbers"),
        (["eval", "--defense", "iso"], "expected strengths for the defense, got none"),
        (["eval", "--set", "data.n_labelled=3"], "unknown setting 'n_labelled' - at 'data'"),
        (["eval", "--set", "data.test=2"], "data.test"),
        (["eval", "--adversary", "bank"], "unknown adversary 'bank'"),
        (["eval", "--engine", "ray"], "expected --engine local or dask:ADDRESS, got 'ray'"),
        (["eval", "--max-leak", "0.3"], "expected NAME=LIMIT, for example mc=0.35, got '0.3'"),
        (["eval", "--max-leak", "norm=0.3"], "unknown attack 'norm'. Known: mc, worst"),
        (["eval", "--dataset", "none.toml"], "none.toml"),
        (["eval", "--attack", "none.py:Mine"], "expected a Python file at none.py, found none"),
        (["report", "nowhere"], "expected results in nowhere, found no spec.toml"),
        (["show", "attack", "mcc"], "Did you mean mc?"),
        (["train", "--set", "train.lr=fast"], "Expected 'float', got 'str' - at 'train.lr'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_get_one_line_and_exit_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    error = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(error) == 1
    assert message in error[0]
    assert "Traceback" not in result.stderr
    assert not list(Path(tmp_path).iterdir()), "bad input leaves nothing behind"


def test_traceback_on_request():
    result = run("--traceback", "eval", "--attack", "mcc")
    assert type(result.exception).__name__ == "UsageError"


def test_options_from_the_environment(tmp_path):
    result = CliRunner(env={"VFLSEC_EVAL_SEEDS": "2"}).invoke(cli, ["eval", "--dataset", "toy", "--dry-run"])
    assert "seeds = 2" in result.stdout
