"""What the active party decodes from one score of a sample whose features have few values."""

import itertools

import numpy as np
import torch
from scipy.spatial import cKDTree

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.core.view import Guess, Need, View
from vflsec.inference.recordings.samples import Floats, RecordingAttack, find_known, get_recording, guess_of_samples

TRIED = 1 << 20  # combinations of values, at most


class ScoreDecoding(RecordingAttack):
    """Tries all combinations of the features' values, and takes the one whose score is nearest to the received one.

    A few known samples under the same weights say which values the features have and, by least squares, which weights.
    Weights stay the same from one training step to the next, so that all test rows share theirs. A score has some fifty
    bits: without noise it tells apart all combinations that can be tried.

    Source: exhaustive search; derived from PrADA (arXiv 2111.10120), Algorithm 4.
    """

    name = "score-decoding"
    side = "active"
    target = "features"
    metric = "exact"
    needs = frozenset({Need.RECORDING, Need.AUX_LABELS})
    reference = "exhaustive search; derived from PrADA, arXiv 2111.10120, Algorithm 4"
    verified = "all rows of binary features without noise; the nearest combination with noise"
    costs = f"a search for each score among at most {TRIED:,} combinations of values"
    fails = "on features of many values, or that the passive party's extractor moves, and under noise on the scores"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return features (k, g) of the samples that were scored under the same weights.

        Raises:
            InsufficientView: there are no scores, too few known samples, or too many values.
        """
        scores = _select_scores(get_recording(view))
        ids, z = np.array(list(scores)), np.array(list(scores.values()))
        at, mu = find_known(view, ids)
        values = [np.unique(column) for column in mu.T]
        if any(3 * len(tried) > len(mu) for tried in values) or len(mu) <= mu.shape[1]:
            raise InsufficientView(
                f"expected a third as many values of a feature as the {len(mu)} known samples, got more"
            )
        if np.prod([float(len(tried)) for tried in values]) > TRIED:
            raise InsufficientView(f"expected at most {TRIED:,} combinations of values, got more")
        features = torch.from_numpy(decode_features(values, mu, z[at], z))
        return guess_of_samples(view, ids, features, f"features of {len(ids)} samples, by trying their values")


def _select_scores(recording: Recording) -> dict[int, Floats]:
    """Return the scores (C,) of each sample in the steps that share their weights and have most rows."""
    groups: list[dict[int, Floats]] = [{}]
    for step in recording.steps():
        if step.has("rows", "scores"):
            groups[-1] |= dict(zip(step.notes["rows"].tolist(), step.notes["scores"], strict=True))
        if step.rate is not None:
            groups.append({})
    most = max(groups, key=len)
    if not most:
        raise InsufficientView("expected scores with the rows that they are of, got none")
    return most


def decode_features(values: list[Floats], mu: Floats, z: Floats, asked: Floats) -> Floats:
    """Return for scores ``asked`` (m, C) the features (m, g), each of its ``values``, from known ``mu`` and ``z``."""
    tried = np.array(list(itertools.product(*values)))
    weights = np.linalg.lstsq(np.column_stack([mu, np.ones(len(mu))]), z, rcond=None)[0]
    nearest = cKDTree(tried @ weights[:-1] + weights[-1]).query(asked)[1]
    return np.asarray(tried[nearest])
