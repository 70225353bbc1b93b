"""Many random powers of one base: a table makes each cost half a multiplication for each digit of its exponent."""

from __future__ import annotations

from collections.abc import Sequence

import gmpy2
import numpy as np
from gmpy2 import mpz

from vflsec.paillier.codec import cut, join

MEMORY = 128 << 20  # bytes that the table of one base may take
_OBJECT = 48  # bytes that a number takes beside its digits
_ENTRY = 2  # multiplications by an entry of the table that making it takes as long as


class FixedBase:
    """The powers base^(d · 2^(window · k)) for all digits d and places k, modulo m^2.

    A unit modulo m^2 is a (1 + m λ), with residue a and slope λ below m. The slope of a product is the sum of the
    slopes, for (1 + m λ)(1 + m μ) = 1 + m (λ + μ). So a product of many takes multiplications by residues, which are
    half as long as units are, and sums.

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
        self._residues: list[list[mpz]] = []
        self._slopes: list[np.ndarray] = []  # in digits of 32 bits
        power = _parts(mpz(base), root)
        for _ in range(0, bits, self.window):
            power = self._append_powers(power)
        for start in range(0, len(subset), self.window):
            row = [_ONE]
            for element in subset[start : start + self.window]:
                factor = _parts(element, root)
                row += [_product(unit, factor, root) for unit in row]
            residues, _, slopes = zip(*row, strict=True)
            self._append(residues, slopes)
        if len(self._residues) % 2:  # they are taken in pairs
            self._append([mpz(1)], [mpz(0)])

    def _append_powers(self, power: _Parts) -> _Parts:
        """Append the row of the powers from 0; return the next."""
        unit, residues, slopes = _ONE, [], []
        for _ in range(1 << self.window):
            residues.append(unit[0])
            slopes.append(unit[2])
            unit = _product(unit, power, self.root)
        self._append(residues, slopes)
        return unit

    def _append(self, residues: Sequence[mpz], slopes: Sequence[mpz]) -> None:
        self._residues.append(list(residues))
        self._slopes.append(np.frombuffer(join(slopes, self._size), "<u4").reshape(len(slopes), -1))

    @property
    def _size(self) -> int:
        """Bytes of a slope, in whole pairs of digits."""
        return 8 * -(-int(self.root).bit_length() // 64)

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


_Parts = tuple[mpz, mpz, mpz]  # a unit's residue, the residue's inverse modulo m, and the slope
_ONE = mpz(1), mpz(1), mpz(0)


def _parts(unit: mpz, root: mpz) -> _Parts:
    quotient, residue = divmod(unit, root)
    inverse = gmpy2.invert(residue, root)
    return residue, inverse, quotient * inverse % root


def _product(x: _Parts, y: _Parts, root: mpz) -> _Parts:
    quotient, residue = divmod(x[0] * y[0], root)
    inverse = x[1] * y[1] % root
    return residue, inverse, (x[2] + y[2] + quotient * inverse) % root


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
