"""The passive party: the key and the features."""

import secrets
from collections.abc import Sequence

import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import Randbits, decode, draw, encode, join, pack, to_ring, unpack, unpack_signed
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.arithmetic.randomizers import FactorSource, Pool
from vflsec.cipher.roles.exchange import EncryptedDelta, Features, MaskedGradient, MaskedScores, NoisedGradient, Scores
from vflsec.cipher.roles.role import Role


class PassiveRole(Role):
    """The party with the features mu (B, g) and the key; of the weights W it has a share e that the other lacks.

    What it learns: delta^C = delta W^T (B, g) of every batch that trains the model, exactly but for rounding. One batch
    gives the direction of delta, and two consecutive ones W and delta up to a common sign, and so the labels.
    Encryption hides nothing of this; a defense must change delta before it is released. Everything else that it
    receives, z + masks and dW + masks, is within 2^-sigma of numbers that depend on nothing, for each number; sums over
    many steps, with momentum and decay, are functions of those. It can deviate from the protocol: an [[e]] that is not
    its share reveals delta in one batch, and a key made for the purpose weakens the other party's randomizers. The
    other party does not notice.

    Source: PrADA, Algorithms 4 and 5, party C, with the optimizer mirrored on its noise.

    Args:
        keys: fresh for this run; their mode decides how randomizers are drawn.
        layout: agreed with the other party.
        optimizer: of the weights, the same as the other party's.
        share0: (g, C) added to the other party's first weights. Without it the other party knows W_0, and can choose it
            so that it reads a feature.
        batches: expected number of batches, by which tables and the work ahead are sized.
        workers: processes that prepare randomizers ahead; end them with ``close``.
        randbits: source of the noise; ``secrets`` but in tests.

    Raises:
        UsageError: a key or a share that does not suit the layout.
    """

    def __init__(
        self,
        keys: Keys,
        layout: CipherLayout,
        *,
        optimizer: LinearSgd,
        share0: np.ndarray | None = None,
        batches: int = 100,
        workers: int = 0,
        randbits: Randbits = secrets.randbits,
    ) -> None:
        share0 = np.zeros((layout.width, layout.outputs)) if share0 is None else np.asarray(share0)
        super().__init__(layout, int(keys.n), share0, optimizer, randbits)
        if keys.mode != layout.mode:
            raise UsageError(f"expected a key of mode {layout.mode}, as in the layout, got one of mode {keys.mode}")
        self.keys = keys
        source = FactorSource(keys, batches * sum(layout.traffic))
        self.pool = Pool(source, self.ciphertexts.square, workers=workers)
        self._mu = np.zeros((0, layout.width), np.int64)
        self._learns = False

    @property
    def mu(self) -> NDArray[np.float64]:
        """The features (B, g) of this turn as they were encrypted, rounded."""
        return np.ldexp(self._mu.astype(np.float64), -self.layout.feature_precision)

    def features(self, mu: np.ndarray, *, learns: bool = True) -> Features:
        """Begin a turn: return the encrypted features mu (B, g), with whole samples only if the batch trains the model.

        Raises:
            UsageError: features that are not finite or out of range, of another width, or too many samples.
        """
        layout = self.layout
        mu = np.asarray(mu)
        if mu.ndim != 2 or mu.shape[1] != layout.width or not 1 <= len(mu) <= layout.batch:
            raise UsageError(f"expected features (B <= {layout.batch}, {layout.width}), got {mu.shape}")
        mu = encode(mu, layout.feature_precision, layout.feature_bits, "features")
        packing, rows = layout.scores, layout.gradients
        columns = [
            pack(column, packing.slot)
            for start in range(0, len(mu), packing.rows)
            for column in mu[start : start + packing.rows].T.tolist()
        ]
        wide = np.pad(mu, ((0, 0), (0, rows.columns * rows.blocks - layout.width)))
        packs = [
            pack(wide[start : start + rows.rows, block : block + rows.columns].ravel().tolist(), rows.slot)
            for block in range(0, wide.shape[1], rows.columns)
            for start in range(0, len(mu), rows.rows)
            if learns
        ]
        message = Features(
            agreement=self.agreement,
            turn=self.turn + 1,
            rows=len(mu),
            updates=self.updates,
            columns=self._encrypt(columns),
            packs=self._encrypt(packs),
        )
        self.turn, self._mu, self._learns, self._awaits = self.turn + 1, mu, learns, MaskedScores
        return message

    def scores(self, message: MaskedScores, noise: np.ndarray | None = None) -> Scores:
        """Return z + r1 + ``noise`` (B, C) modulo 2^L, r1 the other party's masks, and half a unit of mu more or less.

        The other party gets z in clear. An exact z would be a knapsack that gives several features to whoever knows the
        weights; the added half unit is as large as the error of z from rounding the features.

        Raises:
            ProtocolError: a message out of turn, or ciphertexts that cannot come from these features.
            UsageError: noise of another shape, not finite, or as large as the largest score.
        """
        self._expect(message)
        layout, rows = self.layout, len(self._mu)
        packing, outputs = layout.scores, layout.outputs
        precision = layout.feature_precision + layout.weight_precision
        shape = (rows, outputs)
        added = self._to_units(noise, shape, layout.score_bits - 1, precision, " on the scores", "lower score_noise")
        ciphers = self.ciphertexts.read(message.ciphers, packing.count(rows) * outputs, "masked scores")
        masked = np.empty((rows, outputs), np.uint64)
        for i, plaintext in enumerate(self._decrypt(ciphers)):
            block, output = divmod(i, outputs)
            part = slice(block * packing.rows, min(rows, (block + 1) * packing.rows))
            slots = unpack(plaintext, packing.slot, part.stop - part.start)
            masked[part, output] = to_ring(slots, layout.ring)
        share = to_ring(self._scale_weights(), layout.ring).reshape(layout.width, outputs)
        unit = 1 << layout.weight_precision
        blur = [draw(unit, self.randbits) - unit // 2 + value for value in added.ravel().tolist()]
        masked += to_ring(blur, layout.ring).reshape(masked.shape)
        scores = masked + self._mu.view(np.uint64) @ share  # modulo 2^64, and so modulo 2^L
        scores &= np.uint64((1 << layout.ring) - 1)
        self._awaits = MaskedGradient if self._learns else None
        return Scores(agreement=self.agreement, turn=self.turn, values=scores.astype("<u8").tobytes())

    def gradient(self, message: MaskedGradient, rate: float) -> NoisedGradient:
        """Return dW + r2 + n (g, C), sums over the batch, and [[e]]; update the share by the noise -n at this rate.

        Raises:
            ProtocolError: a message out of turn, or ciphertexts that cannot come from these features.
            UsageError: a learning rate that is negative or not finite.
        """
        self._expect(message)
        layout, rows = self.layout, len(self._mu)
        packing, outputs = layout.gradients, layout.outputs
        used = min(rows, packing.rows)
        ciphers = self.ciphertexts.read(message.ciphers, packing.blocks * outputs * used, "masked gradients")
        sums = np.zeros((packing.blocks * packing.columns, outputs), object)
        for i, plaintext in enumerate(self._decrypt(ciphers)):
            # sum k is correct in row k of the packs; its other slots are masked too
            block, output, k = i // used // outputs, i // used % outputs, i % used
            slots = unpack(plaintext, packing.slot, used * packing.columns)
            columns = slice(block * packing.columns, (block + 1) * packing.columns)
            sums[columns, output] += slots[k * packing.columns : (k + 1) * packing.columns]
        noise = [draw(layout.gradient_bound << layout.sigma, self.randbits) for _ in self._share]
        noised = [a + b for a, b in zip(sums[: layout.width].ravel().tolist(), noise, strict=True)]
        moved = self._move([-n for n in noise], rows, rate)
        weights = self._scale_weights(moved.share if layout.order == "paper" else None)
        answer = NoisedGradient(
            agreement=self.agreement,
            turn=self.turn,
            rate=rate,
            values=join(noised, layout.gradient_bytes),
            share=self._encrypt(self._share_packs(weights)),
        )
        self._take(moved)  # last: where something failed before, the turn can be tried again
        self._awaits = EncryptedDelta
        return answer

    def embedding_gradient(self, message: EncryptedDelta) -> NDArray[np.float64]:
        """Return delta^C = delta W^T (B, g) of the released delta, not divided by B.

        Raises:
            ProtocolError: a message out of turn, coefficients that are not finite, or numbers beyond what was agreed.
        """
        self._expect(message)
        layout, rows, rank = self.layout, len(self._mu), message.rank
        packing = layout.deltas
        if rank != (expected := min(rows, layout.outputs) if layout.low_rank else rows):
            raise ProtocolError(f"expected {expected} rows of an embedding gradient, got {rank}")
        ciphers = self.ciphertexts.read(message.ciphers, packing.count(rank), "embedding gradients")
        coefficients = self._get_coefficients(message)
        sent = np.zeros((rank, packing.blocks * packing.columns))
        chunks = packing.count(rank) // packing.blocks
        for i, plaintext in enumerate(self._decrypt(ciphers)):
            block, chunk = divmod(i, chunks)
            part = slice(chunk * packing.rows, min(rank, (chunk + 1) * packing.rows))
            count, n = (part.stop - part.start) * packing.columns, int(self.keys.n)
            slots = unpack_signed(plaintext, packing.slot, count, layout.delta_row_bound, n)
            values = decode(slots, layout.delta_precision + layout.weight_precision)
            sent[part, block * packing.columns : (block + 1) * packing.columns] = values.reshape(-1, packing.columns)
        gradient = sent[:, : layout.width]
        gradient = gradient if coefficients is None else coefficients @ gradient
        bound = layout.outputs * 2.0 ** (layout.delta_bits + layout.weight_bits)
        if np.abs(gradient).max() > 1.001 * bound:  # the message hides the size, which could be a decrypted feature
            raise ProtocolError(f"expected |delta W^T| <= {bound:g}, got more: coefficients beyond what was agreed")
        self._awaits = None
        return gradient

    def _get_coefficients(self, message: EncryptedDelta) -> NDArray[np.float64] | None:
        """Return the coefficients (B, rank) in ``message``, or None where every row was sent."""
        rows = len(self._mu)
        expected = 4 * rows * message.rank if self.layout.low_rank else 0
        if len(message.coefficients) != expected:
            raise ProtocolError(f"expected {expected} bytes of coefficients, got {len(message.coefficients)}")
        if not self.layout.low_rank:
            return None
        single = np.frombuffer(message.coefficients, "<f4").reshape(rows, message.rank)
        if not np.isfinite(single).all():
            raise ProtocolError("expected finite coefficients, got NaN or infinity")
        coefficients = single.astype(np.float64)  # of a signaling NaN this would warn
        largest = 2.0 ** max(message.rank - 1, 0)  # of what pivots give, see ``factor``
        if coefficients.size and (most := np.abs(coefficients).max()) > 1.001 * largest:
            raise ProtocolError(f"expected at most {largest:g}, got {most:g}: coefficients beyond what was agreed")
        return coefficients

    def _share_packs(self, weights: Sequence[int]) -> list[int]:
        """Return the share (g·C), packed but not reduced: the other party's share cancels what exceeds the slots."""
        packing = self.layout.deltas
        table = np.array(weights, object).reshape(self.layout.width, self.layout.outputs)
        return [
            pack(table[start : start + packing.columns, output].tolist(), packing.slot)
            for start in range(0, self.layout.width, packing.columns)
            for output in range(self.layout.outputs)
        ]

    def _decrypt(self, ciphertexts: Sequence[mpz]) -> list[int]:
        """Return the plaintexts of ``ciphertexts``, re-randomized so that nobody chooses what is decrypted."""
        square = self.ciphertexts.square
        pairs = zip(ciphertexts, self.pool.take(len(ciphertexts)), strict=True)
        return self.keys.decrypt([ciphertext * fresh % square for ciphertext, fresh in pairs])

    def _encrypt(self, plaintexts: Sequence[int]) -> bytes:
        """Return fresh ciphertexts of ``plaintexts`` modulo n, the only form in which they are sent."""
        n, square = self.ciphertexts.n, self.ciphertexts.square
        pairs = zip(plaintexts, self.pool.take(len(plaintexts)), strict=True)
        return self.ciphertexts.write((1 + n * (plaintext % n)) * fresh % square for plaintext, fresh in pairs)
