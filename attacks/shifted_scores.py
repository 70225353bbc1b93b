"""What a malicious passive party reads by shifting scores: labels, in one batch."""

from dataclasses import replace

import numpy as np
import torch

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import RecordingAttack, get_ids, get_recording, guess_of_samples

ZERO = 1e-3  # a gradient shorter than this, relative to the longest of its batch, has vanished


class ShiftedScores(RecordingAttack):
    """Shifts scores by a large number: the loss gradient is then 1 - y, and delta^C reveals it.

    Where all scores are far up, the active party's sigmoid is 1 and delta_i = 1 - y_i: gradients of class 1 vanish,
    those of class 0 are one vector. One batch is enough, without any algebra. The active party sees it as a jump of its
    scores and its loss.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 11, with a passive party that deviates.
    """

    name = "shifted-scores"
    reference = "derived from PrADA, arXiv 2111.10120, Algorithm 4, with a passive party that deviates"
    verified = "all labels of a batch whose scores were shifted between the real roles"
    costs = "one pass over delta^C"
    fails = "if the active party stops at score-drift before it sends delta^C, and under noise on delta^C"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (k, 2) of the samples of each step whose gradients are all either nothing or of one length.

        Raises:
            InsufficientView: several outputs, no delta^C, or no such step.
        """
        recording = get_recording(view)
        if recording.header.layout.outputs > 1:
            raise InsufficientView(f"expected one output, got {recording.header.layout.outputs}")
        labels: dict[int, bool] = {}
        rows = batches = 0
        for step in recording.steps():
            if step.rate is None or not step.has("embedding_gradient"):
                continue
            rows += len(step.notes["embedding_gradient"])
            lengths = np.linalg.norm(step.notes["embedding_gradient"], axis=1)
            shares = lengths / lengths.max(initial=1e-300)
            none, full = shares < ZERO, shares > 1 - ZERO
            if none.any() and (none | full).all():
                labels |= dict(zip(get_ids(step).tolist(), none.tolist(), strict=True))
                batches += 1
        if not rows:
            raise InsufficientView("expected delta^C of a training step, got none")
        if not labels:
            raise InsufficientView("no sign that the passive party shifted scores; noise on delta^C could hide it")
        ones = torch.tensor(list(labels.values()), dtype=torch.float64)
        note = f"labels of {count(batches, 'batch', 'batches')} whose scores were shifted"
        guess = guess_of_samples(view, np.array(list(labels)), torch.stack([1 - ones, ones], dim=1), note)
        return replace(guess, facts=(Fact("labels", "share", len(labels) / rows, rows),))
