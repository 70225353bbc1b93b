"""The recorder changes nothing in a training loop, and writes what crosses the cut layer."""

import math
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.audit import recorder as recording
from vflsec.audit.recorder import Recorder
from vflsec.audit.transcript import TranscriptFolder
from vflsec.base.errors import UsageError

PARTIES = {"bank": "active", "bureau": "passive"}
X, Y = torch.randn(60, 7, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2


def train(recorder=None, *, epochs=2, dtype=torch.float32, seen=None):
    """Split learning in plain PyTorch; return all weights."""
    torch.manual_seed(0)
    bottom, top = nn.Linear(7, 3).to(dtype), nn.Linear(3, 2).to(dtype)
    optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.1)
    for _ in range(epochs):
        for rows in torch.randperm(60).split(16):
            h = bottom(X[rows].to(dtype))
            if seen is not None:
                seen.append(("embedding", rows, h.detach().clone()))
                h.register_hook(lambda g, rows=rows: seen.append(("gradient", rows, g.clone())))
            if recorder:
                h = recorder.cut(h, rows=rows)
            loss = F.cross_entropy(top(h), Y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        h = bottom(X.to(dtype))
        if recorder:
            recorder.cut(h, rows=torch.arange(60), split="test")
        top(h)
    return [p.detach().clone() for p in (*bottom.parameters(), *top.parameters())]


def test_recording_changes_no_weight(tmp_path):
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        recorded = train(recorder)
    assert all(torch.equal(one, other) for one, other in zip(recorded, train(), strict=True))


def test_it_writes_embeddings_and_gradients_in_order(tmp_path):
    seen = []
    with Recorder(tmp_path / "t", parties=PARTIES, classes=2) as recorder:
        train(recorder, seen=seen)
    messages = list(TranscriptFolder(tmp_path / "t").messages())
    trained = [m for m in messages if m.phase == "train"]
    assert [m.kind for m in trained] == ["embedding", "gradient"] * 8
    assert [m.step for m in trained[::2]] == [m.step for m in trained[1::2]] == list(range(8))
    for (kind, rows, value), m in zip(seen, trained, strict=True):
        assert (kind, [str(int(r)) for r in rows]) == (m.kind, list(m.rows))
        assert (m.sender, m.receiver) == (("bureau", "bank") if kind == "embedding" else ("bank", "bureau"))
        np.testing.assert_array_equal(value.numpy(), m.values)
    (predicted,) = [m for m in messages if m.phase != "train"]
    assert (predicted.phase, predicted.split, predicted.values.shape) == ("predict", "test", (60, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_recorded(tmp_path, dtype):
    seen = []
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        train(recorder, dtype=dtype, seen=seen, epochs=1)
    first = next(TranscriptFolder(tmp_path / "t").messages())
    np.testing.assert_array_equal(first.values, seen[0][2].float().numpy())


def test_what_is_changed_afterwards_is_not_what_was_recorded(tmp_path):
    h, rows = torch.ones(2, 3), torch.tensor([1, 2])
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        recorder.embedding(h, rows=rows)
        h.zero_()
        rows.zero_()
    (message,) = TranscriptFolder(tmp_path / "t").messages()
    assert message.values.tolist() == [[1.0] * 3] * 2
    assert list(message.rows) == ["1", "2"]


def test_several_passive_parties_are_named(tmp_path):
    with Recorder(tmp_path / "t", parties={**PARTIES, "shop": "passive"}) as recorder:
        with pytest.raises(UsageError, match="party= .*bureau, shop, got None"):
            recorder.cut(torch.ones(2, 3), rows=[1, 2])
        recorder.cut(torch.ones(2, 3), rows=[1, 2], party="shop")
        recorder.cut(torch.ones(2, 4), rows=[1, 2], party="bureau")
    assert [m.sender for m in TranscriptFolder(tmp_path / "t").messages()] == ["shop", "bureau"]


def test_engines_without_autograd_call_it_plainly(tmp_path):
    with Recorder(tmp_path / "t", parties=PARTIES, observer="bureau") as recorder:
        step = recorder.embedding(torch.ones(2, 3), rows=["x", "y"])
        recorder.gradient(torch.zeros(2, 3), rows=["x", "y"], step=step)
        recorder.prediction(torch.ones(2, 2), rows=["x", "y"], receiver="bureau")
    assert [m.kind for m in TranscriptFolder(tmp_path / "t").messages()] == ["embedding", "gradient", "prediction"]


def test_the_page_records_a_training(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "record_your_own_training.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    batches = [(rows, X[rows, :3], X[rows, 3:], Y[rows]) for rows in torch.arange(60).split(20)]
    names = {"batches": batches, "bank": nn.Linear(3, 2), "bottom": nn.Linear(4, 2), "top": nn.Linear(4, 2)}
    exec(code, {**names, "torch": torch, "F": F})  # noqa: S102  (our own page)
    kinds = [(m.kind, m.step) for m in TranscriptFolder(tmp_path / "transcript").messages()]
    assert kinds == [(kind, step) for step in range(3) for kind in ("embedding", "gradient")]


def test_ids_must_fit_the_rows(tmp_path):
    refused = pytest.raises(UsageError, match="2 rows, got 3")
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder, refused:
        recorder.cut(torch.ones(2, 3), rows=[1, 2, 3])


def test_a_full_disk_does_not_cost_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "FLUSH", 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "t", parties=PARTIES)
    monkeypatch.setattr(recorder._writer, "write_lines", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train(recorder)
        with pytest.raises(OSError, match="No space left"):
            recorder.close()
    assert any("recording has stopped" in str(one.message) for one in caught)
    assert all(torch.equal(one, other) for one, other in zip(weights, train(), strict=True))


@pytest.mark.long
def test_memory_is_bounded_by_waiting_for_the_disk(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "t", parties=PARTIES)
    monkeypatch.setattr(recording, "FLUSH", 1)
    write = recorder._writer.write_lines
    monkeypatch.setattr(recorder._writer, "write_lines", lambda *lines: (time.sleep(0.001), write(*lines)))
    most = 0
    for _ in range(400):
        recorder.embedding(torch.ones(2, 3), rows=[1, 2])
        most = max(most, recorder._queue.qsize())
    recorder.close()
    assert most <= recording.WAITING
    assert sum(part.rows for part in TranscriptFolder(tmp_path / "t").parts) == 800


KILLED = """
import os, sys, torch
from vflsec.audit import recorder
recorder.FLUSH = 1000
r = recorder.Recorder(sys.argv[1], parties={"bank": "active", "bureau": "passive"})
for k in range(100000):
    r.embedding(torch.full((8, 4), float(k)), rows=list(range(8)))
    print(k, flush=True)
"""


@pytest.mark.chaos
def test_a_killed_run_leaves_what_it_had_written(tmp_path):
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "t")], stdout=subprocess.PIPE, text=True)
    for line in run.stdout:
        if line == "500\n":
            run.kill()
            break
    run.wait()
    run.stdout.close()
    found = list(TranscriptFolder(tmp_path / "t").messages())
    assert len(found) > 100
    assert [m.step for m in found] == list(range(len(found)))
    assert all((m.values == m.step).all() for m in found)


def recorded(folder):
    return list(TranscriptFolder(folder).messages())


def test_ids_are_those_of_the_call_though_the_caller_changes_them(tmp_path):
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        for ids in (np.arange(3), [0, 1, 2], torch.arange(3)):
            h = recorder.cut(torch.zeros(3, 2, requires_grad=True) * 1, rows=ids)
            ids[0] = 77
            h.sum().backward()
    assert {tuple(one.rows) for one in recorded(tmp_path / "t")} == {("0", "1", "2")}


def test_numbers_and_texts_name_the_same_rows(tmp_path):
    large = 2**53 + 1
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        for ids in (np.array([large], dtype=np.uint64), np.array([large]), [str(large)]):
            recorder.embedding(torch.ones(1, 2), rows=ids)
    assert {one.rows[0] for one in recorded(tmp_path / "t")} == {str(large)}


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (torch.ones(3, 2), {"rows": None}, "one id for each row"),
        (torch.ones(3, 2), {"rows": "abc"}, "one id for each row"),
        (torch.ones(3, 2), {"rows": [1, 2]}, "3 rows, got 2"),
        (torch.ones(3, 2), {"step": -1}, "a step of at least 0"),
        (torch.ones(3, 2), {"step": 2**70}, "a step of at least 0"),
        (torch.ones(3, 2), {"phase": "a\nb"}, "plain characters"),
        (torch.ones(3, 2), {"split": "x" * 65}, "plain characters"),
        (torch.ones(3, 2), {"phase": 7}, "plain characters"),
        (torch.ones(3, 2), {"party": "bank"}, "passive party"),
        (torch.ones(3, 5), {}, "expected 2 numbers a row as before, got 5: pad texts to one length"),
        (torch.ones(3, 0), {}, "at least one number"),
        (torch.tensor(1.0), {}, "at least one number"),
        (np.ones((3, 2)), {}, "a tensor"),
        (torch.ones(3, 2, dtype=torch.complex64), {}, "real numbers"),
        (torch.ones(3, 2).to_sparse(), {}, "a dense tensor"),
    ],
)
def test_what_a_reader_would_refuse_is_refused_at_the_call(tmp_path, value, changes, message):
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        recorder.embedding(torch.ones(3, 2), rows=[1, 2, 3])
        with pytest.raises(UsageError, match=message):
            recorder.embedding(value, **{"rows": [1, 2, 3], **changes})
    assert len(recorded(tmp_path / "t")) == 1


def test_only_messages_of_the_observer_are_recorded(tmp_path):
    parties = {"bank": "active", "a": "passive", "b": "passive"}
    with Recorder(tmp_path / "t", parties=parties, observer="a") as recorder:
        with pytest.raises(UsageError, match="who records them"):
            recorder.cut(torch.ones(1, 2), rows=[1], party="b")
        with pytest.raises(UsageError, match="passive party"):
            recorder.prediction(torch.ones(1, 2), rows=[1], receiver="nobody")


@pytest.mark.parametrize(
    "change", [{"parties": {"bank": "Active", "b": "passive"}}, {"classes": 2.5}, {"classes": "x"}]
)
def test_a_header_that_no_reader_accepts(tmp_path, change):
    with pytest.raises(UsageError):
        Recorder(tmp_path / "t", **{"parties": PARTIES, **change})


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_vectors_that_are_not_finite_end_the_recording_and_not_the_training(tmp_path, bad):
    recorder = Recorder(tmp_path / "t", parties=PARTIES)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        recorder.embedding(torch.ones(2, 2, dtype=torch.float64), rows=[1, 2])
        for _ in range(2 * recording.WAITING):  # more than may wait: a dead thread would block here
            recorder.embedding(torch.full((2, 2), bad, dtype=torch.float64), rows=[1, 2])
        with pytest.raises(UsageError, match="embedding 1 of train"):
            recorder.close()
    assert "recording has stopped" in str(issued[0].message)
    assert len(recorded(tmp_path / "t")) == 1, "what was seen before is kept"


def test_an_error_of_the_loop_comes_before_one_of_the_recorder(tmp_path):
    def loop():
        with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
            recorder.embedding(torch.full((1, 2), math.nan), rows=[1])
            raise ZeroDivisionError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ZeroDivisionError):
            loop()


def test_a_second_training_is_not_written_into_the_transcript_of_the_first(tmp_path):
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        recorder.embedding(torch.ones(4, 2), rows=[1, 2, 3, 4])
    with pytest.raises(UsageError, match="found a transcript .*resume=True"):
        Recorder(tmp_path / "t", parties=PARTIES)
    assert len(recorded(tmp_path / "t")) == 1


def test_two_recorders_do_not_write_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "PATIENCE", 0.1)
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        with pytest.raises(UsageError, match="one recorder in .*another"):
            Recorder(tmp_path / "t", parties=PARTIES)
        recorder.embedding(torch.ones(4, 2), rows=[1, 2, 3, 4])
    Recorder(tmp_path / "t", parties=PARTIES, resume=True).close()
    assert len(recorded(tmp_path / "t")) == 1


def test_small_messages_do_not_pile_up(tmp_path):
    with Recorder(tmp_path / "t", parties=PARTIES) as recorder:
        for _ in range(10_000):
            recorder.embedding(torch.ones(1, 1), rows=[1])
            assert len(recorder._seen) * recording.OVERHEAD <= recording.FLUSH


def test_a_continued_transcript_goes_on_with_its_steps(tmp_path):
    for k in range(2):
        with Recorder(tmp_path / "t", parties=PARTIES, resume=k > 0) as recorder:
            for _ in range(3):
                recorder.embedding(torch.ones(4, 2), rows=[1, 2, 3, 4])
    found = recorded(tmp_path / "t")
    assert [one.step for one in found] == [0, 1, 2, 3, 4, 5]
    assert all(len(one.rows) == 4 for one in found)


def test_a_recorder_without_messages_can_be_continued(tmp_path):
    for _ in range(2):
        with Recorder(tmp_path / "t", parties=PARTIES):
            pass
    assert recorded(tmp_path / "t") == []
