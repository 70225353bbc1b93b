"""Two processes under fire: killed, cut off, garbled, stalled and besieged, they compute what they would alone.

For a longer siege: VFLSEC_CHAOS_KILLS=500 VFLSEC_CHAOS_SEED=2 pytest -m chaos -n 0 -s tests/companies/test_chaos.py
"""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import ssl
import threading
import time

import msgspec
import pytest
from remote_pair import HERE, make_job, owns, run_both, work
from safetensors.numpy import load_file

from vflsec.base.errors import PeerLost
from vflsec.companies.identity import Identity
from vflsec.companies.link import Dialer

KILLS = int(os.environ.get("VFLSEC_CHAOS_KILLS", "25"))
LONGEST = 60 + 2 * KILLS
"""Seconds after which the run counts as hung."""
OVERSIZE = b"vfls\x00\x01\x01" + bytes(8) + b"\xff" * 4
TLS_ALERT = b"\x15"


class Proxy:
    """Stands between the two parties, and now and then cuts, garbles or stalls what goes through."""

    def __init__(self, target, rng):
        self.target, self.rng = target, rng
        self.done = {"cut": 0, "garble": 0, "stall": 0}
        self.quiet = False
        self._open = []
        self._server = socket.create_server((HERE, 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((HERE, self.target), timeout=2)
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            fate = None if self.quiet or self.rng.random() < 0.6 else self.rng.choice(list(self.done))
            left = [int(10 ** self.rng.uniform(2.5, 4.5))]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(*ends, fate, left), daemon=True).start()

    def _pump(self, source, sink, fate, left):
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(4096)):
                before, left[0] = left[0], left[0] - len(data)
                if fate and left[0] <= 0:
                    self.done[fate] += before > 0
                    if fate == "cut":
                        break
                    if fate == "stall":
                        continue  # swallowed: the connection stays, and says nothing more
                    if before > 0:
                        data[0] ^= 0x40
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()
        for end in self._open:
            end.close()


def heard(connection):
    """What the other end says before it hangs up, or in two seconds; TLS itself refuses by an exception."""
    connection.settimeout(2)
    try:
        return connection.recv(1000)
    except (ssl.SSLError, OSError):
        return b""


def with_another_certificate(port, stranger):
    with Dialer((HERE, port), Identity(stranger / "active"), 2).open(2) as there:
        there.sendall(OVERSIZE)
        return heard(there)


def without_certificate(port, stranger):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((HERE, port), timeout=2) as there, context.wrap_socket(there) as secured:
        secured.sendall(OVERSIZE)
        return heard(secured)


def in_plain_text(port, stranger):
    with socket.create_connection((HERE, port), timeout=2) as there:
        there.sendall(OVERSIZE)
        answer = heard(there)
        return b"" if answer[:1] == TLS_ALERT else answer


def besiege(port, stranger, stop, turned_away):
    """Strangers at C's door, one after the other, and some who say nothing at all; none may hear a byte."""
    silent = []
    while not stop.wait(1):
        with contextlib.suppress(OSError, PeerLost):  # C is dead just now
            if len(silent) < 8:
                silent.append(socket.create_connection((HERE, port), timeout=2))
            for attempt in (with_another_certificate, without_certificate, in_plain_text):
                turned_away.append((attempt.__name__, attempt(port, stranger)))
    for there in silent:
        there.close()


def wait_for_batches(folder, count, process):
    """Wait until a party has kept ``count`` further batches, or 3 s."""

    def newest():
        return max((path.name for path in folder.glob("state-*")), default="state-00000000")

    until, deadline = f"state-{int(newest()[6:14]) + count:08}", time.monotonic() + 3
    while newest() < until and time.monotonic() < deadline and process.exitcode is None:
        time.sleep(0.01)


@pytest.mark.chaos
def test_chaos(keys, stranger, tmp_path):
    """Kill either side again and again behind a bad line: the final weights are exactly those of a calm run."""
    job = make_job(rows=200, epochs=max(10, KILLS // 3), momentum=0.5)
    own = owns(job, rows=200)
    calm, _, errors = run_both(keys, job, own, tmp_path / "calm", masks=True)
    assert not errors

    rng = random.Random(os.environ.get("VFLSEC_CHAOS_SEED", "1"))  # noqa: S311
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vflsec.companies.session", "vflsec.companies.link", "torch._dynamo"])
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    proxy = Proxy(port, rng)
    stop, turned_away = threading.Event(), []
    siege = threading.Thread(target=besiege, args=(port, stranger, stop, turned_away))
    ports, running = {"passive": port, "active": proxy.port}, {}

    def start(role):
        folder = tmp_path / "chaos" / role
        running[role] = context.Process(
            target=work, args=(role, keys, job, own[role], folder, ports[role], 0.05, max(10, KILLS // 10))
        )
        running[role].start()

    started, kills = time.monotonic(), {"passive": 0, "active": 0}
    try:
        for role in ports:
            start(role)
        siege.start()
        while any(process.exitcode != 0 for process in running.values()):
            assert time.monotonic() - started < LONGEST, f"hangs: {kills} kills, {proxy.done}"
            role = rng.choice(["passive", "active"])
            if rng.random() < 0.6:  # in the middle of the work, not of the start
                wait_for_batches(tmp_path / "chaos" / role, rng.randint(1, 3), running[role])
            running[role].join(rng.uniform(0, 0.15))
            proxy.quiet = sum(kills.values()) >= KILLS
            if running[role].exitcode is None and not proxy.quiet:
                os.kill(running[role].pid, signal.SIGKILL)
                running[role].join()
                kills[role] += 1
            for each, process in list(running.items()):
                assert process.exitcode in (None, 0, -signal.SIGKILL), f"{each} ended with {process.exitcode}"
                if process.exitcode == -signal.SIGKILL:
                    start(each)
    finally:
        stop.set()
        for process in running.values():
            process.kill()
            process.join()
        siege.join()
        proxy.close()

    print(f"{time.monotonic() - started:.0f} s, {kills} kills, {proxy.done}, {len(turned_away)} turned away")  # noqa: T201
    assert sum(kills.values()) == KILLS, kills
    assert min(kills.values()) > KILLS / 5
    assert KILLS < 50 or min(proxy.done.values()) > 0, proxy.done
    assert len({name for name, _ in turned_away}) == 3
    assert not any(answer for _, answer in turned_away)
    results = {}
    for role in ("passive", "active"):
        folder = tmp_path / "chaos" / role
        ended, expected = load_file(folder / f"{role}.safetensors"), calm[role].side.models()
        assert set(ended) == set(expected)
        for key, value in ended.items():
            assert (value == expected[key]).all(), f"{role}: {key}"
        results[role] = msgspec.json.decode((folder / "result.json").read_bytes())
        assert not list(folder.glob("state-*")), "the key and all states go with the run"
    assert results["passive"]["history"] == results["active"]["history"]
    assert results["active"]["utility"] == calm["active"].result.utility
    assert results["passive"]["utility"] == {}
