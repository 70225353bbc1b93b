"""The active party: the labels."""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from gmpy2 import mpz, powmod
from numpy.typing import NDArray
from scipy import linalg

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import Randbits, center, cut, draw, encode, pack, to_ring
from vflsec.cipher.arithmetic.keys import PublicKey
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd, Moved
from vflsec.cipher.arithmetic.powers import FixedWindow, Pippenger, Schedule, Straus, plan_straus
from vflsec.cipher.arithmetic.randomizers import Pool, make_source
from vflsec.cipher.roles.exchange import EncryptedDelta, Features, MaskedGradient, MaskedScores, NoisedGradient, Scores
from vflsec.cipher.roles.role import Role


class ScoresTooLarge(ProtocolError):
    """Scores beyond 2^score_bits: the model diverges, or the passive party sends other numbers."""


class ActiveRole(Role):
    """The party with the labels; of the weights W it has the share W~ = W - e.

    What it learns: the scores z = mu W (B, C) of every sample, in clear; its own shares; dW + n, within 2^-sigma of
    numbers that depend on nothing, for each number. Where mu stays the same from batch to batch, scores of the same
    samples at many W give mu mu^T, that is mu up to a rotation. Without ``share0`` of the other party it knows W_0. It
    can deviate from the protocol, use other weights than its share, and so read features. The other party does not
    notice, and does not limit how often a sample is scored.

    Source: PrADA, Algorithms 4 and 5, party p, with the sign of line 14 (17) and delta as derivative by the score.

    Args:
        public: the other party's key.
        layout: agreed with the other party.
        weights: (g, C) the first share of W; all of W_0 unless the other party adds its own.
        optimizer: of the weights, the same as the other party's.
        batches: expected number of batches, by which tables and the work ahead are sized; for few, there is no table.
        workers: processes that prepare randomizers ahead; end them with ``close``.
        randbits: source of the masks; ``secrets`` but in tests.

    Raises:
        UsageError: weights that do not suit the layout.
        ProtocolError: not a valid key.
    """

    def __init__(
        self,
        public: PublicKey,
        layout: CipherLayout,
        weights: np.ndarray,
        *,
        optimizer: LinearSgd,
        batches: int = 100,
        workers: int = 0,
        randbits: Randbits = secrets.randbits,
    ) -> None:
        public.check(layout.bits, layout.mode)
        super().__init__(layout, public.modulus, np.asarray(weights), optimizer, randbits)
        if layout.low_rank and (rank := np.linalg.matrix_rank(weights)) < layout.outputs:
            raise UsageError(
                f"expected first weights of rank {layout.outputs} for delta=rank1, got rank {rank}: the coefficients "
                "would tell of delta what delta W^T does not; start from random weights, or take delta=outer"
            )
        source = make_source(public, batches * layout.traffic.to_key)
        self.pool = Pool(source, self.ciphertexts.square, workers=workers)
        self._rows = 0
        self._used: list[int] = []  # the share in this turn's forward pass
        self._score_masks = np.zeros((0, layout.outputs), np.uint64)
        self._gradient_masks: list[int] = []
        self._packs: list[mpz] = []
        self._updated = self._released = False

    def mask_scores(self, message: Features) -> MaskedScores:
        """Return [[mu W~ + r1]], r1 (B, C) independent masks.

        Raises:
            ProtocolError: a message of an earlier turn, or something that is no ciphertext.
        """
        self._is_agreed(message)
        layout, rows = self.layout, message.rows
        packing, outputs = layout.scores, layout.outputs
        if not self.turn < message.turn < 1 << 63:  # as it is saved
            raise ProtocolError(f"expected features of a turn after {self.turn}, got turn {message.turn}")
        if message.updates != self.updates:
            raise ProtocolError(
                f"expected the other party's share to have moved {self.updates} times, as this one, got "
                f"{message.updates}: the weights are lost; go on from states that were saved after the same batch"
            )
        if not 1 <= rows <= layout.batch:
            raise ProtocolError(f"expected features of 1 to {layout.batch} samples, got {rows}")
        count = layout.gradients.count(rows) if message.packs else 0
        columns = self.ciphertexts.read(message.columns, packing.count(rows) * layout.width, "features")
        packs = self.ciphertexts.read(message.packs, count, "packed features")
        used = self._scale_weights()
        share = np.array([value % (1 << layout.ring) for value in used], object).reshape(layout.width, outputs)
        products, masks, masked = [], [], np.empty((rows, outputs), np.uint64)
        schedules: list[Schedule] = []
        for block in range(packing.count(rows)):
            bases = columns[block * layout.width : (block + 1) * layout.width]
            powers = Straus(bases, self.ciphertexts.square, bits=layout.ring, products=outputs)
            schedules = schedules or [plan_straus(share[:, c].tolist(), powers.window) for c in range(outputs)]
            part = slice(block * packing.rows, min(rows, (block + 1) * packing.rows))
            for output, schedule in enumerate(schedules):
                drawn = [self._draw_mask(layout.score_bound) for _ in range(part.start, part.stop)]
                masked[part, output] = to_ring(drawn, layout.ring)
                masks.append(pack(drawn, packing.slot))
                products.append(powers.product(schedule))
        ciphers = self._release(products, masks)
        self.turn, self._rows, self._packs, self._used = message.turn, rows, packs, used
        self._score_masks, self._awaits = masked, Scores
        return MaskedScores(agreement=self.agreement, turn=self.turn, ciphers=ciphers)

    def scores(self, message: Scores) -> NDArray[np.float64]:
        """Return z (B, C).

        Raises:
            ProtocolError: a message out of turn, or a score beyond 2^score_bits.
        """
        self._expect(message)
        layout = self.layout
        values = cut(message.values, 8, self._rows * layout.outputs, "scores")
        masked = np.array(values, np.uint64).reshape(self._score_masks.shape)
        scores = center(masked - self._score_masks, layout.ring)
        precision = layout.feature_precision + layout.weight_precision
        z = np.ldexp(scores.astype(np.float64), -precision)
        if (most := np.abs(z).max()) >= 2.0**layout.score_bits:
            raise ScoresTooLarge(
                f"expected scores below {2**layout.score_bits}, got {most:g}: the model diverges, or the other party "
                "answers with other numbers; take a smaller learning rate, or agree on a larger ring"
            )
        self._awaits = None
        self._score_masks = self._score_masks[:0]  # a mask answers once
        return z

    def mask_gradient(self, delta: np.ndarray) -> MaskedGradient:
        """Return [[mu^T delta + r2]] for delta (B, C), each sample's loss gradient by its scores, not divided by B.

        Raises:
            UsageError: numbers that are not finite or out of range, another shape, or a call out of turn.
        """
        layout = self.layout
        if self._awaits is not None or not self._packs:
            raise UsageError("expected mask_gradient after the scores of a batch that the model learns from")
        weights = self._to_delta(delta)
        packing, outputs = layout.gradients, layout.outputs
        used, chunks = min(self._rows, packing.rows), packing.count(self._rows) // packing.blocks
        totals = np.zeros((packing.blocks * packing.columns, outputs), object)
        sums, masks = [], []
        for block in range(packing.blocks):
            bases = self._packs[block * chunks : (block + 1) * chunks]
            powers = Pippenger(bases, self.ciphertexts.square, layout.delta_precision + layout.delta_bits)
            columns = slice(block * packing.columns, (block + 1) * packing.columns)
            for output in range(outputs):
                for k in range(used):  # row k of every pack; the other rows have wrong weights, and are masked
                    mask = [self._draw_mask(layout.gradient_bound) for _ in range(used * packing.columns)]
                    totals[columns, output] += mask[k * packing.columns : (k + 1) * packing.columns]
                    exponents = weights[k::used, output].tolist()
                    sums.append(powers.product(exponents + [0] * (chunks - len(exponents))))
                    masks.append(pack(mask, packing.slot))
        ciphers = self._release(sums, masks)
        self._gradient_masks = totals[: layout.width].ravel().tolist()
        self._packs, self._awaits, self._updated, self._released = [], NoisedGradient, False, False
        return MaskedGradient(agreement=self.agreement, turn=self.turn, ciphers=ciphers)

    def embedding_gradient(
        self, delta: np.ndarray, message: NoisedGradient, noise: np.ndarray | None = None
    ) -> EncryptedDelta:
        """Return [[delta W^T + noise]] for the released delta (B, C), not divided by B.

        W is that of the forward pass, or with order=paper that after ``update``, whether it has been called or not.
        Noise (B, g) is added under encryption, so that the other party sees only the sum. It needs delta=outer: with
        rank1, one row of delta W^T stands for several.

        Raises:
            ProtocolError: a message out of turn, or something that is no ciphertext.
            UsageError: numbers that are not finite or out of range, another shape, or a call out of turn.
        """
        self._expect(message)
        layout = self.layout
        packing, outputs = layout.deltas, layout.outputs
        if self._released:
            raise UsageError("expected embedding_gradient once in a turn")
        rows, coefficients = self._to_delta(delta), b""
        if noise is not None and layout.low_rank:
            raise UsageError("expected delta=outer in the layout for noise on every coordinate, got rank1: set it")
        bits = layout.delta_bits + layout.weight_bits - 1  # half of what a row may be, so that the sum has room
        precision = layout.delta_precision + layout.weight_precision
        added = self._to_units(noise, (self._rows, layout.width), bits, precision, "", "raise weight_bits")
        if layout.low_rank:
            unit = 2.0**-layout.delta_precision
            chosen, real = factor(np.asarray(delta, np.float64) + unit * self._draw_dither(rows.shape), unit)
            filled = ((0, min(rows.shape) - len(chosen)), (0, 0))  # the same work and size whatever the rank of delta
            rows, coefficients = np.pad(rows[chosen], filled), np.pad(real, filled[::-1]).astype("<f4").tobytes()
        ciphers = self.ciphertexts.read(message.share, packing.blocks * outputs, "a share of the weights")
        used = self._scale_weights(self._get_next(message).share) if layout.order == "paper" else self._used
        share = np.array(used, object).reshape(-1, outputs)
        results, masks = [], []
        for block in range(packing.blocks):
            part = share[block * packing.columns : (block + 1) * packing.columns]
            products = self._multiply_rows(ciphers[block * outputs : (block + 1) * outputs], part, rows)
            results += products
            masks += self._blur(rows, added[:, block * packing.columns : (block + 1) * packing.columns])
        self._released = True
        return EncryptedDelta(
            agreement=self.agreement,
            turn=self.turn,
            rank=len(rows),
            coefficients=coefficients,
            ciphers=self._release(results, masks),
        )

    def update(self, message: NoisedGradient, rate: float) -> None:
        """Update the share by dW + n, divided by B, at this rate.

        Raises:
            ProtocolError: a message out of turn, or another rate at the other party.
            UsageError: a learning rate that is negative or not finite, or a second update in a turn.
        """
        self._expect(message)
        if self._updated:
            raise UsageError("expected one update in a turn")
        if message.rate != rate:
            raise ProtocolError(f"expected the other party to take the learning rate {rate}, got {message.rate}")
        self._take(self._get_next(message))
        self._updated = True

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state; the features and masks of an unfinished turn are discarded."""
        super().load(state)
        self._packs, self._score_masks, self._gradient_masks = [], self._score_masks[:0], []

    def _get_next(self, message: NoisedGradient) -> Moved:
        """Return the share after the update by ``message``."""
        if self._updated:
            return Moved(self._share, self._velocity)
        values = cut(message.values, self.layout.gradient_bytes, len(self._share), "noised gradients")
        return self._move([a - b for a, b in zip(values, self._gradient_masks, strict=True)], self._rows, message.rate)

    def _to_delta(self, delta: np.ndarray) -> NDArray[np.int64]:
        delta = np.asarray(delta)
        if delta.shape != (self._rows, self.layout.outputs):
            raise UsageError(f"expected delta {(self._rows, self.layout.outputs)}, got {delta.shape}")
        return encode(delta, self.layout.delta_precision, self.layout.delta_bits, "delta")

    def _multiply_rows(self, share: Sequence[mpz], weights: np.ndarray, rows: NDArray[np.int64]) -> list[mpz]:
        """Return ciphertexts of rows delta W^T, packed, over a block of features, by [[e]] of each output and W~."""
        n, square, packing = self.ciphertexts.n, self.ciphertexts.square, self.layout.deltas
        packed = min(packing.rows, len(rows))
        bases = [
            cipher * (1 + n * (pack(column, packing.slot) % n)) % square
            for cipher, column in zip(share, weights.T.tolist(), strict=True)
        ]
        for _ in range(packed - 1):  # the same weights, moved up by one row
            bases += [powmod(base, 1 << packing.slot * packing.columns, square) for base in bases[-len(share) :]]
        bits = self.layout.delta_precision + self.layout.delta_bits
        chunks = [rows[start : start + packed].ravel().tolist() for start in range(0, len(rows), packed)]
        powers = FixedWindow(bases, square, bits=bits, products=len(chunks))
        chunks[-1] += [0] * (len(bases) - len(chunks[-1]))
        return [powers.product(chunk) for chunk in chunks]

    def _blur(self, rows: NDArray[np.int64], noise: NDArray[np.object_]) -> list[int]:
        """Return what is added to packed rows, (R, columns) or more.

        It is ``noise`` plus up to half a unit of W, because exact products have a common divisor. That hides the scale
        of one row. Where every row is sent, ratios of rows would still be ratios of integers, which a search over 2^23
        scales finds; the sum is then at least half a unit of delta times a weight of 1. Where weights are much larger
        than 1, ``outer`` may reveal delta and W up to a sign in one batch instead of two.
        """
        packing, least = self.layout.deltas, 1 if self.layout.low_rank else 1 << self.layout.weight_precision
        sizes = np.abs(rows).sum(axis=1)
        limits = np.where(sizes > 0, sizes.clip(min=least), 1).tolist()
        added = np.zeros((len(rows), packing.columns), object)
        added[:, : noise.shape[1]] = noise[: len(rows)]
        added[:, : noise.shape[1]] += [[draw(limit, self.randbits) - limit // 2 for _ in noise.T] for limit in limits]
        chunks = (added[start : start + packing.rows] for start in range(0, len(rows), packing.rows))
        return [pack(chunk.ravel().tolist(), packing.slot) for chunk in chunks]

    def _draw_dither(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Return noise in ±1/2: float32 gradients are multiples of 2^-24 or so, and exact ratios reveal the scale."""
        drawn = [self.randbits(53) for _ in range(math.prod(shape))]
        return np.ldexp(np.array(drawn, np.float64), -53).reshape(shape) - 0.5

    def _draw_mask(self, bound: int) -> int:
        """Return a mask for a number within ±bound, which makes it non-negative."""
        return bound + draw(bound << self.layout.sigma, self.randbits)

    def _release(self, ciphertexts: Sequence[mpz], masks: Sequence[int]) -> bytes:
        """Return ciphertexts with masks, re-randomized: the only form in which results are sent."""
        n, square = self.ciphertexts.n, self.ciphertexts.square
        fresh = self.pool.take(len(ciphertexts))
        return self.ciphertexts.write(
            cipher * (1 + n * mask) % square * randomizer % square
            for cipher, mask, randomizer in zip(ciphertexts, masks, fresh, strict=True)
        )


_RELATIVE = 2.0**-32  # singular values below it, of the largest, are rounding: the message has 24 bits


class Factors(NamedTuple):
    """delta = coefficients @ delta[rows].

    Attributes:
        rows: (r,) positions of independent rows, r the rank.
        coefficients: (B, r).
    """

    rows: NDArray[np.intp]
    coefficients: NDArray[np.float64]


def factor(delta: NDArray[np.float64], unit: float = 0.0) -> Factors:
    """Return rows of ``delta`` (B, C) that span the others, and the coefficients of all by them.

    Both are functions of the space that the columns of ``delta`` span, and so of delta W^T, whatever W is, as long as
    its rank is C: whoever gets delta W^T in full could compute them. The rows are the pivots of a QR decomposition of
    an orthonormal basis, so that coefficients stay within 2^(r-1); with one column, the row is the longest and the
    coefficients are the signed ratios to it.

    Args:
        delta: (B, C).
        unit: that its entries are rounded to when they are sent; directions that rounding by half of it explains are
            left out. The rows of a softmax gradient in float32 add up to zero but for that.
    """
    basis, sizes, _ = linalg.svd(delta, full_matrices=False)
    noise = unit / 2 * (len(delta) ** 0.5 + delta.shape[1] ** 0.5)  # the norm of a matrix of errors is below it
    basis = basis[:, : int((sizes > max(_RELATIVE * sizes[0], noise)).sum())]
    if not basis.shape[1]:
        return Factors(np.empty(0, np.intp), basis)
    _, pivots = linalg.qr(basis.T, mode="r", pivoting=True)
    rows = pivots[: basis.shape[1]].astype(np.intp)
    return Factors(rows, linalg.solve(basis[rows].T, basis.T).T)
