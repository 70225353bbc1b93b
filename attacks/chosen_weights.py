"""What a malicious active party reads by weights of its choice: single features."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from vflsec.base.checks import count
from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import RecordedStep, Recording
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import RecordingAttack, get_recording, guess_of_samples


class ChosenWeights(RecordingAttack):
    """Scores under chosen weights: two passes whose weights differ by a unit vector give a feature.

    The active party computes scores with other weights than its share. The passive party cannot see which W~ the active
    party has used. While the passive party's share e stays as it is, between two updates, z' - z = mu (W~' - W~) for
    the same samples, in clear and with a difference that the active party chose. g + 1 passes give all of mu. At the
    first step the active party may even know W_0, unless the passive party has added a share of its own.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 4, line 6, with an active party that deviates.
    """

    name = "chosen-weights"
    side = "active"
    target = "features"
    reference = "derived from PrADA, arXiv 2111.10120, Algorithm 4, with an active party that deviates"
    verified = "closed form: as many directions as chosen weights span, on runs of the real roles"
    costs = "a pseudo-inverse for each batch that was scored again"
    fails = (
        "if each sample has few forward passes between two updates; the passive party's share of W_0 makes one of them "
        "useless, no more"
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return features (k, g) of the samples that were probed, the part that the chosen weights span.

        Raises:
            InsufficientView: the active party has not deviated.
        """
        recording = get_recording(view)
        width = recording.header.layout.width
        probed: dict[int, np.ndarray] = {}
        dimensions: list[int] = []
        asked_again = False
        for passes in _list_passes(recording):
            asked_again = True
            first = passes[0].notes
            shares = [step.notes["share"] - first["share"] for step in passes[1:]]
            differences = np.concatenate([np.ldexp(share.astype(float), -64) for share in shares], axis=1)  # (g, k C)
            scores = np.concatenate([step.notes["scores"] - first["scores"] for step in passes[1:]], axis=1)
            dimension = int(np.linalg.matrix_rank(differences))
            if dimension:
                probed |= dict(zip(first["rows"].tolist(), scores @ np.linalg.pinv(differences), strict=True))
                dimensions.append(dimension)
        if not probed:
            said = "asked for the same samples again only under the same share"
            if not asked_again:
                said = "never asked for the same samples twice between two updates"
            raise InsufficientView(f"p {said}; these notes show no deviation")
        note = f"{max(dimensions)} of {width} directions of mu in {count(len(dimensions), 'batch', 'batches')}"
        guess = guess_of_samples(view, np.array(list(probed)), torch.from_numpy(np.array(list(probed.values()))), note)
        return replace(guess, facts=(Fact("features", "share", max(dimensions) / width, width),))


def _list_passes(recording: Recording) -> Iterator[list[RecordedStep]]:
    """Yield the passes of each batch between two updates, where there are several."""
    batches: dict[bytes, list[RecordedStep]] = {}
    for step in recording.steps():
        if step.has("rows", "scores", "share"):
            batches.setdefault(step.notes["rows"].tobytes(), []).append(step)
        if step.rate is not None:  # an update after this step's pass
            yield from (passes for passes in batches.values() if len(passes) > 1)
            batches = {}
    yield from (passes for passes in batches.values() if len(passes) > 1)
