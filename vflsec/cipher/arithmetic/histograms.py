"""Histograms of ciphertexts: a pair of numbers in each, products of them by bin, and many bins in one ciphertext."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import pack, unpack
from vflsec.cipher.arithmetic.layout import SPARE_BITS

_WORTH = 0.9  # columns are added up together if they have fewer cells than this share of the rows


def check_size(**bits: int) -> None:
    """Raise UsageError unless the size of a key suits an exchange of histograms: 1024 to 4096 bits, in whole bytes."""
    for name, size in bits.items():
        if not 1024 <= size <= 4096 or size % 8:
            raise UsageError(f"expected 1024 <= {name} <= 4096, a multiple of 8, got {size}")


class PairPacking(NamedTuple):
    """How pairs of signed numbers lie in plaintexts.

    A number takes a slot in two's complement: a negative one borrows from the slot above, which ``unpack_sums`` reads.

    Attributes:
        slot: bits of the sum of one number over all rows, with its sign.
        pairs: in one ciphertext.
    """

    slot: int
    pairs: int

    @classmethod
    def from_sizes(cls, bits: int, rows: int, number_bits: int) -> PairPacking:
        """Return the packing of sums of ``rows`` numbers, |x| <= 2^number_bits, under a key of ``bits`` bits.

        Raises:
            UsageError: the key has no room for one pair.
        """
        slot = (rows << number_bits).bit_length() + 1
        room = bits - 1 - SPARE_BITS
        if 2 * slot > room:
            raise UsageError(f"expected a key with room for a pair of {2 * slot} bits, got {room}; raise bits")
        return cls(slot, room // (2 * slot))

    def ciphertexts(self, pairs: int) -> int:
        """Return how many ciphertexts ``pairs`` pairs take."""
        return -(-pairs // self.pairs)

    def pack_ciphertexts(self, ciphertexts: Sequence[mpz], square: mpz) -> list[mpz]:
        """Return as few ciphertexts, of ``pairs`` pairs each, by shifts: powers of 2^(2 slot) modulo ``square``.

        They are not randomized anew.
        """
        shift = mpz(1) << 2 * self.slot
        packs = []
        for start in range(0, len(ciphertexts), self.pairs):
            *lower, total = ciphertexts[start : start + self.pairs]
            for ciphertext in reversed(lower):
                total = gmpy2.powmod(total, shift, square) * ciphertext % square
            packs.append(total)
        return packs

    def unpack_sums(self, plaintexts: Sequence[int], pairs: int, n: int) -> NDArray[np.int64]:
        """Return the sums (pairs, 2) of decrypted ciphertexts.

        Raises:
            ProtocolError: something else than such sums.
        """
        if len(plaintexts) != self.ciphertexts(pairs):
            raise ProtocolError(f"expected {self.ciphertexts(pairs)} ciphertexts of sums, got {len(plaintexts)}")
        half = 1 << self.slot - 1
        numbers: list[int] = []
        for plaintext in plaintexts:
            slots = 2 * min(self.pairs, pairs - len(numbers) // 2)
            numbers += unpack((plaintext + pack([half] * slots, self.slot)) % n, self.slot, slots)
        return np.array(numbers, dtype=np.int64).reshape(pairs, 2) - half


def multiply_bins(values: Sequence[mpz], places: NDArray[np.int64], modulus: mpz) -> dict[int, mpz]:
    """Return the product of the rows' values by place; places without a row are left out.

    Columns are multiplied together where rows share their places in several of them: first once for each combination
    that occurs, then these products for each column. That never takes more multiplications than column by column.

    Args:
        values: (B,) units modulo ``modulus``.
        places: (B, d) in d columns; no two columns share a place.
        modulus: m.
    """
    products: dict[int, mpz] = {}
    for cells in _merge_columns(places):
        _spread(cells, _multiply_groups(values, cells.of_row, cells.number, modulus), places, modulus, products)
    return products


class _Cells(NamedTuple):
    """The combinations of places that occur in some columns."""

    of_row: NDArray[np.int64]  # (B,) the number of each row's combination
    rows: NDArray[np.int64]  # (M,) a row that has it, of each
    columns: tuple[int, ...]  # that are combined; if it is one column, there are no parts
    parts: tuple[_Cells, ...] = ()  # the two sets of combinations that this one was made of

    @property
    def number(self) -> int:
        return len(self.rows)


def _merge_columns(places: NDArray[np.int64]) -> list[_Cells]:
    """Return sets of columns to add up together, merging the two with the fewest combinations while there are fewer."""
    heap = []
    for column in range(places.shape[1]):
        cells = _combine(places[:, column], (column,))
        heap.append((cells.number, column, cells))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        a, b = first[2], second[2]
        cells = _combine(a.of_row * b.number + b.of_row, a.columns + b.columns, (a, b))
        if cells.number > _WORTH * len(places):
            return [a, b, *(cells for _, _, cells in heap)]
        heapq.heappush(heap, (cells.number, first[1], cells))
    return [cells for _, _, cells in heap]


def _combine(codes: NDArray[np.int64], columns: tuple[int, ...], parts: tuple[_Cells, ...] = ()) -> _Cells:
    _, rows, of_row = np.unique(codes, return_index=True, return_inverse=True)
    return _Cells(of_row, rows, columns, parts)


def _spread(cells: _Cells, products: list[mpz], places: NDArray[np.int64], modulus: mpz, bins: dict[int, mpz]) -> None:
    """Add up the products of combinations for the columns that they are made of."""
    if not cells.parts:
        bins.update(zip(places[cells.rows, cells.columns[0]].tolist(), products, strict=True))
    for part in cells.parts:
        _spread(part, _multiply_groups(products, part.of_row[cells.rows], part.number, modulus), places, modulus, bins)


def _multiply_groups(values: Sequence[mpz], groups: NDArray[np.int64], count: int, modulus: mpz) -> list[mpz]:
    """Return the product of each of ``count`` groups, none of which is empty."""
    products: list[mpz | None] = [None] * count
    for value, group in zip(values, groups.tolist(), strict=True):
        before = products[group]
        products[group] = value if before is None else before * value % modulus
    return products


def count_products(rows: float, widths: Sequence[float]) -> float:
    """Return about how many multiplications ``multiply_bins`` takes if columns of ``widths`` places are independent."""

    def count_occupied(places: float) -> float:
        return float(places * -np.expm1(-rows / places))

    heap = [(count_occupied(width), width) for width in widths]
    total = 0.0
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        if (count := count_occupied(a * b)) > _WORTH * rows:
            return total + rows * (len(heap) + 2)
        total += count
        heapq.heappush(heap, (count, a * b))
    return total + rows * len(heap)
