"""Products of powers modulo m: Straus for few bases and long exponents, Pippenger for many bases and short ones.

The schedule of multiplications depends on the exponents, as does their time: whoever can time this process learns about
the secret they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import gmpy2
from gmpy2 import mpz

Schedule = list[list[tuple[int, int]]]


def inverses(bases: Sequence[mpz], modulus: mpz) -> list[mpz]:
    """Return the inverses of units modulo ``modulus`` with one inversion (Montgomery's trick)."""
    prefix = [mpz(1)]
    for base in bases:
        prefix.append(prefix[-1] * base % modulus)
    rest, found = gmpy2.invert(prefix[-1], modulus), []
    for base, before in zip(reversed(bases), reversed(prefix[:-1]), strict=True):
        found.append(rest * before % modulus)
        rest = rest * base % modulus
    return found[::-1]


class Straus:
    """Products of powers of the same few bases: squarings are shared by all bases, odd powers by all products.

    Source: Straus 1964; sliding windows, as in Handbook of Applied Cryptography, 14.88.

    Args:
        bases: units modulo ``modulus``.
        modulus: m.
        bits: of the longest exponent.
        products: how many are to come, for the width of the window.
        signed: whether exponents may be negative.
    """

    def __init__(
        self, bases: Sequence[mpz], modulus: mpz, *, bits: int, products: int = 1, signed: bool = False
    ) -> None:
        self.modulus, self.window = modulus, straus_window(bits, products)
        negatives = [self._odd_powers(inverse) for inverse in inverses(bases, modulus)] if signed else [[]] * len(bases)
        self._tables = [self._odd_powers(base) + more for base, more in zip(bases, negatives, strict=True)]

    def _odd_powers(self, base: mpz) -> list[mpz]:
        powers, square = [base], base * base % self.modulus
        for _ in range((1 << self.window - 1) - 1):
            powers.append(powers[-1] * square % self.modulus)
        return powers

    def product(self, schedule: Schedule) -> mpz:
        """Return the product of all bases to the exponents that ``schedule`` was made of, with this window."""
        modulus, tables, product = self.modulus, self._tables, mpz(1)
        for digits in schedule:
            product = product * product % modulus
            for base, power in digits:
                product = product * tables[base][power] % modulus
        return product


def straus_window(bits: int, products: int) -> int:
    """Return the width of the window that takes the fewest multiplications for each base."""
    return min(range(1, 9), key=lambda w: products * bits / (w + 1) + (1 << w - 1))


def straus_schedule(exponents: Sequence[int], window: int) -> Schedule:
    """Return, from the highest bit down, which odd power of which base is multiplied in after the squaring."""
    digits: Schedule = [[] for _ in range(max(abs(e).bit_length() for e in exponents))]
    for base, exponent in enumerate(exponents):
        rest, position, negative = abs(exponent), 0, exponent < 0
        while rest:
            zeros = (rest & -rest).bit_length() - 1
            rest, position = rest >> zeros, position + zeros
            power = (rest & (1 << window) - 1) >> 1
            digits[position].append((base, power + (negative << window - 1)))
            rest, position = rest >> window, position + window
    return digits[::-1]


class Pippenger:
    """Products of powers of the same many bases, in balanced digits; their inverses come from one inversion.

    Source: Pippenger 1976, in the form of Bernstein et al. 2012, section 4 (buckets).

    Args:
        bases: units modulo ``modulus``.
        modulus: m.
        bits: |exponent| <= 2^bits.
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, bits: int) -> None:
        self.modulus = modulus
        self.window = pippenger_window(len(bases), bits)
        self.digits = -(-(bits + 2) // self.window)
        self._bases = list(zip(bases, inverses(bases, modulus), strict=True))

    def product(self, exponents: Sequence[int]) -> mpz:
        """Return the product of all bases to these exponents."""
        modulus, window, product = self.modulus, self.window, mpz(1)
        half = 1 << window - 1
        balance = sum(half << window * k for k in range(self.digits))  # added to all digits, taken off each
        shifted = [exponent + balance for exponent in exponents]
        for k in reversed(range(self.digits)):
            product = gmpy2.powmod(product, 1 << window, modulus)
            buckets = [mpz(1)] * (half + 1)
            for pair, exponent in zip(self._bases, shifted, strict=True):
                if digit := (exponent >> window * k & 2 * half - 1) - half:
                    buckets[abs(digit)] = buckets[abs(digit)] * pair[digit < 0] % modulus
            running = total = mpz(1)
            for bucket in reversed(buckets[1:]):  # bucket[d]^d for all d, by sums of sums
                running = running * bucket % modulus
                total = total * running % modulus
            product = product * total % modulus
        return product


def pippenger_window(bases: int, bits: int) -> int:
    """Return the width of the digits that takes the fewest multiplications."""
    return min(range(2, 16), key=lambda w: -(-(bits + 2) // w) * (bases + (1 << w) + w))
