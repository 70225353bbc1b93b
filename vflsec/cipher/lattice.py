"""Sums of encrypted integers under a lattice cipher: BFV (Fan and Vercauteren 2012) of Microsoft SEAL, by tenseal."""

from __future__ import annotations

import os
import secrets
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import numpy as np
from scipy.optimize import nnls

from vflsec.base.errors import ProtocolError, UsageError

DEGREE = 8192
"""N: ciphertexts are pairs of polynomials modulo X^N + 1, whose coefficients are residues modulo each prime."""

MODULUS = 2**50
"""t: sums are known modulo t."""

PRIMES = (0xFFFFFFFFFFFC001, 0xFFFFF3C001, 0xFFFFF4C001, 0xFFFFFDC001)
"""The last is for keys alone. SEAL checks that these 180 bits are within 128-bit security: up to 218 for N."""

SIZES = (8, 5, 5, 5)
"""Bytes of a residue modulo each prime."""

WEIGHT_BITS = 16
"""No weight is larger than 2 to this power."""

FLOOD_BITS = 84
"""Of the noise that hides the passive party's weights; see ``LatticePublic``."""

MAX_PIECES = 1024
"""The most ciphertexts for the values of a batch."""

FLOODED, SENT = 3, 1
"""Primes of the ciphertexts of values and of products, and of those of sums, which are smaller."""


@dataclass(frozen=True)
class SumsLayout:
    """How a batch of values and its sums lie in ciphertexts; a function of their numbers, which both parties know.

    The values are cut into pieces of L. A piece is a polynomial with value r as coefficient r. The weights of as many
    columns as fit are a polynomial with the weight of value r in column j as coefficient jL + L - 1 - r, so that the
    product's coefficient jL + L - 1 is the sum for column j. Products with the same columns are added over pieces.

    Args:
        values: V of a batch.
        sums: P.

    Raises:
        UsageError: more values than MAX_PIECES polynomials have coefficients.
    """

    values: int
    sums: int

    def __post_init__(self) -> None:
        if not (0 < self.values <= MAX_PIECES * DEGREE and self.sums > 0):
            raise UsageError(
                f"expected 1 to {MAX_PIECES * DEGREE} numbers in a sealed batch, got {self.values} for {self.sums} "
                "sums: lower batch"
            )

    @cached_property
    def length(self) -> int:
        """L, with which both parties together send the fewest bytes."""
        fewest = -(-self.values // DEGREE)
        lengths = -(-self.values // np.arange(fewest, min(self.values, MAX_PIECES) + 1))
        up, down = -(-self.values // lengths), -(-self.sums // (DEGREE // lengths))
        return int(lengths[np.argmin(up * _count_bytes(FLOODED) * 2 + down * _count_bytes(SENT))])

    @property
    def pieces(self) -> int:
        """The number of ciphertexts of the values."""
        return -(-self.values // self.length)

    @property
    def columns(self) -> int:
        """The sums of a product."""
        return DEGREE // self.length

    @property
    def products(self) -> int:
        """The number of ciphertexts of the sums."""
        return -(-self.sums // self.columns)

    @property
    def work(self) -> tuple[int, int, int]:
        """The numbers of ciphertexts that both parties make or read, and of products of polynomials."""
        return self.pieces, self.products, self.pieces * self.products

    @property
    def size_of_values(self) -> int:
        """The bytes that the active party sends of the values: both polynomials of each ciphertext."""
        return self.pieces * 2 * _count_bytes(FLOODED)

    @property
    def size_of_sums(self) -> int:
        """The bytes that the passive party sends back: a polynomial of each ciphertext, and a number for each sum."""
        return self.products * _count_bytes(SENT) + self.sums * SIZES[0]

    def positions(self, product: int) -> slice:
        """Return which coefficients of a product are sums."""
        columns = min(self.columns, self.sums - product * self.columns)
        return slice(self.length - 1, columns * self.length, self.length)


class Lattice:
    """SEAL with the parameters of this file, and its objects from and to arrays of residues.

    The package reads and writes files alone. It writes them compressed and would inflate whatever a peer sent, so here
    it loads nothing but what this process wrote: bytes of a peer are checked as residues first.

    Raises:
        UsageError: tenseal is not installed, or its SEAL refuses the parameters.
    """

    def __init__(self) -> None:
        try:
            from tenseal import sealapi
        except ImportError:
            raise UsageError("expected tenseal for lattice encryption: pip install 'vflsec[sealed]'") from None
        self.api = sealapi
        parameters = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.BFV)
        parameters.set_poly_modulus_degree(DEGREE)
        parameters.set_coeff_modulus([sealapi.Modulus(prime) for prime in PRIMES])
        parameters.set_plain_modulus(MODULUS)
        self.context = sealapi.SEALContext(parameters, True, sealapi.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise UsageError(
                f"expected parameters of 128-bit security, but SEAL says: {self.context.parameters_error_message()}"
            )
        self.evaluator = sealapi.Evaluator(self.context)
        with open_private_file() as file:
            sealapi.Plaintext().save(name_file(file))
            file.seek(0)
            self._header = file.read(5) + bytes(3)  # of this version of SEAL, and not compressed

    def get_level(self, primes: int) -> Any:
        """Return how SEAL identifies ciphertexts with as many of the primes."""
        levels = {len(PRIMES): self.context.key_parms_id, FLOODED: self.context.first_parms_id}
        return levels.get(primes, self.context.last_parms_id)()

    def load_plaintext(self, coefficients: np.ndarray) -> Any:
        """Return integers (n,) modulo t as a polynomial."""
        size = len(coefficients)
        return self._load(self.api.Plaintext(), struct.pack("<4QQd", 0, 0, 0, 0, size, 1.0), coefficients)

    def load_ciphertext(self, residues: np.ndarray, kind: str = "Ciphertext", *, transformed: bool = False) -> Any:
        """Return residues (2, primes, N) as a ciphertext, or as another ``kind`` that is stored as such.

        Args:
            residues: below their primes.
            kind: of SEAL's classes.
            transformed: whether they are values of the polynomials and not coefficients.
        """
        size, primes, degree = residues.shape
        fields = struct.pack("<4Q?QQQdQ", *self.get_level(primes), transformed, size, degree, primes, 1.0, 1)
        return self._load(getattr(self.api, kind)(), fields, residues)

    def read_ciphertext(self, ciphertext: Any) -> np.ndarray:
        """Return the residues (2, primes, N) of a ciphertext."""
        shape = ciphertext.size(), ciphertext.coeff_modulus_size(), ciphertext.poly_modulus_degree()
        return np.fromiter(ciphertext, np.uint64, int(np.prod(shape))).reshape(shape)

    def _load(self, empty: Any, fields: bytes, numbers: np.ndarray) -> Any:
        array = numbers.astype("<u8", copy=False).tobytes()
        array = self._frame(struct.pack("<Q", numbers.size) + array)
        with open_private_file() as file:
            file.write(self._frame(fields + array))
            file.seek(0)
            empty.load(self.context, name_file(file))
        return empty

    def _frame(self, content: bytes) -> bytes:
        return self._header + struct.pack("<Q", 16 + len(content)) + content


class LatticeKeys:
    """The active party's key pair, of 128-bit security, made for one run and kept by nobody.

    A ciphertext is a sample of ring learning with errors: without the key it looks random. Randomness is SEAL's own,
    from the operating system.
    """

    def __init__(self) -> None:
        self._lattice = lattice = Lattice()
        generator = lattice.api.KeyGenerator(lattice.context)
        key = lattice.api.PublicKey()
        generator.create_public_key(key)
        self._encryptor = lattice.api.Encryptor(lattice.context, generator.secret_key())
        self._decryptor = lattice.api.Decryptor(lattice.context, generator.secret_key())
        self.public = pack_residues(lattice.read_ciphertext(key.data()))
        """The public key, as bytes."""

    def seal(self, values: np.ndarray, layout: SumsLayout) -> bytes:
        """Return ciphertexts of integers of any shape, ``layout.values`` of them, in the order of their memory."""
        numbers = (values.reshape(layout.values) % MODULUS).astype(np.uint64)
        parts = []
        for first in range(0, layout.values, layout.length):
            ciphertext = self._lattice.api.Ciphertext()
            plain = self._lattice.load_plaintext(numbers[first : first + layout.length])
            self._encryptor.encrypt_symmetric(plain, ciphertext)
            parts.append(pack_residues(self._lattice.read_ciphertext(ciphertext)))
        return b"".join(parts)

    def open(self, data: bytes, layout: SumsLayout) -> np.ndarray:
        """Return the masked sums (P,) modulo t of what ``LatticePublic.weigh`` returned.

        Raises:
            ProtocolError: bytes that cannot be such ciphertexts.
        """
        check_size(data, layout.size_of_sums, "sums")
        split = layout.products * _count_bytes(SENT)
        seconds = unpack_residues(data[:split], (layout.products, SENT, DEGREE), "sums")
        firsts = unpack_residues(data[split:], (1, SENT, layout.sums), "sums").ravel()
        sums = np.zeros(layout.sums, dtype=np.int64)
        for product in range(layout.products):
            places, here = layout.positions(product), slice(product * layout.columns, (product + 1) * layout.columns)
            residues = np.zeros((2, SENT, DEGREE), dtype=np.uint64)
            residues[0, 0, places], residues[1] = firsts[here], seconds[product]
            plain = self._lattice.api.Plaintext()
            self._decryptor.decrypt(self._lattice.load_ciphertext(residues), plain)
            size = plain.coeff_count()
            sums[here] = [plain[k] if k < size else 0 for k in range(DEGREE)[places]]
        return sums


class LatticePublic:
    """What the passive party has: the public key, under which it computes sums that tell the key's owner no more.

    For a party that follows the protocol, all that it receives can be simulated from the masked sums, which with a
    uniform mask are uniform:

    * Of each product only the coefficients that are sums are sent of the first polynomial, and the second polynomial.
    * A fresh encryption of zero is added: its second polynomial is a sample of ring learning with errors whose secret
      the passive party alone knows, so the sent one looks random even to the key's owner.
    * With the second polynomial and the sum, a coefficient of the first tells its noise alone, which depends on the
      weights. A uniform integer from -2^F to 2^F, F = FLOOD_BITS, is added to it before all primes but one are dropped.

    The noise of a fresh value ciphertext is an error of at most 21 (SEAL's centered binomial distribution) and a
    rounding of q m / t of at most 1/2 and a little, so below 22. In a product, and summed over pieces, it is below
    22 times the sum of all weights' absolute values, so below 22 N 2^WEIGHT_BITS for each piece: 2^43.5 for
    MAX_PIECES. The encryption of zero adds at most 2^13. So whatever the weights, the flood is larger by 2^40, and two
    sets of weights with the same sums differ by a statistical distance of less than 2^-40 for each sum; with V values
    and weights of b bits in n pieces it is about 22 n N 2^(b - F), 2^-50 with 4 pieces and 14 bits.

    Sums are exact but for a failure of probability below 2^-80: after the primes are dropped, of noise 2^84 less than
    2^4 (1 + 2^-9) is left, and rounding adds a sum of N + 1 independent terms of at most 1/2. Decryption fails if both
    exceed q'/2t = 2^9, which by Hoeffding's inequality has a probability of at most 2 exp(-2 495^2 / (N + 1)).

    A peer that deviates can send ciphertexts with more noise than that and learn of the weights by it.

    Args:
        public: ``LatticeKeys.public``.

    Raises:
        ProtocolError: bytes that cannot be a key.
    """

    def __init__(self, public: bytes) -> None:
        residues = unpack_residues(public, (2, len(PRIMES), DEGREE), "a public key")
        if not residues.any(axis=2).all():
            raise ProtocolError("expected a public key, got zeros: the peer's key would hide nothing")
        self._lattice = lattice = Lattice()
        key = lattice.load_ciphertext(residues, "PublicKey", transformed=True)
        self._encryptor = lattice.api.Encryptor(lattice.context, key)

    def weigh(self, data: bytes, blocks: Iterable[np.ndarray], mask: np.ndarray, layout: SumsLayout) -> bytes:
        """Return ciphertexts of the weighted sums plus ``mask``, modulo t.

        Args:
            data: from ``LatticeKeys.seal``.
            blocks: integer weights (v, P) of consecutive values.
            mask: (P,) from ``draw_mask``.
            layout: of values and sums.

        Raises:
            ProtocolError: bytes that cannot be such ciphertexts.
            UsageError: a weight beyond 2^WEIGHT_BITS.
        """
        check_size(data, layout.size_of_values, "values")
        evaluator, size = self._lattice.evaluator, 2 * _count_bytes(FLOODED)
        totals = [self._draw_zero() for _ in range(layout.products)]
        product = self._lattice.api.Ciphertext()
        parts = (data[first : first + size] for first in range(0, len(data), size))
        for part, piece in zip(parts, _group(blocks, layout), strict=True):
            ciphertext = self._lattice.load_ciphertext(unpack_residues(part, (2, FLOODED, DEGREE), "values"))
            evaluator.transform_to_ntt_inplace(ciphertext)
            for total, coefficients in zip(totals, _encode(piece, layout), strict=True):
                if coefficients.any():  # SEAL refuses a product by zero, whose ciphertext would be no secret
                    plain = self._lattice.load_plaintext(coefficients)
                    evaluator.transform_to_ntt_inplace(plain, ciphertext.parms_id())
                    evaluator.multiply_plain(ciphertext, plain, product)
                    evaluator.add_inplace(total, product)
        sent = []
        for number, total in enumerate(totals):
            evaluator.transform_from_ntt_inplace(total)
            self._flood(total, mask[number * layout.columns :][: layout.columns], layout.positions(number))
            evaluator.mod_switch_to_inplace(total, self._lattice.get_level(SENT))
            sent.append(self._lattice.read_ciphertext(total))
        firsts = [residues[:1, :, layout.positions(number)] for number, residues in enumerate(sent)]
        return b"".join(pack_residues(part) for part in [*(residues[1:] for residues in sent), *firsts])

    def _draw_zero(self) -> Any:
        zero = self._lattice.api.Ciphertext()
        self._encryptor.encrypt_zero(zero)
        self._lattice.evaluator.transform_to_ntt_inplace(zero)
        return zero

    def _flood(self, total: Any, mask: np.ndarray, positions: slice) -> None:
        """Add the mask and the noise to a ciphertext of sums."""
        q = int(np.prod([int(prime) for prime in PRIMES[:FLOODED]], dtype=object))
        added = [(q * int(m) + MODULUS // 2) // MODULUS + draw_flood() for m in mask]
        residues = np.zeros((2, FLOODED, DEGREE), dtype=np.uint64)
        residues[0, :, positions] = [[a % prime for a in added] for prime in PRIMES[:FLOODED]]
        self._lattice.evaluator.add_inplace(total, self._lattice.load_ciphertext(residues))


def draw_mask(sums: int) -> np.ndarray:
    """Return integers (P,) uniform modulo t, from the operating system: the masked sums are uniform as well."""
    drawn = np.frombuffer(secrets.token_bytes(8 * sums), dtype="<u8") % MODULUS  # a power of two
    return drawn.astype(np.int64)


def draw_flood() -> int:
    """Return a uniform integer from -2^FLOOD_BITS to 2^FLOOD_BITS - 1."""
    return secrets.randbits(FLOOD_BITS + 1) - (1 << FLOOD_BITS)


def estimate_seconds(layouts: Sequence[SumsLayout]) -> float:
    """Return the CPU seconds of both parties for exchanges of these layouts, by a calibration of a second."""
    keys = LatticeKeys()
    public = LatticePublic(keys.public)

    def measure(layout: SumsLayout) -> float:
        began, weights = time.process_time(), np.ones((layout.values, layout.sums), dtype=np.int64)
        keys.open(public.weigh(keys.seal(weights[:, 0], layout), [weights], draw_mask(layout.sums), layout), layout)
        return time.process_time() - began

    measured = [SumsLayout(DEGREE, 1), SumsLayout(2048, 256), SumsLayout(5 * DEGREE, 1)]
    measure(measured[0])  # for the first time, it takes longer
    each, _ = nnls(np.array([layout.work for layout in measured]), np.array([measure(layout) for layout in measured]))
    return float(sum(each @ layout.work for layout in layouts))


def pack_residues(residues: np.ndarray) -> bytes:
    """Return residues (n, primes, count) as little-endian bytes of a fixed size for each prime."""
    split = np.ascontiguousarray(residues, "<u8").view(np.uint8).reshape(*residues.shape, 8)
    return b"".join(split[:, k, :, :size].tobytes() for k, size in enumerate(SIZES[: residues.shape[1]]))


def unpack_residues(data: bytes, shape: tuple[int, int, int], what: str) -> np.ndarray:
    """Return the residues of ``shape`` (n, primes, count) that ``pack_residues`` packed.

    Raises:
        ProtocolError: bytes of another number, or a number that is no residue.
    """
    n, primes, count = shape
    check_size(data, n * count * sum(SIZES[:primes]), what)
    parts = np.split(np.frombuffer(data, np.uint8), n * count * np.cumsum(SIZES[:primes])[:-1])
    split = np.zeros((*shape, 8), dtype=np.uint8)
    for k, (part, size) in enumerate(zip(parts, SIZES[:primes], strict=True)):
        split[:, k, :, :size] = part.reshape(n, count, size)
    residues = split.view("<u8")[..., 0]
    if (residues >= np.array(PRIMES[:primes], np.uint64)[:, None]).any():
        raise ProtocolError(f"expected residues below their primes as {what}, got a larger number")
    return residues


def open_private_file() -> IO[bytes]:
    """Return an empty file without a name, in memory where the system has such files."""
    in_memory = hasattr(os, "memfd_create")
    return open(os.memfd_create("vflsec"), "w+b", 0) if in_memory else tempfile.TemporaryFile(buffering=0)


def name_file(file: IO[bytes]) -> str:
    """Return a path under which this process alone can open the file."""
    return f"/dev/fd/{file.fileno()}"


def check_size(data: bytes, size: int, what: str) -> None:
    """Raise ProtocolError unless ``data`` has ``size`` bytes."""
    if len(data) != size:
        raise ProtocolError(f"expected {size} bytes as {what}, got {len(data)}")


def _count_bytes(primes: int) -> int:
    """Return the bytes of a polynomial."""
    return DEGREE * sum(SIZES[:primes])


def _group(blocks: Iterable[np.ndarray], layout: SumsLayout) -> Iterator[np.ndarray]:
    """Yield the weights (L, P) of each piece; the last may have fewer."""
    rest = np.empty((0, layout.sums), dtype=np.int64)
    for block in blocks:
        if np.abs(block).max(initial=0) > 1 << WEIGHT_BITS:
            raise UsageError(f"expected weights up to 2^{WEIGHT_BITS} for sealed sums, got a larger one: lower bits")
        rest = np.concatenate([rest, block])
        while len(rest) >= layout.length:
            yield rest[: layout.length]
            rest = rest[layout.length :]
    if len(rest):
        yield rest


def _encode(piece: np.ndarray, layout: SumsLayout) -> np.ndarray:
    """Return the coefficients (products, at most N) modulo t of weights (at most L, P)."""
    padded = np.zeros((layout.products * layout.columns, layout.length), dtype=np.int64)
    padded[: layout.sums, layout.length - len(piece) :] = piece[::-1].T
    return (padded % MODULUS).astype(np.uint64).reshape(layout.products, -1)
