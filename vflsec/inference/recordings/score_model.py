"""The features and the first weights that explain the scores of a run: a low-rank bilinear least-squares problem.

The scores of row i at step t are z_t(i) = M_i(t) (kept_t W_0 - P_t), where P_t sums the loss gradients of all earlier
batches, each multiplied by the features of its rows, with the learning rate, momentum and weight decay of the run. All
but M and W_0 is known to the party that has the scores. M is determined up to a rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from vflsec.inference.recordings.simplex import Floats

SAMPLE = 6000
"""Scores from which the preconditioner and the start of a fit are computed."""


class Visit(NamedTuple):
    """One step as the active party sees it.

    Attributes:
        rows: (B,) which samples, numbered from 0.
        scores: (B, C).
        delta: (B, C) loss gradients divided by B; None where nothing is learned.
        rate: of learning; 0 where nothing is learned.
        time: from 0 to 1 over the run.
    """

    rows: NDArray[np.int64]
    scores: Floats
    delta: Floats | None
    rate: float
    time: float


class ScoreModel:
    """The model above, for the visits of one recording.

    Args:
        visits: the steps in order.
        n: number of samples.
        width: g.
        momentum: of the optimizer of W.
        weight_decay: of the optimizer of W.
        drifts: whether features move linearly in time.
        held_out: share of the scores that is left out of the fit.
        seed: of the sample of scores.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        n: int,
        width: int,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        drifts: bool = False,
        held_out: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.n, self.width = n, width
        self.rng = np.random.default_rng(seed)
        self.momentum, self.weight_decay = momentum, weight_decay
        steps, most = len(visits), max(len(visit.rows) for visit in visits)
        outputs = visits[0].scores.shape[1]
        self.rows = np.full((steps, most), n)  # row n is zero: it pads short batches
        self.scores, self.delta = np.zeros((steps, most, outputs)), np.zeros((steps, most, outputs))
        for s, visit in enumerate(visits):
            self.rows[s, : len(visit.rows)] = visit.rows
            self.scores[s, : len(visit.rows)] = visit.scores
            if visit.delta is not None:
                self.delta[s, : len(visit.rows)] = visit.delta
        self.rates = np.array([visit.rate for visit in visits])
        self.learns = np.array([visit.delta is not None for visit in visits])
        time = np.array([visit.time for visit in visits])
        self.basis = np.stack([np.ones(steps), time], axis=1) if drifts else np.ones((steps, 1))  # (S, k)
        seen = np.broadcast_to((self.rows < n)[..., None], self.scores.shape)
        left = self.rng.random(self.scores.shape) < held_out
        self.fitted, self.left = seen & ~left, seen & left
        self.kept = self._kept()
        self._gather = sparse.csr_matrix(
            (np.ones(self.rows.size), (self.rows.ravel(), np.arange(self.rows.size))), shape=(n + 1, self.rows.size)
        )[:n]
        self.places = self._places()

    def _kept(self) -> Floats:
        """Return (S,) which share of W_0 weight decay has left."""
        kept, velocity, found = 1.0, 0.0, np.ones(len(self.rates))
        for s, (rate, learns) in enumerate(zip(self.rates, self.learns, strict=True)):
            found[s] = kept
            if learns:
                velocity = self.momentum * velocity + self.weight_decay * kept
                kept -= rate * velocity
        return found

    def _places(self) -> NDArray[np.int64]:
        """Return (n, V) the positions in ``rows`` at which each row is, and -1."""
        flat = self.rows.ravel()
        order = np.argsort(flat, kind="stable")[: (flat < self.n).sum()]
        counts = np.bincount(flat[order], minlength=self.n)
        found = np.full((self.n, counts.max()), -1)
        found[flat[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
        return found

    def at(self, features: Floats) -> Floats:
        """Return (S, B, g) the features of each visit."""
        padded = np.concatenate([features, np.zeros((1, *features.shape[1:]))])
        found: Floats = padded[:, 0][self.rows]
        if features.shape[1] > 1:
            found = found + self.basis[:, 1, None, None] * padded[:, 1][self.rows]
        return found

    def moved(self, at: Floats) -> Floats:
        """Return (S, C, g) P_t."""
        gradients = self.delta.transpose(0, 2, 1) @ at
        moved, velocity = np.zeros_like(gradients), np.zeros_like(gradients[0])
        if not self.momentum and not self.weight_decay:
            moved[1:] = np.cumsum(self.rates[:-1, None, None] * gradients[:-1], axis=0)
            return moved
        now = np.zeros_like(velocity)
        for s in range(len(gradients)):
            moved[s] = now
            if self.learns[s]:
                velocity = self.momentum * velocity + gradients[s] - self.weight_decay * now
                now = now + self.rates[s] * velocity
        return moved

    def moved_adjoint(self, outer: Floats) -> Floats:
        """Return (S, C, g) the derivative by each step's gradient of what has the derivative ``outer`` by P_t."""
        found = np.zeros_like(outer)
        if not self.momentum and not self.weight_decay:
            found[:-1] = self.rates[:-1, None, None] * np.cumsum(outer[::-1], axis=0)[::-1][1:]
            return found
        now, velocity = np.zeros_like(outer[0]), np.zeros_like(outer[0])
        for s in range(len(outer) - 1, -1, -1):
            if self.learns[s]:
                velocity = velocity + self.rates[s] * now
                found[s] = velocity
                now = now - self.weight_decay * velocity
                velocity = self.momentum * velocity
            now = now + outer[s]
        return found

    def weights(self, features: Floats, first: Floats) -> Floats:
        """Return (S, C, g) the weights at each step."""
        return self.kept[:, None, None] * first - self.moved(self.at(features))

    def predicted(self, features: Floats, weights: Floats) -> Floats:
        """Return (S, B, C) the scores."""
        return self.at(features) @ weights.transpose(0, 2, 1)

    def spread(self, visits: Floats) -> Floats:
        """Return (n, k, g) the adjoint of ``_at``."""
        found = [
            self._gather @ (visits * self.basis[:, j, None, None]).reshape(-1, self.width)
            for j in range(self.basis.shape[1])
        ]
        return np.stack(found, axis=1)

    def sampled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the steps and places of some visits."""
        s, b = np.nonzero(self.rows < self.n)
        most = max(SAMPLE // self.scores.shape[2], 4 * self.width)
        if len(s) > most:
            pick = np.sort(self.rng.choice(len(s), most, replace=False))
            s, b = s[pick], b[pick]
        return s, b
