"""Many random powers of one base: a table makes each cost a few multiplications for many digits of its exponent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import gmpy2
import numpy as np
from gmpy2 import mpz

from vflsec.cipher.arithmetic.codec import cut, join

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
        self.window = fixed_base_window(self.modulus.bit_length(), bits, uses)
        self.top = -(-bits // self.window) * self.window
        self._size = 8 * -(-int(root).bit_length() // 64)  # bytes of a slope, in whole pairs of digits
        self._residues: list[list[mpz]] = []
        self._slopes: list[np.ndarray] = []  # in digits of 32 bits
        power = _Unit.of(mpz(base), root)
        for _ in range(0, bits, self.window):
            power = self._append_powers(power)
        for start in range(0, len(subset), self.window):
            row = [_ONE]
            for element in subset[start : start + self.window]:
                factor = _Unit.of(element, root)
                row += [unit.times(factor, root) for unit in row]
            self._append([unit.residue for unit in row], [unit.slope for unit in row])
        if len(self._residues) % 2:  # they are taken in pairs
            self._append([mpz(1)], [mpz(0)])

    def _append_powers(self, power: _Unit) -> _Unit:
        """Append the row of the powers from 0; return the next."""
        unit, residues, slopes = _ONE, [], []
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
        places = _digits(exponents, self.window, len(self._residues))
        for k in range(0, len(places), 2):
            (row, other), digits = self._residues[k : k + 2], (d.tolist() for d in places[k : k + 2])
            factors = zip(products, *digits, strict=True)
            products = [product * (row[i] * other[j]) % modulus for product, i, j in factors]
        sums = zip(products, self._sums(places), strict=True)
        return [product * (1 + root * (slope % root)) % modulus for product, slope in sums]

    def _sums(self, places: Sequence[np.ndarray]) -> list[int]:
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
    def of(cls, value: mpz, root: mpz) -> _Unit:
        quotient, residue = divmod(value, root)
        inverse = gmpy2.invert(residue, root)
        return cls(residue, inverse, quotient * inverse % root)

    def times(self, other: _Unit, root: mpz) -> _Unit:
        quotient, residue = divmod(self.residue * other.residue, root)
        inverse = self.inverse * other.inverse % root
        return _Unit(residue, inverse, (self.slope + other.slope + quotient * inverse) % root)


_ONE = _Unit(mpz(1), mpz(1), mpz(0))


def fixed_base_window(size: int, bits: int, uses: int) -> int:
    """Return the width with the fewest multiplications, table and ``uses`` powers together, within ``MEMORY``.

    Args:
        size: bits of m^2.
        bits: of the exponents.
        uses: how many powers are taken.
    """

    def affordable(w: int) -> bool:
        return -(-bits // w) * (size // 8 + _OBJECT) << w <= MEMORY

    def work(w: int) -> int:
        return -(-bits // w) * ((_ENTRY << w) + uses)

    return min((w for w in range(1, 17) if affordable(w) or w == 1), key=work)


def _digits(exponents: Sequence[int], window: int, places: int) -> list[np.ndarray]:
    """Return for each place the digits of all exponents, lowest place first."""
    size = places * window // 8 + 4  # a digit is read from three bytes
    data = b"".join(exponent.to_bytes(size, "little") for exponent in exponents)
    columns = np.frombuffer(data, np.uint8).reshape(len(exponents), size).T.astype(np.uint32)
    found = []
    for place in range(places):
        byte, shift = divmod(place * window, 8)
        word = columns[byte] | columns[byte + 1] << 8 | columns[byte + 2] << 16
        found.append(word >> shift & (1 << window) - 1)
    return found
