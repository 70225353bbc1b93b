"""The inner products of the features of one batch that is scored at many steps, in closed form.

With the same batch at every step W_t = W_0 - mu^T h_t, where h_t sums the active party's own past loss gradients times
the learning rate, with momentum and weight decay if there are. So z_t - z_0 = -K h_t for the matrix K = mu mu^T of all
inner products, which has rank g: after g + 1 steps the Nyström formula K = Y (H^T Y)^+ Y^T, with Y = K H, gives it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Header, RecordedStep, Recording
from vflsec.inference.recordings.simplex import Floats

ABOVE_NOISE = 3
"""How far a direction must stand above what rounding makes of none."""


def same_batch(recording: Recording) -> list[RecordedStep]:
    """Return the longest run of learning steps on one batch, all in the order of rows of the first."""
    longest: list[RecordedStep] = []
    run: list[RecordedStep] = []
    last = -1
    for step in recording.steps():
        follows, last = step.number == last + 1, step.number
        if step.rate is None:  # inference moves nothing
            run = run if follows else []
            continue
        if not step.has("rows", "scores", "delta"):
            run = []
        elif run and follows and (found := _reordered(step, run[0].notes["rows"])):
            run.append(found)
        else:
            run = [step]
        if len(run) > len(longest):
            longest = run
    return longest


def _reordered(step: RecordedStep, rows: NDArray[np.int64]) -> RecordedStep | None:
    """Return what the active party has of a step in the order of ``rows``, or None if it is of other rows."""
    own = step.notes["rows"]
    if not np.array_equal(np.sort(own), np.sort(rows)):
        return None
    order = np.argsort(own, kind="stable")[np.argsort(np.argsort(rows, kind="stable"))]
    notes = {name: step.notes[name][order] for name in ("rows", "scores", "delta")}
    return RecordedStep(step.number, step.rate, notes=notes)


def moved(steps: list[RecordedStep], header: Header) -> tuple[Floats, Floats]:
    """Return (H, K H) as columns, (B, (T - 1) C) each.

    W_t = kept_t W_0 - mu^T h_t, so that z_t - kept_t z_0 = -K h_t; kept_t is 1 without weight decay.

    Raises:
        InsufficientView: momentum from before the first step is unknown.
    """
    if header.momentum and steps[0].number:
        raise InsufficientView("expected a recording from the first step on, because W is trained with momentum")
    first = steps[0].notes["scores"]
    h, velocity = np.zeros_like(first), np.zeros_like(first)
    kept, decay = 1.0, 0.0
    sums, changes = [], []
    for step in steps:
        if step is not steps[0]:
            sums.append(h)
            changes.append(kept * first - step.notes["scores"])
        assert step.rate is not None
        velocity = header.momentum * velocity + step.notes["delta"] / len(first) - header.weight_decay * h
        decay = header.momentum * decay + header.weight_decay * kept
        h, kept = h + step.rate * velocity, kept - step.rate * decay
    return np.concatenate(sums, axis=1), np.concatenate(changes, axis=1)


def factor(sums: Floats, changes: Floats, header: Header) -> tuple[Floats, float]:
    """Return F (B, r) with F F^T = K where Y = K H, of the largest rank r <= g that the data bear.

    The second is how asymmetric H^T K H is, from 0 to 1: not at all where mu is frozen.

    With the singular value decomposition Y = left sizes right^T also left = K (H right / sizes), on which the formula
    is well conditioned. Directions count whose size exceeds what rounding W to its unit does to scores.
    """
    left, sizes, right = np.linalg.svd(changes, full_matrices=False)
    noise = np.ldexp(np.sqrt(header.layout.width / 12), -header.layout.weight_precision) * sum(np.sqrt(changes.shape))
    rank = min(header.layout.width, int((sizes > ABOVE_NOISE * noise).sum()))
    if not rank:
        raise InsufficientView("expected scores that follow the loss gradients, got none that do")
    middle = (sums @ right[:rank].T / sizes[:rank]).T @ left[:, :rank]
    kept, axes = np.linalg.eigh(np.linalg.inv((middle + middle.T) / 2))
    asymmetry = np.linalg.norm(middle - middle.T) / (2 * np.linalg.norm(middle))
    return left[:, :rank] @ (axes * np.sqrt(np.maximum(kept, 0))), float(asymmetry)
