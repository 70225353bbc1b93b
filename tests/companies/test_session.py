"""A run over several connections and processes: nothing is lost, nothing counts twice, and no other peer gets in."""

import re
import shutil
import threading
import time
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest
from remote_pair import HERE, Masks, make_job, owns, run_both, session

from vflsec.base.errors import PeerLost, PeerRefused, ProtocolError, StoreError, UsageError
from vflsec.cipher.recording import Recording
from vflsec.cipher.roles.exchange import EncryptedDelta, Features, NoisedGradient, Scores
from vflsec.companies.identity import Identity
from vflsec.companies.link import Dialer, Listener
from vflsec.companies.messages import FIRST, KINDS, Done, Hello, get_limits
from vflsec.companies.session import BatchPort, Session
from vflsec.companies.wire import HEADER, MAGIC, VERSION, Connection

JOB = make_job(momentum=0.5, epochs=3)  # six batches
OWN = owns(JOB)


class Crash(Exception):
    """Stands for a kill: nothing that follows is run."""


@pytest.fixture(scope="module")
def calm(keys, tmp_path_factory):
    """An undisturbed run with masks that can be drawn again."""
    made, found, errors = run_both(keys, JOB, OWN, tmp_path_factory.mktemp("calm"), masks=True)
    assert not errors
    return {role: side.side.models() for role, side in made.items()}, found


def fails(kind, call):
    """Return what the error says that ``call`` must raise."""
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def same(models, expected):
    return all((models[role][key] == value).all() for role in expected for key, value in expected[role].items())


def crash_at(monkeypatch, role, method, kind, step):
    """Let ``role`` die once as it is about to send or has received a ``kind`` of batch ``step``."""
    happened = []
    whole = getattr(BatchPort, method)

    def until(talk, message):
        found = None if method == "send" else whole(talk, message)
        is_kind = (type(message) if method == "send" else message) is kind
        if is_kind and talk._step == step and talk._wire is mine["wire"] and not happened:
            happened.append(True)
            raise Crash
        return whole(talk, message) if method == "send" else found

    mine, connect = {}, Session._connect

    def noting(self):
        wire = connect(self)
        if self.side.role == role:
            mine["wire"] = wire
        return wire

    monkeypatch.setattr(Session, "_connect", noting)
    monkeypatch.setattr(BatchPort, method, until)
    return happened


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("role", "method", "kind", "step"),
    [
        ("active", "receive", Features, 0),
        ("active", "send", EncryptedDelta, 3),  # p has kept a batch that C has not
        ("passive", "receive", EncryptedDelta, 3),
        ("passive", "send", NoisedGradient, 4),  # C's share has moved in memory alone
        ("active", "receive", NoisedGradient, 5),
        ("passive", "send", Scores, 6),  # in the middle of the predictions
        ("active", "receive", Scores, 6),
    ],
)
def test_whoever_dies_wherever_the_numbers_are_the_same(keys, tmp_path, monkeypatch, calm, role, method, kind, step):
    happened = crash_at(monkeypatch, role, method, kind, step)
    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        links = {"passive": listener, "active": Dialer((HERE, listener.port), Identity(keys / "active"), 5)}
        models, deaths = {}, []

        def live(own_role):
            while True:
                made = session(own_role, JOB, OWN[own_role], tmp_path / own_role, links[own_role], Masks(own_role))
                try:
                    made.finish()
                    models[own_role] = made.side.models()
                    return
                except Crash:
                    deaths.append(own_role)
                finally:
                    made.snapshots.close()

        threads = [threading.Thread(target=live, args=(r,)) for r in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert happened
    assert deaths == [role]
    assert same(models, calm[0])


def begun(keys, folder, *, batches=2, job=JOB, masks=False):
    """Run both sides until C gives up for p has died after ``batches``; returns C's error."""
    drawn = {role: Masks(role) if masks else None for role in ("passive", "active")}

    def stop(step):
        if step == batches:
            raise Crash
        if masks:
            drawn["active"].begin(step)

    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        dialer = Dialer((HERE, listener.port), Identity(keys / "active"), 5)
        c = session("passive", job, OWN["passive"], folder / "passive", listener, drawn["passive"], patience=1)
        p = session("active", job, OWN["active"], folder / "active", dialer, drawn["active"], begin=stop)
        thread = threading.Thread(target=fails, args=(Crash, p.finish))
        thread.start()
        with pytest.raises(PeerLost) as error:
            c.finish()
        thread.join()
        for side in (c, p):
            side.snapshots.close()
    return str(error.value)


def states(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*/state-*")}


@pytest.mark.long
def test_a_peer_that_vanishes_ends_the_wait_and_the_line_says_how_to_go_on(keys, tmp_path):
    started = time.monotonic()
    line = begun(keys, tmp_path)
    assert time.monotonic() - started < 20
    assert "progress. 2 of 6 batches" in line
    assert "run the same command again" in line
    _, found, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not errors
    assert found["passive"].batches == 6


@pytest.mark.long
def test_states_are_private_and_gone_at_the_end(keys, tmp_path):
    begun(keys, tmp_path)
    files = sorted(path for path in tmp_path.glob("*/*") if path.name != ".lock")
    three = [f"state-{step:08}.bin" for step in range(3)]  # the last two, and the one before the epoch
    expected = [
        *(f"active/{n}" for n in ["journal.bin", *three]),
        *(f"passive/{name}" for name in ["journal.bin", "key.bin", *three]),
    ]
    assert [str(path.relative_to(tmp_path)) for path in files] == expected
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "passive").stat().st_mode & 0o777 == 0o700
    run_both(keys, JOB, OWN, tmp_path)
    assert {path.name for path in tmp_path.glob("passive/*")} == {".lock", "passive.safetensors", "result.json"}
    assert {path.name for path in tmp_path.glob("active/*")} == {
        ".lock",
        "active.safetensors",
        "predictions.csv",
        "result.json",
    }


@pytest.mark.sampled
@pytest.mark.parametrize("replaced", ["passive", "active"])
def test_a_peer_without_the_run_s_state_is_refused_and_nothing_is_lost(keys, tmp_path, replaced):
    begun(keys, tmp_path)
    (tmp_path / replaced).rename(tmp_path / "elsewhere")
    before = states(tmp_path)
    _, found, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not found
    assert all(isinstance(error, PeerRefused) for error in errors.values())
    other = "active" if replaced == "passive" else "passive"
    assert "one run on both sides" in str(errors[other])
    assert {name: content for name, content in states(tmp_path).items() if name in before} == before
    shutil.rmtree(tmp_path / replaced)
    (tmp_path / "elsewhere").rename(tmp_path / replaced)
    assert not run_both(keys, JOB, OWN, tmp_path)[2]


def test_an_old_copy_is_refused(keys, tmp_path):
    begun(keys, tmp_path, batches=1)
    shutil.copytree(tmp_path / "active", tmp_path / "copy")
    begun(keys, tmp_path, batches=5)
    shutil.rmtree(tmp_path / "active")
    (tmp_path / "copy").rename(tmp_path / "active")
    _, _, errors = run_both(keys, JOB, OWN, tmp_path)
    assert "gone back to an old" in str(errors["passive"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.3}, r"train.lr = 0.2 here and 0.3 there"),
        ({"rows": 39}, '"40 rows" here.*"39 rows"'),
    ],
)
def test_another_job_is_refused_on_both_sides(keys, tmp_path, change, said):
    other = make_job(**{"momentum": 0.5, "epochs": 3, **change})
    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        dialer = Dialer((HERE, listener.port), Identity(keys / "active"), 5)
        c = session("passive", JOB, OWN["passive"], tmp_path / "passive", listener)
        p = session("active", other, OWN["active"], tmp_path / "active", dialer)
        errors = []
        thread = threading.Thread(target=lambda: errors.append(fails(PeerRefused, p.finish)))
        thread.start()
        with pytest.raises(PeerRefused, match=said):
            c.finish()
        thread.join()
    assert "one job on both sides" in errors[0]


def test_other_rows_are_refused(keys, tmp_path):
    fewer = owns(JOB, rows=39)
    _, _, errors = run_both(keys, JOB, {"passive": OWN["passive"], "active": fewer["active"]}, tmp_path)
    assert re.search("28 train .*27 train ", str(errors["passive"]))


@pytest.mark.long
def test_a_run_of_another_job_is_not_gone_on_with(keys, tmp_path):
    begun(keys, tmp_path)
    with pytest.raises(StoreError, match=r"got train.lr = 0.2 there and 0.3 now"):
        session("passive", make_job(momentum=0.5, epochs=3, lr=0.3), OWN["passive"], tmp_path / "passive", None)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_where_every_state_is_damaged_nothing_goes_on(keys, tmp_path):
    begun(keys, tmp_path)
    for path in (tmp_path / "active").glob("state-*"):
        damage(path)
    with pytest.raises(StoreError, match="checksum does not match"):
        session("active", JOB, OWN["active"], tmp_path / "active", None)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["key.bin", "journal.bin"])
def test_a_damaged_key_or_journal_is_refused(keys, tmp_path, name):
    begun(keys, tmp_path)
    damage(tmp_path / "passive" / name)
    with pytest.raises(StoreError, match=f"{name} as it was written"):
        session("passive", JOB, OWN["passive"], tmp_path / "passive", None)


@pytest.mark.long
@pytest.mark.parametrize(("role", "which"), [("passive", [-1]), ("active", [-1]), ("active", [-1, -2])])
def test_both_go_on_from_the_last_state_that_is_not_damaged(keys, tmp_path, calm, role, which):
    begun(keys, tmp_path, batches=5, masks=True)
    for at in which:
        damage(sorted((tmp_path / role).glob("state-*"))[at])
    told = []
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True, tell=told.append)
    assert not errors
    assert same({role: side.side.models() for role, side in made.items()}, calm[0])
    assert "the state after batch 5 is damaged; going on from one that is not, if both parties can" in told


@pytest.mark.long
def test_a_kill_before_older_states_are_removed_ends_no_run(keys, tmp_path, calm, monkeypatch):
    remove = Path.unlink

    def crash(path, **options):
        if path == tmp_path / "active" / "state-00000003.bin":
            raise Crash
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", crash)
        begun(keys, tmp_path, batches=6, masks=True)
    assert len(list((tmp_path / "active").glob("state-*"))) == 5
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not errors
    assert same({role: side.side.models() for role, side in made.items()}, calm[0])


def test_a_damaged_result_is_refused(keys, tmp_path):
    run_both(keys, JOB, OWN, tmp_path)
    folder = tmp_path / "active"
    whole = {path.name: path.read_bytes() for path in folder.glob("*") if path.name != ".lock"}
    wrong = {
        "result.json": [whole["result.json"].replace(b'"auc": ', b'"auc": 1'), b"\xff", whole["result.json"][:99]],
        "predictions.csv": [whole["predictions.csv"].replace(b"0", b"1", 1)],
        "active.safetensors": [whole["active.safetensors"][:-1]],
    }
    for name, contents in wrong.items():
        for content in contents:
            (folder / name).write_bytes(content)
            with pytest.raises(StoreError, match=f"{name}.* restore a copy"):
                session("active", JOB, OWN["active"], folder, None)
        (folder / name).write_bytes(whole[name])
    (folder / "predictions.csv").unlink()  # taken away, which is what it is there for
    assert session("active", JOB, OWN["active"], folder, None).finish().batches == 6


def test_one_folder_is_for_one_process(tmp_path):
    made = session("active", JOB, OWN["active"], tmp_path / "active", None)
    with pytest.raises(StoreError, match="another vflsec party works in"):
        session("active", JOB, OWN["active"], tmp_path / "active", None)
    made.snapshots.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another --out"):
        session("active", JOB, OWN["active"], tmp_path / "file" / "active", None)


def test_a_finished_run_says_its_result_again_without_a_peer(keys, tmp_path):
    _, found, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not errors
    for role in found:
        again = session(role, JOB, OWN[role], tmp_path / role, None)
        assert again.finish() == found[role]
        again.snapshots.close()


def test_a_p_whose_last_word_is_lost_has_its_result(keys, tmp_path, monkeypatch):
    monkeypatch.setattr("vflsec.companies.session.FAREWELL", 0.5)
    send = Connection.send

    def mute(wire, message, step=0):
        if isinstance(message, Done) and threading.current_thread().name == "passive":
            raise Crash
        send(wire, message, step)

    monkeypatch.setattr(Connection, "send", mute)
    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        c = session("passive", JOB, OWN["passive"], tmp_path / "passive", listener)
        p = session(
            "active",
            JOB,
            OWN["active"],
            tmp_path / "active",
            Dialer((HERE, listener.port), Identity(keys / "active"), 1),
        )

        def end():
            fails(Crash, c.finish)
            listener.close()

        thread = threading.Thread(target=end, name="passive")
        thread.start()
        told = []
        p.tell = told.append
        assert set(p.finish().utility) >= {"auc"}
        thread.join()
    assert "nothing is missing here" in told[-1]
    c.snapshots.close()
    again = session("passive", JOB, OWN["passive"], tmp_path / "passive", None)
    assert again.finish().history == p.result.history


def frame(payload, *, version=VERSION, kind=1, length=None):
    length = len(payload) if length is None else length
    return HEADER.pack(MAGIC, version, kind, 0, length, sha256(payload).digest()[:16]) + payload


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (b"\x00" * HEADER.size, "expected a vflsec party"),
        (frame(b"", version=VERSION + 7), f"messages of version {VERSION}, got {VERSION + 7}"),
        (frame(b"", length=2**32 - 1), "bytes at most, got 4294967295"),
        (frame(b"", kind=1 + KINDS.index(Done)), "expected Hello, got Done"),
        (frame(b"\xc1"), "another form"),
    ],
)
def test_what_the_right_peer_says_wrong_is_refused_and_nothing_is_lost(keys, tmp_path, words, said):
    begun(keys, tmp_path)
    before = states(tmp_path)
    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        c = session("passive", JOB, OWN["passive"], tmp_path / "passive", listener)
        there = Dialer((HERE, listener.port), Identity(keys / "active"), 5).open(5)
        there.sendall(words)
        with pytest.raises(ProtocolError, match=said):
            c.finish()
        c.snapshots.close()
        wire = Connection(there, KINDS, FIRST, 2)
        assert wire.receive(Hello).role == "passive"
        with pytest.raises((PeerRefused, PeerLost)):
            wire.receive(Hello)
        there.close()
    assert states(tmp_path) == before


def test_own_errors_end_the_peer_as_well_and_tell_it_nothing(keys, tmp_path):
    job = make_job()  # whose features are not known before the first batch
    own = owns(job)
    own["passive"].features["train"][3, 1] = 12345.0
    _, _, errors = run_both(keys, job, own, tmp_path)
    assert isinstance(errors["passive"], UsageError)
    assert isinstance(errors["active"], PeerRefused)
    assert "an error of its own" in str(errors["active"])
    assert "12345" not in str(errors["active"])


@pytest.mark.long
def test_a_malicious_p_has_no_more_time_by_repeating(keys, tmp_path):
    """Whoever has C redo a batch again and again is given up in the time that one silent peer is."""
    tries = []

    def stop(step):
        tries.append(step)
        if step == 1:
            raise PeerLost("p has seen enough")

    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        dialer = Dialer((HERE, listener.port), Identity(keys / "active"), 5)
        c = session("passive", JOB, OWN["passive"], tmp_path / "passive", listener, patience=1)
        p = session("active", JOB, OWN["active"], tmp_path / "active", dialer, patience=2, begin=stop)
        thread = threading.Thread(target=fails, args=(PeerLost, p.finish))
        thread.start()
        started = time.monotonic()
        with pytest.raises(PeerLost):
            c.finish()
        assert time.monotonic() - started < 20
        listener.close()
        thread.join()
    assert 1 < tries.count(1) < 20


@pytest.mark.parametrize("encoder", ["mlp", "identity"])
def test_a_recording_holds_what_each_saw_once(keys, tmp_path, encoder):
    job = make_job(encoder=encoder)
    own = owns(job)
    recorded = {role: tmp_path / f"{role}.recording" for role in own}
    each = {role: {"record": path} for role, path in recorded.items()}
    made, _, errors = run_both(keys, job, own, tmp_path, each=each)
    assert not errors
    found = {role: list(Recording(path).steps()) for role, path in recorded.items()}
    batches = len(made["passive"].side.schedule)
    assert (
        [step.number for step in found["passive"]]
        == [step.number for step in found["active"]]
        == list(range(batches + 1))
    )
    assert [step.rate for step in found["active"]] == [*[job.train.lr] * batches, None]
    for here, there in zip(found["passive"], found["active"], strict=True):
        kinds = [(m.kind, m.body) for m in here.messages]
        assert kinds == [(m.kind, m.body) for m in there.messages]
        assert [m.direction for m in here.messages] != [m.direction for m in there.messages]
        assert ("embedding_gradient" in here.notes) == (encoder == "mlp" and here.rate is not None)
        z = here.notes["mu"] @ ((here.notes["share"] + there.notes["share"]) / 2**64).astype(float)
        assert np.abs(z - there.notes["scores"]).max() < 1e-6
        assert "labels" not in here.notes
        assert "mu" not in there.notes
    header = Recording(recorded["passive"]).header
    assert header.layout == made["passive"].side.agreed
    assert recorded["passive"].stat().st_mode & 0o777 == 0o600
    if encoder == "identity":
        assert not any(m.kind == "EncryptedDelta" for step in found["passive"] for m in step.messages)


def test_a_recording_goes_on_after_a_break(keys, tmp_path):
    def stop(step):
        if step == 2:
            raise Crash

    path = tmp_path / "active.recording"
    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        dialer = Dialer((HERE, listener.port), Identity(keys / "active"), 5)
        c = session("passive", JOB, OWN["passive"], tmp_path / "passive", listener)
        thread = threading.Thread(target=c.finish)
        thread.start()
        first = session("active", JOB, OWN["active"], tmp_path / "active", dialer, begin=stop, record=path)
        fails(Crash, first.finish)
        first.snapshots.close()
        second = session("active", JOB, OWN["active"], tmp_path / "active", dialer, record=path)
        second.finish()
        thread.join()
        for made in (c, second):
            made.snapshots.close()
    assert [step.number for step in Recording(path).steps()] == list(range(7))


def test_limits_leave_room_for_every_message(keys, tmp_path, monkeypatch):
    largest = {}
    send = Connection.send

    def measuring(wire, message, step=0):
        size = len(msgspec.msgpack.encode(message))
        largest[type(message)] = max(size, largest.get(type(message), 0))
        assert size <= wire.limits[type(message)]
        send(wire, message, step)

    monkeypatch.setattr(Connection, "send", measuring)
    made, _, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not errors
    bounds = get_limits(made["passive"].side.agreed)
    assert set(largest) == {*bounds} - {k for k in bounds if k.__name__ == "Committed"}
    assert all(bounds[kind] <= size + 512 for kind, size in largest.items() if kind not in FIRST)
