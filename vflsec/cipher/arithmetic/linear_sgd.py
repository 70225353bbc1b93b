"""Stochastic gradient descent on a share of the weights: what is linear can be done on each share alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from vflsec.base.checks import check_non_negative
from vflsec.base.errors import UsageError

PRECISION = 64  # fractional bits of a share and its velocity: a thousand steps round to less than 2^-53 together


class Moved(NamedTuple):
    """A share and its velocity after a step."""

    share: list[int]
    velocity: list[int]


class LinearSgd:
    """V <- momentum V + gradient + weight_decay W, W <- W - rate V, as integers, on W or on any share of it.

    The recursion is linear, so that two parties who each apply it to their share of W and to their share of the
    gradient hold shares of the W that it would have given: the active party sees dW + n, the passive party mirrors it
    with -n. Both must use the same numbers at every step. The numbers are taken as the exact dyadic fractions that
    floats are, and what a step rounds is one unit of 2^-64. Shares are not reduced: they grow with their masks, and
    their sum is W exactly.

    Source: algorithms dossier, PrADA, optimizers; torch.optim.SGD without dampening.

    Raises:
        UsageError: a number out of range.
    """

    def __init__(self, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        check_non_negative(momentum=momentum, weight_decay=weight_decay)
        if not momentum < 1:
            raise UsageError(f"expected momentum < 1, got {momentum}")
        if not math.isfinite(weight_decay):
            raise UsageError(f"expected a finite weight_decay, got {weight_decay}")
        self.momentum, self.weight_decay = Fraction(momentum), Fraction(weight_decay)

    def __repr__(self) -> str:
        """Show both numbers exactly."""
        return f"LinearSgd({self.momentum}, {self.weight_decay})"

    @classmethod
    def build(
        cls, optimizer: str, *, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None
    ) -> LinearSgd:
        """Return the optimizer of these settings, if shares of the weights can be moved by it.

        Raises:
            UsageError: one that is not linear in the gradient, or whose step depends on the weights themselves.
        """
        why = "each party moves a share of the weights that it cannot tell from noise"
        if optimizer != "sgd":
            raise UsageError(
                f"expected the optimizer sgd for encrypted weights, got {optimizer}: it is not linear in the "
                f"gradient, and {why}; set train.optimizer=sgd"
            )
        if clip is not None:
            raise UsageError(
                f"expected no clipping of encrypted weights, got clip={clip:g}: the norm of the gradient is not "
                f"linear, and {why}; set train.clip to none"
            )
        return cls(momentum, weight_decay)

    def step(self, share: Sequence[int], velocity: Sequence[int], gradient: Sequence[int], rate: float) -> Moved:
        """Return share and velocity after one step; all in units of 2^-64, ``rate`` >= 0."""
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError(f"expected a finite learning rate >= 0, got {rate}")
        moved = [
            _multiply(self.momentum, v) + g + _multiply(self.weight_decay, w)
            for w, v, g in zip(share, velocity, gradient, strict=True)
        ]
        return Moved([w - _multiply(Fraction(rate), v) for w, v in zip(share, moved, strict=True)], moved)


def _multiply(factor: Fraction, value: int) -> int:
    """Return factor · value, rounded down."""
    return factor.numerator * value // factor.denominator
