"""Histograms of federated trees under Paillier encryption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gmpy2 import mpz
from numpy.typing import NDArray

from vflsec.base.checks import expect_known
from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import Ciphertexts
from vflsec.cipher.arithmetic.cost import count_pairs, time_units
from vflsec.cipher.arithmetic.histograms import PairPacking, check_size, count_products, multiply_bins
from vflsec.cipher.arithmetic.keys import Keys, PublicKey
from vflsec.cipher.arithmetic.layout import MODES, Mode
from vflsec.cipher.arithmetic.randomizers import WITHOUT_TABLE, FactorSource, PowerSource, RandomizerSource, make_source
from vflsec.core.message import Kind
from vflsec.core.party import Party
from vflsec.protocols.histograms_masked import EncryptedHistograms
from vflsec.trees.histograms import FRACTION_BITS, sum_bins

NOISE_BITS = 10  # that defenses may add to a derivative by noise
RANGE_BITS = 2  # of derivatives of the log loss, with room for what changes labels
ROUNDS = 5  # that the table for encryption is made for; one for more would hardly be faster, and much larger
CHUNK = 4096  # ciphertexts that are made at once
OVERHEAD = 1.5  # of an encryption over its multiplications: sums of slopes, and rows of tables beyond the cache
ANSWERS = 1000  # ciphertexts that the table for new randomizers is made for
CALIBRATION = 0.15  # seconds for each of five operations


class PaillierHistograms(EncryptedHistograms):
    """Derivatives go to the passive party as Paillier ciphertexts of the active party's key, and sums come back.

    First and second derivative of a row and output are one plaintext, whose slots no sum can overflow. The passive
    party multiplies ciphertexts by node and bin, joins the products of many bins in one ciphertext by shifts, and
    multiplies each by a randomizer of its own: without it the active party, who knows the randomizer of every row,
    could search for the rows in a bin. Bins without rows are not sent. The key is made for this run, and keys and
    randomizers come from the operating system's generator. Sums are exact, and those of the other exchanges.

    Numbers of rows are in clear. A row that is alone in a bin is known to be there by its derivatives, in every
    exchange of sums.

    Source: Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1; Paillier 1999; packing and compression as in
    Chen et al. 2021 (SecureBoost+), arXiv 2110.10927. Sums of several columns at once are this package's.

    Args:
        passive: holds columns, in bins.
        active: holds labels and the key.
        bits: size of the key; 2048 is about 112 bits of security, 3072 about 128; 1024 is for tests.
        mode: ``standard`` (decisional composite residuosity alone) or ``subgroup`` (faster, with an assumption of its
            own: see ``vflsec.cipher.arithmetic.keys``).
        range_bits: derivatives lie within 2^range_bits of 0. None for what the run needs: 2, which is enough for
            the log loss, or 10 where a defense of the active party changes gradients.

    Raises:
        UsageError: a number out of range.
    """

    name = "histograms-paillier"
    reference = (
        "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1; Paillier 1999; packing as in Chen et al. 2021 "
        "(SecureBoost+), arXiv 2110.10927"
    )

    def __init__(
        self,
        passive: Party,
        active: Party,
        *,
        bits: int = 2048,
        mode: Mode = "standard",
        range_bits: int | None = None,
    ) -> None:
        super().__init__(passive, active)
        expect_known(MODES, mode=mode)
        check_size(bits=bits)
        if range_bits is not None and not 0 <= range_bits <= 16:
            raise UsageError(f"expected 0 <= range_bits <= 16, got {range_bits}")
        self.bits, self.mode, self._range_bits = bits, mode, range_bits
        self._key_side: _KeySide | None = None
        self._sum_side: _SumSide | None = None

    @property
    def range_bits(self) -> int:
        """The bits of a derivative that ``range_bits=None`` stands for, by what the active party's defenses do."""
        if self._range_bits is not None:
            return self._range_bits
        noisy = any(Kind.GRADIENT in defense.kinds for defense in self.active.defenses)
        return NOISE_BITS if noisy else RANGE_BITS

    def encrypt_derivatives(self, derivatives: NDArray[np.int64]) -> Mapping[str, Any]:
        """Return the ciphertexts of the derivatives, and the first time the public key.

        Raises:
            UsageError: a derivative out of range; nothing of them was sent.
        """
        packing = self._choose_packing(len(derivatives))
        if (largest := int(np.abs(derivatives).max(initial=0))) > 1 << FRACTION_BITS + self.range_bits:
            raise UsageError(
                f"expected |derivatives| <= {2**self.range_bits}, got {largest / 2**FRACTION_BITS:.9g}; nothing of "
                "them was sent: lower the noise on gradients, or raise range_bits"
            )
        key: dict[str, Any] = {}
        if self._key_side is None:
            keys = Keys.generate(self.bits, self.mode)
            self._key_side = _KeySide(keys, ROUNDS * derivatives.size // 2)
            key = {"key": torch.frombuffer(bytearray(keys.public.n), dtype=torch.uint8)}
            if keys.public.generator:
                key["generator"] = torch.frombuffer(bytearray(keys.public.generator), dtype=torch.uint8)
        return {"value": self._key_side.encrypt(derivatives, packing), **key}

    def keep(self, payload: Mapping[str, Any]) -> None:
        """Keep the ciphertexts, once they are found to be some of this key.

        Raises:
            ProtocolError: something else.
        """
        if "key" in payload:
            parts = (payload[name].numpy().tobytes() if name in payload else b"" for name in ("key", "generator"))
            public = PublicKey(*parts)
            public.check(self.bits, self.mode)
            self._sum_side = _SumSide(public)
        assert self._sum_side, "the first message has the key"
        self._sum_side.keep(payload["value"])

    def add_derivatives(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], shape: tuple[int, int], output: int
    ) -> tuple[Encrypted, NDArray[np.int64]]:
        """Return the sums of bins that have rows, in as few ciphertexts as hold them, and numbers of rows."""
        assert self._sum_side, "share comes before sums"
        counts = sum_bins(bins, nodes, np.zeros((len(bins), 0), np.int64), *shape)[..., 0]
        return self._sum_side.add_derivatives(bins, nodes, counts, output), counts

    def decrypt_sums(self, answer: Encrypted, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums.

        Raises:
            ProtocolError: numbers that cannot be sums of so many derivatives.
        """
        assert self._key_side, "share comes before sums"
        return self._key_side.decrypt(answer, counts, 1 << FRACTION_BITS + self.range_bits)

    def seconds(self, rounds: int, outputs: int, rows: int, columns: int, n_bins: int, passes: float) -> float:
        """Return the CPU seconds of both parties, by a calibration of less than a second; tables are not counted.

        Args:
            rounds: of boosting.
            outputs: C, trees in each round.
            rows: that are shared in each round.
            columns: d, taken to be independent and of as many bins each.
            n_bins: of all columns.
            passes: over all rows, for one tree: 1 for the first level, and 1/2 for each further one, where the smaller
                child of each pair is added up.
        """
        if not (rounds and outputs and rows and columns and passes):
            return 0.0
        unit, packing = time_units(self.bits, self.mode, CALIBRATION), self._choose_packing(rows)
        pairs = count_pairs(self.bits, self.mode, ROUNDS * rows * outputs, through_factors=True)
        encryption = OVERHEAD * 2 * pairs * unit.half + unit.full
        levels = max(1.0, 2 * passes - 1)
        products = bins = 0.0
        for level in range(round(levels)):
            asked, inside = max(1.0, 2.0 ** (level - 1)), rows / (2 if level else 1)
            each = inside / asked
            products += asked * count_products(each, [n_bins / columns] * columns)
            bins += min(asked * n_bins, inside * columns)
        answers = bins / packing.pairs + round(levels) / 2
        per_tree = products * unit.full + bins * 2 * packing.slot * unit.full
        if self.mode == "standard" and rounds * outputs * answers <= WITHOUT_TABLE:
            randomizer = unit.residues
        else:
            randomizer = count_pairs(self.bits, self.mode, ANSWERS, through_factors=False) * unit.digits
        per_tree += answers * (2 * unit.powers + randomizer)
        return rounds * outputs * (rows * encryption + per_tree)

    def _choose_packing(self, rows: int) -> PairPacking:
        return PairPacking.from_sizes(self.bits, rows, FRACTION_BITS + self.range_bits)


class Encrypted(NamedTuple):
    """Ciphertexts as they travel.

    Attributes:
        data: their bytes.
        shape: of the array that they form.
        packing: how sums lie in them.
    """

    data: bytes
    shape: tuple[int, ...]
    packing: PairPacking

    @property
    def nbytes(self) -> int:
        """Size of the ciphertexts."""
        return len(self.data)


class _KeySide:
    """The active party: the key."""

    def __init__(self, keys: Keys, uses: int) -> None:
        self.keys, self._wire = keys, Ciphertexts(int(keys.n))
        self._source = FactorSource(keys, uses)

    def encrypt(self, derivatives: NDArray[np.int64], packing: PairPacking) -> Encrypted:
        """Return the ciphertexts (C, B) of pairs of derivatives (B, 2 C)."""
        n, square, outputs = self.keys.n, self._wire.square, derivatives.shape[1] // 2
        first, second = (half.T.ravel().tolist() for half in (derivatives[:, :outputs], derivatives[:, outputs:]))
        plaintexts, ciphertexts = [a + (b << packing.slot) for a, b in zip(first, second, strict=True)], []
        for start in range(0, len(plaintexts), CHUNK):
            some = plaintexts[start : start + CHUNK]
            randomizers = self._source.draw(len(some))
            ciphertexts += [(1 + n * m) * r % square for m, r in zip(some, randomizers, strict=True)]
        return Encrypted(self._wire.write(ciphertexts), (outputs, len(derivatives)), packing)

    def decrypt(self, answer: Encrypted, counts: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
        """Return the sums (N, n_bins, 2)."""
        filled = counts > 0
        pairs = int(filled.sum())
        ciphertexts = self._wire.read(answer.data, answer.packing.ciphertexts(pairs), "encrypted sums")
        opened = answer.packing.unpack_sums(self.keys.decrypt(ciphertexts), pairs, int(self.keys.n))
        if (np.abs(opened) > bound * counts[filled][:, None]).any():
            raise ProtocolError("expected sums of derivatives within their range, got larger ones: they are of others")
        sums = np.zeros((*counts.shape, 2), np.int64)
        sums[filled] = opened
        return sums


class _SumSide:
    """The passive party: the public key, and ciphertexts that it cannot read."""

    def __init__(self, public: PublicKey) -> None:
        self._wire = Ciphertexts(public.modulus)
        self._randomizers = _Randomizers(public)

    def keep(self, message: Encrypted) -> None:
        """Keep the ciphertexts (C, B) of a round."""
        outputs, rows = message.shape
        read = self._wire.read(message.data, outputs * rows, "encrypted derivatives")
        self._kept = [read[start : start + rows] for start in range(0, len(read), rows)]
        self._packing = message.packing

    def add_derivatives(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], counts: NDArray[np.int64], output: int
    ) -> Encrypted:
        """Return the sums of one output in all bins that have rows, in the order of nodes and bins."""
        square, inside = self._wire.square, np.flatnonzero(nodes >= 0)
        values, places = self._kept[output], nodes[inside, None] * counts.shape[1] + bins[inside]
        products = multiply_bins([values[row] for row in inside.tolist()], places, square)
        joined = self._packing.pack_ciphertexts([products[place] for place in np.flatnonzero(counts).tolist()], square)
        fresh = self._randomizers.draw(len(joined))
        data = self._wire.write(a * b % square for a, b in zip(joined, fresh, strict=True))
        return Encrypted(data, (len(joined),), self._packing)


class _Randomizers:
    """Of the party without the key: the first ones singly, as a table is worth its making for many only."""

    def __init__(self, public: PublicKey) -> None:
        self._public, self._left = public, 0 if public.generator else WITHOUT_TABLE
        self._few = PowerSource(public.modulus)
        self._many: RandomizerSource | None = None

    def draw(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ones."""
        single = min(count, self._left)
        self._left -= single
        drawn = self._few.draw(single)
        if count > single:
            self._many = self._many or make_source(self._public, ANSWERS)
            drawn += self._many.draw(count - single)
        return drawn
