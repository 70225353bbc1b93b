"""What the active party can notice: scores that jump, because the passive party has shifted them."""

from collections import deque

import numpy as np
import torch

from vflsec.base.errors import InsufficientView
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import RecordingAttack, get_recording

BEFORE = 8  # batches that say what is usual
JUMP = 4  # how many times as large as the largest usual score one must be


class ScoreDrift(RecordingAttack):
    """Looks for scores far beyond those of the batches before: the passive party may have shifted them.

    Shifted scores tell C the labels (``shifted-scores``), and honest ones do not jump. A shift that stays below what
    is usual is not noticed, and tells C little. The first batches, which have none before them, are not judged.

    Stop at the first jump: the labels of that batch are known to the passive party once delta^C is sent.

    Source: the guard against ``shifted-scores``.
    """

    name = "score-drift"
    side = "active"
    target = "exposure"
    reference = "guards against shifted-scores"
    verified = "a shifted batch is noticed, and honest training raises no alarm"
    costs = "one pass over the notes"
    fails = "if the shift stays below the usual size of scores, and in the first batches"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the share of samples whose scores have jumped.

        Raises:
            InsufficientView: there are too few batches.
        """
        usual: deque[float] = deque(maxlen=BEFORE)
        jumped, judged, where = 0, 0, []
        for step in get_recording(view).steps():
            if step.rate is None or not step.has("scores"):
                continue
            sizes = np.abs(step.notes["scores"]).max(axis=1)
            if len(usual) == BEFORE:
                judged += len(sizes)
                beyond = int((sizes > JUMP * max(usual)).sum())
                jumped += beyond
                if beyond:
                    where.append(step.number)
                    continue  # what has jumped does not become usual
            usual.append(float(sizes.max()))
        if not judged:
            raise InsufficientView(f"expected more than {BEFORE} batches with scores, got fewer")
        note = f"{jumped} of {judged} scores jump" + (f", first in step {where[0]}" if where else "")
        note += f"; those of the first {BEFORE} batches are not judged"
        return Guess(facts=(Fact("scores", "share", jumped / judged, judged),), notes=(note,))
