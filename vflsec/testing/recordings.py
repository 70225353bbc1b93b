"""Recordings of the training of a linear layer in float64, as both roles see it, without ciphertexts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vflsec.audit.recordings import open_recording
from vflsec.base.seeds import derive
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout, Mode
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.exchange import ROLES, Exchange, Seat
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.core.attack import Attack
from vflsec.run.runner import try_attack
from vflsec.run.spec import AuxSpec

Floats = NDArray[np.float64]


def make_rng(seed: int, *names: object) -> np.random.Generator:
    """Return a fresh generator for the stream called ``names``."""
    return np.random.default_rng(derive(seed, *names))


@dataclass(frozen=True, kw_only=True)
class LinearRun:
    """A logistic (softmax) regression on g features that a linear extractor computes from Gaussian columns.

    Attributes:
        width: g.
        outputs: C.
        batch: B.
        steps: T.
        rate: of W.
        order: as in ``CipherLayout``.
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
        rows: training rows, drawn in shuffled batches; 0 for new rows at every step.
        validation: rows that are scored after each epoch of ``rows``.
        score_noise: deviation of noise on the scores, relative to theirs.
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
    rows: int = 0
    validation: int = 0
    score_noise: float = 0.0

    def record(self, folder: Path) -> tuple[Recording, Recording]:
        """Train; return the recordings of the passive and the active party, new files in ``folder``."""
        with _open_writers(folder, self.layout(), self.momentum, self.weight_decay) as (c, p):
            for number, (seen_by_c, seen_by_p) in enumerate(self._train()):
                for recorder, notes in ((c, seen_by_c), (p, seen_by_p)):
                    recorder.begin(number, rate=self.rate if "delta" in seen_by_p else None)
                    for name, array in notes.items():
                        recorder.note(name, array)
        return Recording(c.path), Recording(p.path)

    def layout(self, **further: Any) -> CipherLayout:
        """Return the layout of the encrypted layer."""
        return CipherLayout(width=self.width, outputs=self.outputs, batch=self.batch, order=self.order, **further)

    def batches(self) -> Iterator[tuple[NDArray[np.int64], Floats, NDArray[np.int64]]]:
        """Yield which samples, their columns and their labels, for each step."""
        rng = make_rng(self.seed, "batches")
        true = rng.normal(size=(self.columns, self.outputs))
        if self.rows:
            yield from self._shuffle(rng, true)
            return
        for t in range(self.steps):
            if t == 0 or not self.same_batch:
                x = rng.normal(size=(self.batch, self.columns))
                labels = self._labels(x @ true + rng.normal(size=(self.batch, self.outputs)))
            rows = np.arange(self.batch) + (0 if self.same_batch else t * self.batch)
            yield rows, x, labels

    def _shuffle(
        self, rng: np.random.Generator, true: Floats
    ) -> Iterator[tuple[NDArray[np.int64], Floats, NDArray[np.int64]]]:
        x = rng.normal(size=(self.rows + self.validation, self.columns))
        labels = self._labels(x @ true + rng.normal(size=(len(x), self.outputs)))
        kept = np.arange(self.rows, len(x))
        order = np.zeros(0, dtype=np.int64)
        for _ in range(self.steps):
            if not len(order):
                order = rng.permutation(self.rows)
            rows, order = np.split(order, [self.batch])
            yield rows, x[rows], labels[rows]
            if not len(order) and self.validation:
                yield kept, x[kept], labels[kept]

    def start(self) -> tuple[Floats, Floats]:
        """Return W_0 (g, C) and the extractor (columns, g)."""
        rng = make_rng(self.seed, "start")
        extractor = rng.normal(size=(self.columns, self.width)) / np.sqrt(self.columns)
        return 0.3 * rng.normal(size=(self.width, self.outputs)), extractor

    def _train(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        weights, extractor = self.start()
        rng = make_rng(self.seed, "noise")
        share = rng.integers(-(1 << 62), 1 << 62, size=weights.shape).astype(object)
        velocity = np.zeros_like(weights)
        for rows, x, labels in self.batches():
            mu = x @ extractor
            scores = mu @ (np.round(np.ldexp(weights, self.unit)) / 2.0**self.unit)
            if self.score_noise:
                scores = scores + self.score_noise * scores.std() * rng.normal(size=scores.shape)
            if self.rows and rows[0] >= self.rows:  # validation
                yield {"rows": rows, "mu": mu}, {"rows": rows, "scores": scores}
                continue
            delta = compute_gradient(scores, labels)
            velocity = self.momentum * velocity + mu.T @ delta / len(rows) + self.weight_decay * weights
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
            extractor = extractor - self.drift * self.rate * x.T @ (delta @ weights.T) / len(rows)
            weights = after

    def _labels(self, scores: Floats) -> NDArray[np.int64]:
        if self.outputs > 1:
            return np.asarray(scores.argmax(axis=1))
        return (scores[:, 0] > np.quantile(scores[:, 0], 1 - self.positives)).astype(np.int64)


def attack_recording(
    attack: Attack, recording: Recording, other: Recording | None = None, *, n: int = 0
) -> dict[str, Any]:
    """Return status, leak and notes of an attack on a recording, by whoever knows the answers of ``n`` samples."""
    audit = open_recording(recording.path, other.path if other else None, aux=AuxSpec(n=n))
    draw = audit.joint(0)
    attack.check(audit.subject.side, attack.needs)
    return try_attack(attack, audit.build_question(attack, draw), draw.federation, audit.aux)


def compute_gradient(scores: Floats, labels: NDArray[np.int64]) -> Floats:
    """Return sigmoid(z) - y, or softmax(z) - y of several outputs, (B, C)."""
    if scores.shape[1] == 1:
        return np.asarray(1 / (1 + np.exp(-scores)) - labels[:, None])
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True) - np.eye(scores.shape[1])[labels])


@dataclass(frozen=True, kw_only=True)
class EncryptedRun:
    """The same regression between the real roles, on frozen features, with every message recorded.

    Attributes:
        run: the regression; its noise is added under encryption, which needs ``delta`` outer.
        delta: form of delta^C on the wire.
        bits: of the key; 1024 is for tests.
        mode: of the key.
        share0: standard deviation of the passive party's part of W_0; 0 for none.
        inference: forward passes of the last batch after training.
        passive: class of the passive role, for one that deviates from the protocol.
        active: class of the active role, likewise.
    """

    run: LinearRun
    delta: Literal["rank1", "outer"] = "rank1"
    bits: int = 1024
    mode: Mode = "standard"
    share0: float = 0.0
    inference: int = 0
    passive: type[PassiveRole] = PassiveRole
    active: type[ActiveRole] = ActiveRole

    def record(self, folder: Path) -> tuple[Recording, Recording]:
        """Train and infer; return the recordings of the passive and the active party, new files in ``folder``."""
        run = self.run
        layout = run.layout(bits=self.bits, mode=self.mode, delta=self.delta)
        optimizer = LinearSgd(run.momentum, run.weight_decay)
        weights, extractor = run.start()
        rng = make_rng(run.seed, "noise")
        keys = Keys.generate(self.bits, self.mode)
        share0 = self.share0 * rng.normal(size=weights.shape)
        passive = self.passive(keys, layout, optimizer=optimizer, batches=1, share0=share0)
        active = self.active(keys.public, layout, weights, optimizer=optimizer, batches=1)
        with _open_writers(folder, layout, run.momentum, run.weight_decay, keys.public.n) as recorders:
            line: list[Any] = []
            seats = (
                Seat(role, _RecordedLine(writer, line))
                for role, writer in zip((passive, active), recorders, strict=True)
            )
            exchange = Exchange(**dict(zip(ROLES, seats, strict=True)))

            def scores(number: int, rows: NDArray[np.int64], rate: float | None) -> Floats:
                for recorder in recorders:
                    recorder.begin(number, rate=rate)
                    recorder.note("rows", rows)
                return np.asarray(exchange.scores(mu, learns=rate is not None))

            for number, (rows, x, labels) in enumerate(run.batches()):
                noise = run.noise * rng.normal(size=(run.batch, run.width)) if run.noise else None
                unit = 2.0**-layout.feature_precision
                mu: Floats = np.asarray(np.round(x @ extractor / unit) * unit)
                delta = compute_gradient(scores(number, rows, run.rate), labels)
                recorders[1].note("labels", labels)
                exchange.embedding_gradient(exchange.weights(delta, rate=run.rate), delta, noise)
            for number in range(run.steps, run.steps + self.inference):
                scores(number, rows, None)
        return Recording(recorders[0].path), Recording(recorders[1].path)


class _RecordedLine:
    def __init__(self, recorder: RecordingWriter, line: list[Any]) -> None:
        self.recorder, self.line, self.note = recorder, line, recorder.note

    def send(self, message: Any) -> None:
        self.recorder.message("sent", message)
        self.line.append(message)

    def receive(self, expected: type[Any]) -> Any:
        message = self.line.pop()
        self.recorder.message("received", message)
        return message


@contextmanager
def _open_writers(
    folder: Path, layout: CipherLayout, momentum: float, weight_decay: float, n: bytes = b""
) -> Iterator[tuple[RecordingWriter, RecordingWriter]]:
    headers = [Header(role=role, layout=layout, n=n, momentum=momentum, weight_decay=weight_decay) for role in ROLES]
    with (
        RecordingWriter(folder / "passive.recording", headers[0]) as c,
        RecordingWriter(folder / "active.recording", headers[1]) as p,
    ):
        yield c, p
