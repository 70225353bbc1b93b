"""What the passive party reads through masks that are not much larger than what they hide: they average out."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linprog

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import (
    Floats,
    Integers,
    RecordingAttack,
    get_masked_scores,
    get_recording,
    guess_of_weights,
)

ROWS = 1 << 17  # most samples that are used
ROUNDS = 50

PERMUTATIONS = 1999  # of the scores of each half; W shows where it beats all of them in either half
ENOUGH = 10  # of the scores dealt anew, bands as narrow as the true one, after which no more are dealt
HIDDEN = 1e6  # by how much a W that does not show is divided, so that no chance hit counts
LEVEL = 2 / (PERMUTATIONS + 1)  # how often it does so by accident: in one audit of a thousand


class SmallMasks(RecordingAttack):
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
    target = "parameters"
    reference = "derived from PrADA, arXiv 2111.10120, Algorithm 4, line 8"
    verified = "the narrowest band by a dense linear programme; the level of the test where masks hide everything"
    costs = "three linear programmes, and up to 1999 permutations of the scores"
    fails = "under masks uniform over 2^sigma times the range of what they hide, sigma at least 40"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return W (g, C) at the first of the steps that share it; nearly zero where the test has no sign of it.

        Raises:
            InsufficientView: there are too few samples under one W.
        """
        recording = get_recording(view)
        width = recording.header.layout.width
        longest = max(_split_at_updates(recording), key=lambda run: len(run.mu), default=None)
        if longest is None or len(longest.mu) < 8 * width:
            raise InsufficientView(f"expected masked scores of {8 * width} samples under one W, got fewer")
        mu, scores = longest.mu, longest.scores
        weights = find_narrowest(mu, scores)
        halves = [find_narrowest(mu[part::2], scores[part::2]) for part in (0, 1)]
        size = float(sum(((mu @ half) ** 2).sum() for half in halves))
        apart = float(((mu @ (halves[0] - halves[1])) ** 2).sum()) / size if size else 1.0
        p = get_p_value(mu, scores, halves)
        band = float(np.ptp(scores - mu @ weights, axis=0).max()) / 2
        note = f"W from {len(mu)} samples under masks of ±{band:.3g}; "
        note += f"the scores computed from two halves of the samples differ by {100 * apart:.1f} %; "
        note += (
            f"W shows, p = {p:.3g}"
            if p <= LEVEL
            else f"no sign that W shows (p = {p:.3g}; a leak needs p <= {LEVEL:g})"
        )
        whole = weights + np.ldexp(longest.added.astype(np.float64), -64)
        shown = whole if p <= LEVEL else whole / HIDDEN
        fact = Fact("scores", "consistency", max(0.0, 1 - apart), len(mu))
        return replace(guess_of_weights(view, longest.first, shown, note), facts=(fact,))


class MaskedRun(NamedTuple):
    """The steps that no update separates.

    Attributes:
        first: number of the first step.
        mu: (n, g).
        scores: (n, C) under masks.
        added: (g, C) as in ``Masked``.
    """

    first: int
    mu: Floats
    scores: Floats
    added: Integers


def _split_at_updates(recording: Recording) -> Iterator[MaskedRun]:
    """Yield each run of steps with masked scores that no update separates."""
    header = recording.header
    half = 1 << header.layout.ring - 1
    first, size = 0, 0
    mus: list[Floats] = []
    values: list[Floats] = []
    added = np.zeros((header.layout.width, header.layout.outputs), dtype=object)
    for step in recording.steps():
        masked = get_masked_scores(step, header)
        if masked is not None and size < ROWS:
            first, added = (first, added) if mus else (step.number, masked.added)
            scores = masked.scores
            if not step.has("masked_scores"):  # known modulo 2^L
                scores = (scores + half) % (2 * half) - half
            mus.append(step.notes["mu"])
            values.append(np.ldexp(scores.astype(np.float64), -masked.precision))
            size += len(step.notes["mu"])
        if mus and step.rate is not None:  # an update ends the run
            yield MaskedRun(first, np.concatenate(mus), np.concatenate(values), added)
            mus, values, size = [], [], 0
    if mus:
        yield MaskedRun(first, np.concatenate(mus), np.concatenate(values), added)


def get_p_value(mu: Floats, scores: Floats, halves: Sequence[Floats]) -> float:
    """Return the p-value of scores that depend on mu: twice the lesser of those of two exact permutation tests.

    ``scores`` (n, C) are masked. ``halves`` are the W (g, C) of the even and of the odd samples; each is tried on the
    others. Either test stops early where there is nothing to find, which leaves it exact (Besag and Clifford 1991).
    """
    rng = np.random.default_rng(0)
    size = np.maximum(np.ptp(scores, axis=0), np.finfo(np.float64).tiny)
    least = 1.0
    for part, weights in enumerate(halves):
        others, shift = scores[1 - part :: 2] / size, mu[1 - part :: 2] @ weights / size
        band, narrower, p = np.ptp(others - shift, axis=0).sum(), 0, 1.0
        for count in range(1, PERMUTATIONS + 1):
            narrower += np.ptp(rng.permutation(others) - shift, axis=0).sum() <= band
            p = (narrower + 1) / (count + 1)
            if narrower == ENOUGH:
                p = ENOUGH / count
                break
        least = min(least, float(p))
    return min(1.0, 2 * least)


def find_narrowest(mu: Floats, scores: Floats) -> Floats:
    """Return W (g, C) with the narrowest band of ``scores`` - ``mu`` W, the band's center left free."""
    columns = np.column_stack([mu, np.ones(len(mu))])
    return np.column_stack([_fit_minimax(columns, column)[:-1] for column in scores.T])


def _fit_minimax(columns: Floats, values: Floats) -> Floats:
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
        solution = linprog(
            np.append(np.zeros(columns.shape[1]), 1.0),
            A_ub=np.block([[chosen, -ones], [-chosen, -ones]]),
            b_ub=np.concatenate([targets, -targets]),
            bounds=(None, None),
            method="highs",
        )
        assert solution.x is not None  # a minimum always exists
        x = solution.x[:-1]
    return np.asarray(x * size)
