"""What the passive party reads through masks that are not much larger than what they hide: they average out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from scipy.optimize import linprog

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.inference.recordings.masked import masked_scores
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Figure, Floats, Recovered, Truth

ROWS = 1 << 17
"""Most samples that are used."""

ROUNDS = 50

PERMUTATIONS = 1999
"""Of the scores of each half; W shows where it beats all of them in either half."""

ENOUGH = 10
"""Of the scores dealt anew, bands as narrow as the true one, after which no more are dealt."""

LEVEL = 2 / (PERMUTATIONS + 1)
"""How often it does so by accident: in one audit of a thousand."""


class SmallMasks(Audit):
    """Finds the W whose masks lie in the narrowest band: the error falls with 1 / n, not with 1 / sqrt(n).

    While W stays as it is, at inference or between slow updates, n masked scores v = mu W + r with r uniform in a
    band are linear constraints on W. The W that leaves the narrowest band for v - mu W, a linear programme, is the
    center of all that are feasible. Masks of ±1024 on scores of size 1 are so overcome by 80,000 samples, where least
    squares would still be useless. Masks 2^40 times as wide as the scores need as many more samples.

    Some W leaves the narrowest band even where there is nothing to find. Whether it shows W, a permutation test says:
    the W of one half of the samples must leave the scores of the other half in a narrower band than it does after they
    have been dealt to other samples, in each of 1999 ways, for either half. Where masks hide everything, that happens
    in one audit of a thousand. What does not pass is reported, and not called a leak.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 8, with masks of a fixed small range.
    """

    name = "small-masks"
    role = "passive"
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
        size = float(sum(((mu @ half) ** 2).sum() for half in halves))
        apart = float(((mu @ (halves[0] - halves[1])) ** 2).sum()) / size if size else 1.0
        p = p_value(mu, scores, halves)
        own = Figure(of="scores", metric="consistency", value=max(0.0, 1 - apart), chance=0.0, n=len(mu))
        width = float(np.ptp(scores - mu @ weights, axis=0).max()) / 2
        found = f"W from {len(mu)} samples under masks of ±{width:.3g}; "
        found += f"the scores computed from two halves of the samples differ by {100 * apart:.1f} %; "
        found += (
            f"W shows, p = {p:.3g}"
            if p <= LEVEL
            else f"no sign that W shows (p = {p:.3g}; a leak needs p <= {LEVEL:g})"
        )
        return Recovered(found, {number: {"weights": weights, "mu": mu, "p": np.array([p])}}, (_judged(own, p),))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return how much was recovered of W, or of the active party's share if only that was masked, and of mu W."""
        found = []
        for number, notes in truth.at(list(recovered.steps)).items():
            guess, mu, (p,) = (recovered.steps[number][name] for name in ("weights", "mu", "p"))
            true = [np.ldexp(notes[name].astype(float), -64) for name in ("sum", "active share") if name in notes]
            sides = [
                (figures.vectors("weights", guess, w), figures.vectors("scores", mu @ guess, mu @ w)) for w in true
            ]
            best = max(sides, key=lambda pair: max(figure.value for figure in pair), default=())
            found += [_judged(figure, p) for figure in best]
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


def p_value(mu: Floats, scores: Floats, halves: Sequence[Floats]) -> float:
    """Return the p-value of scores that depend on mu: twice the lesser of those of two exact permutation tests.

    Either test stops early where there is nothing to find, which leaves it exact (Besag and Clifford 1991).

    Args:
        mu: (n, g).
        scores: (n, C) under masks.
        halves: the W (g, C) of the even and of the odd samples; each is tried on the others.
    """
    rng = np.random.default_rng(figures.SEED)
    size = np.maximum(np.ptp(scores, axis=0), np.finfo(np.float64).tiny)
    least = 1.0
    for part, weights in enumerate(halves):
        others, own = scores[1 - part :: 2] / size, mu[1 - part :: 2] @ weights / size
        band, narrower, p = np.ptp(others - own, axis=0).sum(), 0, 1.0
        for count in range(1, PERMUTATIONS + 1):
            narrower += np.ptp(rng.permutation(others) - own, axis=0).sum() <= band
            p = (narrower + 1) / (count + 1)
            if narrower == ENOUGH:
                p = ENOUGH / count
                break
        least = min(least, float(p))
    return min(1.0, 2 * least)


def _judged(figure: Figure, p: float) -> Figure:
    """Return the figure; one that may be an accident has an interval from chance on."""
    return figure if p <= LEVEL else msgspec.structs.replace(figure, ci95=(figure.chance, figure.value))


def narrowest(mu: Floats, scores: Floats) -> Floats:
    """Return W (g, C) with the narrowest band of ``scores`` - ``mu`` W, the band's center left free."""
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
