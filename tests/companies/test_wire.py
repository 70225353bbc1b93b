"""Frames: what was sent arrives; anything else ends the run before it takes memory, and nothing hangs."""

import contextlib
import socket
import threading
import time
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.base.errors import PeerLost, PeerRefused, ProtocolError
from vflsec.companies.wire import HEADER, MAGIC, VERSION, Connection, Refusal


class Ping(msgspec.Struct, frozen=True):
    value: bytes


class Pong(msgspec.Struct, frozen=True):
    value: int


KINDS = (Ping, Pong)
LIMITS = {Ping: 2_000_000, Pong: 10}


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield Connection(one, KINDS, LIMITS, 2), Connection(other, KINDS, LIMITS, 2)
    one.close()
    other.close()


@pytest.fixture
def raw():
    one, other = socket.socketpair()
    yield one, Connection(other, KINDS, LIMITS, 0.5)
    one.close()
    other.close()


def frame(payload, *, magic=MAGIC, version=VERSION, kind=1, step=0, length=None):
    length = len(payload) if length is None else length
    return HEADER.pack(magic, version, kind, step, length, sha256(payload).digest()[:16]) + payload


@pytest.mark.parametrize("size", [0, 1, 1_500_000])  # the last is more than the system's buffers hold
def test_what_is_sent_arrives(ends, size):
    message = Ping(bytes(range(256)) * (size // 256) + bytes(size % 256))
    sender = threading.Thread(target=ends[0].send, args=(message, 7))
    sender.start()
    assert ends[1].receive(Ping, 7) == message
    sender.join()
    assert ends[0].sent == ends[1].received > size


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.0\r\n\r\n" + bytes(20), "vflsec party, got bytes 47455420"),
        (frame(b"", version=VERSION + 1), f"version {VERSION}, got {VERSION + 1}"),
        (frame(b"", kind=2), "expected Ping, got Pong"),
        (frame(b"", kind=200), "expected Ping, got kind 200"),
        (frame(b"", step=8), "of step 0, got step 8"),
        (frame(b"", length=2**32 - 1), "of 2000000 bytes at most, got 4294967295"),
        (frame(b"\xc1"), "another form"),
        (frame(b"\x81\xa5value\xa2\xff\xfe"), "another form"),
        (frame(b"\x81\xa2\xff\xfe\x01"), "another form"),
        (frame(msgspec.msgpack.encode(Ping(b"1234")))[:-1] + b"5", "got other bytes"),
        (frame(b""), "another form"),
        (frame(msgspec.msgpack.encode(Pong(1))), "another form"),
        (frame(b"\x91" * 100_000), "another form"),
        (frame(msgspec.msgpack.encode(Ping(b"")) + b"more"), "another form"),
    ],
)
def test_anything_else_is_refused(raw, sent, said):
    raw[0].sendall(sent)
    with pytest.raises(ProtocolError, match=said):
        raw[1].receive(Ping)


def test_too_long_a_message_takes_no_memory(raw, monkeypatch):
    raw[0].sendall(frame(b"", length=2**31))
    taken = []
    monkeypatch.setattr("vflsec.companies.wire.bytearray", lambda n: taken.append(n) or bytearray(n), raising=False)
    with pytest.raises(ProtocolError):
        raw[1].receive(Ping)
    assert taken == [HEADER.size]


@settings(max_examples=200)
@given(garbage=st.binary(max_size=200), flips=st.lists(st.integers(0, 8 * HEADER.size + 80), max_size=3))
def test_no_garbage_is_taken_for_a_message(garbage, flips):
    content = bytearray(frame(msgspec.msgpack.encode(Ping(b"12345678")), step=3) + garbage)
    for bit in flips:
        content[bit // 8 % len(content)] ^= 1 << bit % 8
    one, other = socket.socketpair()
    wire = Connection(other, KINDS, LIMITS, 2)
    with one, other:
        one.sendall(content)
        one.close()
        with contextlib.suppress(ProtocolError, PeerRefused, PeerLost):
            assert wire.receive(Ping, 3).value == b"12345678"


def test_a_refusal_is_told_at_any_time_and_cannot_steer_a_terminal(ends):
    ends[0].refuse("seed 1 and\x1b[31m 2\n")
    with pytest.raises(PeerRefused, match=r"1 and \[31m 2 $"):
        ends[1].receive(Ping, 12)


def test_refusing_a_peer_that_is_gone_is_no_error(ends):
    ends[1].close()
    ends[0].refuse("too late")


@pytest.mark.parametrize(
    "sent", [b"", HEADER.pack(MAGIC, VERSION, 1, 0, 100, bytes(16))[:5], frame(b"", length=100) + b"only"]
)
def test_a_cut_or_silent_connection_is_lost_in_time(raw, sent):
    raw[0].sendall(sent)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="said nothing for"):
        raw[1].receive(Ping)
    assert 0.4 < time.monotonic() - started < 2
    raw[0].sendall(sent)
    raw[0].close()
    with pytest.raises(PeerLost, match="hung up"):
        raw[1].receive(Ping)


def test_drops_do_not_lengthen_the_time(raw):
    stop = threading.Event()

    def drip():
        for byte in frame(bytes(1000)):
            if stop.wait(0.05):
                return
            raw[0].send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with pytest.raises(PeerLost):
        raw[1].receive(Ping)
    assert time.monotonic() - started < 2
    stop.set()
    thread.join()


def test_a_peer_that_does_not_read_is_lost_in_time(raw):
    with pytest.raises(PeerLost, match="in time"):
        raw[1].send(Ping(bytes(1_900_000)))


def test_a_peer_that_connects_anew_ends_the_wait():
    one, other = socket.socketpair()
    with one, other, pytest.raises(PeerLost, match="connected anew"):
        Connection(other, KINDS, LIMITS, 60, is_superseded=lambda: True).receive(Ping)


def test_a_refusal_is_bounded(raw):
    reason = msgspec.msgpack.encode({"reason": "x" * 4000})
    raw[0].sendall(frame(reason, kind=0))
    with pytest.raises(ProtocolError, match="another form"):
        raw[1].receive(Ping)
    assert Connection(raw[0], KINDS, LIMITS, 1).limits[Refusal] < 10_000
