"""Scores that fold a privacy-utility curve into one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt


def cap(utility: Sequence[float], leak: Sequence[float]) -> float:
    """Return the calibrated averaged performance, mean over strengths of U · (1 - A).

    Source: FedHSSL (arXiv 2208.08934), definition 1; the paper leaves the distance undefined, and 1 - A reproduces its
    tables VII and XII from its table XI. CAP rewards a destroyed model: on a binary task one that predicts a constant
    scores about 0.25. Read it beside ``calibrated_cap``.

    Args:
        utility: U per strength, in [0, 1].
        leak: A per strength, in [0, 1].
    """
    return sum(u * (1 - a) for u, a in zip(utility, leak, strict=True)) / len(utility)


def calibrated_cap(utility: Sequence[float], leak: Sequence[float], alone: Sequence[float]) -> float:
    """Return CAP with the leak replaced by its advantage over the adversary alone, clipped to [0, 1].

    What the adversary could have inferred without joining is not the federation's leak.
    """
    return cap(utility, [min(1.0, max(0.0, a - b)) for a, b in zip(leak, alone, strict=True)])


def dcs(leak: float, utility: float, *, ideal_utility: float, ideal_leak: float = 0.0, beta: float = 0.5) -> float:
    """Return the defense capability score, 1 / (1 + distance to the ideal point).

    Source: Zou et al. 2024 (VFLAIR), section 3.5: sqrt((1-b)(A-A*)^2 + b(U-U*)^2). One-sided as in its released code:
    only a leak above A* and a utility below U* count. It lies in [0.5, 1] for A* = 0, and, unlike CAP, takes the
    undefended model's utility for the ideal one.
    """
    lost = max(0.0, ideal_utility - utility)
    leaked = max(0.0, leak - ideal_leak)
    return 1 / (1 + sqrt((1 - beta) * leaked**2 + beta * lost**2))


def t_dcs(scores: Sequence[float]) -> float:
    """Return the mean DCS over attacks of one type."""
    return sum(scores) / len(scores)


def c_dcs(by_type: Mapping[str, float], weights: Mapping[str, float] | None = None) -> float:
    """Return the weighted mean of T-DCS over attack types; equal weights unless given."""
    weights = weights or dict.fromkeys(by_type, 1 / len(by_type))
    return sum(weights[name] * value for name, value in by_type.items()) / sum(weights.values())
