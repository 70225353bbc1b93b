"""Ciphertexts on the wire: of fixed width, and checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable

import gmpy2
from gmpy2 import mpz

from vflsec.base.errors import ProtocolError
from vflsec.cipher.arithmetic.codec import cut, join


class Ciphertexts:
    """Reads and writes numbers modulo n^2.

    Args:
        n: the modulus of the key.

    Attributes:
        square: n^2.
        size: bytes of one.
    """

    def __init__(self, n: int) -> None:
        self.n, self.square = mpz(n), mpz(n) ** 2
        self.size = n.bit_length() // 4

    def write(self, ciphertexts: Iterable[mpz]) -> bytes:
        """Return their bytes."""
        return join(ciphertexts, self.size)

    def read(self, data: bytes, count: int, what: str) -> list[mpz]:
        """Return ``count`` ciphertexts.

        Raises:
            ProtocolError: bytes for another number of them, or a number that is no unit modulo n^2 (zero is none).
        """
        found = [mpz(value) for value in cut(data, self.size, count, what)]
        product = mpz(1)
        for ciphertext in found:
            if ciphertext >= self.square:
                raise ProtocolError(f"expected {what} below n^2, got a larger number")
            product = product * ciphertext % self.n
        if gmpy2.gcd(product, self.n) != 1:
            raise ProtocolError(f"expected units modulo n^2 as {what}, got zero or a multiple of a factor of n")
        return found
