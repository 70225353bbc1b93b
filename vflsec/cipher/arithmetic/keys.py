"""Key pairs: phe's objects, how randomizers are drawn under them, and decryption through the factors."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import gmpy2
import msgspec
from gmpy2 import mpz
from phe import PaillierPrivateKey, PaillierPublicKey, generate_paillier_keypair

from vflsec.base.checks import expect_known
from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.layout import MODES, Mode

ORDER_BITS = 256  # of the prime order of the randomizers modulo each prime square, in subgroup mode
_SMALL = 1 << 20  # prime factors of p - 1 below it are known


class PublicKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the active party gets of a key.

    Attributes:
        n: the modulus, little-endian.
        generator: in subgroup mode, of the randomizers modulo n^2, little-endian; else empty.
    """

    n: bytes
    generator: bytes = b""

    @property
    def modulus(self) -> int:
        """The modulus n."""
        return int.from_bytes(self.n, "little")

    def check(self, bits: int, mode: Mode = "standard") -> None:
        """Raise ProtocolError unless this can be a key of ``bits`` bits and this mode."""
        n, generator = self.modulus, int.from_bytes(self.generator, "little")
        if n.bit_length() != bits or n % 2 == 0:
            raise ProtocolError(f"expected a key of {bits} bits, got one of {n.bit_length()}")
        if gmpy2.gcd(n, gmpy2.primorial(_SMALL)) != 1:
            raise ProtocolError("expected a key of two large primes, got one with a small factor")
        if bool(self.generator) != (mode == "subgroup"):
            raise ProtocolError(
                f"expected a key of mode {mode}, got one {'with' if self.generator else 'without'} a generator"
            )
        if self.generator and not (1 < generator < n * n and math.gcd(generator, n) == 1):
            raise ProtocolError("expected a generator among the units modulo n^2, got something else")


class Half(NamedTuple):
    """What is known of one prime factor p of n.

    Attributes:
        prime: p.
        square: p^2.
        order: of the group that randomizers are drawn from modulo p^2, a divisor of p - 1.
        scale: turns a decryption's logarithm into the message modulo p.
    """

    prime: mpz
    square: mpz
    order: mpz
    scale: mpz


class Keys:
    """A key pair, made for one run and kept by nobody.

    A Paillier ciphertext of m is (1 + n)^m times a randomizer, a random n-th residue modulo n^2. Under the decisional
    composite residuosity assumption (DCR) it tells nothing about m. The modes differ in which residues are drawn:

    * ``standard``: the passive party's are uniform, up to a subgroup of an index without prime factors below 2^20,
      where there is one; the active party's, which must hide from the passive party who knows the factors of n, are
      within 2^-40 of uniform. Assumes DCR alone.
    * ``subgroup``: p - 1 and q - 1 each have a prime factor of 256 bits, and randomizers lie in the subgroup of these
      orders, whose generator is public. Also assumes that this subgroup cannot be told from all n-th residues, which
      the factors' special form must not help. The active party's are within 2^-64 of uniform on the subgroup.

    Source: Paillier 1999; decryption through the factors, ibid. section 7; subgroup keys, Damgard et al. 2007 and
    Ma et al. 2021. Decryption takes powers with secret exponents by gmpy2, which is not constant in time. So
    ``PassiveRole`` multiplies every ciphertext by a fresh randomizer first: whoever sends it does not know, let alone
    choose, the base. That ends what is learned from chosen bases; it does not end what a process on the same processor
    sees of caches and branches, which depend on the exponent.

    Args:
        private: the key, an object of ``phe``.
        mode: see above.
        orders: in subgroup mode, the two primes of 256 bits, in the order of ``private.p`` and ``private.q``.

    Raises:
        UsageError: an unknown mode, or orders that do not belong to key and mode.
    """

    def __init__(
        self, private: PaillierPrivateKey, mode: Mode = "standard", orders: tuple[int, int] | None = None
    ) -> None:
        expect_known(MODES, mode=mode)
        self.private, self.mode = private, mode
        self.n = mpz(private.public_key.n)
        primes = mpz(private.p), mpz(private.q)
        if (mode == "subgroup") != (orders is not None) or any(
            (p - 1) % order for p, order in zip(primes, orders or (1, 1), strict=True)
        ):
            raise UsageError("expected divisors of p - 1 and q - 1 as orders in subgroup mode, and in no other")
        self.halves = tuple(
            self._halve(p, mpz(order)) for p, order in zip(primes, orders or (p - 1 for p in primes), strict=True)
        )
        self._p_to_q = gmpy2.invert(primes[0], primes[1])

    def _halve(self, prime: mpz, order: mpz) -> Half:
        square = prime * prime
        logarithm = (gmpy2.powmod(self.n + 1, order, square) - 1) // prime
        return Half(prime, square, order, gmpy2.invert(logarithm, prime))

    @classmethod
    def generate(cls, bits: int, mode: Mode = "standard") -> Keys:
        """Return a fresh pair of ``bits`` bits."""
        expect_known(MODES, mode=mode)
        if mode != "subgroup":
            return cls(generate_paillier_keypair(n_length=bits)[1], mode)
        primes: dict[int, int] = {}
        while len(primes) < 2:
            primes.update([_draw_prime(bits // 2)])
        p, q = sorted(primes)
        return cls(PaillierPrivateKey(PaillierPublicKey(p * q), p, q), mode, (primes[p], primes[q]))

    @property
    def public(self) -> PublicKey:
        """What the other party may know; in subgroup mode with a fresh generator."""
        n, size = int(self.n), self.n.bit_length() // 8
        if self.mode != "subgroup":
            return PublicKey(n.to_bytes(size, "little"))
        cofactor = math.prod((half.prime - 1) // half.order for half in self.halves)
        generator = int(gmpy2.powmod(secrets.randbelow(n - 2) + 2, self.n * cofactor, self.n * self.n))
        return PublicKey(n.to_bytes(size, "little"), generator.to_bytes(2 * size, "little"))

    def decrypt(self, ciphertexts: Sequence[mpz]) -> list[int]:
        """Return the plaintexts in [0, n) of units modulo n^2, as ``phe`` does; on two cores, one for each factor.

        Raises:
            ProtocolError: in subgroup mode, a randomizer outside the subgroup: what would come out depends on the key.
        """
        with ThreadPoolExecutor(1) as second:  # powers of a list are taken without the interpreter's lock
            modulo_q = second.submit(_decrypt_half, ciphertexts, self.halves[1])
            modulo_p = _decrypt_half(ciphertexts, self.halves[0])
        p, q = self.halves[0].prime, self.halves[1].prime
        pairs = zip(modulo_p, modulo_q.result(), strict=True)
        return [int(a + p * ((b - a) * self._p_to_q % q)) for a, b in pairs]


def _decrypt_half(ciphertexts: Sequence[mpz], half: Half) -> list[mpz]:
    """Return the messages modulo a prime factor of n."""
    messages = []
    for power in gmpy2.powmod_base_list(list(ciphertexts), half.order, half.square):
        quotient, rest = divmod(power - 1, half.prime)
        if rest:
            raise ProtocolError("expected a ciphertext of this key, got one whose randomizer is not of its subgroup")
        messages.append(quotient * half.scale % half.prime)
    return messages


def draw_generator(half: Half) -> mpz:
    """Return a random n-th residue modulo p^2 that generates the group of order ``half.order``, or nearly all of it.

    If it misses some of the group, then by an index whose every prime factor is above 2^20; the odds are 2^-14 or less.
    """
    small = _list_factors(gmpy2.gcd(half.order, gmpy2.primorial(_SMALL)))
    exponent = half.prime * ((half.prime - 1) // half.order)
    while True:
        residue = gmpy2.powmod(secrets.randbelow(int(half.prime) - 2) + 2, exponent, half.square)
        if residue != 1 and all(gmpy2.powmod(residue, half.order // prime, half.square) != 1 for prime in small):
            return residue


def _draw_prime(bits: int) -> tuple[int, int]:
    """Return a prime p of ``bits`` bits, its two highest set, and a prime of 256 bits that divides p - 1."""

    def random(size: int) -> mpz:
        return mpz(secrets.randbits(size) | 3 << size - 2)

    order = gmpy2.next_prime(random(ORDER_BITS))
    while True:
        low, high = (3 << bits - 2) // (2 * order) + 1, (1 << bits) // (2 * order)
        prime = 2 * order * (low + secrets.randbelow(int(high - low))) + 1
        if gmpy2.is_prime(prime, 40):
            return int(prime), int(order)


def _list_factors(product: mpz) -> list[mpz]:
    """Return the primes of a square-free product of small ones."""
    primes, candidate = [], mpz(2)
    while candidate * candidate <= product:
        if product % candidate == 0:
            primes.append(candidate)
            product //= candidate
        candidate = gmpy2.next_prime(candidate)
    return primes + [product] * (product > 1)
