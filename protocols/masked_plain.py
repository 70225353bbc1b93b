"""The PHE-masked linear layer without encryption: the same messages, sealed; for experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.core.settings import TrainSpec
from vflsec.protocols.masked_linear import MaskedLinearBoundary, RolePair


class PlainMaskedBoundary(MaskedLinearBoundary):
    """The masked linear layer in float64, whose ciphertexts are sealed numbers that only the key's owner may open.

    Who learns what is as under encryption, and so is the training but for rounding, at a hundredth of the time. It
    protects nothing: use it to see what the encrypted layer would leak, and ``paillier`` to see what it costs.

    Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected.
    """

    name = "masked-plain"

    def start(self, weight: np.ndarray, share: np.ndarray, train: TrainSpec) -> RolePair:
        """Return roles whose masks come from a fixed seed, so that a run can be repeated bit for bit."""
        LinearSgd.build(train.optimizer, momentum=train.momentum, weight_decay=train.weight_decay, clip=train.clip)
        key, rng = object(), np.random.default_rng(0)
        passive_share = _ExactShare(share.copy(), train.momentum, train.weight_decay)
        return RolePair(
            _SealedPassiveRole(key, passive_share, rng),
            _SealedActiveRole(_ExactShare(weight.copy(), train.momentum, train.weight_decay), rng),
        )


@dataclass(frozen=True)
class Sealed:
    """Numbers that can be computed with, and read by whoever has the key."""

    _values: np.ndarray
    _key: object

    @property
    def nbytes(self) -> int:
        """Size of the numbers."""
        return self._values.nbytes

    @property
    def rows(self) -> int:
        """Their number of rows, which is no secret."""
        return len(self._values)

    def open(self, key: object) -> np.ndarray:
        """Return the numbers.

        Raises:
            PermissionError: not with this key.
        """
        if key is not self._key:
            raise PermissionError("sealed numbers can be read with the key alone, which the passive party holds")
        return self._values

    def dot(self, right: np.ndarray) -> Sealed:
        """Return the product with numbers in clear."""
        return Sealed(self._values @ right, self._key)

    def add(self, other: np.ndarray) -> Sealed:
        """Return the sum with numbers in clear."""
        return Sealed(self._values + other, self._key)

    @property
    def T(self) -> Sealed:
        """The transpose."""
        return Sealed(self._values.T, self._key)


@dataclass(frozen=True)
class Noised:
    """The gradient (g, C) under both parties' masks, and the passive party's share of the weights, sealed."""

    gradient: np.ndarray
    share: Sealed

    @property
    def nbytes(self) -> int:
        """Size of both."""
        return self.gradient.nbytes + self.share.nbytes


class _ExactShare:
    """One party's share of W (g, C), moved by SGD with momentum and weight decay, all of it linear."""

    def __init__(self, weight: np.ndarray, momentum: float, weight_decay: float) -> None:
        self.weight, self.velocity = weight, np.zeros_like(weight)
        self.momentum, self.weight_decay = momentum, weight_decay

    def step(self, gradient: np.ndarray, rate: float) -> None:
        self.velocity = self.momentum * self.velocity + gradient + self.weight_decay * self.weight
        self.weight = self.weight - rate * self.velocity

    def state(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight, "velocity": self.velocity}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self.weight, self.velocity = state["weight"], state["velocity"]


class _SealedPassiveRole:
    """Party C: the key, the features, the share e."""

    def __init__(self, key: object, share: _ExactShare, rng: np.random.Generator) -> None:
        self.key, self.share, self.rng = key, share, rng
        self.state, self.load = share.state, share.load

    def features(self, mu: np.ndarray, *, learns: bool) -> Sealed:
        self.mu = mu
        return Sealed(mu, self.key)

    def scores(self, message: Sealed, noise: np.ndarray | None) -> np.ndarray:
        scores: np.ndarray = message.open(self.key) + self.mu @ self.share.weight
        return scores if noise is None else scores + noise

    def gradient(self, message: Sealed, rate: float) -> Noised:
        noise = self.rng.standard_normal(self.share.weight.shape)
        before = self.share.weight
        self.share.step(-noise / len(self.mu), rate)
        return Noised(message.open(self.key) + noise, Sealed(before, self.key))

    def embedding_gradient(self, message: Sealed) -> np.ndarray:
        return message.open(self.key)


class _SealedActiveRole:
    """Party p: the labels, the share W - e."""

    def __init__(self, share: _ExactShare, rng: np.random.Generator) -> None:
        self.share, self.rng = share, rng
        self.state, self.load = share.state, share.load

    def mask_scores(self, message: Sealed) -> Sealed:
        self.features, self.used = message, self.share.weight
        self.mask = self.rng.standard_normal((message.rows, self.share.weight.shape[1]))
        return message.dot(self.share.weight).add(self.mask)

    def scores(self, message: np.ndarray) -> np.ndarray:
        return message - self.mask

    def mask_gradient(self, delta: np.ndarray) -> Sealed:
        self.mask = self.rng.standard_normal(self.share.weight.shape)
        return self.features.T.dot(delta).add(self.mask)

    def embedding_gradient(self, delta: np.ndarray, message: Noised, noise: np.ndarray | None) -> Sealed:
        exact = message.share.add(self.used).dot(delta.T).T
        return exact if noise is None else exact.add(noise)

    def update(self, message: Noised, rate: float) -> None:
        self.share.step((message.gradient - self.mask) / self.features.rows, rate)
