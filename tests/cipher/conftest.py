"""Both roles in one process, driven as a boundary drives them, beside the same training in float64."""

import random
import secrets
from dataclasses import dataclass, field

import numpy as np
import pytest

from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import PRECISION, LinearSgd
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole


@pytest.fixture(scope="session")
def keys():
    """A key pair of 1024 bits: for tests alone."""
    return Keys.generate(1024)


@dataclass
class Pair:
    """The two roles, and what they have said."""

    c: PassiveRole
    p: ActiveRole
    said: list = field(default_factory=list)
    updates_first: bool = False

    def hear(self, message):
        self.said.append(message)
        return message

    def scores(self, mu, *, learns=True):
        masked = self.hear(self.p.mask_scores(self.hear(self.c.features(mu, learns=learns))))
        return self.p.scores(self.hear(self.c.scores(masked)))

    def learn(self, delta, rate, released=None):
        """Return delta^C of one step."""
        released = delta if released is None else released
        noised = self.hear(self.c.gradient(self.hear(self.p.mask_gradient(delta)), rate))
        if self.updates_first:
            self.p.update(noised, rate)
        encrypted = self.hear(self.p.embedding_gradient(released, noised))
        if not self.updates_first:
            self.p.update(noised, rate)
        return self.c.embedding_gradient(encrypted)

    @property
    def weights(self):
        """W (g, C), which neither party knows."""
        shares = [
            [int.from_bytes(number.tobytes(), "little", signed=True) for number in state["share"].reshape(-1, 32)]
            for state in (self.c.state(), self.p.state())
        ]
        total = [float(a + b) for a, b in zip(*shares, strict=True)]
        return np.ldexp(total, -PRECISION).reshape(self.c.layout.width, self.c.layout.outputs)


@pytest.fixture(scope="session")
def make_pair(keys):
    """How to make a pair: ``make_pair(weights, batch=8, ...)``, other settings as the layout's."""

    def make(weights, *, keys=keys, share0=None, optimizer=None, steps=1, seed=None, **settings):
        weights = np.asarray(weights, float)
        bits = keys.private.public_key.n.bit_length()
        layout = CipherLayout(width=weights.shape[0], outputs=weights.shape[1], bits=bits, mode=keys.mode, **settings)
        optimizer = optimizer or LinearSgd()
        drawn = [random.Random(seed).getrandbits if seed else secrets.randbits for _ in range(2)]  # noqa: S311
        return Pair(
            PassiveRole(keys, layout, optimizer=optimizer, share0=share0, batches=steps, randbits=drawn[0]),
            ActiveRole(keys.public, layout, weights, optimizer=optimizer, batches=steps, randbits=drawn[1]),
        )

    return make


@dataclass
class Problem:
    """A random task of g features and C outputs, whose labels follow a linear model."""

    width: int
    outputs: int
    seed: int = 0

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.truth = self.rng.normal(size=(self.width, self.outputs))
        self.weights = self.rng.normal(size=(self.width, self.outputs)) * 0.3

    def batch(self, rows):
        """Return features and labels as indicators."""
        mu = self.rng.normal(size=(rows, self.width)).clip(-7, 7)
        noisy = mu @ self.truth + self.rng.normal(size=(rows, self.outputs))
        if self.outputs == 1:
            return mu, (noisy > 0).astype(float)
        return mu, np.eye(self.outputs)[noisy.argmax(1)]

    def delta(self, z, y):
        """Return the loss gradient by the scores: of logistic regression, or of softmax."""
        if self.outputs == 1:
            return 1 / (1 + np.exp(-z)) - y
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True) - y


@pytest.fixture(scope="session")
def problem():
    """The class of problems."""
    return Problem
