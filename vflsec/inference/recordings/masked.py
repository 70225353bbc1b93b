"""What the passive party decrypts in a forward pass: scores under the active party's masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.cipher.arithmetic.codec import cut
from vflsec.cipher.recording import Header, RecordedStep
from vflsec.cipher.roles.messages import Scores

Integers = NDArray[np.object_]


class Masked(NamedTuple):
    """Masked scores of one batch.

    Attributes:
        mu: (B, g) integers in units of 2^-``feature_precision``.
        scores: (B, C) integers in units of 2^-``precision``; modulo 2^L they are mu W + masks, without ``added``.
        feature_precision: the least that makes every mu an integer.
        precision: fractional bits of the scores.
        added: (g, C) the part of W that scores are without, in units of 2^-64: the passive party's share where it noted
            what it decrypts, and nothing in what it sent back.
    """

    mu: Integers
    scores: Integers
    feature_precision: int
    precision: int
    added: Integers


def masked_scores(step: RecordedStep, header: Header) -> Masked | None:
    """Return what the passive party decrypted in a step: its note, else what it sent back, with its share added."""
    layout = header.layout
    if not step.has("mu"):
        return None
    mu, feature_precision = _integers(step.notes["mu"])
    precision = layout.feature_precision + layout.weight_precision
    nothing = np.zeros((layout.width, layout.outputs), dtype=object)
    if step.has("masked_scores"):
        scores = step.notes["masked_scores"].astype(object)
        precision = precision if header.score_precision is None else header.score_precision
        return Masked(mu, scores, feature_precision, precision, step.notes.get("share", nothing))
    for message in step.messages:
        if message.kind == Scores.__name__ and message.direction == "sent":
            values = cut(message.decode(Scores).values, 8, len(mu) * layout.outputs, "recorded scores")
            scores = np.array(values, dtype=object).reshape(len(mu), layout.outputs)
            return Masked(mu, scores, feature_precision, precision, nothing)
    return None


def _integers(values: NDArray[np.float64]) -> tuple[Integers, int]:
    """Return floats as integers times 2^-precision, exactly."""
    ratios = [float(value).as_integer_ratio() for value in values.ravel()]
    precision = max((denominator.bit_length() - 1 for _, denominator in ratios), default=0)
    exact = [numerator * ((1 << precision) // denominator) for numerator, denominator in ratios]
    return np.array(exact, dtype=object).reshape(values.shape), precision
