"""Recordings: what was written is read; what was torn, damaged or foreign is never read as something else."""

import stat
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.base.errors import DataError, UsageError
from vflsec.cipher import recording
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import MAGIC, Header, Recording, RecordingWriter

HEADER = Header(role="passive", layout=CipherLayout(width=2, batch=3), n=b"\x17")


class Ping(msgspec.Struct):
    body: bytes


class Pong(msgspec.Struct):
    body: bytes


def written(path, steps=3):
    with RecordingWriter(path, HEADER) as recorder:
        for t in range(steps):
            recorder.begin(t, rate=0.1 * (t + 1))
            recorder.message("received", Ping(bytes([t])))
            recorder.note("embedding_gradient", np.full((3, 2), float(t)))
    return path


def test_what_was_written_is_read(tmp_path):
    found = Recording(written(tmp_path / "c.rec"))
    assert found.header == HEADER
    steps = list(found.steps())
    assert [step.number for step in steps] == [0, 1, 2]
    assert [step.rate for step in steps] == pytest.approx([0.1, 0.2, 0.3])
    assert [step.messages[0].decode(Ping).body for step in steps] == [b"\x00", b"\x01", b"\x02"]
    assert steps[2].notes["embedding_gradient"].tolist() == [[2.0, 2.0]] * 3


def test_only_its_owner_may_read_it(tmp_path):
    assert stat.S_IMODE(written(tmp_path / "c.rec").stat().st_mode) == 0o600


def test_an_existing_file_is_never_written_over(tmp_path):
    path = written(tmp_path / "c.rec")
    with pytest.raises(UsageError, match="which exists: name another"):
        RecordingWriter(path, HEADER)
    assert len(list(Recording(path).steps())) == 3


@given(st.lists(st.integers(-(1 << 200), 1 << 200), min_size=0, max_size=12))
def test_integers_of_any_size_are_read_as_written(values):
    note = recording.Note.from_array("share", np.array(values, dtype=object).reshape(-1, 1))
    assert note.array().ravel().tolist() == values


@settings(max_examples=40)
@given(st.data())
def test_a_file_torn_anywhere_reads_as_a_prefix(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("torn") / "c.rec")
    whole = path.read_bytes()
    full = [(step.number, len(step.messages), sorted(step.notes)) for step in Recording(path).steps()]
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        steps = [(step.number, len(step.messages), sorted(step.notes)) for step in Recording(path).steps()]
    except DataError:
        assert len(path.read_bytes()) < len(MAGIC) + 500  # the header itself is torn
        return
    assert steps[:-1] == full[: len(steps[:-1])]
    assert all(n <= m and set(a) <= set(b) for (_, n, a), (_, m, b) in zip(steps, full, strict=False))


@settings(max_examples=60)
@given(st.data())
def test_a_changed_byte_is_noticed(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("bad") / "c.rec")
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with pytest.raises(DataError):
        list(Recording(path).steps())


def test_a_resumed_recording_forgets_the_steps_that_did_not_count(tmp_path):
    path = written(tmp_path / "c.rec")
    path.write_bytes(path.read_bytes()[:-5])
    with RecordingWriter.resume(path, HEADER, step=1) as recorder:
        recorder.begin(1, rate=9.0)
        recorder.note("embedding_gradient", np.zeros((3, 2)))
    steps = list(Recording(path).steps())
    assert [(step.number, step.rate) for step in steps] == [(0, 0.1), (1, 9.0)]
    with RecordingWriter.resume(path, HEADER, step=7) as recorder:
        recorder.begin(7, rate=None)
    assert [step.number for step in Recording(path).steps()] == [0, 1, 7]
    with pytest.raises(UsageError, match="got one with other settings"):
        RecordingWriter.resume(path, msgspec.structs.replace(HEADER, role="active"), step=1)


def test_a_message_of_another_kind_is_refused(tmp_path):
    step = next(Recording(written(tmp_path / "c.rec")).steps())
    with pytest.raises(DataError, match="recorded Pong, got Ping"):
        step.messages[0].decode(Pong)


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("secret", [1.0], "unknown note 'secret'"),
        ("mu", [1.0], "2 dimensions, got shape"),
        ("mu", [[float("nan")]], "expected finite mu, got 1"),
    ],
)
def test_notes_are_checked_when_written(tmp_path, name, array, match):
    with RecordingWriter(tmp_path / "c.rec", HEADER) as recorder:
        recorder.begin(0, rate=0.1)
        with pytest.raises(UsageError, match=match):
            recorder.note(name, array)


@pytest.mark.parametrize(
    ("note", "match"),
    [
        (recording.Note("mu", "<f8", (2, 2), b"\0" * 8), "expected 4 numbers of mu"),
        (recording.Note("mu", "<f8", (1 << 40, 1 << 40), b""), "expected 1208925819614629174706176 numbers"),
        (recording.Note("mu", "<f8", (-1, -1), b"\0" * 8), "got 'mu' of shape"),
        (recording.Note("share", "integer", (1 << 40, 1 << 40), b""), "expected 1208925819614629174706176 numbers"),
        (recording.Note("share", "integer", (1, 1), b""), "expected 1 numbers of share"),
        (recording.Note("mu", "<f8", (1, 1), b"\xff" * 8), "expected finite mu"),
        (recording.Note("evil", "<f8", (1, 1), b"\0" * 8), "got 'evil'"),
    ],
)
def test_notes_are_checked_when_read(tmp_path, note, match):
    path = tmp_path / "c.rec"
    with RecordingWriter(path, HEADER) as recorder:
        recorder.begin(0, rate=0.1)
        recorder._write(note)
    with pytest.raises(DataError, match=match):
        list(Recording(path).steps())


def test_a_length_beyond_the_limit_is_refused_before_it_is_read(tmp_path):
    path = written(tmp_path / "c.rec")
    with path.open("ab") as file:
        start = (1 << 31).to_bytes(4, "big") + bytes(4)
        file.write(start + zlib.crc32(start).to_bytes(4, "big"))
    with pytest.raises(DataError, match="expected at most 268435456 bytes"):
        list(Recording(path).steps())


def test_what_is_no_recording_or_of_another_version_is_refused(tmp_path):
    path = tmp_path / "other"
    with pytest.raises(DataError, match="cannot read"):
        Recording(path)
    path.write_bytes(b"\x80\x04 something else")
    with pytest.raises(DataError, match="expected a recording of vflsec"):
        Recording(path)
    RecordingWriter(tmp_path / "new.rec", msgspec.structs.replace(HEADER, version=2)).close()
    with pytest.raises(DataError, match="version 1, got 2"):
        Recording(tmp_path / "new.rec")


def test_steps_must_go_up(tmp_path):
    path = tmp_path / "c.rec"
    with RecordingWriter(path, HEADER) as recorder:
        recorder.begin(1, rate=0.1)
        recorder.begin(1, rate=0.1)
    with pytest.raises(DataError, match="expected a step after 1, got 1"):
        list(Recording(path).steps())


@pytest.mark.parametrize("change", ["swapped", "twice", "left out"])
def test_frames_that_are_swapped_lost_or_doubled_are_damage(tmp_path, change):
    path = tmp_path / "c.rec"
    with RecordingWriter(path, HEADER) as recorder:
        for step in range(4):
            recorder.begin(step, rate=0.1)
            recorder.note("loss", np.array([float(step)]))
    content, frames, at = path.read_bytes(), [], len(MAGIC)
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        frames.append(content[at:end])
        at = end
    assert len(frames) == 9
    assert [step.number for step in Recording(path).steps()] == [0, 1, 2, 3]
    others = {
        "swapped": [*frames[:2], frames[4], frames[3], frames[2], *frames[5:]],
        "twice": [*frames[:3], frames[2], *frames[3:]],
        "left out": [*frames[:3], *frames[5:]],
    }
    path.write_bytes(MAGIC + b"".join(others[change]))
    with pytest.raises(DataError, match="checksum does not match"):
        list(Recording(path).steps())
