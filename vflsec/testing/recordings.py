"""Training of a linear layer in float64, recorded as both roles see it: what audits need, without the ciphertexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vflsec.audit.recording import Header, Recorder, Recording
from vflsec.paillier.layout import Layout

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearRun:
    """A logistic (softmax) regression of g features that a linear extractor makes of Gaussian columns.

    Attributes:
        width: g.
        outputs: C.
        batch: B.
        steps: T.
        rate: of W.
        order: as in ``Layout``.
        momentum: of W.
        weight_decay: of W.
        seed: of everything.
        positives: share of class 1, of one output.
        unit: fractional bits of the W that makes the scores.
        rounding: unit to which delta^C is rounded; 0 for none.
        noise: standard deviation on every coordinate of delta^C.
        row_noise: standard deviation on each delta_i before it meets W, which keeps the rank.
        same_batch: whether every step has the same batch.
        drift: rate of the extractor relative to that of W; 0 freezes it.
        columns: that the extractor reads.
    """

    width: int = 10
    outputs: int = 1
    batch: int = 128
    steps: int = 2
    rate: float = 0.1
    order: Literal["current", "paper"] = "current"
    momentum: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0
    positives: float = 0.24
    unit: int = 28
    rounding: float = 0.0
    noise: float = 0.0
    row_noise: float = 0.0
    same_batch: bool = False
    drift: float = 0.0
    columns: int = 20

    def record(self, folder: Path) -> tuple[Recording, Recording]:
        """Train; return the recordings of C and p, new files in ``folder``."""
        layout = Layout(width=self.width, outputs=self.outputs, batch=self.batch, order=self.order)
        paths = folder / "C.recording", folder / "p.recording"
        roles: tuple[Literal["C"], Literal["p"]] = ("C", "p")
        headers = [
            Header(role=role, layout=layout, momentum=self.momentum, weight_decay=self.weight_decay) for role in roles
        ]
        with Recorder(paths[0], headers[0]) as c, Recorder(paths[1], headers[1]) as p:
            for number, (seen_by_c, seen_by_p) in enumerate(self._train()):
                for recorder, notes in ((c, seen_by_c), (p, seen_by_p)):
                    recorder.begin(number, rate=self.rate)
                    for name, array in notes.items():
                        recorder.note(name, array)
        return Recording(paths[0]), Recording(paths[1])

    def _train(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        rng = np.random.default_rng(self.seed)
        weights = 0.3 * rng.normal(size=(self.width, self.outputs))
        velocity = np.zeros_like(weights)
        share = rng.integers(-(1 << 62), 1 << 62, size=weights.shape).astype(object)
        true = rng.normal(size=(self.columns, self.outputs))
        extractor = rng.normal(size=(self.columns, self.width)) / np.sqrt(self.columns)
        for t in range(self.steps):
            if t == 0 or not self.same_batch:
                x = rng.normal(size=(self.batch, self.columns))
                labels = self._labels(x @ true + rng.normal(size=(self.batch, self.outputs)))
                rows = t * self.batch + np.arange(self.batch)
            mu = x @ extractor
            scores = mu @ (np.round(np.ldexp(weights, self.unit)) / 2.0**self.unit)
            delta = loss_gradient(scores, labels)
            velocity = self.momentum * velocity + mu.T @ delta / self.batch + self.weight_decay * weights
            after = weights - self.rate * velocity
            released = delta + self.row_noise * rng.normal(size=delta.shape)
            gradient = released @ (after if self.order == "paper" else weights).T
            gradient += self.noise * rng.normal(size=gradient.shape)
            if self.rounding:
                gradient = np.round(gradient / self.rounding) * self.rounding
            exact = np.array([int(w) for w in np.ldexp(weights, 64).ravel()], dtype=object).reshape(weights.shape)
            yield (
                {"rows": rows, "mu": mu, "embedding_gradient": gradient, "share": share},
                {"rows": rows, "scores": scores, "delta": delta, "labels": labels, "share": exact - share},
            )
            extractor = extractor - self.drift * self.rate * x.T @ (delta @ weights.T) / self.batch
            weights = after

    def _labels(self, scores: Floats) -> NDArray[np.int64]:
        if self.outputs > 1:
            return np.asarray(scores.argmax(axis=1))
        return (scores[:, 0] > np.quantile(scores[:, 0], 1 - self.positives)).astype(np.int64)


def loss_gradient(scores: Floats, labels: NDArray[np.int64]) -> Floats:
    """Return sigmoid(z) - y, or softmax(z) - y of several outputs, (B, C)."""
    if scores.shape[1] == 1:
        return np.asarray(1 / (1 + np.exp(-scores)) - labels[:, None])
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True) - np.eye(scores.shape[1])[labels])
