"""What a malicious active party reads by weights of its choice: single features."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import RecordedStep, Recording
from vflsec.secure.transcripts import figures
from vflsec.secure.transcripts.audit import Audit, Figure, Recovered, Truth


class ChosenWeights(Audit):
    """Scores under chosen weights: two passes whose weights differ by a unit vector give a feature.

    The active party computes scores with other weights than its share. The passive party cannot see which W~ the active
    party has used. While the passive party's share e stays as it is, between two updates, z' - z = mu (W~' - W~) for
    the same samples, in clear and with a difference that the active party chose. g + 1 passes give all of mu. At the
    first step the active party may even know W_0, unless the passive party has added a share of its own.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 6, with an active party that deviates.
    """

    name = "chosen-weights"
    role = "active"
    reads = "z^C of the same samples under several shares of its own, between two updates"
    mitigation = (
        "few forward passes of each sample; the passive party's share of W_0 makes one of them useless, no more"
    )
    reference = "derived from PrADA, Algorithm 4, with an active party that deviates"

    def run(self, recording: Recording) -> Recovered:
        """Return ``mu`` (B, g), the part of it that the chosen weights span, at the first pass of each batch."""
        steps = {}
        dimensions = []
        asked_again = False
        for passes in _passes(recording):
            asked_again = True
            first = passes[0].notes
            shares = [step.notes["share"] - first["share"] for step in passes[1:]]
            differences = np.concatenate([np.ldexp(share.astype(float), -64) for share in shares], axis=1)  # (g, k C)
            scores = np.concatenate([step.notes["scores"] - first["scores"] for step in passes[1:]], axis=1)
            dimension = int(np.linalg.matrix_rank(differences))
            if dimension:
                steps[passes[0].number] = {"mu": scores @ np.linalg.pinv(differences)}
                dimensions.append(dimension)
        if not steps:
            said = "asked for the same samples again only under the same share"
            if not asked_again:
                said = "never asked for the same samples twice between two updates"
            raise InsufficientView(f"p {said}; these notes show no deviation")
        batches = count(len(steps), "batch", "batches")
        found = f"{max(dimensions)} of {recording.header.layout.width} directions of mu in {batches}"
        share = max(dimensions) / recording.header.layout.width
        own = Figure(of="features", metric="share", value=share, chance=0.0, n=recording.header.layout.width)
        return Recovered(found, steps, (own,))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return which share of mu was recovered, of the batch that gives most."""
        true = truth.at(list(recovered.steps))
        known = [number for number in recovered.steps if "mu" in true[number]]
        if not known:
            return ()
        each = [figures.vectors("features", recovered.steps[n]["mu"], true[n]["mu"]) for n in known]
        return (max(each, key=lambda figure: figure.value),)


def _passes(recording: Recording) -> Iterator[list[RecordedStep]]:
    """Yield the passes of each batch between two updates, where there are several."""
    batches: dict[bytes, list[RecordedStep]] = {}
    for step in recording.steps():
        if step.has("rows", "scores", "share"):
            batches.setdefault(step.notes["rows"].tobytes(), []).append(step)
        if step.rate is not None:  # an update after this step's pass
            yield from (passes for passes in batches.values() if len(passes) > 1)
            batches = {}
    yield from (passes for passes in batches.values() if len(passes) > 1)
