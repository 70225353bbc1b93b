"""Messages between two processes: frames of one version, one kind, one step and a bounded size.

    magic  version  kind   step   length   digest   payload
    4      u16      u8     u64    u32      16       msgpack, ``length`` bytes

The digest is over all payloads of the connection until now, of both sides: the parties have heard the same, or part.
Whoever reads knows which message must come next. Every field of the header is checked before a byte of the payload is
read or memory for it taken. Anything else than what must come ends the run: the peer has proved who it is, and what
it says wrong it would say wrong again.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, TypeVar

import msgspec

from vflsec.base.errors import PeerLost, PeerRefused, ProtocolError

MAGIC = b"vfls"
VERSION = 2
HEADER = struct.Struct(">4sHBQI16s")
LOOK_UP = 0.5
"""Seconds between two looks whether the peer has connected anew."""

M = TypeVar("M", bound=msgspec.Struct)


class Refusal(msgspec.Struct, frozen=True):
    """The last message of a party that will not go on, and why."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class Connection:
    """One authenticated connection, on which both sides take turns.

    Args:
        connection: a TLS connection, or another stream socket.
        kinds: the types of all messages, in the order of their numbers on the wire.
        limits: largest payload of each type, in bytes.
        timeout: seconds until a message must be here, or gone, as a whole.
        is_superseded: whether the peer has meanwhile opened another connection.

    Attributes:
        sent: bytes sent, headers and all.
        received: likewise.
    """

    def __init__(
        self,
        connection: socket.socket,
        kinds: Sequence[type[msgspec.Struct]],
        limits: Mapping[type[msgspec.Struct], int],
        timeout: float,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.limits: dict[type[msgspec.Struct], int] = {Refusal: 5000}
        self.limits.update(limits)
        self.timeout = timeout
        self.sent = self.received = 0
        self._connection = connection
        self._kinds = (Refusal, *kinds)
        self._superseded = is_superseded
        self._transcript = sha256()

    def send(self, message: msgspec.Struct, step: int = 0) -> None:
        """Send ``message``, which belongs to ``step``.

        Raises:
            PeerLost: the connection broke, or the peer does not read in time.
        """
        payload = msgspec.msgpack.encode(message)
        assert len(payload) <= self.limits[type(message)], "we keep the limits that we demand"
        digest = self._update_transcript(payload)
        frame = HEADER.pack(MAGIC, VERSION, self._kinds.index(type(message)), step, len(payload), digest) + payload
        deadline = time.monotonic() + self.timeout
        view, done = memoryview(frame), 0
        while done < len(frame):  # sendall would grant the whole time to each piece
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                done += self._connection.send(view[done:])
            except OSError as error:
                raise classify_failure(error) from error
        self.sent += len(frame)

    def receive(self, expected: type[M], step: int = 0) -> M:
        """Return the next message, which must be an ``expected`` one of ``step``.

        Raises:
            PeerLost: the connection broke, or nothing came in time.
            ProtocolError: something else came.
            PeerRefused: the peer says why it will not go on.
        """
        deadline = time.monotonic() + self.timeout
        magic, version, kind, of_step, length, digest = HEADER.unpack(self._read(HEADER.size, deadline))
        if magic != MAGIC:
            raise ProtocolError(f"expected a vflsec party, got bytes {magic.hex()}: is it vflsec that runs there?")
        if version != VERSION:
            raise ProtocolError(f"expected messages of version {VERSION}, got {version}: give both parties one vflsec")
        sent = self._kinds[kind] if kind < len(self._kinds) else None
        if sent not in (expected, Refusal):
            name = sent.__name__ if sent else f"kind {kind}"
            raise ProtocolError(f"expected {expected.__name__}, got {name}: give both parties one vflsec")
        if sent is expected and of_step != step:
            raise ProtocolError(f"expected {expected.__name__} of step {step}, got step {of_step}: start both again")
        if length > self.limits[sent]:
            raise ProtocolError(f"expected {sent.__name__} of {self.limits[sent]} bytes at most, got {length}")
        payload = self._read(length, deadline)
        self.received += HEADER.size + length
        if sent is Refusal:
            raise PeerRefused(f"the other party refuses: {clean(_decode(payload, Refusal).reason)}")
        message = _decode(payload, expected)
        if digest != self._update_transcript(payload):  # a refusal can come out of turn
            raise ProtocolError(f"expected {expected.__name__} as it was sent, got other bytes: start both again")
        return message

    def refuse(self, reason: str) -> None:
        """Tell the peer, if it still listens, why we will not go on; ``reason`` must hold nothing of our own data."""
        try:
            self.send(Refusal(clean(reason)))
        except PeerLost:
            return

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _update_transcript(self, payload: bytes | bytearray) -> bytes:
        """Add ``payload`` to what both sides have heard, and return the digest over all of it."""
        self._transcript.update(payload)
        return self._transcript.digest()[:16]

    def _read(self, count: int, deadline: float) -> bytearray:
        """Return ``count`` bytes; look up now and then whether the peer has come back on another connection."""
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLost(f"the other party has said nothing for {self.timeout:g} s")
            if self._superseded():
                raise PeerLost("the other party has connected anew")
            self._connection.settimeout(min(left, LOOK_UP))
            try:
                read = self._connection.recv_into(view[done:])
            except TimeoutError:
                continue
            except OSError as error:
                raise classify_failure(error) from error
            if not read:
                raise PeerLost("the other party has hung up")
            done += read
        return buffer


def classify_failure(error: OSError) -> PeerLost | PeerRefused:
    """Return what a failed connection means: a peer that does not accept our certificate, or one to try again."""
    reason = (getattr(error, "reason", "") or "") if isinstance(error, ssl.SSLError) else ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerRefused(
            f"the other party shows another certificate than the one in peer.pem ({error.verify_message}): "
            "ask it for its certificate.pem"
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return PeerRefused("the other party does not accept our certificate: give it our certificate.pem as peer.pem")
    if isinstance(error, TimeoutError):
        return PeerLost("the other party does not answer in time")
    return PeerLost(f"the connection broke: {reason or error.strerror or error}")


def clean(text: str) -> str:
    """Return a stranger's text as one line that cannot steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)[:1000]


def _decode(payload: bytearray, expected: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(payload, type=expected)
    except (ValueError, RecursionError) as error:  # a DecodeError, or text that is not in UTF-8
        raise ProtocolError(f"expected a {expected.__name__} message, got another form: {clean(str(error))}") from None
