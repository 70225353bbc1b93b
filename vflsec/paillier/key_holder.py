"""The party with the key and the features."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import numpy as np

from vflsec.paillier.keys import Keys
from vflsec.paillier.layout import Layout
from vflsec.paillier.linear_sgd import LinearSgd
from vflsec.paillier.messages import (
    EncryptedDelta,
    Features,
    MaskedGradient,
    MaskedScores,
    NoisedGradient,
    Scores,
)


class KeyHolder:
    """Party C.

    Args:
        keys: fresh for this run; their mode says how randomisers are drawn.
        layout: agreed.
        optimizer: of the weights, the same as p's.
        share0: (g, C) what C adds to p's first weights, unknown to p.
        batches: about how many batches are to come; decides how large the tables are.
        workers: processes that prepare randomisers ahead.
        randbits: source of the masks; for tests.
    """

    def __init__(
        self,
        keys: Keys,
        layout: Layout,
        *,
        optimizer: LinearSgd,
        share0: np.ndarray | None = None,
        batches: int | None = None,
        workers: int = 0,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None: ...

    def features(self, mu: np.ndarray, *, learns: bool = True) -> Features:
        """Begin a turn with the features mu (B, g); without row packs unless the model learns from them."""
        raise NotImplementedError

    def scores(self, message: MaskedScores) -> Scores:
        """Return z + r1 mod 2^L."""
        raise NotImplementedError

    def gradient(self, message: MaskedGradient, rate: float) -> NoisedGradient:
        """Return dW + n + r2 (sums over the batch) and [[e_t]], and move C's share."""
        raise NotImplementedError

    def embedding_gradient(self, message: EncryptedDelta) -> np.ndarray:
        """Return delta^C = delta W^T (B, g), not divided by B, float64."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Return what to save: uint8 and int64 arrays of fixed shape."""
        raise NotImplementedError

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a saved state."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes that prepare randomisers."""
