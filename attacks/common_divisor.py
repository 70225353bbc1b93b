"""What the passive party reads out of exact fixed-point products: their common divisors."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from vflsec.base.errors import InsufficientView
from vflsec.cipher.recording import RecordedStep
from vflsec.core.view import Fact, Guess, View
from vflsec.inference.recordings.samples import RecordingAttack, get_recording, guess_of_weights

ROWS = 8  # fewest exact rows whose common divisor is looked for: of unrelated numbers it is above 1 once in 256 times
# the divisor of one row is that of as few numbers as there are features: below this it may be an accident
LARGE = 1 << 11
EXACT = 1 << 53  # integers beyond this are rounded in a float64, so that divisors are lost


class CommonDivisor(RecordingAttack):
    """One batch suffices where delta^C is exact: the greatest common divisor of the integers delta_i W_j is |W_j|.

    Fixed-point numbers are integers, and so are their products. Over the rows of a batch the divisor of column j is
    |W_j|, since the divisor of the deltas is 1; over the columns that of row i is |delta_i|. Signs follow from those
    of the products, up to one for all. Where only one row was sent, it is read alone. Noise below the size of a unit
    of W, as large as delta_i, leaves no divisor and changes nothing that training would feel.

    Source: derived from PrADA (arXiv 2111.10120), Algorithm 5, line 22, in fixed-point arithmetic.
    """

    name = "common-divisor"
    target = "parameters"
    metric = "exact"
    reference = "derived from PrADA, arXiv 2111.10120, Algorithm 5, line 22"
    verified = "integers whose divisors are known, and runs of the real roles with and without noise below a unit"
    costs = "one pass over delta^C"
    fails = "under noise below a unit of W on what is encrypted, which is always added; delta-chain needs no divisor"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return W (g, 1) of the step that gives most; the sign for all is that of loss gradients of a rare class 1.

        Raises:
            InsufficientView: several outputs, or no row of delta^C in exact fixed point.
        """
        recording = get_recording(view)
        layout = recording.header.layout
        if layout.outputs > 1:
            raise InsufficientView(f"expected one output, got {layout.outputs}: sums of products have no divisor")
        unit = layout.weight_precision + layout.delta_precision
        divided = numbers = 0
        most, best = -1.0, None
        for step in recording.steps():
            products = _select_exact(step, unit)
            if not len(products):
                continue
            rounding = np.gcd.reduce(np.abs(products), axis=None)
            rounding &= -rounding  # the power of two that all have, where they were rounded to a larger unit
            divisors = np.gcd.reduce(np.abs(products), axis=0) if len(products) >= ROWS else np.zeros(0, dtype=np.int64)
            deltas = np.gcd.reduce(np.abs(products), axis=1)
            large = int((divisors > rounding).sum() + (deltas > rounding * LARGE).sum())
            size = len(divisors) + len(deltas)
            divided, numbers = divided + large, numbers + size
            at = step.number + (layout.order == "paper")  # the W by which delta was multiplied
            if large / size > most and (best is None or len(divisors)):
                most, best = large / size, (at, _solve(products, divisors, layout.weight_precision))
        if best is None:
            raise InsufficientView("expected a row of delta^C in exact fixed point, got none")
        text = (
            f"{divided} of {numbers} columns and rows of delta^C {'has' if divided == 1 else 'have'} a common divisor"
        )
        text += ": |W_j|, |delta_i|"
        if not divided:
            text = f"no column or row of delta^C (of {numbers}) has a common divisor, which would be |W_j| or |delta_i|"
        number, weights = best
        fact = Fact("weights and loss gradients", "share", most, numbers)
        if not divided or weights is None:
            return Guess(facts=(fact,), notes=(text,))
        return replace(guess_of_weights(view, number, weights, text), facts=(fact,))


def _solve(products: NDArray[np.int64], divisors: NDArray[np.int64], precision: int) -> NDArray[np.float64] | None:
    """Return W (g, 1) by the divisors of its columns; None where too few rows are exact."""
    if not len(divisors):
        return None
    longest = products[np.abs(products).max(axis=1).argmax()]
    weights: NDArray[np.float64] = np.ldexp((divisors * np.sign(longest)).astype(np.float64), -precision)
    sign = 1.0 if np.median(products @ weights) >= 0 else -1.0
    return sign * weights[:, None]


def _select_exact(step: RecordedStep, unit: int) -> NDArray[np.int64]:
    """Return the rows of delta^C (k, g) that are whole multiples of 2^-unit, and not zero."""
    if step.rate is None or not step.has("embedding_gradient"):
        return np.zeros((0, 1), dtype=np.int64)
    scaled = np.ldexp(step.notes["embedding_gradient"], unit)
    if not (np.abs(scaled) < EXACT).all():
        raise InsufficientView("expected |delta^C| that a float64 holds exactly, got larger: note it as integers")
    whole = (scaled == np.round(scaled)).all(axis=1) & (scaled != 0).any(axis=1)
    return np.asarray(scaled[whole], dtype=np.int64)
