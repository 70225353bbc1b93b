"""What the active party reads out of the scores by regression on a few samples whose features it knows."""

from __future__ import annotations

import numpy as np

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Figure, Recovered, Truth


class ScoreRegression(Audit):
    """Regresses features on scores: where features depend on each other, one score predicts much of all.

    Of each sample the active party has the scores of its last pass, their squares, and the mean over all passes. A
    ridge regression on three samples for each feature, which the active party is taken to know, predicts the features
    of all others. It needs no second
    pass: training itself turns the embedding's main direction towards the weights.

    Source: ridge regression, Hoerl and Kennard 1970; derived from PrADA (arXiv 2111.10120), Algorithm 4.
    """

    name = "score-regression"
    role = "active"
    reads = "z^C of each sample, and the features of a few known ones"
    mitigation = "score_noise as large as the scores; features that depend less on each other"
    reference = "Hoerl and Kennard 1970; derived from PrADA, Algorithm 4"

    def run(self, recording: Recording) -> Recovered:
        """Return the scores (B, C) with their rows, by step."""
        steps = {
            step.number: {"rows": step.notes["rows"], "scores": step.notes["scores"]}
            for step in recording.steps()
            if step.has("rows", "scores")
        }
        if not steps:
            raise InsufficientView("expected scores with the rows that they are of, got none")
        return Recovered("features, predicted from the scores; the known rows are taken from --truth", steps)

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return R2 of the features at the last pass of each sample, of the samples that are not known."""
        true = truth.at(list(recovered.steps))
        sums: dict[int, np.ndarray] = {}
        counts: dict[int, int] = {}
        last: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for number, notes in sorted(recovered.steps.items()):
            if not {"mu", "rows"} <= true[number].keys():
                continue
            features = dict(zip(true[number]["rows"].tolist(), true[number]["mu"], strict=True))
            for row, scores in zip(notes["rows"].tolist(), notes["scores"], strict=True):
                sums[row] = sums.get(row, 0.0) + scores
                counts[row] = counts.get(row, 0) + 1
                last[row] = (scores, features[row])
        if not last:
            return ()
        z, mean = np.array([last[row][0] for row in last]), np.array([sums[row] / counts[row] for row in last])
        z, mean = (one / max(float(one.std()), 1e-12) for one in (z, mean))
        mu = np.array([features for _, features in last.values()])
        return figures.with_known_rows("features", np.hstack([z, mean, z**2]), mu)
