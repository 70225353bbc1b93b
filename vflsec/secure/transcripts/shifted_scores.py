"""What a malicious passive party reads by shifting scores: labels, in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Figure, Recovered, Truth

ZERO = 1e-3
"""A gradient shorter than this, relative to the longest of its batch, has vanished."""


class ShiftedScores(Audit):
    """Shifts scores by a large number: the loss gradient is then 1 - y, and delta^C reveals it.

    Where all scores are far up, the active party's sigmoid is 1 and delta_i = 1 - y_i: gradients of class 1 vanish,
    those of class 0 are one vector. One batch is enough, without any algebra. The active party sees it as a jump of its
    scores and its loss.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 11, with a passive party that deviates.
    """

    name = "shifted-scores"
    role = "passive"
    reads = "delta^C of a batch whose scores the passive party has shifted"
    mitigation = "score-drift at the active party, before it sends delta^C; smaller shifts go unnoticed"
    reference = "derived from PrADA, Algorithm 4, with a passive party that deviates"

    def run(self, recording: Recording) -> Recovered:
        """Return ``labels`` of each step whose gradients are all either nothing or of one length."""
        if recording.header.layout.outputs > 1:
            raise InsufficientView(f"expected one output, got {recording.header.layout.outputs}")
        steps: dict[int, dict[str, NDArray[Any]]] = {}
        rows = 0
        for step in recording.steps():
            if step.rate is None or not step.has("embedding_gradient"):
                continue
            rows += len(step.notes["embedding_gradient"])
            lengths = np.linalg.norm(step.notes["embedding_gradient"], axis=1)
            shares = lengths / lengths.max(initial=1e-300)
            none, full = shares < ZERO, shares > 1 - ZERO
            if none.any() and (none | full).all():
                steps[step.number] = {"labels": none.astype(np.int64)}
        if not rows:
            raise InsufficientView("expected delta^C of a training step, got none")
        if not steps:
            raise InsufficientView("no sign that the passive party shifted scores; noise on delta^C could hide it")
        read = sum(len(arrays["labels"]) for arrays in steps.values())
        own = figures.share("labels", read, rows)
        return Recovered(f"labels of {count(len(steps), 'batch', 'batches')} whose scores were shifted", steps, (own,))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return the accuracy of the labels."""
        true = truth.at(list(recovered.steps))
        known = [number for number in recovered.steps if "labels" in true[number]]
        if not known:
            return ()
        guess = np.concatenate([recovered.steps[number]["labels"] for number in known])
        return (figures.labels(guess, np.concatenate([true[number]["labels"] for number in known])),)
