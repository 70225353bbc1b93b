"""Numbers as integers of a fixed unit, and these as slots of a plaintext; plaintexts and ciphertexts as bytes."""

from collections.abc import Callable, Iterable, Sequence

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.layout import MAX_BITS

Randbits = Callable[[int], int]


def encode(
    x: np.ndarray, precision: int, bits: int, name: str, columns: Sequence[str] | None = None
) -> NDArray[np.int64]:
    """Return ``x``, any shape, in units of 2^-precision, rounded to nearest.

    Args:
        x: real numbers.
        precision: fractional bits.
        bits: |x| <= 2^bits, once rounded: what float32 arithmetic leaves above a bound is no reason to stop.
        name: what they are called in messages; without its plural s, the name of the setting of ``bits``.
        columns: names of the columns of ``x`` (n, d), by which messages call them; None for their numbers.

    Raises:
        UsageError: NaN, infinity, or a number out of range; the line names the column and the value to set.
    """
    x = np.asarray(x, dtype=np.float64)

    def locate(worst: int) -> str:
        column = worst % x.shape[-1] if x.ndim == 2 else 0
        return f" in column {columns[column] if columns else column}" if x.ndim == 2 else ""

    if not (finite := np.isfinite(x)).all():
        worst = int(finite.argmin())
        raise UsageError(f"expected finite {name}, got {x.flat[worst]}{locate(worst)}; nothing of it was sent")
    units = np.rint(np.ldexp(x, precision))
    if x.size and (most := np.abs(units).max()) > 2.0 ** (precision + bits):
        worst = int(np.abs(x).argmax())
        needed = (int(most) - 1).bit_length() - precision
        way_out = f"set {name.removesuffix('s')}_bits = {needed}" if needed <= MAX_BITS else "make it smaller"
        raise UsageError(
            f"expected |{name}| <= {2**bits}, got {np.abs(x).flat[worst]:.9g}{locate(worst)}; nothing of it was sent: "
            + way_out
        )
    return np.asarray(units, dtype=np.int64)


def decode(values: Iterable[int], precision: int) -> NDArray[np.float64]:
    """Return integers in units of 2^-precision as floats."""
    return np.asarray(np.ldexp(np.array([float(value) for value in values]), -precision))


def pack(values: Sequence[int], slot: int) -> int:
    """Return the sum of values[i] · 2^(slot · i); a negative value borrows from the slot above."""
    packed = 0
    for value in reversed(values):
        packed = (packed << slot) + value
    return packed


def unpack(packed: int, slot: int, count: int) -> list[int]:
    """Return the slots of a sum whose every slot was made non-negative.

    Raises:
        ProtocolError: more than ``count`` slots are filled.
    """
    if packed >> slot * count:
        raise ProtocolError("a plaintext overflows its slots: the ciphertext is of another key, or of other numbers")
    full = (1 << slot) - 1
    return [packed >> slot * i & full for i in range(count)]


def unpack_signed(packed: int, slot: int, count: int, bound: int, modulus: int) -> list[int]:
    """Return the slots, |value| <= bound < 2^(slot-1), of a sum modulo ``modulus``.

    Raises:
        ProtocolError: something else than such a sum.
    """
    half = 1 << slot - 1
    values = [value - half for value in unpack((packed + pack([half] * count, slot)) % modulus, slot, count)]
    if max(map(abs, values), default=0) > bound:
        raise ProtocolError(
            f"expected |delta W^T| within {bound.bit_length() - 1} bits, got more: the weights have grown beyond what "
            "was agreed; take a smaller learning rate, or agree on more weight_bits"
        )
    return values


def draw(count: int, randbits: Randbits) -> int:
    """Return a random integer in [0, count), uniform but for 2^-64."""
    return randbits(count.bit_length() + 64) % count


def to_ring(values: Iterable[int], bits: int) -> NDArray[np.uint64]:
    """Return integers modulo 2^bits, bits <= 64."""
    full = (1 << bits) - 1
    return np.array([value & full for value in values], dtype=np.uint64)


def center(values: NDArray[np.uint64], bits: int) -> NDArray[np.int64]:
    """Return the representatives in [-2^(bits-1), 2^(bits-1)) of numbers modulo 2^bits."""
    shift = np.uint64(64 - bits)
    return (values << shift).view(np.int64) >> np.int64(64 - bits)


def join(values: Iterable[int], size: int, *, signed: bool = False) -> bytes:
    """Return integers as ``size`` bytes each, little-endian."""
    return b"".join(value.to_bytes(size, "little", signed=signed) for value in values)


def cut(data: bytes, size: int, count: int, what: str, *, signed: bool = False) -> list[int]:
    """Return ``count`` integers of ``size`` bytes.

    Raises:
        ProtocolError: bytes for another number of them.
    """
    if len(data) != size * count:
        raise ProtocolError(f"expected {count} {what} of {size} bytes, got {len(data)} bytes")
    starts = range(0, len(data), size)
    return [int.from_bytes(data[start : start + size], "little", signed=signed) for start in starts]


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
        ciphertexts = [mpz(value) for value in cut(data, self.size, count, what)]
        product = mpz(1)
        for ciphertext in ciphertexts:
            if ciphertext >= self.square:
                raise ProtocolError(f"expected {what} below n^2, got a larger number")
            product = product * ciphertext % self.n
        if gmpy2.gcd(product, self.n) != 1:
            raise ProtocolError(f"expected units modulo n^2 as {what}, got zero or a multiple of a factor of n")
        return ciphertexts
