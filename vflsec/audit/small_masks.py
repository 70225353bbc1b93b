"""What C reads through masks that are not much larger than what they hide: they average out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.optimize import linprog

from vflsec.audit import figures
from vflsec.audit.audit import Audit, Figure, Floats, Recovered, Truth
from vflsec.audit.masked import masked_scores
from vflsec.paillier.recording import Recording
from vflsec.core.errors import InsufficientView

ROWS = 1 << 17
"""Most samples that are used."""

ROUNDS = 50


class SmallMasks(Audit):
    """C finds the W whose masks lie in the narrowest band: the error falls with 1 / n, not with 1 / sqrt(n).

    While W stays as it is, at inference or between slow updates, n masked scores v = mu W + r with r uniform in a
    band are linear constraints on W. The W that leaves the narrowest band for v - mu W, a linear programme, is the
    centre of all that are feasible. Masks of ±1024 on scores of size 1 are so overcome by 80,000 samples, where least
    squares would still be useless. Masks 2^40 times as wide as the scores need as many more samples.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 8, with masks of a fixed small range.
    """

    name = "small-masks"
    role = "C"
    reads = "masked scores under one W, and mu"
    mitigation = "masks uniform over 2^sigma times the range of what they hide, sigma at least 40"
    reference = "derived from PrADA, Algorithm 4, line 8"

    def run(self, recording: Recording) -> Recovered:
        """Return ``weights`` (g, C) at the first of the steps that share it."""
        header = recording.header
        number, mu, scores = max(_same_weights(recording), key=lambda found: len(found[1]), default=(0, None, None))
        if mu is None or scores is None or len(mu) < 8 * header.layout.width:
            raise InsufficientView(
                f"expected masked scores of {8 * header.layout.width} samples under one W, got fewer"
            )
        weights = narrowest(mu, scores)
        halves = [narrowest(mu[part::2], scores[part::2]) for part in (0, 1)]
        size = float(sum((half**2).sum() for half in halves))
        apart = float(((halves[0] - halves[1]) ** 2).sum()) / size if size else 1.0
        own = Figure(of="weights", metric="consistency", value=max(0.0, 1 - apart), chance=0.0, n=weights.size)
        width = float(np.ptp(scores - mu @ weights, axis=0).max()) / 2
        found = f"W from {len(mu)} samples under masks of ±{width:.3g}; two halves of them differ by {apart:.1%}"
        return Recovered(found, {number: {"weights": weights}}, (own,))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return which share of W, or of p's share where only that was under the masks, was recovered."""
        found = []
        for number, notes in truth.at(list(recovered.steps)).items():
            guess = recovered.steps[number]["weights"]
            names = [name for name in ("sum", "p share") if name in notes]
            sides = [figures.vectors("weights", guess, np.ldexp(notes[n].astype(float), -64)) for n in names]
            found += [max(sides, key=lambda figure: figure.value)] if sides else []
        return tuple(found)


def _same_weights(recording: Recording) -> Iterator[tuple[int, Floats, Floats]]:
    """Yield first step, mu (n, g) and masked scores (n, C) of each run of steps that no update separates."""
    header = recording.header
    half = 1 << header.layout.ring - 1
    first, count = 0, 0
    mus: list[Floats] = []
    values: list[Floats] = []
    for step in recording.steps():
        masked = masked_scores(step, header)
        if masked is not None and count < ROWS:
            first = first if mus else step.number
            scores = masked.scores
            if not step.has("masked_scores"):  # known modulo 2^L
                scores = (scores + half) % (2 * half) - half
            mus.append(step.notes["mu"])
            values.append(np.ldexp(scores.astype(np.float64), -masked.precision))
            count += len(step.notes["mu"])
        if mus and step.rate is not None:  # an update ends the run
            yield first, np.concatenate(mus), np.concatenate(values)
            mus, values, count = [], [], 0
    if mus:
        yield first, np.concatenate(mus), np.concatenate(values)


def narrowest(mu: Floats, scores: Floats) -> Floats:
    """Return W (g, C) with the narrowest band of ``scores`` - ``mu`` W, the band's centre left free."""
    columns = np.column_stack([mu, np.ones(len(mu))])
    return np.column_stack([_minimax(columns, column)[:-1] for column in scores.T])


def _minimax(columns: Floats, values: Floats) -> Floats:
    """Return x with the least largest |values - columns x|: constraints are added until none is violated."""
    size = float(np.abs(values).max()) or 1.0
    values = values / size
    x = np.linalg.lstsq(columns, values, rcond=None)[0]
    active = np.zeros(len(values), dtype=bool)
    step = 4 * columns.shape[1]
    for _ in range(ROUNDS):
        residual = np.abs(values - columns @ x)
        bound = residual[active].max() if active.any() else -1.0
        if residual.max() <= bound * (1 + 1e-9):
            break
        active[np.argsort(residual)[-step:]] = True
        chosen, targets = columns[active], values[active]
        ones = np.ones((len(targets), 1))
        found = linprog(
            np.append(np.zeros(columns.shape[1]), 1.0),
            A_ub=np.block([[chosen, -ones], [-chosen, -ones]]),
            b_ub=np.concatenate([targets, -targets]),
            bounds=(None, None),
            method="highs",
        )
        assert found.x is not None  # a minimum always exists
        x = found.x[:-1]
    return np.asarray(x * size)
