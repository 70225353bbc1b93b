"""The Python API says and does what the command line does."""

import html
import io
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import vflsec
from vflsec.base.errors import Diverged, InsufficientView, UsageError, VflsecError
from vflsec.cli import cli
from vflsec.core import registry
from vflsec.defenses.iso import IsotropicNoise
from vflsec.run import engine

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SMALL = {"dataset": "toy", "data": {"options": {"rows": 300}}, "train": {"epochs": 2}}
ATTACKED = {**SMALL, "attack": "mc:epochs=5", "aux": {"n": 20, "folds": 0}, "seeds": 2, "jobs": 1}


def vflsec_(words):
    """Run a command in this process."""
    with pytest.raises(SystemExit, match="0") if words[0] == "audit" else nullcontext():
        cli.main(words, standalone_mode=False)


@pytest.mark.long
def test_a_strength_may_stand_with_its_defense(tmp_path):
    report = vflsec.evaluate(**ATTACKED, defense="iso:lambda=5", fixed=["iso:lambda=1@embedding"], out=tmp_path)
    assert [point.strength for point in report.points] == [0.0, 5.0]
    assert [(d["name"], d["strength"], d["at"]) for d in report.manifest.settings["fixed"]] == [
        ("iso", 1.0, ["embedding"])
    ]
    assert (tmp_path / "curve.svg").exists()


@pytest.mark.long
def test_plug_ins_are_called_as_they_call_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "from vflsec.defenses.iso import IsotropicNoise\nfrom vflsec.methods.fedsplitnn import FedSplitNN\n"
    noise, method = "class N(IsotropicNoise):\n    name = 'mine'\n", "class M(FedSplitNN):\n    name = 'my-way'\n"
    (tmp_path / "own.py").write_text(head + noise + method + "class T(IsotropicNoise):\n    name = 'iso'\n")
    report = vflsec.evaluate(
        **ATTACKED, defense=["own.py:N:lambda=5", "own.py:T:lambda=5", "iso:lambda=5"], methods="own.py:M", out="run"
    )
    assert {point.method for point in report.points} == {"my-way"}
    assert {point.defense for point in report.points} == {"mine", "own.py:T", "iso"}  # two call themselves iso
    assert f"Guarantee: {html.escape(IsotropicNoise.guarantee)}." in report.to_html()
    assert "own.py" in (tmp_path / "run" / "spec.toml").read_text()


@pytest.mark.long
def test_an_audit_from_python_is_that_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    vflsec_(["train", "--dataset", "toy", "--set", "data.options.rows=300", "--set", "train.epochs=2", "--out", "ckpt"])
    found = vflsec.audit_system("ckpt", attack="mc:epochs=5", draws=2, aux={"n": 20}, out="python")
    vflsec_(["audit", "ckpt", "--attack", "mc:epochs=5", "--draws", "2", "--set", "aux.n=20", "--out", "shell"])
    expected = vflsec.Report.read("shell").to_dict()
    assert found.to_dict()["verdict"] == expected["verdict"]
    for key in ("points", "worst"):
        assert [one["leak"] for one in found.to_dict()[key]] == [one["leak"] for one in expected[key]]
    assert (tmp_path / "python" / "report.html").exists()
    with pytest.raises(UsageError, match=r"run\.csv .*--messages is messages="):
        vflsec.audit_system("run.csv", messages="ckpt")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dataset": "toy", "aux": {"n": 10**6}}, '--set aux.n=... is aux={"n": ...}'),
        ({"dataset": "toy", "attack": "norm", "adversary": "active"}, "(in Python, --adversary is adversary=)"),
        ({"methods": "fedhssl", "method": "x"}, "table of options for method"),
    ],
)
def test_errors_name_the_arguments(arguments, told):
    with pytest.raises(VflsecError) as caught:
        vflsec.evaluate(**arguments)
    assert told in str(caught.value)


@pytest.mark.long
def test_a_model_that_is_trained_badly_is_told(tmp_path):
    """An effect of two parties' columns together, which an additive head cannot see."""
    rng = np.random.default_rng(0)
    own, other = rng.normal(size=(2, 2000))
    bank = pd.DataFrame({"a": own, "y": (own * other > 0).astype(int)})
    data = vflsec.dataset(active=bank, passive=pd.DataFrame({"b": other}), label="y")
    chosen = {"attack": "mc:epochs=5", "seeds": 1, "jobs": 1, "train": {"epochs": 2}, "aux": {"n": 20, "folds": 0}}
    report = vflsec.evaluate(dataset=data, out=tmp_path, **chosen)
    assert any("a quick model of all" in note for note in report.summary.notes)
    same = vflsec.evaluate(**{**ATTACKED, "train": {"epochs": 20}}, out=tmp_path / "toy")
    assert not any("a quick model of all" in note for note in same.summary.notes)


def test_a_strength_is_given_once(tmp_path):
    with pytest.raises(UsageError, match="expected the strength once"):
        vflsec.evaluate(**ATTACKED, defense="iso:lambda=5", strengths=[1], out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["foo", "cuda:99", "cuda:x", "cpu:0"])
def test_devices_that_are_not_there(tmp_path, device):
    message = r"--device cpu, .*\(\d here\), got"
    with pytest.raises(UsageError, match=message):
        vflsec.evaluate(**ATTACKED, device=device, out=tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        vflsec.train(**SMALL, device=device)
    assert not list(tmp_path.iterdir())


def test_a_cluster_may_have_devices_that_this_machine_lacks():
    engine.check_device("cuda:99", here=False)
    with pytest.raises(UsageError, match="got 'foo'"):
        engine.check_device("foo", here=False)


def test_train_takes_tables_and_defenses():
    trained = vflsec.train(
        **SMALL, options={"boundary": "plain"}, fixed=["iso:lambda=1@embedding"], defense="iso:lambda=5"
    )
    assert [d.strength for d in trained.federation.active.defenses] == [1.0, 5.0]
    assert trained.predict("test").shape == (90, 2)


def test_few_labels_train_although_no_adversary_could_have_them():
    assert vflsec.train(**{**SMALL, "data": {"n_labeled": 40}}).federation.n_rows("train") == 40


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"boundary": "nope"}}, "unknown boundary 'nope'"),
        ({"options": {"cut": 3}}, "fedsplitnn: unknown option 'cut'"),
        ({"seeds": 3}, "training 'seeds'"),
        ({"defense": "iso"}, "fixed defense iso"),
        ({"data": {"n_labeled": 900}}, "expected n_labeled <= 420"),
        ({"train": {"patience": 1}}, "need validation rows"),
    ],
)
def test_wrong_settings_of_a_training(settings, message):
    with pytest.raises(UsageError, match=message):
        vflsec.train(**{**SMALL, **settings})


def test_a_training_without_a_number_is_raised():
    with pytest.raises(Diverged, match="diverged: .* lower train.lr"):
        vflsec.train(**{**SMALL, "train": {"epochs": 2, "lr": 1e30, "optimizer": "sgd"}})
    train = {"epochs": 20, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 999.0}
    with pytest.raises(Diverged, match="collapsed: .*predicts the same"):
        vflsec.train(**{**SMALL, "train": train})


def test_attack_takes_what_train_returns():
    trained = vflsec.train(dataset="toy", train={"epochs": 5})
    leak = vflsec.attack(trained, "logistic", n_aux=20)
    assert leak["test"]["metrics"]["auc"] > 0.8
    assert leak["train"]["n"] == trained.federation.n_rows("train") - 20


def test_attack_on_what_was_not_kept():
    trained = vflsec.train(dataset="toy", train={"epochs": 1})
    with pytest.raises(UsageError, match="'passive_9'. Did you mean passive_1"):
        vflsec.attack(trained, "mc", adversary="passive_9", n_aux=20)
    for rows in (5000, trained.federation.n_rows("train") - 1):
        with pytest.raises(UsageError, match="expected fewer auxiliary labels"):
            vflsec.attack(trained, "mc", n_aux=rows)


def test_settings_that_do_not_exist_name_the_nearest():
    with pytest.raises(UsageError, match=r"'atack'.*mean attack\?.*attack, .*defense"):
        vflsec.evaluate(atack="mc")
    with pytest.raises(UsageError, match="strengths=, got no defense"):
        vflsec.evaluate(strengths=[1])


@pytest.mark.long
def test_all_warns_of_what_it_leaves_out(tmp_path, monkeypatch):
    """Of four attacks only: that each registered attack runs is tested one by one."""
    entries, some = registry.list_all, ("mc", "norm", "direct", "logistic")
    monkeypatch.setattr(
        registry,
        "list_all",
        lambda kind: {name: one for name, one in entries(kind).items() if kind != "attacks" or name in some},
    )
    settings = {**ATTACKED, "attack": ["mc:epochs=5", "all"], "seeds": 1}
    with pytest.warns(UserWarning, match=r"all attacks: .*direct: .*model\.head=none"):
        report = vflsec.evaluate(**settings, out=tmp_path)
    assert {"norm", "mc"} <= {point.attack for point in report.points}


def test_an_attack_in_training_comes_too_late():
    trained = vflsec.train(**SMALL)
    with pytest.raises(UsageError, match=r"'active-mc' acts in training.*vflsec\.evaluate"):
        vflsec.attack(trained, "active-mc", n_aux=20)


def test_an_unfinished_attack_is_said_to_be():
    with pytest.warns(UserWarning, match="'mc' is unconverged.*lower bound"):
        vflsec.attack(vflsec.train(**SMALL), "mc", n_aux=20, epochs=2)


def test_the_victims_model_may_be_given_away():
    trained = vflsec.train(**SMALL)
    with pytest.raises(InsufficientView, match=r"train\(\) does not keep.*vflsec\.evaluate"):
        vflsec.attack(trained, "inversion-whitebox", adversary="active", n_aux=20, victim_model=True)


def test_arguments_may_be_of_numpy_and_torch(tmp_path):
    given = {"defense": "iso", "seeds": np.int64(1), "device": torch.device("cpu"), "progress": False, "jobs": 1}
    given |= {"attack": "norm", "train": {"epochs": np.int64(2)}, "engine": "local"}
    report = vflsec.evaluate(**{**SMALL, **given}, strengths=np.array([1.0]), out=tmp_path / "run")
    again = vflsec.evaluate(**{**SMALL, **given}, strengths=1, out=tmp_path / "run")
    assert {point.strength for point in again.points} == {0.0, 1.0}
    assert again.to_csv() == report.to_csv()


@pytest.mark.parametrize(
    "call",
    [
        lambda: vflsec.evaluate(**SMALL, attack=None),
        lambda: vflsec.evaluate(**SMALL, methods=None),
        lambda: vflsec.evaluate(**SMALL, defense="iso", strengths=None),
        lambda: vflsec.evaluate(**SMALL, out=3),
        lambda: vflsec.evaluate(**SMALL, out=""),
        lambda: vflsec.evaluate(**SMALL, engine="ray"),
        lambda: vflsec.train(dataset="toy", seed="x"),
        lambda: vflsec.train(dataset="toy", options=3),
        lambda: vflsec.audit_system(None),
        lambda: vflsec.audit_system("toy", attack=None),
        lambda: vflsec.Report.read(None),
        lambda: vflsec.SweepReport.read(3),
    ],
)
def test_arguments_of_other_types_are_one_line(call):
    with pytest.raises(UsageError, match=r"^expected [^\n]*, got [^\n]*$"):
        call()


def test_data_of_an_audit_may_be_a_path(tmp_path):
    (tmp_path / "sent.csv").write_text("id,e_0\n1,0.5\n")
    said = []
    for data in ("none.toml", Path("none.toml")):
        with pytest.raises(VflsecError) as error:
            vflsec.audit_system(tmp_path / "sent.csv", data, attack="mc")
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "none.toml" in said[0]
