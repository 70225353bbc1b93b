"""What the passive party reads out of exact fixed-point products: their common divisors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import RecordedStep, Recording
from vflsec.secure.transcripts.audit import Audit, Figure, Recovered, Truth

ROWS = 8
"""Fewest exact rows whose common divisor is looked for: of unrelated numbers it is above 1 once in 256 times."""

LARGE = 1 << 11
"""The divisor of one row is that of as few numbers as there are features: below this it may be an accident."""

EXACT = 1 << 53
"""Integers beyond this are rounded in a float64, so that divisors are lost."""


class CommonDivisor(Audit):
    """One batch suffices where delta^C is exact: the greatest common divisor of the integers delta_i W_j is |W_j|.

    Fixed-point numbers are integers, and so are their products. Over the rows of a batch the divisor of column j is
    |W_j|, since the divisor of the deltas is 1; over the columns that of row i is |delta_i|. Signs follow from those
    of the products, up to one for all. Where only one row was sent, it is read alone. Noise below the size of a unit
    of W, as large as delta_i, leaves no divisor and changes nothing that training would feel.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 5, line 22, in fixed-point arithmetic.
    """

    name = "common-divisor"
    role = "passive"
    reads = "one batch of delta^C"
    mitigation = "noise below a unit of W on what is encrypted, which is always added; delta-chain reads W all the same"
    reference = "derived from PrADA, Algorithm 5, line 22"

    def run(self, recording: Recording) -> Recovered:
        """Return ``weights`` (g, 1), magnitudes with signs up to one for all, of each step that gives all of them."""
        layout = recording.header.layout
        if layout.outputs > 1:
            raise InsufficientView(f"expected one output, got {layout.outputs}: sums of products have no divisor")
        unit = layout.weight_precision + layout.delta_precision
        steps = {}
        divided = numbers = 0
        most = 0.0
        for step in recording.steps():
            products = _exact_rows(step, unit)
            if not len(products):
                continue
            rounding = np.gcd.reduce(np.abs(products), axis=None)
            rounding &= -rounding  # the power of two that all have, where they were rounded to a larger unit
            divisors = np.gcd.reduce(np.abs(products), axis=0) if len(products) >= ROWS else np.zeros(0, dtype=np.int64)
            deltas = np.gcd.reduce(np.abs(products), axis=1)
            found = int((divisors > rounding).sum() + (deltas > rounding * LARGE).sum())
            count = len(divisors) + len(deltas)
            divided, numbers, most = divided + found, numbers + count, max(most, found / count)
            if len(divisors):
                longest = products[np.abs(products).max(axis=1).argmax()]
                weights = np.ldexp((divisors * np.sign(longest)).astype(np.float64), -layout.weight_precision)
                steps[step.number] = {"weights": weights[:, None]}
        if not numbers:
            raise InsufficientView("expected a row of delta^C in exact fixed point, got none")
        own = Figure(of="weights and loss gradients", metric="share", value=most, chance=0.0, n=numbers)
        text = (
            f"{divided} of {numbers} columns and rows of delta^C {'has' if divided == 1 else 'have'} a common divisor"
        )
        text += ": |W_j|, |delta_i|"
        if not divided:
            text = f"no column or row of delta^C (of {numbers}) has a common divisor, which would be |W_j| or |delta_i|"
        return Recovered(text, steps, (own,))

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return the share of weights that one batch gives to the unit, up to one sign for all of them."""
        after = truth.header.layout.order == "paper"
        true = truth.at([number + after for number in recovered.steps])
        known = [number for number in recovered.steps if "weights" in true[number + after]]
        if not known:
            return ()
        unit = 2.0**-truth.header.layout.weight_precision
        hits = [
            int((np.abs(sign * recovered.steps[number]["weights"] - true[number + after]["weights"]) <= unit).sum())
            for number in known
            for sign in (1, -1)
        ]
        width = truth.header.layout.width
        return (Figure(of="weights", metric="share", value=max(hits) / width, chance=0.0, n=width),)


def _exact_rows(step: RecordedStep, unit: int) -> NDArray[np.int64]:
    """Return the rows of delta^C (k, g) that are whole multiples of 2^-unit, and not zero."""
    if step.rate is None or not step.has("embedding_gradient"):
        return np.zeros((0, 1), dtype=np.int64)
    scaled = np.ldexp(step.notes["embedding_gradient"], unit)
    if not (np.abs(scaled) < EXACT).all():
        raise InsufficientView("expected |delta^C| that a float64 holds exactly, got larger: note it as integers")
    whole = (scaled == np.round(scaled)).all(axis=1) & (scaled != 0).any(axis=1)
    return np.asarray(scaled[whole], dtype=np.int64)
