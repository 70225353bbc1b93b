"""A peer that lies, hangs up or is killed: one line, nothing secret left, and a run that can go on."""

import multiprocessing
import os
import signal
import socket
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from remote_pair import HERE, assert_same, killed_at_a_state, make_job, owns, run_both, session, train_calmly, work

from vflsec.attacks.forward_passes import ForwardPasses
from vflsec.base.errors import Diverged, PeerLost, PeerRefused, ProtocolError, StoreError, UsageError, VflsecError
from vflsec.cipher.recording import Recording
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.exchange import EncryptedDelta, Scores
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.companies.active_side import ActiveSide
from vflsec.companies.messages import Done
from vflsec.companies.passive_side import PassiveSide
from vflsec.companies.session import BatchPort
from vflsec.companies.side import Schedule
from vflsec.companies.snapshots import Journal
from vflsec.companies.wire import Connection
from vflsec.testing.recordings import attack_recording

pytestmark = pytest.mark.chaos

JOB = make_job(momentum=0.5, epochs=3)  # six batches, two an epoch
OWN = owns(JOB)
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def calm(keys, tmp_path_factory):
    """The models of an undisturbed run with masks that can be drawn again."""
    return train_calmly(keys, JOB, OWN, tmp_path_factory.mktemp("calm"))


# Repeats ------------------------------------------------------------------------------------------------------------


def asks_again(keys, folder, batch, *, times=100, **options):
    """Let p hang up after C's scores of ``batch``, up to ``times`` times; return the answers, C's error and its log."""
    answers, told, hung_up = {}, [], []
    receive = BatchPort.receive

    def hangs_up(talk, expected):
        message = receive(talk, expected)
        if expected is Scores:
            answers[talk._step] = answers.get(talk._step, 0) + 1
            if talk._step == batch and len(hung_up) < times:
                hung_up.append(True)
                raise PeerLost("p has what it wants")
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchPort, "receive", hangs_up)
        each = {"passive": {"tell": told.append, **options}}
        _, _, errors = run_both(keys, JOB, OWN, folder, masks=True, each=each)
    return answers, errors, told


@pytest.mark.parametrize("batch", [0, 3, 6])  # the last one is of test rows
def test_a_p_that_hangs_up_gets_three_answers_more_and_no_others(keys, tmp_path, calm, batch):
    answers, errors, told = asks_again(keys, tmp_path, batch)
    assert answers[batch] == 4
    assert all(count == 1 for step, count in answers.items() if step != batch)
    assert isinstance(errors["passive"], PeerRefused)
    assert errors["passive"].exit_code == 2
    assert str(errors["passive"]).startswith(f"batch {batch} is not answered again: it was answered 4 times")
    lines = [line for line in told if "trying again" in line]
    assert f"(answers to batch {batch}: 1; repeats: 0 of 3, and 0 of 63 in all)" in lines[0]
    assert f"batch {batch}: 4; repeats: 3" in lines[-1]
    answers, errors, _ = asks_again(keys, tmp_path, batch)  # a restart forgets nothing
    assert batch not in answers
    assert isinstance(errors["passive"], PeerRefused)
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True, each={"passive": {"repeats": 4}})
    assert not errors
    assert_same(made, calm)


def test_a_c_that_hangs_up_gets_three_gradients_more(keys, tmp_path, calm):
    answers, receive = [], BatchPort.receive

    def hangs_up(talk, expected):
        message = receive(talk, expected)
        if expected is EncryptedDelta and talk._step == 3:
            answers.append(message)
            raise PeerLost("C has what it wants")
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchPort, "receive", hangs_up)
        _, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True, each={"passive": {"repeats": 100}})
    assert len(answers) == 4
    assert isinstance(errors["active"], PeerRefused)
    assert "start active with more --repeats" in str(errors["active"])
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True, repeats=5)
    assert not errors
    assert_same(made, calm)


def test_repeats_are_limited_in_all(keys, tmp_path):
    made = session(
        "passive", JOB, OWN["passive"], tmp_path, None, repeats=1
    )  # of one batch; twenty in all, and one of test rows
    for step in range(30):
        made.answers.count(step)
    for step in range(21):
        made.answers.count(step)
    with pytest.raises(PeerRefused, match="21 repeats.*1 repeats of one"):
        made.answers.count(21)
    made.snapshots.close()


def test_an_answer_is_counted_before_it_leaves(keys, tmp_path):
    made = session("passive", JOB, OWN["passive"], tmp_path, None)
    for _ in range(3):
        made.answers.count(0)
    assert made.snapshots.load_journal() == Journal(answered=1, repeats={0: 2})
    made.snapshots.close()


def test_a_line_that_breaks_now_and_then_is_no_attack(keys, tmp_path, calm):
    breaks, send, lost = [2, 9, 11, 17, 22, 25], BatchPort.send, []

    def cut(talk, message):
        lost.append(type(message))
        if len(lost) in breaks:
            raise PeerLost("cut")
        send(talk, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchPort, "send", cut)
        made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not errors
    assert len(lost) > max(breaks)
    assert_same(made, calm)


# Lies ---------------------------------------------------------------------------------------------------------------


def coefficients(value):
    return lambda holder, message: replace(
        message, coefficients=np.full(len(message.coefficients) // 4, value, "<f4").tobytes()
    )


LIES = {  # who, which answer, how it is changed, and what is said where
    "rank 0": (
        ActiveRole, "embedding_gradient", lambda holder, m: replace(m, rank=0, coefficients=b"", ciphers=b""),
        "passive", ProtocolError, "embedding gradient, got 0"
    ),
    "coefficients of 100": (
        ActiveRole, "embedding_gradient", coefficients(100), "passive", ProtocolError, "coefficients",
    ),
    "coefficients of 1000": (
        ActiveRole, "embedding_gradient", coefficients(1e3), "passive", ProtocolError, "coefficients",
    ),
    "NaN": (ActiveRole, "embedding_gradient", coefficients(np.nan), "passive", ProtocolError, "finite coefficients"),
    "signaling NaN": (
        ActiveRole,
        "embedding_gradient",
        lambda holder, m: replace(m, coefficients=b"\x00\x00\xa0\x7f" * (len(m.coefficients) // 4)),
        "passive",
        ProtocolError,
        "finite coefficients",
    ),
    "wrong rank": (
        ActiveRole, "embedding_gradient", lambda holder, m: replace(m, rank=-1),
        "passive", ProtocolError, "embedding gradient, got -1"
    ),
    "wrong rate": (
        PassiveRole, "gradient", lambda holder, m: replace(m, rate=2 * m.rate),
        "active", ProtocolError, "take the learning rate 0.2, got 0.4",
    ),
    "wrong rows": (
        PassiveRole, "features", lambda holder, m: replace(m, rows=m.rows - 1),
        "active", (ProtocolError, PeerRefused), "expected .* got",
    ),
    "zero gradient": (
        PassiveRole, "gradient", lambda holder, m: replace(m, values=bytes(len(m.values))),
        "active", Diverged, "expected scores below 4096",
    ),
    "zero scores": (
        PassiveRole, "scores", lambda holder, m: replace(m, values=bytes(len(m.values))),
        "active", Diverged, "expected scores below 4096",
    ),
    "another share": (
        PassiveRole, "gradient",
        lambda holder, m: replace(m, share=holder._encrypt([1 << 900] * (len(m.share) // holder.ciphertexts.size))),
        "passive", ProtocolError, "a plaintext overflows",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "step"),
    [*((name, 2) for name in LIES), *((name, step) for name in ("rank 0", "zero gradient") for step in (0, 5))],
)
def test_a_lie_ends_in_one_line_and_an_honest_peer_goes_on(keys, tmp_path, monkeypatch, calm, name, step):
    kind, method, lie, who, error, said = LIES[name]
    whole, told = getattr(kind, method), []

    def lies(holder, *args, **options):
        message = whole(holder, *args, **options)
        return lie(holder, message) if holder.turn == step + 1 else message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, lies)
        _, found, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not found
    with pytest.raises(error, match=said):
        raise errors[who]
    assert all(isinstance(each, VflsecError) and "\n" not in str(each) for each in errors.values())
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True, tell=told.append)
    assert not errors
    assert_same(made, calm)


def test_a_zero_delta_is_refused(keys, tmp_path, monkeypatch, calm):
    whole = ActiveRole.embedding_gradient

    def lies(holder, delta, *rest):
        return whole(holder, 0 * delta if holder.turn == 3 else delta, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActiveRole, "embedding_gradient", lies)
        _, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert isinstance(errors["passive"], ProtocolError)
    assert "of batch 2, got zero" in str(errors["passive"])
    made, _, errors = run_both(keys, JOB, OWN, tmp_path, masks=True)
    assert not errors
    assert_same(made, calm)


def test_a_gradient_that_drives_the_embedding_out_of_range_never_counts(keys, tmp_path):
    """It is within what the layout admits, so that only C's own model shows that it is wrong."""
    job = make_job(epochs=1, lr=1.0)
    whole = ActiveRole.embedding_gradient

    def lies(holder, *rest):
        holder._used = [weight * 200 for weight in holder._used]
        return whole(holder, *rest)

    calm, _, errors = run_both(keys, job, OWN, tmp_path / "calm", masks=True)
    assert not errors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActiveRole, "embedding_gradient", lies)
        _, _, errors = run_both(keys, job, OWN, tmp_path / "lied", masks=True)
    assert isinstance(errors["passive"], UsageError)
    assert str(errors["passive"]).startswith("after batch 0, which does")
    assert "expected |features| <= 16, got" in str(errors["passive"])
    made, _, errors = run_both(keys, job, OWN, tmp_path / "lied", masks=True)
    assert not errors
    assert_same(made, {role: side.side.models() for role, side in calm.items()})


def test_a_lie_that_shows_late_goes_back_to_the_end_of_an_epoch(keys, tmp_path, monkeypatch):
    """C spoils p's share in batch 2, which p notices in batch 5: the last two states of both are spoiled."""
    learn, gradient, shares = ActiveSide.learn, PassiveRole.gradient, {}

    def notices(side, exchange, batch, commit):
        if (side.holder.share != shares.setdefault(batch.number, side.holder.share)).any() and batch.number == 5:
            raise Diverged("numbers out of range")
        learn(side, exchange, batch, commit)

    def lies(holder, *rest):
        honest = gradient(holder, *rest)
        return replace(honest, values=b"\x07" + honest.values[1:]) if holder.turn == 3 else honest

    monkeypatch.setattr(ActiveSide, "learn", notices)
    calm, _, errors = run_both(keys, JOB, OWN, tmp_path / "calm", masks=True)
    assert not errors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassiveRole, "gradient", lies)
        _, _, errors = run_both(keys, JOB, OWN, tmp_path / "lied", masks=True)
    assert isinstance(errors["active"], Diverged)
    told = []
    _, _, errors = run_both(keys, JOB, OWN, tmp_path / "lied", masks=True, each={"active": {"tell": told.append}})
    assert isinstance(errors["active"], Diverged)  # from the state before the newest one, which is spoiled too
    assert "the one after batch 2" in told[-1]
    made, _, errors = run_both(keys, JOB, OWN, tmp_path / "lied", masks=True)
    assert not errors
    assert_same(made, {role: side.side.models() for role, side in calm.items()})


def test_an_error_that_comes_back_goes_back_further_each_time(keys, tmp_path, monkeypatch):
    """C's own error may come from its settings: only a state that fails twice is set aside, then those before it."""
    learn, starts = PassiveSide.learn, []

    def fails(side, exchange, batch, commit):
        starts[-1].append(batch.number)
        if batch.number == 5 and len(starts) < 4:
            raise UsageError("features out of range")
        learn(side, exchange, batch, commit)

    monkeypatch.setattr(PassiveSide, "learn", fails)
    for _ in range(3):
        starts.append([])
        _, _, errors = run_both(keys, JOB, OWN, tmp_path)
        assert isinstance(errors["passive"], UsageError)
    starts.append([])
    _, _, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not errors
    assert [first for first, *_ in starts] == [0, 5, 4, 2]  # batch 3 is no end of an epoch


# Kills and keys -----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill in the middle of a write."""


def killed_while_writing(name, times, sizes):
    """Return an fsync that dies, after half of a file whose name starts with ``name`` is written; ``times`` times."""
    whole = os.fsync

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith(f".writing-{name}") and len(sizes) < times:
            sizes.append(path.stat().st_size)
            os.ftruncate(descriptor, sizes[-1] // 2)
            raise Killed
        whole(descriptor)

    return fsync


@pytest.mark.parametrize("name", ["state-00000002", "key", "journal", "result", "passive.safetensors"])
def test_nothing_secret_survives_a_kill_in_the_middle_of_a_write(keys, tmp_path, monkeypatch, name):
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vflsec.base.files.os.fsync", killed_while_writing(name, 1, sizes))
        patch.setattr("vflsec.companies.session.FAREWELL", 1)
        _, _, errors = run_both(keys, JOB, OWN, tmp_path, timeout=2, patience=2)
    assert any(isinstance(error, Killed) for error in errors.values())
    assert list(tmp_path.glob("*/.writing-*")), "a real kill leaves it"
    _, _, errors = run_both(keys, JOB, OWN, tmp_path)
    assert not errors
    left = {path.name for role in OWN for path in (tmp_path / role).iterdir()}
    assert left == {".lock", "result.json", "passive.safetensors", "active.safetensors", "predictions.csv"}


KILLS = int(os.environ.get("VFLSEC_STATE_KILLS", "12"))


@pytest.mark.chaos
def test_no_key_is_left_after_kills_at_the_writing_of_states(keys, tmp_path):
    """SIGKILL, and not only an exception: each new process of C is killed as it writes one of its next states."""
    job = make_job(momentum=0.5, epochs=KILLS // 2 + 5)  # of two batches: a killed process gets on by at most one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vflsec.companies.session", "vflsec.companies.link", "torch._dynamo"])
    kills, killed = context.Value("i", KILLS), 0
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    p = context.Process(target=work, args=("active", keys, job, OWN["active"], tmp_path / "active", port, 0, KILLS))
    p.start()
    try:
        while True:
            c = context.Process(
                target=killed_at_a_state, args=(kills, tmp_path / "passive", keys, job, OWN["passive"], port, 0, KILLS)
            )
            c.start()
            c.join(60)
            if c.exitcode != -signal.SIGKILL:
                break
            assert list((tmp_path / "passive").glob(".writing-*"))
            killed += 1
        p.join(60)
        assert (c.exitcode, p.exitcode) == (0, 0)
    finally:
        for process in (c, p):
            process.kill()
            process.join()
    assert killed == KILLS
    left = {path.name for role in OWN for path in (tmp_path / role).iterdir()}
    assert left == {".lock", "result.json", "passive.safetensors", "active.safetensors", "predictions.csv"}


# Small keys -----------------------------------------------------------------------------------------------------------


def test_a_small_key_is_warned_of_on_both_sides(keys, tmp_path):
    told = {role: [] for role in OWN}
    run_both(keys, JOB, OWN, tmp_path, each={role: {"tell": lines.append} for role, lines in told.items()})
    for lines in told.values():
        assert lines == ["a key of 1024 bits protects nothing that matters: take bits = 2048 or more"]


# Counting answers ----------------------------------------------------------------------------------------------------


def passes_read(answers):
    """How often p has read each sample, by the scores that it got of each batch."""
    schedule, found = Schedule(JOB, len(OWN["passive"].ids["train"])), Counter()
    for step, times in answers.items():
        if step < len(schedule):
            found.update(dict.fromkeys(schedule[step].rows.tolist(), times))
    return found


@pytest.mark.parametrize("batch", [0, 3, 6])
@pytest.mark.parametrize("times", [2, 100])
def test_the_recording_counts_answers_to_a_batch_that_is_never_done(keys, tmp_path, batch, times):
    """C refuses the fifth, and there the recording ends."""
    answers, _, _ = asks_again(keys, tmp_path, batch, times=times, record=tmp_path / "passive.recording")
    recorded = {
        step.number: int(step.notes["answers"][0]) for step in Recording(tmp_path / "passive.recording").steps()
    }
    assert recorded == answers


def test_answers_before_a_return_to_an_older_state_are_counted(keys, tmp_path):
    """Both go back from batch 5 to batch 2, and p stops there: what C answered beyond has been read all the same."""
    answers, receive, path = Counter(), BatchPort.receive, tmp_path / "passive.recording"

    def stops_at(batch):
        def stops(talk, expected):
            message = receive(talk, expected)
            if expected is Scores:
                answers[talk._step] += 1
                if talk._step == batch:
                    raise PeerRefused("p stops")
            return message

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchPort, "receive", stops)
            run_both(keys, JOB, OWN, tmp_path, each={"passive": {"record": path}})

    stops_at(5)
    for state in sorted((tmp_path / "active").glob("state-*"))[-2:]:
        state.write_bytes(b"x")
    stops_at(2)
    assert max(answers) == 5
    assert answers[2] == 2
    layout = Recording(path).header.layout
    most = max(passes_read(answers).values())
    (block,) = attack_recording(ForwardPasses(), Recording(path))["leak"].values()
    assert block.headline == min(1, most * layout.outputs / layout.width)
    _, _, errors = run_both(keys, JOB, OWN, tmp_path, each={"passive": {"record": path}})
    assert not errors
    ended = {step.number: int(step.notes["answers"][0]) for step in Recording(path).steps()}
    assert ended == {step: answers[step] + 1 - (step in (0, 1)) for step in ended}


def test_a_break_before_the_farewell_leaves_the_recording_whole(keys, tmp_path):
    send, broken = Connection.send, []

    def breaks(wire, message, step=0):
        if isinstance(message, Done) and not broken:
            broken.append(True)
            raise PeerLost("the line breaks")
        return send(wire, message, step)

    paths = {role: tmp_path / f"{role}.recording" for role in OWN}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", breaks)
        _, _, errors = run_both(keys, JOB, OWN, tmp_path, each={role: {"record": path} for role, path in paths.items()})
    assert broken
    assert not errors
    tested = {role: [s.number for s in Recording(path).steps() if s.rate is None] for role, path in paths.items()}
    assert tested["passive"] == tested["active"] == [6]


@pytest.mark.parametrize("name", ["missing/passive.recording", "folder"])
def test_a_recording_that_cannot_be_written_is_noticed_before_anybody_connects(tmp_path, name):
    (tmp_path / "folder").mkdir()
    alone = session("passive", JOB, OWN["passive"], tmp_path / "passive", link=None, record=tmp_path / name)
    with pytest.raises(StoreError, match="cannot write the recording"):
        alone.finish()
