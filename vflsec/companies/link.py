"""Reaching the other party: one of the two listens, the other dials; both prove who they are before a byte is read."""

import contextlib
import errno
import queue
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

from vflsec.base.errors import PeerLost, PeerRefused, UsageError
from vflsec.companies.identity import Identity
from vflsec.companies.wire import classify_failure

HANDSHAKES = 64
"""Connections that may be in the middle of a TLS handshake at once; for one more, the oldest silent one gives way."""
HANDSHAKE = 10.0
"""Seconds for a TLS handshake, at most: it takes two round trips, and only strangers need longer."""
LINES = 100
"""Lines about strangers, at most: they can knock for ever, and a log cannot hold that."""


class Link(ABC):
    """The way to the other party; it can be opened again and again.

    Class attributes:
        speaks_first: who dials in TLS 1.3 is done before its certificate is judged, and must listen to hear of it.
    """

    speaks_first: ClassVar[bool]

    @abstractmethod
    def open(self, within: float) -> ssl.SSLSocket:
        """Return a connection whose peer has proved to be the pinned one.

        Raises:
            PeerLost: nobody is there ``within`` so many seconds; try again.
            PeerRefused: somebody else is there, or does not accept us.
        """

    def is_superseded(self) -> bool:
        """Whether the peer has opened another connection since the last ``open``."""
        return False

    def close(self) -> None:  # noqa: B027  (who dials has nothing to close)
        """Stop listening."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class Dialer(Link):
    """Connects to the party that listens.

    Args:
        address: host and port.
        identity: our key, and the peer's certificate.
        timeout: seconds for TCP, and again for TLS; ``HANDSHAKE`` if that is shorter.
    """

    speaks_first = False

    def __init__(self, address: tuple[str, int], identity: Identity, timeout: float) -> None:
        self.address = address
        self.identity = identity
        self.timeout = min(timeout, HANDSHAKE)
        self._context = identity.context(server=False)

    def open(self, within: float) -> ssl.SSLSocket:
        """Connect once."""
        host, port = self.address
        try:
            connection = socket.create_connection(self.address, timeout=min(within, self.timeout))
        except OSError as error:
            raise PeerLost(f"cannot reach {host}:{port}: {error.strerror or error}") from error
        return _secure(connection, self._context, self.identity, self.timeout)


class Listener(Link):
    """Waits for the party that dials; each newcomer proves itself in a thread of its own.

    A stranger therefore cannot keep the peer waiting: when too many connections are in the middle of a handshake, the
    oldest one that has said nothing is hung up on, or else the oldest one. A peer that lost its connection takes over
    at once from the one that it had: with one pinned certificate, whoever comes last is the same party.

    Args:
        address: host and port; port 0 takes any free one.
        identity: our key, and the peer's certificate.
        timeout: seconds for a TLS handshake; ``HANDSHAKE`` if that is shorter.
        tell: called with a line about a stranger that was turned away; not twice with the same one.

    Attributes:
        port: on which it listens.

    Raises:
        UsageError: it cannot listen there.
    """

    speaks_first = True

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        timeout: float,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.identity = identity
        self.timeout = min(timeout, HANDSHAKE)
        self._context = identity.context(server=True)
        self._tell = tell
        self._arrived: queue.SimpleQueue[ssl.SSLSocket] = queue.SimpleQueue()
        self._reported: set[str] = set()
        self._newcomers: dict[socket.socket, bool] = {}
        """Connections in the middle of a handshake, the oldest first, and whether each has said something."""
        self._guard = threading.Lock()
        host, port = address
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._socket = socket.create_server(address, family=family)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def open(self, within: float) -> ssl.SSLSocket:
        """Wait for the peer; of several connections the last one counts."""
        try:
            connection = self._arrived.get(timeout=within)
        except queue.Empty:
            raise PeerLost(f"nobody connected within {round(within, 1):g} s") from None
        while self.is_superseded():
            connection.close()
            connection = self._arrived.get()
        return connection

    def is_superseded(self) -> bool:
        """Whether the peer has connected again."""
        return not self._arrived.empty()

    def close(self) -> None:
        """Stop listening, and hang up on whoever still waits."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        while self.is_superseded():
            self._arrived.get().close()

    def _serve(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._socket.fileno() < 0 or not _is_passing(error):
                    return  # closed
                time.sleep(0.1)  # out of descriptors, for example
                continue
            with self._guard:
                if len(self._newcomers) >= HANDSHAKES:
                    silent = (newcomer for newcomer, spoke in self._newcomers.items() if not spoke)
                    oldest = next(silent, None) or next(iter(self._newcomers))
                    del self._newcomers[oldest]
                    hang_up(oldest)
                self._newcomers[connection] = False
            threading.Thread(target=self._welcome, args=(connection, address), daemon=True).start()

    def _welcome(self, connection: socket.socket, address: Any) -> None:
        """Wait for the first byte, then for the end of the handshake; who has to give way is hung up on meanwhile."""
        handle = connection
        try:
            connection.settimeout(self.timeout)
            connection.recv(1, socket.MSG_PEEK)
            with self._guard:
                if self._newcomers.pop(connection, None) is None:
                    raise PeerLost("it was silent while others came")
                handle = connection.dup()  # TLS takes the connection over
                self._newcomers[handle] = True
            secured = _secure(connection, self._context, self.identity, self.timeout)
            with self._guard:
                if self._newcomers.pop(handle, None) is None:
                    secured.close()
                    raise PeerLost("it was slow while others came")
            self._arrived.put(secured)
        except (PeerLost, PeerRefused, OSError) as error:
            connection.close()
            line = f"turned away {address[0]}: {classify_failure(error) if isinstance(error, OSError) else error}"
            if line not in self._reported and len(self._reported) < LINES:
                self._reported.add(line)
                self._tell(line)
        finally:
            with self._guard:
                self._newcomers.pop(handle, None)
            if handle is not connection:
                handle.close()


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``[::1]:7000`` among them.

    Raises:
        UsageError: something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"expected HOST:PORT, got {text!r}; for example 127.0.0.1:7700")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # as the socket functions do, whose UnicodeError nobody would expect
    except UnicodeError:
        raise UsageError(
            f"expected a host with dot-separated parts of 1 to 63 characters, got {host!r}: use its name or IP address"
        ) from None
    return host, int(port)


def _secure(connection: socket.socket, context: ssl.SSLContext, identity: Identity, timeout: float) -> ssl.SSLSocket:
    """Return ``connection`` after a TLS handshake in which the peer has shown the pinned certificate and its key."""
    connection.settimeout(timeout)
    server = context.protocol is ssl.PROTOCOL_TLS_SERVER
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each message waits for its answer
        secured = context.wrap_socket(connection, server_side=server)
    except OSError as error:
        connection.close()
        raise classify_failure(error) from error
    if secured.getpeercert(binary_form=True) != identity.peer:
        secured.close()
        raise PeerRefused("the other party shows another certificate than the one in peer.pem")
    return secured


def hang_up(connection: socket.socket) -> None:
    """End a connection that another thread may be reading from; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _is_passing(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
