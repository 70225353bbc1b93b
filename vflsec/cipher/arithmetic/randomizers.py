"""Randomizers: the factors that make ciphertexts of one message unlike. None depends on data, none is used twice."""

import multiprocessing
import os
import secrets
import signal
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import gmpy2
from gmpy2 import mpz

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import cut, join
from vflsec.cipher.arithmetic.keys import ORDER_BITS, Keys, PublicKey, draw_generator
from vflsec.cipher.arithmetic.powers import FixedBase

SLACK = 64  # bits by which an exponent is longer than an order that its drawer does not know
COSETS = 128  # random elements whose subset products reach the cosets of a cyclic subgroup
WITHOUT_TABLE = 200  # randomizers that cost p less one by one than after building a table
CHUNK = 512  # drawn at once where there is a table: a row of it then serves many while it is in the cache
_AHEAD = 8  # chunks that a process may be ahead
_COUNT_BYTES = 8  # of a request


class RandomizerSource(ABC):
    """Draws randomizers; builds its tables when it is first asked, in the process that asks.

    Args:
        uses: how many are about to be drawn.

    Attributes:
        chunk: how many to draw at once.
    """

    chunk: int = CHUNK

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self._tables: list[FixedBase] = []

    @abstractmethod
    def draw(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ones."""


class FactorSource(RandomizerSource):
    """Of the key holder, through the factors of n: a power of one generator modulo each prime square.

    The mode of ``keys`` says in which group they lie.
    """

    def __init__(self, keys: Keys, uses: int) -> None:
        super().__init__(uses)
        self.keys = keys

    def draw(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ones."""
        p, q = self.keys.halves
        if not self._tables:
            self._tables = [
                FixedBase(draw_generator(half), half.prime, half.order.bit_length(), uses=self.uses) for half in (p, q)
            ]
            self._p_to_q = gmpy2.invert(p.square, q.square)
        modulo_p, modulo_q = (
            table.powers([secrets.randbelow(int(half.order)) for _ in range(count)])
            for table, half in zip(self._tables, (p, q), strict=True)
        )
        return [a + p.square * ((b - a) * self._p_to_q % q.square) for a, b in zip(modulo_p, modulo_q, strict=True)]


class CosetSource(RandomizerSource):
    """Of the other party, who does not know the order of the group and must hide from who does.

    A power of one random n-th residue, with an exponent longer than the order by 64 bits, times a random subset product
    of 128 more: within 2^-40 of uniform on all n-th residues, as long as one residue generates all but 2^48 cosets.
    """

    def __init__(self, n: int, uses: int) -> None:
        super().__init__(uses)
        self.n = mpz(n)

    def draw(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ones."""
        if not self._tables:
            base, *subset = PowerSource(self.n).draw(1 + COSETS)
            self._tables = [FixedBase(base, self.n, self.n.bit_length() + SLACK, uses=self.uses, subset=subset)]
        (table,) = self._tables
        return table.powers([secrets.randbits(table.top + COSETS) for _ in range(count)])


class PowerSource(RandomizerSource):
    """r^n for a uniform r each: no table, the choice for few."""

    chunk = 1

    def __init__(self, n: int, uses: int = 0) -> None:
        super().__init__(uses)
        self.n = mpz(n)

    def draw(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ones."""
        square = self.n * self.n
        return [gmpy2.powmod(secrets.randbelow(int(self.n) - 1) + 1, self.n, square) for _ in range(count)]


class SubgroupSource(RandomizerSource):
    """Of the other party, in subgroup mode: a power of the public generator."""

    def __init__(self, public: PublicKey, uses: int) -> None:
        super().__init__(uses)
        self.public = public

    def draw(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ones."""
        bits = 2 * ORDER_BITS + SLACK
        if not self._tables:
            generator = int.from_bytes(self.public.generator, "little")
            self._tables = [FixedBase(generator, mpz(self.public.modulus), bits, uses=self.uses)]
        return self._tables[0].powers([secrets.randbits(bits) for _ in range(count)])


def make_source(public: PublicKey, uses: int) -> RandomizerSource:
    """Return what the active party draws about ``uses`` randomizers from."""
    if public.generator:
        return SubgroupSource(public, uses)
    return (CosetSource if uses > WITHOUT_TABLE else PowerSource)(public.modulus, uses)


class Pool:
    """Randomizers made ahead, by this process or by its own children.

    Children are forked before there are tables: each builds its own, while the others already work.

    Args:
        source: draws them.
        modulus: n^2.
        workers: how many children; 0 for none.

    Raises:
        UsageError: children on a system that cannot fork.
    """

    def __init__(self, source: RandomizerSource, modulus: mpz, *, workers: int = 0) -> None:
        if workers and "fork" not in multiprocessing.get_all_start_methods():
            raise UsageError(f"expected workers=0 on a system that cannot fork, got {workers}")
        self._source, self._size = source, -(-modulus.bit_length() // 8)
        self._to_come = source.uses  # of those that were announced
        self._stock: list[mpz] = []
        self._owner = os.getpid()
        self._links: list[Connection] = []
        self._asked: deque[Connection] = deque()  # a link for each request that waits, in their order
        self._children = []
        for _ in range(workers):
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(
                target=_serve, args=(source, self._size, theirs, ours), daemon=True
            )
            child.start()
            theirs.close()
            self._links.append(ours)
            self._children.append(child)
        for link in self._links * _AHEAD:
            self._ask(link)

    def take(self, count: int) -> list[mpz]:
        """Return ``count`` randomizers and forget them.

        Raises:
            ProtocolError: this process was forked from the one that owns the pool, and would give what that one gives.
        """
        if os.getpid() != self._owner:
            raise ProtocolError(
                "a pool of randomizers serves the process that made it alone; make another after forking"
            )
        while lacking := max(count - len(self._stock), 0):
            self._stock += self._receive(lacking) if self._links else self._source.draw(self._count_due(lacking))
        rest = len(self._stock) - count
        taken, self._stock = self._stock[rest:], self._stock[:rest]
        return taken

    def fill(self, count: int) -> None:
        """Draw ``count`` more in this process, before they are needed."""
        self._stock += self._source.draw(count)
        self._to_come = max(self._to_come - count, 0)

    def _count_due(self, least: int = 0) -> int:
        """Return how many to draw next: a chunk, or what is still to come if that is less, and at least ``least``."""
        count = max(min(self._source.chunk, self._to_come), least)
        self._to_come = max(self._to_come - count, 0)
        return count

    def _ask(self, link: Connection, least: int = 0) -> None:
        if count := self._count_due(least):
            link.send_bytes(count.to_bytes(_COUNT_BYTES, "little"))
            self._asked.append(link)

    def _receive(self, least: int) -> list[mpz]:
        try:
            if not self._asked:  # more than were announced: all draw a share, and one for the next time
                for child in self._links * 2:
                    self._ask(child, -(-least // len(self._links)))
            link = self._asked.popleft()
            data = link.recv_bytes()
            self._ask(link)
        except (EOFError, OSError):
            raise ProtocolError(
                "a process that prepares randomizers has died; start again, or with workers=0"
            ) from None
        return [mpz(value) for value in cut(data, self._size, len(data) // self._size, "randomizers")]

    def close(self) -> None:
        """End the children."""
        for link, child in zip(self._links, self._children, strict=True):
            link.close()
            child.terminate()
        for child in self._children:
            child.join()
        self._links, self._children = [], []
        self._asked.clear()


def _serve(source: RandomizerSource, size: int, link: Connection, parents: Connection) -> None:
    """Draw as many as each request says, until the parent is gone; what it does not yet read waits in a thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it
    parents.close()
    os.nice(5)  # the party that takes them can use both cores, and is the one that others wait for
    with ThreadPoolExecutor(1) as sender:
        try:
            while True:
                count = int.from_bytes(link.recv_bytes(), "little")
                sender.submit(link.send_bytes, join(source.draw(count), size))
        except (EOFError, OSError):
            return
