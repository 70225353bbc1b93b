"""The command line, as a person meets it: help, lists, cards, tables, exit codes, one line for every mistake."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from vflsec.cli import BUILT_IN, cli, list_all
from vflsec.core import registry
from vflsec.core.attack import Attack
from vflsec.core.method import Method
from vflsec.core.options import CONTRIB
from vflsec.core.party import Party

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SMALL = ["--dataset", "toy", "--set", "train.epochs=2", "--set", "aux.folds=0", "--set", "aux.n=20", "--jobs", "1"]
TOY = ["--dataset", "toy"]
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


@pytest.mark.parametrize("name", list_all())
def test_every_command_has_help_that_agrees_with_its_summary(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    first = cli.get_command(None, name).help.split("\n")[0]
    assert first.rstrip(".").split(":")[0].split(";")[0][:20] == BUILT_IN.get(name, first).rstrip(".")[:20]


def test_list_names_everything_with_a_summary():
    found = json.loads(run("list", "--format", "json").output)
    assert {"mc", "logistic"} <= set(found["attacks"])
    assert all(summary for names in found.values() for summary in names.values())
    assert "credit-default" in run("list", "datasets").output


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("attack", "mc", ["Fu et al.", "auxiliary labels", "freeze_bottom = True", "epochs = None, which means 300"]),
        ("defense", "iso", ["none, empirical only", "gradient, embedding, parameters"]),
        ("method", "fedsplitnn", ["He et al.", "differs from the paper in:", "batch = 256"]),
        (
            "method",
            "fedhssl-simsiam",
            [
                "Optimizers are those of the authors' code",
                "gamma = 0.5\n      weight of the cross-party guidance",
                "train.pretrain: epochs = 40, batch = 512, lr = 0.8",
                "view 2 a corruption of it",
                "encoder = 'auto'",
            ],
        ),
        ("method", "fedhssl-moco", ["ssl_options: projector = 512, momentum = 0.99", "in-batch NT-Xent"]),
        ("attack", "logistic", ["differs from the paper in:\n  * Two classes:", "Regularized logistic regression"]),
        ("protocol", "plain", ["active learns", "passive learns"]),
        ("dataset", "credit-default", ["CC BY 4.0", "passive_1 (10 columns)", "30000"]),
        ("dataset", "flights", ["CC0", "airline (7 columns), weather (10 columns), registry (7 columns)", "336776"]),
    ],
)
def test_cards(kind, name, words):
    result = run("show", kind, name)
    assert result.exit_code == 0
    assert all(word in result.output for word in words), result.output
    assert kind == "dataset" or max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "secureboost",
            {
                "sends in train": "ciphertext (exchange masked or paillier), control, gradient (exchange plain), "
                "histogram, nodes",
                "the passive side sees": "auxiliary labels, node memberships, own features, own model, received "
                "gradients (exchange plain)",
                "the active side sees": "auxiliary labels, histograms, node memberships, own features, own model",
            },
        ),
        ("fedlocal-byol", {"sends in pretrain": "parameters (pma true)", "sends in finetune": "embedding, gradient"}),
        ("fedsplitnn", {"sends in train": "embedding, gradient"}),
    ],
)
def test_a_card_says_with_which_options_something_is_sent(name, facts):
    assert facts.items() <= json.loads(run("show", "method", name, "--format", "json").output).items()


def test_a_card_is_data_too():
    for kind, name, facts in (
        ("attack", "residual", {"costs", "fails", "contrib", "differs", "options"}),
        ("defense", "sign", {"hides", "costs", "fails", "contrib", "options"}),
        ("dataset", "credit-default", {"parties", "license"}),
    ):
        assert facts <= json.loads(run("show", kind, name, "--format", "json").output).keys()
    listed = run("list", "defenses").output
    assert "(contrib)" in listed
    assert listed.endswith(f"\ncontrib: {CONTRIB}\n")
    assert "contrib" not in run("list", "datasets").output


def test_a_card_has_no_empty_heading():
    card = run("show", "attack", "model-recovery").output
    assert "differs from the paper" not in card  # its reference is none
    assert "not stated" not in card
    assert "options:" not in run("show", "attack", "averaging").output
    assert "options:" not in run("show", "protocol", "plain").output
    assert "options:\n  strength\n      alpha." in run("show", "defense", "mixup").output


def test_cards_of_one_family_hold_for_each_member():
    cards = [run("show", "method", name).output for name in ("fedhssl-moco", "fedhssl-simsiam", "prada-no-fg-ir")]
    moco, simsiam, single = (" ".join(card.split()) for card in cards)
    assert moco.count("predictor (MoCo has none)") == 2
    assert "target networks" in moco
    assert "target networks" not in simsiam
    assert "batch by batch (interleave" not in simsiam
    assert "have layers of 24" in single
    assert "The discriminator is 36 wide" in single


def test_every_attack_and_method_says_what_differs():
    for kind, base in (("attacks", Attack), ("methods", Method)):
        for name in registry.list_all(kind):
            found = registry.load(kind, name)
            stated = [one for one in found.__mro__ if "differs" in vars(one) and one is not base]
            assert stated, name
            assert all(sentence.endswith(".") for sentence in found.differs), name
            assert len(set(found.differs)) == len(found.differs), name


def test_a_plug_in_that_states_no_difference_says_so(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUG_IN)
    result = run("show", "attack", f"{path}:Acts")
    assert result.exit_code == 0
    assert "paper in:\n  * not stated" in result.output


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--attack", "mc@pretrain"], ["/ mc@pretrain\n", "passive_1, honest-but-curious, 80 labeled rows"]),
        (["--adversary", "server", "--attack", "all@pretrain"], ["server, honest-but-curious, no labels needed"]),
    ],
)
def test_the_banner_says_who_strikes_when_and_with_what(words, shown, tmp_path):
    base = ("eval", "--dataset", "multiple-features", "--method", "fedhssl-simsiam", "--seeds", "1", "--dry-run")
    result = run(*base, *words, "--out", tmp_path / "run")
    assert all(text in result.stderr for text in shown), result.stderr
    assert "1 pre-trainings" not in result.stderr
    assert result.stderr.count("is for the passive side") <= 1


def test_eval_prints_the_table_and_draws_the_curve(finished):
    out, result = finished
    assert "Strongest attack on labels" in result.stdout
    assert "CAP over the defended strengths" in result.stdout
    assert "16 results: 0 cached, 16 to compute" in result.stderr
    assert {"curve.svg", "curve.png", "spec.toml", "env.json", "manifest.json", "records.jsonl", "cells"} <= {
        p.name for p in out.iterdir()
    }


def test_a_second_run_computes_nothing_and_says_so(finished):
    out, first = finished
    before = (out / "records.jsonl").read_bytes()
    again = run(*SWEEP, "--out", out)
    assert "16 results: 16 cached, nothing to compute" in again.stderr
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
    assert "18 results: 16 cached, 2 to compute" in plan.stderr


def test_comma_lists_and_repeated_options_are_the_same():
    listed, repeated = (run("eval", "--defense", "iso", *words, "--dry-run").stdout for words in (
        ["--lambda", "1,5,25"], ["--lambda", "1", "--lambda", "5,25"],
    ))  # fmt: skip
    assert listed == repeated
    assert "strengths = [" in listed


def test_each_defense_may_have_strengths_of_its_own(tmp_path):
    words = ["--defense", "iso:lambda=1,5", "--defense", "compress:lambda=.25,.9,max-norm", "--seeds", "1"]
    plan = run("eval", *TOY, *words, "--dry-run")
    assert "13 results: 0 cached" in plan.stderr  # no defense, 2 + 2, the usual 3 of max-norm, and five baselines
    config = tmp_path / "c.toml"
    config.write_text(plan.stdout)
    assert run("eval", "--config", config, "--dry-run").stdout == plan.stdout
    others = run("eval", *TOY, *words, "--lambda", "7", "--dry-run")
    assert "11 results: 0 cached" in others.stderr


def test_strengths_of_the_file_are_for_defenses_without_their_own(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("dataset = 'toy'\ndefenses = ['iso']\nstrengths = [2.0]\nseeds = 1\n")
    for words, count in (([], 7), (["iso:lambda=1,5"], 8), (["iso:lambda=1,5,perp"], 9), (["perp"], 7)):
        chosen = ["--defense", *words] if words else []
        assert f"{count} results" in run("eval", "--config", config, *chosen, "--dry-run").stderr, words


def test_an_epsilon_takes_the_place_of_the_strength():
    plan = run("eval", *TOY, "--defense", "label-dp", "--epsilon", "1,2", "--epsilon", "8", "--dry-run")
    assert [float(x) for x in re.findall(r"^ +([.\d]+),$", plan.stdout, re.MULTILINE)] == [1.0, 0.5, 0.125]
    both = run("eval", *TOY, "--defense", "label-dp", "--epsilon", "1", "--lambda", "1", "--dry-run")
    assert both.exit_code == 2
    assert "drop one" in both.stderr
    assert "--epsilon" in run("eval", *TOY, "--defense", "label-dp", "--epsilon", "x", "--dry-run").stderr


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


@pytest.mark.long
def test_gates_decide_the_exit_code(finished):
    out, _ = finished
    assert run("report", out, "--max-leak", "mc=1").exit_code == 0
    failed = run("report", out, "--max-leak", "mc=0.1", "--min-utility", "0")
    assert failed.exit_code == 1
    assert "GATE max-leak mc 0.1: FAILED" in failed.stdout
    assert "GATE min-utility 0: holds" in failed.stdout


@pytest.mark.long
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
    (cell,) = (tmp_path / "cells").iterdir()
    trained = cell.stat().st_mtime_ns
    assert "6 results: 5 cached, 1 to compute" in run(*words, "--retry-errors").stderr
    assert cell.stat().st_mtime_ns > trained, "trained again"
    assert "6 results: 0 cached, 6 to compute" in run(*words, "--fresh").stderr


@pytest.mark.parametrize("command", ["eval", "report", "audit"])
@pytest.mark.parametrize(("limit", "message"), [("-1", "least 0, got -1"), ("nan", "finite")])
def test_a_limit_on_what_is_undetected_is_at_least_0(tmp_path, command, limit, message):
    words = [] if command == "eval" else [str(tmp_path)]
    result = run(command, *words, "--max-undetected", limit)
    assert result.exit_code == 2
    assert re.search(f"--max-undetected': expected .*{message}", result.stderr)


def test_interruption_is_exit_130_and_keeps_what_is_done(tmp_path, monkeypatch):
    from tests.results.analysis.made import made_baseline
    from vflsec.run import engine

    def interrupted(todo, store, **_):
        store.append(made_baseline())
        yield made_baseline()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "evaluate", interrupted)
    result = run(*SWEEP, "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("interrupted: 0 trainings and 1")
    assert "the same command goes on" in result.stderr


def test_train_writes_a_checkpoint_without_pickle(tmp_path):
    out = tmp_path / "model"
    result = run("train", "--dataset", "toy", "--set", "train.epochs=2", "--defense", "iso:lambda=1", "--out", out)
    assert result.exit_code == 0, result.output
    assert "auc" in result.stdout
    models = ["active.safetensors", "passive_1.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == sorted(
        [*models, "cell.json", "encoders.json", "rows.json", "training.toml"]
    )
    assert "new folder for --out" in run("train", "--dataset", "toy", "--out", out).stderr


def test_train_says_what_was_spent():
    words = ["--dataset", "toy", "--set", "train.epochs=2", "--set", "data.options.parties=3"]
    defenses = ["laplace-dp:strength=4@embedding", "label-dp:epsilon=3", "dp-sgd:epsilon=5", "iso:lambda=1"]
    result = run("train", *words, *(word for defense in defenses for word in ("--defense", defense)))
    assert result.exit_code == 0, result.output
    told = [line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if line.startswith("epsilon")]
    assert told == [
        "0.5 at delta 0 by laplace-dp: one row in 2 releases to active; 255 over the releases of all rows received",
        "5 at delta 1e-05 by dp-sgd: one row in 2 updates of a party's own models, not in the messages about the row",
        "3 at delta 0 by label-dp: one label or text, over all messages of the training",
    ]
    assert "epsilon" not in run("train", *words[:4], "--defense", "iso:lambda=1").stdout


TRAIN = ["train", "--dataset", "toy", "--set", "train.epochs=1"]


@pytest.fixture
def fitted(monkeypatch):
    """What ``train`` was about to train: specification and seed."""
    from vflsec import api
    from vflsec.base.errors import Diverged

    seen = []

    def record(spec, seed, *_):
        seen.append((spec, seed))
        raise Diverged("recorded")

    monkeypatch.setattr(api, "fit", record)
    return seen


def test_train_takes_the_settings_of_an_evaluation(finished, fitted):
    out, _ = finished
    run("train", "--config", out / "spec.toml", "--defense", "iso:lambda=2", "--set", "train.lr=0.1", "--seed", "3")
    ((spec, seed),) = fitted
    assert (spec.dataset, spec.train.epochs, spec.train.lr, seed) == ("toy", 2, 0.1, 3)
    assert [(d.name, d.strength) for d in spec.fixed] == [("iso", 2.0)]
    assert not spec.defenses


def test_options_win_over_the_file_and_fixed_defenses_add_up(tmp_path, fitted):
    file = tmp_path / "c.toml"
    file.write_text("dataset = 'digits'\nfixed = ['iso:lambda=1']\nmethods = ['fedsplitnn', 'b']\n[method.b]\nx = 1")
    words = ["--config", file, "--method", "fedsplitnn", "--defense", "iso:lambda=2"]
    run("train", *words)
    run("train", *words, "--dataset", "credit-default", "--set", "dataset=toy")
    assert [spec.dataset for spec, _ in fitted] == ["digits", "toy"]
    assert [d.strength for d in fitted[0][0].fixed] == [1.0, 2.0]
    plan = run("eval", *words[:4], "--with", "iso:lambda=2", "--dry-run").stdout
    assert (plan.count("strength = 1.0"), plan.count("strength = 2.0")) == (1, 1)


COLLAPSING = ["train.epochs=20", "train.optimizer=sgd", "train.momentum=0.0", "train.weight_decay=999.0"]


def test_a_collapsed_training_gives_no_number(tmp_path):
    words = [word for setting in COLLAPSING for word in ("--set", setting)]
    result = run("train", "--dataset", "toy", *words, "--out", tmp_path / "model")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "Error: collapsed: the model predicts the same for every test row"
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_one_line(monkeypatch):
    from vflsec import api

    def fit(*_):
        raise MemoryError("Unable to allocate 3.91 GiB")

    monkeypatch.setattr(api, "fit", fit)
    result = run(*TRAIN)
    assert result.exit_code == 2
    assert "Unable to allocate 3.91 GiB" in result.stderr.splitlines()[-1]


def test_a_checkpoint_that_cannot_be_written_is_found_before_training(fitted):
    result = run(*TRAIN, "--out", "/proc/x/y")
    assert result.exit_code == 2
    assert "cannot write to /proc/x/y" in result.stderr
    assert not fitted


SAYS_WHEN_IT_TRAINS = """
import signal
from vflsec import api, cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background does not have
fit = api.fit
def announced(*arguments):
    print("training", flush=True)
    return fit(*arguments)
api.fit = announced
cli.main()
"""


def test_an_interrupted_training_is_exit_130_and_one_line(monkeypatch):
    send, messages = Party.send, itertools.count()

    def interrupted(*arguments, **options):
        if next(messages) == 50:
            signal.raise_signal(signal.SIGINT)
        return send(*arguments, **options)

    monkeypatch.setattr(Party, "send", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = run("train", *TOY, "--set", "train.epochs=100000")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.stderr.split() == ["interrupted"]


@pytest.mark.chaos
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_interrupted_in_training_is_exit_130_and_one_line(ending):
    words = [sys.executable, "-c", SAYS_WHEN_IT_TRAINS, "train", "--set", "train.epochs=100000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "training\n"
        time.sleep(0.5)
        for wait in (20, 20, 20):  # an import that is under way may swallow the first
            process.send_signal(ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, error = process.communicate(timeout=wait)
                break
        assert process.returncode == 130
    finally:
        process.kill()
    assert error.split() == ["interrupted"]


def test_an_interruption_before_the_first_cell_is_exit_130(monkeypatch, tmp_path):
    from vflsec.run import engine

    def interrupted(spec):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "check", interrupted)
    result = run(*SWEEP, "--out", tmp_path / "run")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert not list(tmp_path.iterdir())


BROKEN = """\
from vflsec.attacks.norm import Norm
class Broken(Norm):
    def run(self, view, *, rng):
        return {}["no such key"]
"""


@pytest.mark.long
def test_the_cause_of_an_error_is_in_the_table_and_its_traceback_on_request(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["eval", "--attack", f"{tmp_path / 'broken.py'}:Broken", "--seeds", "2", *SMALL, "--out", tmp_path / "run"]
    result = run(*words)
    assert result.exit_code == 3
    assert "error, KeyError: 'no such key'" in result.stderr
    assert "ERROR Broken, no defense (2 of 2 seeds): KeyError: 'no such key' (broken.py, line 4)" in result.stdout
    assert "Traceback" not in result.stderr
    assert "broken.py, line 4" in (tmp_path / "run" / "report.html").read_text("utf-8")
    again = run("--traceback", *words, "--retry-errors")
    assert again.stderr.count("Traceback (most recent call last)") == 2
    assert 'return {}["no such key"]' in again.stderr


@pytest.mark.parametrize("words", [["--dry-run"], ["--dry-run", "--fresh"]])
def test_a_plan_writes_nothing(words, tmp_path):
    assert run(*SWEEP, "--out", tmp_path, *words).exit_code == 0
    assert not list(tmp_path.iterdir())


def test_a_report_makes_no_cells(finished, tmp_path):
    out, _ = finished
    for name in ("manifest.json", "records.jsonl"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    assert run("report", tmp_path).exit_code == 0
    assert not (tmp_path / "cells").exists()


def test_a_fresh_start_refuses_a_foreign_folder(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "work.txt").touch()
    result = run(*SWEEP, "--out", tmp_path, "--fresh")
    assert result.exit_code == 2
    assert "choose another --out" in result.stderr
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cells", "work.txt"]


def test_folders_that_cannot_be_written(finished, tmp_path):
    out, _ = finished
    for name in ("manifest.json", "records.jsonl"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    (tmp_path / "curve.svg").mkdir()
    (tmp_path / "locked" / ".lock").mkdir(parents=True)
    result = run("eval", "--config", out / "spec.toml", "--out", tmp_path / "locked")
    assert result.exit_code == 2
    assert f"Error: cannot write to {tmp_path / 'locked'}: Is a directory; choose another --out" in result.stderr
    shown = run("report", tmp_path)
    assert shown.exit_code == 0
    assert shown.stdout == run("report", out).stdout
    assert f"curve or report.html is missing: cannot write to {tmp_path}" in shown.stderr


def test_the_card_of_ones_own_dataset(tmp_path):
    (tmp_path / "all.csv").write_text("id,y,a,b\n" + "\n".join(f"{k},{k % 2},{k},{-k * k}" for k in range(20)))
    file = tmp_path / "my.toml"
    file.write_text("label='y'\nid='id'\nfile='all.csv'\n[parties.active]\ncolumns=['a']\n"
                    "[parties.passive_1]\ncolumns=['b']")  # fmt: skip
    result = run("show", "dataset", file)
    assert result.exit_code == 0
    assert "passive_1 (1 columns)" in result.stdout


def test_an_attack_that_acts_in_training_is_announced(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(PLUG_IN)
    plan = run("eval", "--attack", f"{file}:Acts", "--dataset", "toy", "--dry-run")
    honest = run("eval", "--dataset", "toy", "--dry-run")
    assert "(malicious in training under x)" in plan.stderr
    assert "adversary: passive_1, honest-but-curious, 80 labeled rows" in honest.stderr


@pytest.mark.long
def test_what_a_malicious_party_breaks_is_printed_apart(tmp_path):
    words = ["eval", "--attack", "backdoor", "--defense", "iso", "--lambda", "1,5", "--seeds", "2", *SMALL]
    result = run(*words, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Integrity: what" in result.stdout
    assert "CAP" not in result.stdout
    assert "12 results: 0 cached, 12 to compute" in result.stderr
    assert "iso:5 without backdoor seed 1" in result.stderr
    assert "malicious in training under backdoor" in result.stderr
    assert run(*words, "--out", tmp_path).stdout == result.stdout
    found = json.loads(run("report", tmp_path, "--format", "json").stdout)
    assert (found["points"], [d["strength"] for d in found["integrity"]]) == ([], [0.0, 1.0, 5.0])
    assert run("report", tmp_path, "--min-utility", "1").exit_code == 1
    records = tmp_path / "records.jsonl"
    records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[1:]))
    assert run("report", tmp_path).exit_code == 3, "a damage without its honest half"


PLUG_IN = """
from vflsec.core.attack import Attack
from vflsec.core.view import Need

class Raises(Attack):
    name = reference = verified = "x"
    needs = frozenset()
    def __init__(self): raise ValueError("two\\nlines")
    def run(self, view, *, rng): ...

class Needless(Attack):
    name = reference = verified = "x"
    def run(self, view, *, rng): ...

class Acts(Attack):
    name = reference = verified = "x"
    needs = frozenset()
    def run(self, view, *, rng): ...
    def optimizer(self, parameters, lr): ...

class Abstract(Attack):
    name = reference = verified = "x"
    needs = frozenset()

class NeverAlone(Attack):
    name = reference = verified = "x"
    needs = frozenset()
    def run(self, view, *, rng): ...
    def alone(self): raise ValueError("no")

class AloneIsNoAttack(NeverAlone):
    def alone(self): return 0.5

class Ends(NeverAlone):
    def alone(self): return None
    def run(self, view, *, rng):
        import os
        os._exit(0)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "mine.py:Raises cannot be made: ValueError"),
        ("Needless", "'mine.py:Needless' to state its needs"),
        ("Abstract", "mine.py:Abstract cannot be made: TypeError"),
        ("NeverAlone", "attack 'x': alone() failed: ValueError: no"),
        ("AloneIsNoAttack", "None from alone(), got float"),
    ],
)
def test_mistakes_in_a_plug_in_are_one_line(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("mine.py").write_text(PLUG_IN)
    result = run("eval", "--dataset", "toy", "--attack", f"mine.py:{name}")
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(("limit", "code"), [("0.3", 1), ("0.4", 0)])
def test_what_scores_will_tell_is_a_gate_before_training(command, limit, code, tmp_path):
    """Two passes of one output against six features: a third of what determines them."""
    words = [*TOY, "--method", "vertical-lr", "--defense", "phe:on=1,backend=plain", "--out", tmp_path / "out"]
    words += [word for setting in ("optimizer=sgd", "epochs=2") for word in ("--set", f"train.{setting}")]
    words += ["--seeds", 1, "--attack", "logistic", "--jobs", 1, "--set", "aux.folds=0"] if command == "eval" else []
    found = run(command, *words, "--max-exposure", limit)
    assert found.exit_code == code, found.output
    assert "exposure 0.33: 2 passes x" in found.stderr
    assert ("gate failed: exposure 0.33" in found.stderr) == bool(code)
    assert (tmp_path / "out").exists() != bool(code)


def test_an_exposure_without_an_encrypted_layer_is_refused():
    found = run("eval", *TOY, "--max-exposure", "0.5")
    assert (found.exit_code, "encrypted layer with --max-exposure" in found.stderr) == (2, True)


@pytest.mark.chaos
def test_a_worker_that_dies_is_one_line_and_what_was_written_is_kept(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUG_IN)
    words = ("eval", *TOY, "--seeds", 2, "--set", "train.epochs=1", "--set", "aux.folds=0", "--out", tmp_path / "out")
    died = run(*words, "--jobs", 2, "--attack", f"{file}:Ends,norm")
    assert died.exit_code == 2
    assert "a worker process has died" in died.stderr.splitlines()[-1]
    assert run(*words, "--jobs", 1, "--attack", "norm", "--fresh").exit_code == 0


def test_a_dataset_file_that_is_a_folder_or_lacks_its_table(tmp_path):
    (tmp_path / "dir.toml").mkdir()
    result = run("eval", "--dataset", tmp_path / "dir.toml")
    assert (result.exit_code, "expected a TOML file" in result.stderr) == (2, True)
    file = tmp_path / "my.toml"
    file.write_text("label='y'\nid='id'\n[parties.active]\nfile='a.csv'\n[parties.passive_1]\nfile='b.csv'")
    result = run("eval", "--dataset", file)
    assert (result.exit_code, "expected a file" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "--attack", "mcc"], "'mcc'. Did you mean mc?"),
        (["eval", "--defense", "izo", "--lambda", "1"], "'izo'. Did you mean iso?"),
        (["eval", "--defense", "iso", "--lambda", "1,x"], "'1,x' is not a comma-separated"),
        (["eval", "--defense", "iso:lambda=0"], "iso, got none: add --lambda"),
        (["eval", "--set", "data.n_labelled=3"], "unknown setting 'n_labelled' - at 'data'"),
        (["eval", "--set", "data.test=2"], "data.test"),
        (["eval", "--adversary", "bank"], "unknown adversary 'bank'"),
        (["eval", "--engine", "ray"], "dask:ADDRESS, got 'ray'"),
        (["eval", "--max-leak", "0.3"], "mc=0.35, got '0.3'"),
        (["eval", "--max-leak", "mc=nan"], "limit for mc, got nan"),
        (["eval", "--min-utility", "nan"], "finite number, got nan"),
        (["eval", "--max-leak", "norm=0.3"], "'norm'. Known: mc, worst; --attack"),
        (["eval", "--max-leak", "nrom=0.3"], "'nrom'. Known: mc, worst"),
        (["eval", "--attack", "mc,backdoor", "--max-leak", "backdoor=0.3"], "--max-leak, got backdoor"),
        (["eval", "--attack", "backdoor:aim=2", *TOY], "aim < 2,"),
        (["eval", "--dataset", "none.toml"], "none.toml"),
        (["eval", "--attack", "none.py:Mine"], "file at none.py, found none"),
        (["report", "nowhere"], "nowhere, found no manifest.json"),
        (["show", "attack", "mcc"], "Did you mean mc?"),
        (["eval", "--max-leak", "mc=0.3", "--max-leak", "mc=0.4"], "limit for mc, got two"),
        (["eval", "--defense", "iso:lambda=5", "--lambda", "1"], "strength once, got strengths"),
        (["train", "--defense", "iso:lambda=5,1"], "defense iso, got 5, 1"),
        (["eval", "--defense", "compress:lambda=.5,2"], "expected 0 <= strength <= 1, got 2"),
        (["eval", "--at", "gradient"], "--defense with --at gradient"),
        (
            ["eval", "--defense", "iso:lambda=5@gradient", "--at", "embedding"],
            "iso:lambda=5@gradient and --at embedding",
        ),
        (["eval", "--with", "iso"], "iso, got 0: write iso:lambda=5"),
        (["train", "--defense", "iso"], "iso, got 0: write iso:lambda=5"),
        (["eval", "--defense", "iso:lambda=5", "--at", "parameters"], "iso@parameters acts at parameters"),
        (["train", "--defense", "iso:lambda=5@parameters"], "acts at parameters, where fedsplitnn"),
        (["eval", "--device", "foo"], "--device cpu, or cuda"),
        (["train", "--device", "cuda:99"], "--device cpu, or cuda"),
        (["eval", "--set", "aux.n=500", *TOY], "than the 420 labeled"),
        (["eval", "--set", "data.n_labeled=900", *TOY], "expected n_labeled <= 420"),
        (["eval", "--set", "train.select=best_on_val", *TOY], "best_on_val need validation rows"),
        (["train", "--set", "train.patience=3", *TOY], "best_on_val need validation rows"),
        (["eval", "--set", "data.test=0.001", *TOY], "among the 1 test rows"),
        (["eval", "--set", "method.fedsplitnn.boundary=nope", *TOY], "fedsplitnn: unknown boundary 'nope'"),
        (["train", "--set", "method.fedsplitnn.boundary=nope", *TOY], "fedsplitnn: unknown boundary 'nope'"),
        (["eval", "--defense", "kd-k", "--lambda", "0.3,0.65", *TOY], "0.5 for kd-k with k=2"),
        (["eval", "--method", "fedcvt", "--defense", "mixup", "--lambda", "1", *TOY], "mixes rows, got mixup"),
        (["train", "--set", "aux.n=3"], "training 'aux'. Known: data, dataset"),
        (["train", "--method", "fedsplitnn", "--method", "x"], "to train, got fedsplitnn, x"),
        (["train", "--set", "train.lr=fast"], "'str' - at 'train.lr'"),
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


@pytest.mark.long
def test_a_collapsed_model_cannot_pass_a_gate(tmp_path):
    vanishing = ["epochs=20", "optimizer=sgd", "momentum=0.0", "lr=0.001", "weight_decay=999.0"]
    words = [word for setting in vanishing for word in ("--set", f"train.{setting}")]
    base = ["eval", "--dataset", "toy", "--set", "aux.folds=0", "--set", "aux.n=20", "--seeds", "1", "--jobs", "1"]
    result = run(*base, *words, "--max-leak", "mc=0.99", "--out", tmp_path)
    assert "GATE max-leak mc 0.99: UNDECIDED" in result.stdout
    assert result.exit_code == 3
    assert run("report", tmp_path).exit_code == 3, "a cell without a number, gate or no gate"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "x=" + "[" * 20_000], "unknown setting"),
        (["--set", "train.lr=" + "9" * 5000], "train.lr"),
        (["--seeds", "99999999999999999999"], "at most 10000 seeds"),
        (["--defense", "iso", "--lambda", "1e101"], "below 1e+100"),
        (["--attack", "mc:lr=1e999"], "finite number below 2^63 for lr"),
        (["--attack", "mc:lr=nan"], "lr"),
        (["--attack", "mc:batch=" + "9" * 23], "batch"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_is_computed(tmp_path, words, message):
    result = run("eval", *words, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr) < 2200
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["eval", "--dataset"], ["eval", "--config"], ["audit"], ["party", "run"]])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path, words):
    os.mkfifo(tmp_path / "f.toml")
    assert run(*words, tmp_path / "f.toml").exit_code == 2


PLUG_INS = """
import sys
from vflsec.core.attack import Attack
from vflsec.core.view import Need

class Base(Attack):
    name, reference, verified, needs = "x", "none", "none", frozenset()

    def run(self, view, *, rng): ...
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("needs = [1]", "set of Need, got [1]"),
        ("needs = None", "set of Need, got None"),
        ('name = "\\x1b[31m"', "name without control characters"),
        ('def __init__(self, *, k: "Nope" = 1): ...', "cannot be read"),
        ("def __init__(self): sys.exit(5)", "cannot be made: SystemExit"),
    ],
)
def test_a_plug_in_that_declares_something_else_is_one_line(tmp_path, body, message):
    (tmp_path / "p.py").write_text(f"{PLUG_INS}\nclass Bad(Base):\n    {body}\n")
    options = ":k=1" if "Nope" in body else ""
    result = run("eval", "--attack", f"{tmp_path / 'p.py'}:Bad{options}", "--dry-run")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evl"], "'evl'. Did you mean eval?"),
        (["adit", "x"], "'adit'. Did you mean audit?"),
        (["list", "atack"], "'atack'. Did you mean attacks?"),
        (["show", "metod", "lr"], "'metod'. Did you mean methods?"),
        (["eval", "--defense", "iso:lamda=1"], "'lamda'. Did you mean lambda?"),
        (["eval", "--defense", "gaussian-dp:epsilom=1"], "'epsilom'. Did you mean epsilon?"),
        (["eval", "--set", "train.epoch=3"], "'train'. Did you mean epochs?"),
        (["eval", "--set", "seed=3"], "'seed'. Did you mean seeds?"),
    ],
)
def test_a_typing_mistake_gets_one_line_with_the_right_word(words, said):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_kind_may_be_in_the_singular_or_the_plural():
    runs = [CliRunner().invoke(cli, words) for words in (["list", "attack"], ["list", "attacks"])]
    assert runs[0].stdout == runs[1].stdout != ""
    runs = [CliRunner().invoke(cli, ["show", kind, "norm"]) for kind in ("attack", "attacks")]
    assert runs[0].stdout == runs[1].stdout != ""
