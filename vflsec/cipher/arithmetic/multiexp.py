"""Products of powers modulo m: of few bases by windows, of many bases and short exponents by Pippenger's buckets.

``FixedWindow`` and ``Pippenger`` take the same multiplications of numbers of full size whatever the exponents are, so
that their time does not tell how large a loss gradient is. That is no constant time: gmpy2's multiplications take a
little longer for some numbers than for others, which number is read from memory depends on the exponent, and bases of
unusual form, which a party that deviates can send, make some multiplications faster. ``Straus`` is for exponents that
are uniform on their range.
"""

from __future__ import annotations

import secrets
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

    The schedule of multiplications depends on the exponents: take it for those that are uniform on their range.

    Source: Straus 1964; sliding windows, as in Handbook of Applied Cryptography, 14.88.

    Args:
        bases: units modulo ``modulus``.
        modulus: m.
        bits: of the longest exponent.
        products: how many are to come, for the width of the window.
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, *, bits: int, products: int = 1) -> None:
        self.modulus, self.window = modulus, straus_window(bits, products)
        self._tables = [self._odd_powers(base) for base in bases]

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
    digits: Schedule = [[] for _ in range(max(e.bit_length() for e in exponents))]
    for base, exponent in enumerate(exponents):
        rest, position = exponent, 0
        while rest:
            zeros = (rest & -rest).bit_length() - 1
            rest, position = rest >> zeros, position + zeros
            digits[position].append((base, (rest & (1 << window) - 1) >> 1))
            rest, position = rest >> window, position + window
    return digits[::-1]


class FixedWindow:
    """Products of signed powers of the same few bases, by the same multiplications whatever the exponents are.

    Exponents are shifted to be positive and cut into digits of a fixed number. The power for each digit, zero as well,
    carries a random factor, so that no multiplication is by 1. Shift and factors come off at the end: they are what
    exponents of zero give.

    Source: Straus 1964, with fixed windows.

    Args:
        bases: units modulo ``modulus``.
        modulus: m.
        bits: |exponent| <= 2^bits.
        products: how many are to come, for the width of the window.
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, *, bits: int, products: int = 1) -> None:
        self.modulus, self._shift = modulus, 1 << bits
        self.window = fixed_window(bits, products)
        self.digits = -(-(bits + 2) // self.window)
        factor = _random_unit(modulus)
        self._tables = [self._powers(base, factor) for base in bases]
        self._origin = gmpy2.invert(self._raw([0] * len(bases)), modulus)

    def _powers(self, base: mpz, factor: mpz) -> list[mpz]:
        powers = [factor]
        for _ in range((1 << self.window) - 1):
            powers.append(powers[-1] * base % self.modulus)
        return powers

    def _raw(self, exponents: Sequence[int]) -> mpz:
        modulus, window, product = self.modulus, self.window, mpz(1)
        shifted, full = [exponent + self._shift for exponent in exponents], (1 << self.window) - 1
        for k in reversed(range(self.digits)):
            for _ in range(window):
                product = product * product % modulus
            for table, exponent in zip(self._tables, shifted, strict=True):
                product = product * table[exponent >> window * k & full] % modulus
        return product

    def product(self, exponents: Sequence[int]) -> mpz:
        """Return the product of all bases to these exponents."""
        return self._raw(exponents) * self._origin % self.modulus


def fixed_window(bits: int, products: int) -> int:
    """Return the width of the window that takes the fewest multiplications for each base; one product is the origin."""
    return min(range(1, 9), key=lambda w: (products + 1) * -(-(bits + 2) // w) + (1 << w))


class Pippenger:
    """Products of signed powers of the same many bases, by the same multiplications whatever the exponents are.

    Digits are balanced, and inverses come from one inversion. A digit of zero has a bucket too, which nothing is made
    of; and buckets start from a random factor, which comes off at the end, so that no multiplication is by 1.

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
        self._factor, half = _random_unit(modulus), 1 << self.window - 1
        *inverted, origin = inverses([*bases, self._factor], modulus)
        self._bases = list(zip(bases, inverted, strict=True))
        times = half * (half + 1) // 2 * sum(1 << self.window * k for k in range(self.digits))
        self._origin = gmpy2.powmod(origin, times, modulus)

    def product(self, exponents: Sequence[int]) -> mpz:
        """Return the product of all bases to these exponents."""
        modulus, window, product = self.modulus, self.window, mpz(1)
        half = 1 << window - 1
        balance = sum(half << window * k for k in range(self.digits))  # added to all digits, taken off each
        shifted = [exponent + balance for exponent in exponents]
        for k in reversed(range(self.digits)):
            product = gmpy2.powmod(product, 1 << window, modulus)
            buckets = [self._factor] * (half + 1)
            for pair, exponent in zip(self._bases, shifted, strict=True):
                digit = (exponent >> window * k & 2 * half - 1) - half
                buckets[abs(digit)] = buckets[abs(digit)] * pair[digit < 0] % modulus
            running = total = mpz(1)
            for bucket in reversed(buckets[1:]):  # bucket[d]^d for all d, by sums of sums
                running = running * bucket % modulus
                total = total * running % modulus
            product = product * total % modulus
        return product * self._origin % modulus


def _random_unit(modulus: mpz) -> mpz:
    """Return a random number below ``modulus``, which has no small factor: it is a unit, but for negligible odds."""
    return mpz(secrets.randbelow(int(modulus) - 1) + 1)


def pippenger_window(bases: int, bits: int) -> int:
    """Return the width of the digits that takes the fewest multiplications."""
    return min(range(2, 16), key=lambda w: -(-(bits + 2) // w) * (bases + (1 << w) + w))
