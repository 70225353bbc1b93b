"""What the active party reads out of the scores by regression on a few samples whose features it knows."""

import numpy as np
import torch

from vflsec.base.errors import InsufficientView
from vflsec.core.view import Guess, Need, View
from vflsec.inference.recordings.samples import RecordingAttack, get_recording, guess_of_samples, regress_on_known_rows


class ScoreRegression(RecordingAttack):
    """Regresses features on scores: where features depend on each other, one score predicts much of all.

    Of each sample the active party has the scores of its last pass, their squares, and the mean over all passes. A
    ridge regression on the samples whose features it knows predicts the features of all others. It needs no second
    pass: training itself turns the embedding's main direction towards the weights.

    Source: ridge regression, Hoerl and Kennard 1970; derived from PrADA (arXiv 2111.10120), Algorithm 4.
    """

    name = "score-regression"
    side = "active"
    target = "features"
    needs = frozenset({Need.RECORDING, Need.AUX_LABELS})
    reference = "Hoerl and Kennard 1970; derived from PrADA, arXiv 2111.10120, Algorithm 4"
    verified = "closed form: the share of variance along the weights"
    costs = "a ridge regression on the known rows"
    fails = "under noise as large as the scores, and on features that do not depend on each other"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return features (k, g) of the samples that were scored.

        Raises:
            InsufficientView: there are no scores, or none of the known samples.
        """
        sums: dict[int, np.ndarray] = {}
        counts: dict[int, int] = {}
        last: dict[int, np.ndarray] = {}
        for step in get_recording(view).steps():
            if step.has("rows", "scores"):
                for row, scores in zip(step.notes["rows"].tolist(), step.notes["scores"], strict=True):
                    sums[row] = sums.get(row, 0.0) + scores
                    counts[row] = counts.get(row, 0) + 1
                    last[row] = scores
        if not last:
            raise InsufficientView("expected scores with the rows that they are of, got none")
        z, mean = np.array(list(last.values())), np.array([sums[row] / counts[row] for row in last])
        z, mean = (values / max(float(values.std()), 1e-12) for values in (z, mean))
        ids = np.array(list(last))
        features = regress_on_known_rows(view, ids, np.hstack([z, mean, z**2]))
        return guess_of_samples(view, ids, features, f"features of {len(ids)} samples, predicted from the scores")
