"""The party with the labels."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import numpy as np

from vflsec.paillier.keys import PublicKey
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


class LabelHolder:
    """Party p.

    Args:
        public: C's key.
        layout: agreed.
        weights: (g, C) p's first share of W, all of W_0 unless C adds its own.
        optimizer: of the weights, the same as C's.
        batches: about how many batches are to come; for few, no table is built.
        workers: processes that prepare randomisers ahead.
        randbits: source of the masks; for tests.
    """

    def __init__(
        self,
        public: PublicKey,
        layout: Layout,
        weights: np.ndarray,
        *,
        optimizer: LinearSgd,
        batches: int | None = None,
        workers: int = 0,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None: ...

    def masked_scores(self, message: Features) -> MaskedScores:
        """Return [[mu W~ + r1]]."""
        raise NotImplementedError

    def scores(self, message: Scores) -> np.ndarray:
        """Return z^C (B, C), float64."""
        raise NotImplementedError

    def masked_gradient(self, delta: np.ndarray) -> MaskedGradient:
        """Return [[mu^T delta + r2]] for the loss gradients delta (B, C) of each sample, not divided by B."""
        raise NotImplementedError

    def embedding_gradient(self, delta: np.ndarray, message: NoisedGradient) -> EncryptedDelta:
        """Return [[delta W^T]] for delta (B, C) as released; with order=paper after ``update``."""
        raise NotImplementedError

    def update(self, message: NoisedGradient, rate: float) -> None:
        """Move p's share by the noised gradient, divided by B, at this learning rate."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Return what to save: uint8 and int64 arrays of fixed shape."""
        raise NotImplementedError

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a saved state."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes that prepare randomisers."""
