"""What both roles have in common: a share of the weights that an optimizer moves, and the order of messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic.codec import Ciphertexts, Randbits, cut, encode, join
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import PRECISION, LinearSgd, Moved
from vflsec.cipher.arithmetic.randomizers import Pool
from vflsec.cipher.roles.exchange import PaillierMessage

_STATE_BYTES = 32  # of one number of a saved share or velocity: 2^255 units are masks of 10^20 steps


class Role:
    """One party of the encrypted linear layer.

    Args:
        layout: agreed with the other party.
        n: modulus of the key.
        weights: (g, C) the first share of this party.
        optimizer: of the weights, the same at both parties.
        randbits: source of masks and noise.

    Attributes:
        pool: of randomizers.
        turn: number of the last forward pass that was begun.
        updates: number of updates of the share.
    """

    pool: Pool

    def __init__(
        self, layout: CipherLayout, n: int, weights: np.ndarray, optimizer: LinearSgd, randbits: Randbits
    ) -> None:
        if n.bit_length() != layout.bits:
            raise UsageError(f"expected a key of {layout.bits} bits, as in the layout, got one of {n.bit_length()}")
        if weights.shape != (layout.width, layout.outputs):
            raise UsageError(f"expected weights {(layout.width, layout.outputs)}, got {weights.shape}")
        encode(weights, layout.weight_precision, layout.weight_bits, "weights")
        self.layout = layout
        self.agreement = layout.fingerprint(n, repr(optimizer))
        self.optimizer = optimizer
        self.turn = self.updates = 0
        self.randbits = randbits
        self.ciphertexts = Ciphertexts(n)
        self._share = [round(float(weight) * 2.0**PRECISION) for weight in weights.ravel()]
        self._velocity = [0] * len(self._share)
        self._awaits: type[PaillierMessage] | None = None

    @property
    def share(self) -> NDArray[np.object_]:
        """This party's share of W (g, C), integers in units of 2^-64; both shares add up to W."""
        return np.array(self._share, dtype=object).reshape(self.layout.width, self.layout.outputs)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state between turns: ``share`` and ``velocity``, uint8 (g, C, 32), ``turn`` and ``updates``."""
        shape = (self.layout.width, self.layout.outputs, _STATE_BYTES)
        return {
            name: np.frombuffer(join(values, _STATE_BYTES, signed=True), np.uint8).reshape(shape).copy()
            for name, values in (("share", self._share), ("velocity", self._velocity))
        } | {name: np.array(getattr(self, name), np.int64) for name in ("turn", "updates")}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state; an unfinished turn is discarded.

        Raises:
            UsageError: another shape, or a missing entry.
        """
        shape = (self.layout.width, self.layout.outputs, _STATE_BYTES)
        if missing := {"share", "velocity", "turn", "updates"} - set(state):
            raise UsageError(f"expected a saved share of the weights, got one without {', '.join(sorted(missing))}")
        restored = []
        for name in ("share", "velocity"):
            array = np.asarray(state[name])
            if array.shape != shape or array.dtype != np.uint8:
                raise UsageError(f"expected a saved {name} of {shape} bytes, got {array.shape} of {array.dtype}")
            count = self.layout.width * self.layout.outputs
            restored.append(cut(array.tobytes(), _STATE_BYTES, count, name, signed=True))
        self._share, self._velocity = restored
        self.turn, self.updates, self._awaits = int(state["turn"]), int(state["updates"]), None

    def close(self) -> None:
        """End the processes that prepare randomizers."""
        self.pool.close()

    def _to_units(
        self, noise: np.ndarray | None, shape: tuple[int, int], bits: int, precision: int, on: str, way_out: str
    ) -> NDArray[np.object_]:
        """Return noise of this shape, below 2^bits, as integers in units of 2^-precision; zeros for None.

        Raises:
            UsageError: another shape, not finite, or too large; ``on`` and ``way_out`` complete the message.
        """
        if noise is None:
            return np.zeros(shape, object)
        noise = np.asarray(noise, np.float64)
        if noise.shape != shape:
            raise UsageError(f"expected noise {shape}{on}, got {noise.shape}")
        if not (np.abs(noise) < (most := 2.0**bits)).all():
            raise UsageError(f"expected finite noise below {most:g}{on}, got other: {way_out}")
        return np.array([round(value * 2.0**precision) for value in noise.ravel().tolist()], object).reshape(shape)

    def _scale_weights(self, share: Sequence[int] | None = None) -> list[int]:
        """Return the share (g·C), or another, in units of the weights; the parties' add up to W within one unit."""
        unit = PRECISION - self.layout.weight_precision
        return [(value + (1 << unit - 1)) >> unit for value in (self._share if share is None else share)]

    def _move(self, gradient: Sequence[int], rows: int, rate: float) -> Moved:
        """Return the share as moved by its part of the sum (g·C) of the gradients of ``rows`` samples."""
        unit = PRECISION - self.layout.feature_precision - self.layout.delta_precision
        mean = [(value << unit) // rows for value in gradient]
        moved = self.optimizer.step(self._share, self._velocity, mean, rate)
        if max(abs(value).bit_length() for values in moved for value in values) >= 8 * _STATE_BYTES:
            raise UsageError(
                f"expected shares of the weights below 2^{8 * _STATE_BYTES - 1 - PRECISION}, got more: learning rate, "
                "momentum and weight decay make their masks grow without end"
            )
        return moved

    def _take(self, moved: Moved) -> None:
        """Take over the updated share."""
        self._share, self._velocity = moved
        self.updates += 1

    def _expect(self, message: PaillierMessage) -> None:
        """Raise ProtocolError unless ``message`` is the next one of this turn."""
        self._is_agreed(message)
        if type(message) is not self._awaits:
            waits = f"a message {self._awaits.__name__}" if self._awaits else "the next turn to begin"
            raise ProtocolError(f"expected {waits}, got {type(message).__name__}")
        if message.turn != self.turn:
            raise ProtocolError(f"expected a message of turn {self.turn}, got one of turn {message.turn}")

    def _is_agreed(self, message: PaillierMessage) -> None:
        if message.agreement != self.agreement:
            raise ProtocolError(
                "a message was made under another key or layout, or for another optimizer; begin again with common ones"
            )
