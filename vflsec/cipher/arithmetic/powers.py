"""Powers modulo m: of one base by a table; products of few by windows, of many and short ones by Pippenger's buckets.

``FixedWindow`` and ``Pippenger`` take the same multiplications of numbers of full size whatever the exponents are, so
that their time does not tell how large a loss gradient is. That is no constant time: gmpy2's multiplications take a
little longer for some numbers than for others, which number is read from memory depends on the exponent, and bases of
unusual form, which a party that deviates can send, make some multiplications faster. ``Straus`` is for exponents that
are uniform on their range.

Bases are units modulo m, exponents lie within ±2^bits, and the number of products to come gives the width of windows.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import gmpy2
import numpy as np
from gmpy2 import mpz

from vflsec.cipher.arithmetic.codec import cut, join

Schedule = list[list[tuple[int, int]]]


def invert_all(bases: Sequence[mpz], modulus: mpz) -> list[mpz]:
    """Return the inverses of units modulo ``modulus`` with one inversion (Montgomery's trick)."""
    prefix = [mpz(1)]
    for base in bases:
        prefix.append(prefix[-1] * base % modulus)
    rest, inverted = gmpy2.invert(prefix[-1], modulus), []
    for base, before in zip(reversed(bases), reversed(prefix[:-1]), strict=True):
        inverted.append(rest * before % modulus)
        rest = rest * base % modulus
    return inverted[::-1]


def _compute_powers(first: mpz, factor: mpz, count: int, modulus: mpz) -> list[mpz]:
    """Return ``first`` and its products with ``factor`` to the powers up to ``count``."""
    powers = [first]
    for _ in range(count):
        powers.append(powers[-1] * factor % modulus)
    return powers


class Straus:
    """Products of powers of the same few bases: squarings are shared by all bases, odd powers by all products.

    The schedule of multiplications depends on the exponents: take it for those that are uniform on their range.

    Source: Straus 1964; sliding windows, as in Handbook of Applied Cryptography, 14.88.
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, *, bits: int, products: int = 1) -> None:
        self.modulus, self.window = modulus, choose_window(bits, products)
        count = (1 << self.window - 1) - 1  # odd powers after the first
        self._tables = [_compute_powers(base, base * base % modulus, count, modulus) for base in bases]

    def product(self, schedule: Schedule) -> mpz:
        """Return the product of all bases to the exponents that ``schedule`` was made of, with this window."""
        modulus, tables, product = self.modulus, self._tables, mpz(1)
        for digits in schedule:
            product = product * product % modulus
            for base, power in digits:
                product = product * tables[base][power] % modulus
        return product


def choose_window(bits: int, products: int) -> int:
    """Return the width of the window that takes the fewest multiplications for each base."""
    return min(range(1, 9), key=lambda w: products * bits / (w + 1) + (1 << w - 1))


def plan_straus(exponents: Sequence[int], window: int) -> Schedule:
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
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, *, bits: int, products: int = 1) -> None:
        self.modulus, self._shift = modulus, 1 << bits
        self.window = find_fixed_window(bits, products)
        self.digits = -(-(bits + 2) // self.window)
        factor = _draw_unit(modulus)
        self._tables = [_compute_powers(factor, base, (1 << self.window) - 1, modulus) for base in bases]
        self._origin = gmpy2.invert(self._multiply_raw([0] * len(bases)), modulus)

    def _multiply_raw(self, exponents: Sequence[int]) -> mpz:
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
        return self._multiply_raw(exponents) * self._origin % self.modulus


def find_fixed_window(bits: int, products: int) -> int:
    """Return the width of the window that takes the fewest multiplications for each base; one product is the origin."""
    return min(range(1, 9), key=lambda w: (products + 1) * -(-(bits + 2) // w) + (1 << w))


class Pippenger:
    """Products of signed powers of the same many bases, by the same multiplications whatever the exponents are.

    Digits are balanced, and inverses come from one inversion. A digit of zero has a bucket too, which nothing is made
    of; and buckets start from a random factor, which comes off at the end, so that no multiplication is by 1.

    Source: Pippenger 1976, in the form of Bernstein et al. 2012, section 4 (buckets).
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, bits: int) -> None:
        self.modulus = modulus
        self.window = choose_digits(len(bases), bits)
        self.digits = -(-(bits + 2) // self.window)
        self._factor, half = _draw_unit(modulus), 1 << self.window - 1
        *inverted, origin = invert_all([*bases, self._factor], modulus)
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


def _draw_unit(modulus: mpz) -> mpz:
    """Return a random number below ``modulus``, which has no small factor: it is a unit, but for negligible odds."""
    return mpz(secrets.randbelow(int(modulus) - 1) + 1)


def choose_digits(bases: int, bits: int) -> int:
    """Return the width of the digits that takes the fewest multiplications."""
    return min(range(2, 16), key=lambda w: -(-(bits + 2) // w) * (bases + (1 << w) + w))


MEMORY = 128 << 20  # bytes that the table of one base may take
_OBJECT = 48  # bytes that a number takes beside its digits
_ENTRY = 4  # digits of a power that take as long as an entry of the table


class FixedBase:
    """The powers base^(d · 2^(window · k)) for all digits d and places k, modulo m^2.

    A unit modulo m^2 is a (1 + m λ), with residue a and slope λ below m. The slope of a product is the sum of the
    slopes, for (1 + m λ)(1 + m μ) = 1 + m (λ + μ). So a product of many takes multiplications by residues, which are
    half as long as units are, two at a time, and sums.

    Source: Brickell et al. 1992, with a table for each digit; residues and slopes are this package's.

    Args:
        base: a unit modulo m^2.
        root: m.
        bits: exponents are in [0, 2^bits).
        uses: how many powers are about to be taken, for the width of the window.
        subset: further elements; each is multiplied in if its bit is set, above the exponent's ``top`` bits.

    Attributes:
        top: the place of the first such bit: ``bits``, rounded up to whole digits.
    """

    def __init__(self, base: int, root: mpz, bits: int, *, uses: int, subset: Sequence[mpz] = ()) -> None:
        self.root, self.modulus = root, root * root
        self.window = find_fixed_base_window(self.modulus.bit_length(), bits, uses)
        self.top = -(-bits // self.window) * self.window
        self._size = 8 * -(-int(root).bit_length() // 64)  # bytes of a slope, in whole pairs of digits
        self._residues: list[list[mpz]] = []
        self._slopes: list[np.ndarray] = []  # in digits of 32 bits
        power = _Unit.from_value(mpz(base), root)
        for _ in range(0, bits, self.window):
            power = self._append_powers(power)
        for start in range(0, len(subset), self.window):
            row = [_IDENTITY]
            for element in subset[start : start + self.window]:
                factor = _Unit.from_value(element, root)
                row += [unit.times(factor, root) for unit in row]
            self._append([unit.residue for unit in row], [unit.slope for unit in row])
        if len(self._residues) % 2:  # they are taken in pairs
            self._append([mpz(1)], [mpz(0)])

    def _append_powers(self, power: _Unit) -> _Unit:
        """Append the row of the powers from 0; return the next."""
        unit, residues, slopes = _IDENTITY, [], []
        for _ in range(1 << self.window):
            residues.append(unit.residue)
            slopes.append(unit.slope)
            unit = unit.times(power, self.root)
        self._append(residues, slopes)
        return unit

    def _append(self, residues: Sequence[mpz], slopes: Sequence[mpz]) -> None:
        self._residues.append([residue + 0 for residue in residues])  # a copy takes no more memory than it needs
        self._slopes.append(np.frombuffer(join(slopes, self._size), "<u4").reshape(len(slopes), -1))

    def powers(self, exponents: Sequence[int]) -> list[mpz]:
        """Return base^e for each e, place by place: a row of the table serves many while it is in the cache."""
        root, modulus, products = self.root, self.modulus, [mpz(1)] * len(exponents)
        places = _split_digits(exponents, self.window, len(self._residues))
        for k in range(0, len(places), 2):
            (row, other), digits = self._residues[k : k + 2], (d.tolist() for d in places[k : k + 2])
            factors = zip(products, *digits, strict=True)
            products = [product * (row[i] * other[j]) % modulus for product, i, j in factors]
        sums = zip(products, self._sum(places), strict=True)
        return [product * (1 + root * (slope % root)) % modulus for product, slope in sums]

    def _sum(self, places: Sequence[np.ndarray]) -> list[int]:
        """Return the sum of the slopes at each exponent's digits."""
        total = np.zeros((len(places[0]), self._size // 4), "<u8")  # room for carries, which are left in place
        for row, digits in zip(self._slopes, places, strict=True):
            total += row.take(digits, axis=0)
        even, odd = (cut(total[:, k::2].tobytes(), self._size, len(total), "slopes") for k in (0, 1))
        return [low + (high << 32) for low, high in zip(even, odd, strict=True)]


class _Unit(NamedTuple):
    """A unit modulo m^2 in parts: its residue, the residue's inverse modulo m, and the slope."""

    residue: mpz
    inverse: mpz
    slope: mpz

    @classmethod
    def from_value(cls, value: mpz, root: mpz) -> _Unit:
        quotient, residue = divmod(value, root)
        inverse = gmpy2.invert(residue, root)
        return cls(residue, inverse, quotient * inverse % root)

    def times(self, other: _Unit, root: mpz) -> _Unit:
        quotient, residue = divmod(self.residue * other.residue, root)
        inverse = self.inverse * other.inverse % root
        return _Unit(residue, inverse, (self.slope + other.slope + quotient * inverse) % root)


_IDENTITY = _Unit(mpz(1), mpz(1), mpz(0))


def find_fixed_base_window(size: int, bits: int, uses: int) -> int:
    """Return the width with the fewest multiplications, table and ``uses`` powers together, within ``MEMORY``.

    m^2 has ``size`` bits, and the exponents have ``bits``.
    """

    def affordable(w: int) -> bool:
        return -(-bits // w) * (size // 8 + _OBJECT) << w <= MEMORY

    def work(w: int) -> int:
        return -(-bits // w) * ((_ENTRY << w) + uses)

    return min((w for w in range(1, 17) if affordable(w) or w == 1), key=work)


def _split_digits(exponents: Sequence[int], window: int, places: int) -> list[np.ndarray]:
    """Return for each place the digits of all exponents, lowest place first."""
    size = places * window // 8 + 4  # a digit is read from three bytes
    data = b"".join(exponent.to_bytes(size, "little") for exponent in exponents)
    columns = np.frombuffer(data, np.uint8).reshape(len(exponents), size).T.astype(np.uint32)
    digits = []
    for place in range(places):
        byte, shift = divmod(place * window, 8)
        word = columns[byte] | columns[byte + 1] << 8 | columns[byte + 2] << 16
        digits.append(word >> shift & (1 << window) - 1)
    return digits
