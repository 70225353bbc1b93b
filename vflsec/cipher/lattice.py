"""Sums of encrypted integers under a lattice cipher: BFV (Fan and Vercauteren 2012) of Microsoft SEAL, by tenseal."""

import math
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

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
"""The most ciphertexts for the values of a batch, within which the flood is large enough."""

FLOODED, SENT = 3, 1
"""Primes of the ciphertexts of values and of products, and of those of sums, which are smaller."""


class SumsLayout:
    """How a batch of values and its sums lie in ciphertexts; a function of their numbers, which both parties know.

    The values are cut into pieces of L. A piece is a polynomial with value r as coefficient r. The weights of as many
    columns as fit are a polynomial with the weight of value r in column j as coefficient jL + L - 1 - r, so that the
    product's coefficient jL + L - 1 is the sum for column j. Products with the same columns are added over pieces.

    Args:
        values: V of a batch.
        sums: P.

    Attributes:
        length: L, with which both parties together send the fewest bytes.
        pieces: ciphertexts of the values.
        columns: sums of a product; of the last, those beyond P are zero.
        products: ciphertexts of the sums.
        places: which coefficients of a product are sums.
        size_of_values: the bytes that the active party sends.
        size_of_sums: the bytes that the passive party sends back: of each product a polynomial, and its sums' numbers.
        work: what an exchange takes, in units of a product of two polynomials; the others are measured.

    Raises:
        UsageError: more values than MAX_PIECES polynomials have coefficients.
    """

    def __init__(self, values: int, sums: int) -> None:
        if not (0 < values <= MAX_PIECES * DEGREE and sums > 0):
            raise UsageError(
                f"expected 1 to {MAX_PIECES * DEGREE} numbers in a sealed batch, got {values} for {sums} sums: lower "
                "batch"
            )
        self.values, self.sums = values, sums
        lengths = -(-values // np.arange(-(-values // DEGREE), min(values, MAX_PIECES) + 1))
        up, down = -(-values // lengths), -(-sums // (DEGREE // lengths))
        self.length = int(lengths[np.argmin(2 * up * sum(SIZES[:FLOODED]) + down * sum(SIZES[:SENT]))])
        self.pieces = -(-values // self.length)
        self.columns = min(sums, DEGREE // self.length)
        self.products = -(-sums // self.columns)
        self.places = slice(self.length - 1, self.columns * self.length, self.length)
        self.size_of_values = self.pieces * 2 * DEGREE * sum(SIZES[:FLOODED])
        self.size_of_sums = self.products * (DEGREE + self.columns) * sum(SIZES[:SENT])
        self.work = 14 * self.pieces + 7 * self.products + self.pieces * self.products


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
        with open_private_file() as (file, path):
            sealapi.Plaintext().save(path)
            file.seek(0)
            self._header = file.read(5) + bytes(3)  # of this version of SEAL, and not compressed

    def evaluate(self, operation: str, *operands: Any) -> None:
        """Run an operation of SEAL's evaluator, or raise ProtocolError if a hostile peer's zeros make it no secret."""
        try:
            getattr(self.evaluator, operation)(*operands)
        except RuntimeError as error:
            raise ProtocolError(f"expected keys and ciphertexts that hide numbers, but SEAL says: {error}") from None

    def get_level(self, primes: int) -> Any:
        """Return how SEAL identifies ciphertexts with as many of the primes."""
        levels = {len(PRIMES): self.context.key_parms_id, FLOODED: self.context.first_parms_id}
        return levels.get(primes, self.context.last_parms_id)()

    def load_plaintext(self, coefficients: np.ndarray) -> Any:
        """Return integers (n,) modulo t as a polynomial."""
        size = len(coefficients)
        return self._load(self.api.Plaintext(), struct.pack("<4QQd", 0, 0, 0, 0, size, 1.0), coefficients)

    def load_ciphertext(self, residues: np.ndarray, kind: str = "Ciphertext", *, transformed: bool = False) -> Any:
        """Return residues (2, primes, N), of coefficients or ``transformed`` for products, as what SEAL stores so."""
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
        with open_private_file() as (file, path):
            file.write(self._frame(fields + array))
            file.seek(0)
            empty.load(self.context, path)
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
        pieces = []
        for first in range(0, layout.values, layout.length):
            ciphertext = self._lattice.api.Ciphertext()
            plain = self._lattice.load_plaintext(numbers[first : first + layout.length])
            self._encryptor.encrypt_symmetric(plain, ciphertext)
            pieces.append(self._lattice.read_ciphertext(ciphertext))
        return pack_residues(np.concatenate(pieces))

    def open(self, data: bytes, layout: SumsLayout) -> np.ndarray:
        """Return the masked sums (P,) modulo t of what ``LatticePublic.weigh`` returned.

        Raises:
            ProtocolError: bytes that cannot be such ciphertexts.
        """
        sums, plain = [], self._lattice.api.Plaintext()
        for numbers in unpack_residues(data, (layout.products, SENT, DEGREE + layout.columns), "sums"):
            residues = np.zeros((2, SENT, DEGREE), dtype=np.uint64)
            residues[0, :, layout.places], residues[1] = numbers[:, DEGREE:], numbers[:, :DEGREE]
            self._decryptor.decrypt(self._lattice.load_ciphertext(residues), plain)
            size = plain.coeff_count()
            sums += [plain[k] if k < size else 0 for k in range(DEGREE)[layout.places]]
        return np.array(sums[: layout.sums], dtype=np.int64)


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
        """Return ciphertexts of the sums of sealed values with weights (v, P), in blocks of values, plus a mask (P,).

        Raises:
            ProtocolError: bytes that cannot be such ciphertexts.
            UsageError: a weight beyond 2^WEIGHT_BITS.
        """
        evaluate, product = self._lattice.evaluate, self._lattice.api.Ciphertext()
        totals = [self._draw_zero() for _ in range(layout.products)]
        pieces = unpack_residues(data, (layout.pieces * 2, FLOODED, DEGREE), "values")
        for residues, weights in zip(np.split(pieces, layout.pieces), _group(blocks, layout), strict=True):
            ciphertext = self._lattice.load_ciphertext(residues)
            evaluate("transform_to_ntt_inplace", ciphertext)
            for total, coefficients in zip(totals, _encode(weights, layout), strict=True):
                if coefficients.any():  # SEAL refuses a product by zero
                    plain = self._lattice.load_plaintext(coefficients)
                    evaluate("transform_to_ntt_inplace", plain, ciphertext.parms_id())
                    evaluate("multiply_plain", ciphertext, plain, product)
                    evaluate("add_inplace", total, product)
        sent, masks = [], np.pad(mask, (0, layout.products * layout.columns - layout.sums))
        for total, masks_here in zip(totals, np.split(masks, layout.products), strict=True):
            evaluate("transform_from_ntt_inplace", total)
            self._flood(total, masks_here, layout.places)
            evaluate("mod_switch_to_inplace", total, self._lattice.get_level(SENT))
            first, second = self._lattice.read_ciphertext(total)
            sent.append(np.concatenate([second, first[:, layout.places]], axis=1))
        return pack_residues(np.stack(sent))

    def _draw_zero(self) -> Any:
        zero = self._lattice.api.Ciphertext()
        self._encryptor.encrypt_zero(zero)
        self._lattice.evaluate("transform_to_ntt_inplace", zero)
        return zero

    def _flood(self, total: Any, mask: np.ndarray, places: slice) -> None:
        """Add the mask and the noise to a ciphertext of sums."""
        q = math.prod(PRIMES[:FLOODED])
        added = [(q * int(m) + MODULUS // 2) // MODULUS + draw_flood() for m in mask]
        residues = np.zeros((2, FLOODED, DEGREE), dtype=np.uint64)
        residues[0, :, places] = [[a % prime for a in added] for prime in PRIMES[:FLOODED]]
        self._lattice.evaluate("add_inplace", total, self._lattice.load_ciphertext(residues))


def draw_mask(sums: int) -> np.ndarray:
    """Return integers (P,) uniform modulo t, from the operating system: the masked sums are uniform as well."""
    drawn = np.frombuffer(secrets.token_bytes(8 * sums), dtype="<u8") % MODULUS  # a power of two
    return drawn.astype(np.int64)


def draw_flood() -> int:
    """Return a uniform integer from -2^FLOOD_BITS to 2^FLOOD_BITS - 1."""
    return secrets.randbits(FLOOD_BITS + 1) - (1 << FLOOD_BITS)


def estimate_seconds(layouts: Iterable[SumsLayout]) -> float:
    """Return the CPU seconds of both parties for exchanges of these layouts, in proportion to one that is timed."""
    keys, probe, weights = LatticeKeys(), SumsLayout(2048, 256), np.ones((2048, 256), dtype=np.int64)
    public, began = LatticePublic(keys.public), time.process_time()
    keys.open(public.weigh(keys.seal(weights[:, 0], probe), [weights], draw_mask(256), probe), probe)
    return (time.process_time() - began) / probe.work * sum(layout.work for layout in layouts)


def pack_residues(residues: np.ndarray) -> bytes:
    """Return residues (n, primes, count) as bytes, little-endian, of a fixed size for each prime."""
    split = np.ascontiguousarray(residues.swapaxes(1, 2), "<u8").view(np.uint8)
    return split.reshape(*split.shape[:2], -1, 8)[..., _find_used(residues.shape[1])].tobytes()


def unpack_residues(data: bytes, shape: tuple[int, int, int], what: str) -> np.ndarray:
    """Return the residues of ``shape`` (n, primes, count) that ``pack_residues`` packed.

    Raises:
        ProtocolError: bytes of another number, or a number that is no residue.
    """
    n, primes, count = shape
    size = n * count * sum(SIZES[:primes])
    if len(data) != size:
        raise ProtocolError(f"expected {size} bytes as {what}, got {len(data)}")
    split = np.zeros((n, count, primes, 8), dtype=np.uint8)
    split[..., _find_used(primes)] = np.frombuffer(data, np.uint8).reshape(n, count, -1)
    residues: np.ndarray = split.view("<u8")[..., 0].swapaxes(1, 2)
    if (residues >= np.array(PRIMES[:primes], np.uint64)[:, None]).any():
        raise ProtocolError(f"expected residues below their primes as {what}, got a larger number")
    return residues


@contextmanager
def open_private_file() -> Iterator[tuple[IO[bytes], str]]:
    """Yield an empty file without a name, in memory where the system has such files, and its path for this process."""
    descriptor = os.memfd_create("vflsec") if hasattr(os, "memfd_create") else None
    with tempfile.TemporaryFile(buffering=0) if descriptor is None else open(descriptor, "w+b", 0) as file:
        yield file, f"/dev/fd/{file.fileno()}"


def _find_used(primes: int) -> np.ndarray:
    """Return which of the eight bytes of a residue modulo each prime are sent, (primes, 8)."""
    return np.arange(8) < np.array(SIZES[:primes])[:, None]


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
