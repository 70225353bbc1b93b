"""Transcripts and files as others write them: no message is lost, and no row of training is a test row."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import WeightedRandomSampler

from vflsec.audit import job
from vflsec.audit.opening import from_table
from vflsec.audit.recorder import Recorder
from vflsec.audit.subject import from_transcript
from vflsec.audit.transcript import TranscriptWriter
from vflsec.audit.transcript_lines import Sent, TranscriptHeader
from vflsec.base.errors import UsageError
from vflsec.cli import cli
from vflsec.report.report import Report
from vflsec.run.job import Job
from vflsec.run.spec import AttackSpec, AuxSpec
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

PARTIES = {"bank": "active", "bureau": "passive"}
TRAIN = 400

FUSION = AttackSpec(name="fusion")


def world(folder, *, positives=0.5, n=500, width=6):
    """Write the files of a bank whose columns tell the label, and of a bureau whose columns do not."""
    rng = np.random.default_rng(5)
    y = (rng.random(n) < positives).astype(int)
    own, other = rng.normal(size=(n, 4)) + 2 * y[:, None], rng.normal(size=(n, width))
    ids = np.array([f"row {k}" for k in range(n)])
    index = pd.Index(ids, name="id")
    pd.DataFrame(own, index, [f"a{k}" for k in range(4)]).assign(label=y).to_csv(folder / "bank.csv")
    pd.DataFrame(other, index, [f"p{k}" for k in range(width)]).to_csv(folder / "bureau.csv")
    (folder / "mine.toml").write_text(
        'label = "label"\nid = "id"\n[parties.active]\nfile = "bank.csv"\n[parties.passive_1]\nfile = "bureau.csv"\n'
    )
    tensors = [torch.tensor(own).float(), torch.tensor(other).float(), torch.tensor(y)]
    return SimpleNamespace(folder=folder, ids=ids, own=tensors[0], other=tensors[1], y=tensors[2])


@pytest.fixture
def made(tmp_path):
    return world(tmp_path)


def leaks(made, *attacks, transcript="t", **options):
    """Return the leak of each attack, on training rows where there are any, and of the headline."""
    audit = job.prepare_audit(
        made.folder / transcript,
        str(made.folder / "mine.toml"),
        attacks=[AttackSpec(name=name) for name in attacks],
        draws=1,
        aux=AuxSpec(n=40, folds=0),
        **options,
    )
    out = made.folder / f"out-{transcript}"
    store = Store(out)
    with store.lock():
        list(Job(store.folder, [audit]).run(Job(store.folder, [audit]).plan()))
    summary = Report.read(out).summary
    return {point.attack: point.leak_train.mean for point in (*summary.points, *summary.worst)}


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_embeddings_of_training_rows_alone_are_used(made):
    """A bottom model that has learned the label by heart tells it, though no test row was ever sent."""
    noise = torch.randn(TRAIN, 3, generator=torch.Generator().manual_seed(0))
    h = noise + 3 * made.y[:TRAIN, None]
    with Recorder(made.folder / "t", parties=PARTIES, observer="bureau") as recorder:
        recorder.embedding(h, rows=made.ids[:TRAIN])
    assert leaks(made, "fusion", allow_misfit=True)["fusion"] > 0.98


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_how_often_a_row_is_sampled_is_used(tmp_path):
    made = world(tmp_path, positives=0.2)
    weights = torch.where(made.y[:TRAIN] == 1, 4.0, 1.0)
    sampler = WeightedRandomSampler(weights, TRAIN, generator=torch.Generator().manual_seed(0))
    with Recorder(made.folder / "t", parties=PARTIES, observer="bureau") as recorder:
        for _ in range(15):
            for rows in torch.tensor(list(sampler)).split(32):
                recorder.embedding(made.other[rows, :3], rows=made.ids[rows])
        recorder.embedding(made.other[:TRAIN, :3], rows=made.ids[:TRAIN], phase="predict")
        recorder.embedding(made.other[TRAIN:, :3], rows=made.ids[TRAIN:], split="test")
    assert leaks(made, "fusion")["fusion"] > 0.97


def noisy_gradients(made, epochs=20):
    """Yield epoch, batch, rows, embeddings and gradients in which only the mean over epochs tells the label."""
    rng = torch.Generator().manual_seed(1)
    for epoch in range(epochs):
        for batch, rows in enumerate(torch.randperm(TRAIN, generator=rng).split(50)):
            signal = (2.0 * made.y[rows, None] - 1) * torch.ones(3)
            yield epoch, batch, rows, made.other[rows, :3], signal + 6 * torch.randn(len(rows), 3, generator=rng)


def written(made, name, step, phase):
    """Write the same messages with steps and phases of a foreign engine."""
    found = []
    for epoch, batch, rows, h, gradient in noisy_gradients(made):
        common = (phase(epoch), "train", step(epoch, batch), made.ids[rows])
        found.append(Sent("embedding", "bureau", "bank", *common, h.numpy()))
        found.append(Sent("gradient", "bank", "bureau", *common, gradient.numpy()))
    header = TranscriptHeader(observer="bureau", parties=PARTIES)
    TranscriptWriter(made.folder / name, header).write(found)


@pytest.mark.long
def test_steps_and_phases_of_other_engines_lose_no_release(made):
    written(made, "straight", lambda epoch, batch: 8 * epoch + batch, lambda epoch: "train")
    written(made, "restart", lambda epoch, batch: batch, lambda epoch: "train")
    written(made, "phases", lambda epoch, batch: batch, lambda epoch: f"epoch_{epoch}")
    found = [leaks(made, "averaging", transcript=name)["averaging"] for name in ("straight", "restart", "phases")]
    assert found[0] > 0.85
    assert found == pytest.approx([found[0]] * 3)
    assert "do not tell batches apart" in " ".join(from_transcript(made.folder / "restart").notes)
    assert "epoch_0, epoch_1 and 18 more" in " ".join(from_transcript(made.folder / "phases").notes)
    assert not [note for note in from_transcript(made.folder / "straight").notes if "steps" in note]


def test_a_row_twice_in_a_batch_counts_twice_for_itself_alone(tmp_path):
    """An invertible linear map of the columns is inverted exactly, however rows are sampled."""
    made = world(tmp_path, width=3)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    rng = torch.Generator().manual_seed(2)
    with Recorder(made.folder / "t", parties=PARTIES, observer="bank") as recorder:
        for _ in range(40):
            rows = torch.randint(TRAIN, (64,), generator=rng)
            recorder.embedding(made.other[rows] @ turn, rows=made.ids[rows])
        for split, where in (("train", slice(0, TRAIN)), ("test", slice(TRAIN, None))):
            recorder.embedding(made.other[where] @ turn, rows=made.ids[where], split=split)
    assert leaks(made, "inversion-blackbox")["inversion-blackbox"] > 0.99


@pytest.mark.parametrize("split", ["unlabeled", "Train", "test"])
def test_a_row_with_a_gradient_or_another_split_was_trained_on(made, split):
    bottom = nn.Linear(6, 3)
    with Recorder(made.folder / "t", parties=PARTIES, observer="bureau") as recorder:
        for where, name in ((slice(0, 200), "train"), (slice(200, TRAIN), split)):
            h = recorder.cut(bottom(made.other[where]), rows=made.ids[where], split=name)
            F.mse_loss(h, torch.zeros_like(h)).backward()
    subject = from_transcript(made.folder / "t")
    assert set(subject.train) == set(made.ids[:TRAIN])
    assert not len(subject.test)


def test_ids_of_the_user_cannot_make_a_trained_row_a_test_row(made):
    with Recorder(made.folder / "t", parties=PARTIES, observer="bureau") as recorder:
        recorder.embedding(made.other[:TRAIN], rows=made.ids[:TRAIN])
    (made.folder / "train.txt").write_text("\n".join(made.ids[:200]))
    (made.folder / "test.txt").write_text("\n".join(made.ids[200:TRAIN]))
    data, ids = str(made.folder / "mine.toml"), {k: made.folder / f"{k}.txt" for k in ("train", "test")}
    with pytest.raises(UsageError, match="is no test row"):
        job.prepare_audit(made.folder / "t", data, train_ids=ids["train"], test_ids=ids["test"])
    audit = job.prepare_audit(made.folder / "t", data, train_ids=ids["train"], draws=1)
    assert set(audit.data.ids["test"]) == set(made.ids[TRAIN:])


def test_ids_that_differ_in_zeros_are_refused(tmp_path):
    made = world(tmp_path)
    for name in ("bank", "bureau"):
        table = pd.read_csv(tmp_path / f"{name}.csv").assign(id=range(500))
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    with Recorder(tmp_path / "t", parties=PARTIES, observer="bureau") as recorder:
        recorder.embedding(made.other[:TRAIN], rows=[f"{k:03}" for k in range(TRAIN)])
    with pytest.raises(UsageError, match="got '000' of t, .*'0'"):
        job.prepare_audit(tmp_path / "t", str(tmp_path / "mine.toml"))


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_labels_come_first_and_other_targets_are_named(made):
    """A bureau that learns the label by heart, so that no column predicts where, and whose columns are the bank's."""
    table = pd.read_csv(made.folder / "bank.csv", index_col="id")
    copy = table.drop(columns="label").add_prefix("of_")
    copy.to_csv(made.folder / "bureau.csv")
    with Recorder(made.folder / "t", parties=PARTIES, observer="bureau") as recorder:
        h = torch.randn(TRAIN, 3, generator=torch.Generator().manual_seed(0)) + 9 * made.y[:TRAIN, None]
        recorder.embedding(h, rows=made.ids[:TRAIN])
    words = [made.folder / "t", "--data", made.folder / "mine.toml", "--draws", 1, "--out", made.folder / "o"]
    words += ["--set", "aux.folds=0"]
    attacks = ["--attack", "attribute-fusion,fusion", "--max-leak", "worst=0.6", "--allow-misfit"]
    done = CliRunner().invoke(cli, ["audit", *map(str, words), *attacks], catch_exceptions=False)
    assert done.exit_code == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("VERDICT") and "NOTE" not in line]
    assert next(line for line in lines if "infers" in line).count("infers the labels of") == 1
    assert "GATE max-leak worst 0.6: FAILED" in done.stdout


@pytest.mark.long
@pytest.mark.usefixtures("few_trees")
def test_labels_that_belong_to_other_rows_are_suspected(made):
    bank = pd.read_csv(made.folder / "bank.csv")
    bank["label"] = np.random.default_rng(0).permutation(bank["label"])
    bank.to_csv(made.folder / "bank.csv", index=False)
    with Recorder(made.folder / "t", parties=PARTIES, observer="bureau") as recorder:
        recorder.embedding(made.other[:TRAIN], rows=made.ids[:TRAIN])
    audit = job.prepare_audit(
        made.folder / "t", str(made.folder / "mine.toml"), attacks=[AttackSpec(name="fusion")], draws=1
    )
    store = Store(made.folder / "o")
    with store.lock():
        list(Job(store.folder, [audit]).run(Job(store.folder, [audit]).plan()))
    assert "nothing is shown to be" in " ".join(Report.read(made.folder / "o").summary.alarms)


def test_the_only_other_column_of_a_table_has_the_ids(made):
    table = pd.DataFrame(made.other[:, :3].numpy(), columns=[f"e_{k}" for k in range(3)])
    table.insert(0, "customer", [f"0{k}" for k in range(500)])
    table.to_csv(made.folder / "embeddings.csv", index=False)

    assert from_table(made.folder / "embeddings.csv", "passive_1").embeddings.index[:2].tolist() == ["00", "01"]
