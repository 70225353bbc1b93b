"""Reaching the other party: the pinned one and nobody else, whatever a stranger sends."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from vflsec.base.errors import PeerLost, PeerRefused, UsageError
from vflsec.companies import identity
from vflsec.companies.identity import Identity
from vflsec.companies.link import HANDSHAKE, HANDSHAKES, Dialer, Listener, parse_address

HERE = "127.0.0.1"


def _wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def told():
    return []


@pytest.fixture
def listener(keys, told):
    with Listener((HERE, 0), Identity(keys / "passive"), 2, told.append) as found:
        yield found


def dialer(listener, folder):
    return Dialer((HERE, listener.port), Identity(folder), 2)


def test_both_sides_know_who_is_there(listener, keys):
    there = dialer(listener, keys / "active").open(2)
    here = listener.open(2)
    assert here.version() == there.version() == "TLSv1.3"
    assert here.getpeercert(binary_form=True) == Identity(keys / "passive").peer
    there.sendall(b"hello")
    assert here.recv(5) == b"hello"
    for connection in (here, there):
        connection.close()


def test_a_stranger_is_turned_away_on_either_side(listener, keys, stranger, told):
    there = dialer(listener, stranger / "active").open(2)  # in TLS 1.3 who dials is done before it is judged
    with pytest.raises(ssl.SSLError, match="(?i)unknown ca"):
        there.recv(1)
    there.close()
    with pytest.raises(PeerLost, match=r"^nobody connected within 0\.2 s$"):
        listener.open(0.2)
    assert "another certificate" in told[0]
    refused = pytest.raises(PeerRefused, match=r"ask it for.*certificate\.pem")
    with Listener((HERE, 0), Identity(stranger / "passive"), 2) as impostor, refused:
        dialer(impostor, keys / "active").open(2)


def test_a_peer_without_certificate_is_turned_away(listener, keys, told):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    there = context.wrap_socket(socket.create_connection((HERE, listener.port), timeout=2))
    with there, pytest.raises(ssl.SSLError, match="(?i)certificate required"):
        there.recv(1)
    with pytest.raises(PeerLost):
        listener.open(0.2)
    assert told


def test_an_expired_certificate_is_refused(tmp_path):
    for role in identity.ROLES:
        identity.make(tmp_path / role, role, days=-0.5 if role == "active" else 1)
    for role, other in ("passive", "active"), ("active", "passive"):
        (tmp_path / role / identity.PEER).write_bytes((tmp_path / other / identity.CERTIFICATE).read_bytes())
    with Listener((HERE, 0), Identity(tmp_path / "active"), 2) as listener, pytest.raises(PeerRefused, match="expired"):
        dialer(listener, tmp_path / "passive").open(2)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01" + bytes(range(200)), b""])
def test_plain_text_and_garbage_get_nothing(listener, words, told):
    there = socket.create_connection((HERE, listener.port), timeout=2)
    with there, contextlib.suppress(OSError):  # it may hang up while we speak
        there.sendall(words)
        there.shutdown(socket.SHUT_WR)
        answer = there.recv(1000)
        assert answer == b"" or answer[0] == 21  # a TLS alert
    with pytest.raises(PeerLost):
        listener.open(0.2)
    assert len(told) == 1


def test_silent_strangers_do_not_keep_the_peer_waiting(listener, keys):
    silent = [socket.create_connection((HERE, listener.port), timeout=2) for _ in range(HANDSHAKES - 1)]
    there = dialer(listener, keys / "active").open(2)
    listener.open(2).close()
    there.close()
    for connection in silent:
        connection.close()


def strangers(listener, count, words=b""):
    """Connections that stay open and say no more than ``words``."""
    found = [socket.create_connection((HERE, listener.port), timeout=5) for _ in range(count)]
    for connection in found:
        connection.sendall(words)
    return found


@pytest.mark.chaos
@pytest.mark.parametrize("words", [b"", b"\x16"])  # silent, or silent in the middle of a handshake
def test_among_500_strangers_the_peer_joins_within_its_handshake_time(keys, words):
    with Listener((HERE, 0), Identity(keys / "passive"), 60) as listener, contextlib.ExitStack() as ends:
        for connection in strangers(listener, 500, words):
            ends.enter_context(connection)
        _wait_for(lambda: len(listener._newcomers) == HANDSHAKES)
        started = time.monotonic()
        there = ends.enter_context(Dialer((HERE, listener.port), Identity(keys / "active"), HANDSHAKE).open(HANDSHAKE))
        here = ends.enter_context(listener.open(HANDSHAKE))
        there.sendall(b"here")
        assert here.recv(4) == b"here"
        assert time.monotonic() - started < HANDSHAKE
        assert len(listener._newcomers) <= HANDSHAKES


def test_the_oldest_silent_one_gives_way(keys):
    with Listener((HERE, 0), Identity(keys / "passive"), 60) as listener, contextlib.ExitStack() as ends:
        speaks = ends.enter_context(strangers(listener, 1, b"\x16")[0])
        _wait_for(lambda: any(listener._newcomers.values()))
        silent = [ends.enter_context(each) for each in strangers(listener, HANDSHAKES)]
        assert silent[0].recv(1) == b""
        for connection in (speaks, silent[1], silent[-1]):
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(1)


def test_a_handshake_has_its_own_short_time(keys, monkeypatch):
    monkeypatch.setattr("vflsec.companies.link.HANDSHAKE", 0.3)
    with Listener((HERE, 0), Identity(keys / "passive"), 60) as listener:
        started = time.monotonic()
        for words in (b"", b"\x16"):
            with strangers(listener, 1, words)[0] as connection:
                connection.recv(1)
        assert time.monotonic() - started < 5


def test_the_last_connection_of_the_peer_counts(listener, keys):
    first = dialer(listener, keys / "active").open(2)
    _wait_for(listener.is_superseded)
    second = dialer(listener, keys / "active").open(2)
    _wait_for(lambda: listener._arrived.qsize() == 2)
    here = listener.open(2)
    assert not listener.is_superseded()
    second.sendall(b"2")
    assert here.recv(1) == b"2"
    third = dialer(listener, keys / "active").open(2)
    _wait_for(listener.is_superseded)
    for connection in (first, second, third, here):
        connection.close()


def test_nobody_there(keys):
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="cannot listen on 127.0.0.1"):
            Listener((HERE, port), Identity(keys / "passive"), 1)
    with pytest.raises(PeerLost, match="cannot reach 127.0.0.1"):
        Dialer((HERE, port), Identity(keys / "passive"), 1).open(1)


def test_a_silent_server_is_given_up(keys):
    with socket.create_server((HERE, 0)) as server:
        started = time.monotonic()
        with pytest.raises(PeerLost, match="in time"):
            Dialer((HERE, server.getsockname()[1]), Identity(keys / "passive"), 0.3).open(5)
        assert time.monotonic() - started < 3


def test_a_closed_listener_leaves_no_thread(keys):
    before = threading.active_count()
    Listener((HERE, 0), Identity(keys / "passive"), 1).close()
    _wait_for(lambda: threading.active_count() <= before)


@pytest.mark.parametrize(
    ("text", "address"),
    [("localhost:1", ("localhost", 1)), ("[::1]:7700", ("::1", 7700)), ("10.0.0.1:0", ("10.0.0.1", 0))],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("host", ["a" * 70, "..", "a..b", "é" * 70, "\udcff"])
def test_a_host_that_no_resolver_can_be_asked_for(host):
    with pytest.raises(UsageError, match="use its name or IP"):
        parse_address(f"{host}:7700")


@pytest.mark.parametrize("text", ["", "localhost", ":7700", "localhost:", "a:b", "a:65536", "a:-1", "a:²"])
def test_what_is_no_address(text):
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        parse_address(text)
