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
        scores: (B, C) integers in units of 2^-``precision``; modulo 2^L they are mu W + masks, where the passive party
            has added its share before it noted them, else mu W~ + masks.
        feature_precision: the least that makes every mu an integer.
        precision: fractional bits of the scores.
    """

    mu: Integers
    scores: Integers
    feature_precision: int
    precision: int


def masked_scores(step: RecordedStep, header: Header) -> Masked | None:
    """Return what C decrypted in a step: its note, else what it sent back, which is the same modulo 2^L plus mu e."""
    layout = header.layout
    if not step.has("mu"):
        return None
    mu, feature_precision = _integers(step.notes["mu"])
    precision = layout.feature_precision + layout.weight_precision
    if step.has("masked_scores"):
        scores = step.notes["masked_scores"].astype(object)
        precision = precision if header.score_precision is None else header.score_precision
        return Masked(mu, scores, feature_precision, precision)
    for message in step.messages:
        if message.kind == Scores.__name__ and message.direction == "sent":
            values = cut(message.decode(Scores).values, 8, len(mu) * layout.outputs, "recorded scores")
            scores = np.array(values, dtype=object).reshape(len(mu), layout.outputs)
            return Masked(mu, scores, feature_precision, precision)
    return None


def _integers(values: NDArray[np.float64]) -> tuple[Integers, int]:
    """Return floats as integers times 2^-precision, exactly."""
    ratios = [float(value).as_integer_ratio() for value in values.ravel()]
    precision = max((denominator.bit_length() - 1 for _, denominator in ratios), default=0)
    exact = [numerator * ((1 << precision) // denominator) for numerator, denominator in ratios]
    return np.array(exact, dtype=object).reshape(values.shape), precision
