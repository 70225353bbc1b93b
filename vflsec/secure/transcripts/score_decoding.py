"""What the active party decodes from one score of a sample whose features have few values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from scipy.spatial import cKDTree

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import Recording
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Figure, Floats, Recovered, Truth

TRIED = 1 << 20
"""Combinations of values, at most."""


class ScoreDecoding(Audit):
    """Tries all combinations of the features' values, and takes the one whose score is nearest to the received one.

    A few known samples under the same weights, three for each feature, say which values the features have and, by least
    squares, which weights. Weights stay the same from one training step to the next, so that all test rows
    share theirs. A score has some fifty bits: without noise it tells apart all combinations that can be tried.

    Source: exhaustive search; derived from PrADA (arXiv 2111.10120), Algorithm 4.
    """

    name = "score-decoding"
    role = "active"
    reads = "z^C of the samples that were scored under the same weights, and the features of a few known ones"
    mitigation = "features of many values, or that the passive party's extractor moves; score_noise"
    reference = "exhaustive search; derived from PrADA, Algorithm 4"

    def run(self, recording: Recording) -> Recovered:
        """Return the scores (B, C) with their rows, of the steps that share their weights and have most rows."""
        groups: dict[int, dict[int, Mapping[str, np.ndarray]]] = {}
        trained = 0
        for step in recording.steps():
            if step.has("rows", "scores"):
                notes = {"rows": step.notes["rows"], "scores": step.notes["scores"]}
                groups.setdefault(trained, {})[step.number] = notes
            trained += step.rate is not None
        if not groups:
            raise InsufficientView("expected scores with the rows that they are of, got none")
        steps = max(groups.values(), key=lambda one: sum(len(notes["rows"]) for notes in one.values()))
        found = (
            "the passive party's features, by trying their values; the known rows are taken from --truth. It takes "
            f"6 rows for each feature under the same weights, and at most {TRIED:,} combinations of values"
        )
        return Recovered(found, steps)

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return the proportion of unknown samples of which every feature is right."""
        true = truth.at(list(recovered.steps))
        both = [(true[n]["mu"], notes["scores"]) for n, notes in recovered.steps.items() if "mu" in true[n]]
        if not both:
            return ()
        mu, z = (np.concatenate(parts) for parts in zip(*both, strict=True))
        n_known = 3 * mu.shape[1]
        if len(mu) < 2 * n_known:
            return ()
        order = np.random.default_rng(figures.SEED).permutation(len(mu))
        known, asked = order[:n_known], order[n_known:]
        values = [np.unique(column) for column in mu[known].T]
        few = all(3 * len(one) <= n_known for one in values)
        if not few or np.prod([float(len(one)) for one in values]) > TRIED:
            return ()
        right = (decoded(values, mu[known], z[known], z[asked]) == mu[asked]).all(axis=1)
        rows, counts = np.unique(mu[known], axis=0, return_counts=True)
        chance = float((mu[asked] == rows[counts.argmax()]).all(axis=1).mean())
        of = f"rows of features, {n_known} known rows"
        return (figures.share(of, int(right.sum()), len(asked), chance=chance),)


def decoded(values: list[Floats], mu: Floats, z: Floats, asked: Floats) -> Floats:
    """Return for scores ``asked`` (m, C) the features (m, g), each of its ``values``, from known ``mu`` and ``z``."""
    tried = np.array(list(itertools.product(*values)))
    weights = np.linalg.lstsq(np.column_stack([mu, np.ones(len(mu))]), z, rcond=None)[0]
    nearest = cKDTree(tried @ weights[:-1] + weights[-1]).query(asked)[1]
    found: Floats = tried[nearest]
    return found
