"""Many random powers of one base: a table makes each cost one multiplication for every digit of its exponent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gmpy2 import mpz

MEMORY = 128 << 20  # bytes that the table of one base may take
_OBJECT = 48  # bytes that a number takes beside its digits


class FixedBase:
    """The powers base^(d · 2^(window · k)) for all digits d and places k.

    Source: Brickell et al. 1992, with a table for each digit.

    Args:
        base: a unit modulo ``modulus``.
        modulus: m.
        bits: exponents are in [0, 2^bits).
        uses: how many powers are about to be taken, for the width of the window.
        subset: further elements; each is multiplied in if its bit is set, above the exponent's ``top`` bits.

    Attributes:
        top: the place of the first such bit: ``bits``, rounded up to whole digits.
    """

    def __init__(self, base: int, modulus: mpz, bits: int, *, uses: int, subset: Sequence[mpz] = ()) -> None:
        self.modulus, self.window = modulus, fixed_base_window(modulus.bit_length(), bits, uses)
        self.top = -(-bits // self.window) * self.window
        self._rows, power = [], mpz(base)
        for _ in range(0, bits, self.window):
            row = [mpz(1)]
            for _ in range((1 << self.window) - 1):
                row.append(row[-1] * power % modulus)
            self._rows.append(row)
            power = row[-1] * power % modulus
        for start in range(0, len(subset), self.window):
            row = [mpz(1)]
            for element in subset[start : start + self.window]:
                row += [product * element % modulus for product in row]
            self._rows.append(row)

    def powers(self, exponents: Sequence[int]) -> list[mpz]:
        """Return base^e for each e, place by place: a row of the table serves many while it is in the cache."""
        modulus, products = self.modulus, [mpz(1)] * len(exponents)
        for row, digits in zip(self._rows, _digits(exponents, self.window, len(self._rows)), strict=True):
            products = [product * row[d] % modulus for product, d in zip(products, digits.tolist(), strict=True)]
        return products


def fixed_base_window(size: int, bits: int, uses: int) -> int:
    """Return the width with the fewest multiplications, table and ``uses`` powers together, within ``MEMORY``.

    Args:
        size: bits of the modulus.
        bits: of the exponents.
        uses: how many powers are taken.
    """

    def affordable(w: int) -> bool:
        return -(-bits // w) * (size // 8 + _OBJECT) << w <= MEMORY

    return min((w for w in range(1, 17) if affordable(w) or w == 1), key=lambda w: -(-bits // w) * ((1 << w) + uses))


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
