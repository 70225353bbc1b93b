"""Mutated messages, greetings, states and recordings: one line each, no other weights, and the run goes on.

`make test-extended` tries some. For as many of each kind as you like:
VFLSEC_FUZZ=10000 pytest -m chaos -n 0 -s tests/companies/test_fuzz.py
"""

import os
import random
import shutil
import socket
import struct
import zlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from remote_pair import Masks, make_job, owns, run_both, session

from vflsec.base.errors import DataError, PeerLost, StoreError, VflsecError
from vflsec.cipher import recording
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.recording import Recording
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.companies.messages import FIRST, KINDS, agree
from vflsec.companies.wire import HEADER, MAGIC, VERSION, Connection, clean

pytestmark = pytest.mark.chaos

TRIES = int(os.environ.get("VFLSEC_FUZZ", "60"))
JOB = make_job(momentum=0.5)  # four batches, two an epoch
OWN = owns(JOB)
LIMITS = {**dict.fromkeys(KINDS, 1 << 20), **FIRST}
BAD_TEXT = b"\xa4\xff\xfe\xc0\x80"
ODD = [None, True, -1, 2**63, 2**64 - 1, -(2**63), float("nan"), float("inf")]
ODD += ["", "\x1b[31m\n", "x" * 2000, b"", b"\xff" * 99, [], {}]


def rng(name):
    return random.Random(f"{name} {os.environ.get('VFLSEC_FUZZ_SEED', '1')}")  # noqa: S311


def damaged(data, rng):
    """Return ``data`` with a few bits flipped, or cut, or with a piece put in, left out or doubled."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        piece = rng.choice(
            [bytes(1), b"\xff" * 4, BAD_TEXT, bytes(content[at : at + 8]), rng.randbytes(rng.randint(1, 40))]
        )
        match rng.randrange(5):
            case 0 | 1 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 2:
                content[at:at] = piece
            case 3:
                del content[at : at + len(piece)]
            case _:
                content[at : at + len(piece)] = piece
    if rng.random() < 0.1:
        del content[rng.randrange(len(content) + 1) :]
    return bytes(content) if content != data else bytes(content) + b"\x00"


def other(value, rng, depth=0):
    """Return ``value``, a tree of what msgpack knows, with one part replaced by something odd."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(["", "more", 7]): rng.choice(ODD)}
            case _:
                return {**value, key: other(value[key], rng, depth + 1)}
    if isinstance(value, bytes) and value and rng.random() < 0.7:
        return damaged(value, rng)
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7])
    if rng.random() < 0.03:
        return msgspec.Raw(b"\x91" * 5000 + b"\x90")  # nested too deep
    return rng.choice(ODD)


def mutated(message, rng):
    """Return the msgpack of ``message`` with one field replaced, or damaged as bytes; never what it was."""
    whole = msgspec.msgpack.encode(message)
    while True:
        if rng.random() < 0.3:
            found = damaged(whole, rng)
        else:
            found = msgspec.msgpack.encode(other(msgspec.msgpack.decode(whole), rng))
        if found != whole:
            return found


class Line:
    """One direction of a connection, on which ``change`` may alter a frame."""

    def __init__(self, there, change=bytes):
        self.there, self.change = there, change

    def settimeout(self, seconds):
        pass

    def send(self, frame):
        self.there.sendall(self.change(frame))
        return len(frame)


class Lying(Connection):
    """Sends a payload that is not the message's own, under its digest."""

    payload = b""

    def send(self, message, step=0):
        kind = self._kinds.index(type(message))
        head = HEADER.pack(MAGIC, VERSION, kind, step, len(self.payload), self._update_transcript(self.payload))
        self._connection.send(head + self.payload)


def crossed(message, how, rng):
    """Return ``message`` as it arrives: ``honest``, with other bytes on its way, or as a ``lie`` of its sender.

    Raises:
        VflsecError: what arrived is none.
    """
    one, there = socket.socketpair()
    with one, there:
        change = (lambda frame: damaged(bytes(frame), rng)) if how == "other bytes" else bytes
        sender = (Lying if how == "lie" else Connection)(Line(one, change), KINDS, LIMITS, 1)
        if how == "lie":
            sender.payload = mutated(message, rng)
        sender.send(message, 3)
        one.shutdown(socket.SHUT_WR)
        return Connection(there, KINDS, LIMITS, 1).receive(type(message), 3)


class Pair:
    """Both roles of the encrypted layer in one process, with what they need to do one batch again and again."""

    def __init__(self):
        keys, layout, sgd = (
            Keys.generate(1024),
            CipherLayout(width=3, outputs=2, batch=6, bits=1024),
            LinearSgd(0.5, 0.0),
        )
        draw = np.random.default_rng(0)
        self.masks = {role: Masks(role) for role in ("passive", "active")}
        self.c = PassiveRole(keys, layout, optimizer=sgd, batches=1, randbits=self.masks["passive"])
        first = draw.normal(size=(3, 2))
        self.p = ActiveRole(keys.public, layout, first, optimizer=sgd, batches=1, randbits=self.masks["active"])
        self.mu, self.delta = draw.normal(size=(6, 3)), draw.normal(size=(6, 2)) / 4
        self.before = self.c.state(), self.p.state()

    def batch(self, deliver):
        """Do the first batch; ``deliver`` brings each message over. Return what both have then."""
        for role, masks in zip((self.c, self.p), self.masks.values(), strict=True):
            masks.begin(0)
            role.load(self.before[role is self.p])
        c, p = self.c, self.p
        z = p.scores(deliver(c.scores(deliver(p.mask_scores(deliver(c.features(self.mu)))))))
        noised = deliver(c.gradient(deliver(p.mask_gradient(self.delta)), 0.1))
        last = p.embedding_gradient(self.delta, noised)
        p.update(noised, 0.1)
        down = c.embedding_gradient(deliver(last))
        return [z, down, *c.state().values(), *p.state().values()]


def equal(found, expected):
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["other bytes", "lie"])
def test_messages(how):
    """Other bytes than were sent are always refused; a lie is refused, or is a number that a party may send."""
    draw, pair, said = rng(how), Pair(), Counter()
    expected = pair.batch(lambda message: message)
    for _ in range(TRIES):
        ways = ["honest"] * 6
        ways[draw.randrange(6)] = how
        left = iter(ways)
        try:
            found = pair.batch(lambda message, left=left: crossed(message, next(left), draw))
        except VflsecError as error:
            one_line(error)
            said[type(error).__name__] += 1
        else:  # bytes behind a frame wait for the next one
            assert how == "lie" or equal(found, expected)
            said["accepted"] += 1
            said["accepted, with other numbers"] += not equal(found, expected)
    assert equal(pair.batch(lambda message: crossed(message, "honest", draw)), expected)
    print(how, dict(said))  # noqa: T201


def one_line(error):
    assert str(error)
    assert "\n" not in clean(str(error))


@pytest.fixture(scope="module")
def interrupted(keys, tmp_path_factory):
    """A folder with the files of a run that stopped after three batches, and the models at its undisturbed end."""
    folder, whole = tmp_path_factory.mktemp("interrupted"), tmp_path_factory.mktemp("whole")
    calm, _, errors = run_both(keys, JOB, OWN, whole, masks=True)
    assert not errors

    record = {role: {"record": folder / f"{role}.recording"} for role in OWN}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Masks, "begin", cut_at(3, Masks.begin))
        _, _, errors = run_both(keys, JOB, OWN, folder, masks=True, patience=0.5, each=record)
    assert all(isinstance(error, PeerLost) for error in errors.values())
    return folder, {role: side.side.models() for role, side in calm.items()}


def cut_at(step, begin):
    def cut(masks, at):
        if at == step:
            raise PeerLost("cut")
        begin(masks, at)

    return cut


def goes_on(keys, folder, expected):
    """Assert that both go on in ``folder`` and end with the models of an undisturbed run."""
    made, _, errors = run_both(keys, JOB, OWN, folder, masks=True)
    assert not errors
    for role, models in expected.items():
        ended = made[role].side.models()
        assert all((ended[key] == value).all() for key, value in models.items()), role


def test_greetings(keys, interrupted, tmp_path):
    """Whatever a peer says first is understood or refused, and what it says wrong changes nothing."""
    folder, expected = interrupted
    shutil.copytree(folder, tmp_path / "run")
    said, hellos, draw = Counter(), {}, rng("greetings")
    made = {role: session(role, JOB, OWN[role], tmp_path / "run" / role, None) for role in OWN}
    for role, one in made.items():
        hellos[role] = one._make_hello()
    for number in range(TRIES):
        role, other_role = ("passive", "active") if number % 2 else ("active", "passive")
        try:
            theirs = crossed(hellos[other_role], "lie", draw)
            assert agree(hellos[role], theirs) in made[role].history
            made[role].side.meet(theirs)
            said["accepted"] += 1
        except VflsecError as error:
            one_line(error)
            said[type(error).__name__] += 1
    for one in made.values():
        one.snapshots.close()
    goes_on(keys, tmp_path / "run", expected)
    print(dict(said))  # noqa: T201


def test_states(keys, interrupted, tmp_path):
    """A damaged file is refused, or another state is taken; no other numbers are ever read."""
    folder, expected = interrupted
    shutil.copytree(folder, tmp_path / "run")
    draw, said = rng("states"), Counter()
    files = sorted(path for path in (tmp_path / "run").glob("*/*.bin"))
    assert {path.name for path in files} >= {"key.bin", "journal.bin", "state-00000002.bin"}
    kept, history = {}, {}
    for role in OWN:
        whole = session(role, JOB, OWN[role], tmp_path / "run" / role, None)
        history[role] = whole.history
        kept[role] = {step: whole.snapshots.load(step) for step in whole.history}
        whole.snapshots.close()
    for number in range(TRIES):
        path = draw.choice(files)
        role, content = path.parent.name, path.read_bytes()
        path.write_bytes(damaged(content, draw))
        try:
            found = session(role, JOB, OWN[role], path.parent, None)
        except StoreError as error:
            one_line(error)
            said["refused"] += 1
        else:
            said["another state is taken"] += 1
            step = int(path.stem.removeprefix("state-"))
            assert found.history == {at: digest for at, digest in history[role].items() if at != step}
            for at in found.history:
                state = found.snapshots.load(at)
                assert state.keys() == kept[role][at].keys()
                assert all(np.array_equal(state[key], value) for key, value in kept[role][at].items())
            found.snapshots.close()
            if said["another state is taken"] % 50 == 1:
                copy = tmp_path / f"{number}"
                shutil.copytree(tmp_path / "run", copy)
                goes_on(keys, copy, expected)
                shutil.rmtree(copy)
                said["of these, gone on to the end"] += 1
        path.write_bytes(content)
    goes_on(keys, tmp_path / "run", expected)
    print(dict(said))  # noqa: T201


def contents(path):
    return [
        (step.number, step.rate, step.messages, [(name, note.tolist()) for name, note in step.notes.items()])
        for step in Recording(path).steps()
    ]


def test_recordings(interrupted, tmp_path):
    """A damaged recording is refused; a cut one ends earlier; frames with the right checksums hold no surprise."""
    draw, said = rng("recordings"), Counter()
    for number in range(TRIES):
        whole = interrupted[0] / f"{draw.choice(['passive', 'active'])}.recording"
        if number < 2:
            said["steps"] += len(contents(whole))
        data, path = whole.read_bytes(), tmp_path / "recording"
        lies = number % 2
        if lies:
            frames = list(split(data))
            at = draw.randrange(len(frames))
            frames[at] = mutated(msgspec.Raw(frames[at]), draw)
            data, before = recording.MAGIC, 0
            for body in frames:
                before = zlib.crc32(body, before)
                start = struct.pack(">II", len(body), before)
                data += start + struct.pack(">I", zlib.crc32(start)) + body
        else:
            data = damaged(data, draw)
        path.write_bytes(data)
        try:
            found = contents(path)
        except DataError as error:
            one_line(error)
            said["refused"] += 1
        else:
            said["read"] += 1
            expected = contents(whole)
            assert lies or found[:-1] == expected[: len(found[:-1])]
    print(dict(said))  # noqa: T201


def split(data):
    """Return the bodies of a recording's frames."""
    at = len(recording.MAGIC)
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        yield data[at + 12 : at + 12 + length]
        at += 12 + length
