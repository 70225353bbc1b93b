"""What a run under encryption in one process records is what both roles see, and the audits read it."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from vflsec.attacks.delta_chain import DeltaChain
from vflsec.attacks.score_gram import ScoreGram
from vflsec.attacks.wire import Wire
from vflsec.audit.transcript import TranscriptFolder
from vflsec.base.errors import UsageError
from vflsec.cipher.recording import Recording
from vflsec.cli import cli
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.defenses.phe import EncryptedBoundary
from vflsec.methods.feature_group_method import VerticalLogisticRegression
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.methods.prada import PrADA
from vflsec.testing.federations import make_toy_federation
from vflsec.testing.recordings import attack_recording

SGD = {"optimizer": "sgd", "momentum": 0.5, "lr": 0.1, "batch": 32, "epochs": 2}


def record(folder, kind, *, train=None, model=None, source=0, parties=2):
    federation = make_toy_federation(rows=160, columns=4, source=source, parties=parties)
    for party in federation.all_parties:
        party.defenses = (EncryptedBoundary(bits=1024),)
    spec = TrainSpec(**{**SGD, **(train or {})}, pretrain=PretrainSpec(epochs=1, batch=32))
    method = kind(spec, ModelSpec(**(model or {})))
    method.build(federation)
    method.record(folder)
    for phase in method.phases:
        method.run(phase, federation)
    Trained(method, federation, {}).predict("test")
    method.close()
    return federation, method


def both(folder):
    return Recording(folder / "passive.recording"), Recording(folder / "active.recording")


def test_the_notes_of_both_roles_are_one_regression(tmp_path):
    federation, method = record(tmp_path, VerticalLogisticRegression)
    c, p = both(tmp_path / "passive_1")
    numbers = [step.number for step in c.steps()]
    passes = 2 * -(-federation.n_rows("train") // 32)
    assert numbers == [step.number for step in p.steps()] == list(range(len(numbers)))
    assert [step.rate for step in c.steps()] == [0.1] * passes + [None] * (len(numbers) - passes)
    notes = {}
    for one, other in zip(c.steps(), p.steps(), strict=True):
        found = notes[one.number] = {**one.notes, **other.notes}
        weights = np.ldexp((one.notes["share"] + other.notes["share"]).astype(float), -64)
        unit = c.header.layout.feature_precision
        assert np.allclose(found["mu"] @ weights, found["scores"], rtol=0, atol=2.0 ** (2 - unit))
        assert "embedding_gradient" not in found  # columns stay: nothing comes back
    x = federation.passive[0].features
    rows = notes[0]["rows"].copy()
    assert np.allclose(notes[0]["mu"], x["train"][torch.from_numpy(rows)].numpy(), rtol=0, atol=2.0**-20)
    tested = np.concatenate([notes[number]["rows"] for number in numbers[passes:]])
    before = sum(len(x[split]) for split in list(x)[: list(x).index("test")])
    assert (tested == before + np.arange(federation.n_rows("test"))).all()
    assert (notes[0]["labels"] == federation.active.labels["train"][torch.from_numpy(rows)].numpy()).all()
    method.predict(federation, "test")  # no longer recorded
    assert len(list(c.steps())) == len(numbers)


@pytest.mark.long
def test_recording_changes_nothing_of_the_audits_of_a_real_run(tmp_path):
    record(tmp_path, PrADA, source=96, train={"epochs": 4})
    for folder in (tmp_path / "passive_1", tmp_path / "source" / "passive_1"):
        c, p = both(folder)
        assert all(attack_recording(Wire(), one)["leak"]["messages"].headline == 0 for one in (c, p))
        assert all(step.has("mu", "share", "rows") for step in c.steps())
        assert all(step.has("embedding_gradient") for step in c.steps() if step.rate is not None)


def test_delta_tells_c_the_labels_of_split_learning_under_encryption(tmp_path):
    record(tmp_path, FedSplitNN, model={"bottom": (6,), "cut": 3})
    c, p = both(tmp_path / "passive_1")
    leak = attack_recording(DeltaChain(), c, p, n=20)["leak"]["train"]
    assert leak.headline == leak.metrics["accuracy"] == 1.0


@pytest.mark.long
def test_scores_tell_p_the_geometry_of_columns_that_stay(tmp_path):
    record(tmp_path, VerticalLogisticRegression, train={"batch": 160, "epochs": 12, "lr": 0.5})
    c, p = both(tmp_path / "passive_1")
    assert attack_recording(ScoreGram(), p, c, n=20)["leak"]["train"].headline > 0.99


def test_each_passive_party_has_its_own(tmp_path):
    record(tmp_path, FedSplitNN, model={"bottom": (6,), "cut": 3}, parties=3, train={"epochs": 1})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.recording")) == [
        f"passive_{k}/{role}.recording" for k in (1, 2) for role in ("active", "passive")
    ]
    keys = {Recording(path).header.n for path in tmp_path.rglob("passive.recording")}
    assert len(keys) == 2


def test_an_older_recording_is_not_overwritten(tmp_path):
    (tmp_path / "passive_1").mkdir()
    (tmp_path / "passive_1" / "passive.recording").write_text("mine")
    with pytest.raises(UsageError, match="new file for the recording"):
        record(tmp_path, VerticalLogisticRegression)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "lr"), "nodes to record, got lr"),
        (("--defense", "phe:on=1,backend=plain", "--set", "train.optimizer=sgd"), "to record, got masked-plain"),
    ],
)
def test_what_sends_no_message_is_not_recorded(tmp_path, arguments, said):
    result = CliRunner().invoke(cli, ["train", "--dataset", "digits", "--record", str(tmp_path / "r"), *arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "r").exists()


@pytest.mark.long
def test_train_records_and_audit_reads(tmp_path):
    settings = "train.optimizer=sgd", "train.lr=0.1", "train.epochs=1", "train.batch=512", "data.n_labeled=512"
    arguments = [word for setting in settings for word in ("--set", setting)]
    where = str(tmp_path / "r")
    defense = ["--defense", "phe:on=1,bits=1024"]
    result = CliRunner().invoke(cli, ["train", "--dataset", "digits", *defense, *arguments, "--record", where])
    assert result.exit_code == 0, result.output
    c, p = (str(tmp_path / "r" / "passive_1" / f"{role}.recording") for role in ("passive", "active"))
    assert f"recording: {c}" in result.stderr.replace("\n", "")
    for own, other in ((c, p), (p, c)):
        result = CliRunner().invoke(cli, ["audit", own, "--truth", other, "--attack", "wire", "--out", f"{own}.audit"])
        assert result.exit_code == 0, result.output
        assert "no fault" in result.output


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("secureboost", ["--defense", "id-lmid:strength=20", "--set", "method.secureboost.rows=0.5"]),
        ("secureboost-turns", ["--set", "method.secureboost-turns.exchange=plain"]),
        (
            "secureboost-layers",
            ["--set", "data.validation=0.2", "--set", "method.secureboost-layers.patience=2"],
        ),
    ],
)
def test_recorded_trees_are_read_as_trees(tmp_path, method, arguments):
    where = tmp_path / "r"
    small = ["--set", "data.n_labeled=300", "--set", f"method.{method}.rounds=3", "--dataset", "digits"]
    result = CliRunner().invoke(cli, ["train", "--method", method, *small, *arguments, "--record", str(where)])
    assert result.exit_code == 0, result.output
    assert ("nodes", "train") in {(sent.kind, sent.phase) for sent in TranscriptFolder(where).messages()}
