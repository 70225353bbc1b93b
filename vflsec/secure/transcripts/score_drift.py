"""What the active party can notice: scores that jump, because the passive party has shifted them."""

from __future__ import annotations

from collections import deque

import numpy as np

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Recovered

BEFORE = 8
"""Batches that say what is usual."""

JUMP = 4
"""How many times as large as the largest usual score one must be."""


class ScoreDrift(Audit):
    """Looks for scores far beyond those of the batches before: the passive party may have shifted them.

    Shifted scores tell C the labels (``shifted-scores``), and honest ones do not jump. A shift that stays below what
    is usual is not noticed, and tells C little. The first batches, which have none before them, are not judged.

    Source: the guard against ``shifted-scores``.
    """

    name = "score-drift"
    role = "active"
    reads = "z^C of successive batches"
    mitigation = "stop at the first jump: the labels of that batch are known to the passive party once delta^C is sent"
    reference = "guards against shifted-scores"

    def run(self, recording: Recording) -> Recovered:
        """Return the share of samples whose scores have jumped."""
        usual: deque[float] = deque(maxlen=BEFORE)
        jumped, judged, where = 0, 0, []
        for step in recording.steps():
            if step.rate is None or not step.has("scores"):
                continue
            sizes = np.abs(step.notes["scores"]).max(axis=1)
            if len(usual) == BEFORE:
                judged += len(sizes)
                found = int((sizes > JUMP * max(usual)).sum())
                jumped += found
                if found:
                    where.append(step.number)
                    continue  # what has jumped does not become usual
            usual.append(float(sizes.max()))
        if not judged:
            raise InsufficientView(f"expected more than {BEFORE} batches with scores, got fewer")
        text = f"{jumped} of {judged} scores jump" + (f", first in step {where[0]}" if where else "")
        text += f"; those of the first {BEFORE} batches are not judged"
        return Recovered(text, own=(figures.share("labels", jumped, judged),))
