"""What the passive party has answered: how many equations in its features an honest active party has."""

from collections import Counter

import numpy as np
import torch

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import RecordingAttack, get_recording


class ForwardPasses(RecordingAttack):
    """Counts the forward passes of each sample: each gives the inner products of its features with the columns of W.

    With k passes and C outputs the active party has k C linear equations in the g features of a sample. A batch that
    was answered again after a broken connection counts as often as it was answered, and so do batches that were
    answered before both parties went back to an older state. Features at rest are determined by g equations. The
    passive party's share of W_0 hides g C numbers, but they are the same for all samples, so that the count leaves them
    out. It is on the directions of independent features, for the sample with the most passes. Features that depend on
    each other, or have few values, are read from fewer; and an active party that deviates reads as many bits of a
    sample from two answers as a score has.

    Source: counting of unknowns; the attacks are ``score-gram`` and ``score-regression``.
    """

    name = "forward-passes"
    target = "exposure"
    reference = "counts the equations that score-gram solves"
    verified = "closed form: passes times outputs over the number of features"
    costs = "one pass over the notes"
    fails = (
        "where features depend on each other or have few values: score-regression and score-decoding need fewer passes"
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the count, the largest over samples of min(1, equations / g).

        Raises:
            InsufficientView: steps are missing, or which samples a batch has.
        """
        recording = get_recording(view)
        passes: Counter[int] = Counter()
        beyond = np.zeros((0, 2), dtype=np.int64)
        last = -1
        for step in recording.steps():
            if step.number != last + 1:
                raise InsufficientView(f"expected all steps from 0 on, got {step.number} after {last}")
            last = step.number
            if step.has("rows"):
                answers = int(step.notes["answers"][0]) if step.has("answers") else 1
                passes.update(dict.fromkeys(step.notes["rows"].tolist(), answers))
            beyond = step.notes.get("answers_beyond", beyond[:0])  # later steps that are recorded count by themselves
        for sample, answers in beyond.tolist():
            passes[sample] += answers
        if not passes:
            raise InsufficientView("expected which samples each batch has, got no notes of rows")
        width, outputs = recording.header.layout.width, recording.header.layout.outputs
        counts = np.array(list(passes.values()))
        shares = np.minimum(counts * outputs / width, 1)
        note = (
            f"{count(counts.max(), 'pass', 'passes')} x {count(outputs, 'output')} of a sample at most, in its {width} "
            f"features; {(shares == 1).sum()} of {len(counts)} samples are fully exposed"
        )
        fact = Fact("directions of features", "determined", float(shares.max()), len(counts))
        return Guess(facts=(fact,), notes=(note,))
