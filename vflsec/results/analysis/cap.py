"""Scores that fold a privacy-utility curve into one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.results.statistics import over_seeds


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


def hypervolume(gain: Sequence[float] | NDArray[np.floating], kept: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the area of the union of the rectangles from (0, 0) to each (g, k).

    Source: Zitzler and Thiele 1998, "Multiobjective optimization using evolutionary algorithms", section 3 (size of the
    space covered). A point that another one dominates adds nothing, and a point without gain has no area.

    Args:
        gain: g per strength, at least 0: the utility that joining adds.
        kept: k per strength, at least 0: see ``privacy_kept``.
    """
    order = np.argsort(gain)[::-1]
    width, height = np.asarray(gain, dtype=float)[order], np.maximum.accumulate(np.asarray(kept, dtype=float)[order])
    return float(-np.diff(width, append=0.0) @ height)


def privacy_kept(leak: float, alone: float) -> float:
    """Return (1 - A) / (1 - alone) in [0, 1]: 1 if nothing is inferred beyond *alone*, 0 if everything is."""
    alone = max(0.0, alone)  # an R2 below 0 is no leak
    return 1.0 if leak <= alone else max(0.0, (1 - leak) / (1 - alone))


class Volume(NamedTuple):
    """A hypervolume as a share of what joining gains.

    Attributes:
        value: None if the seeds do not show whether anything is gained.
        by_seed: its jackknife pseudo-values.
        most: what it would be if each gain that is not shown were at the upper end of its interval.
    """

    value: float | None
    by_seed: list[float]
    most: float


def relative_hypervolume(gains: Sequence[Sequence[float]], kept: Sequence[Sequence[float]]) -> Volume:
    """Return the hypervolume of mean gains, as a share of what joining gains.

    Gains are averaged over seeds before negative ones are cut off, and a gain whose 95 % interval over seeds includes 0
    counts as none. Otherwise a model that has learned nothing from the other parties would win by noise. If such an
    interval also reaches all that joining gains, the seeds are too few to tell: where that leaves nothing, or is so of
    the gain without a defense, there is no value.

    Source: Tukey 1958 for pseudo-values, whose deviation is that of the ratio (Shao and Tu 1995, section 1.2).

    Args:
        gains: (S, 1 + K) by seed the utility that joining adds, first without a defense and then at each strength.
        kept: (S, K) by seed, see ``privacy_kept``.
    """
    gain, privacy = np.asarray(gains), np.asarray(kept)
    n, mean = len(gain), gain.mean(axis=0)
    ends = np.array([over_seeds(column)[1:3] if n > 1 else (column[0],) * 2 for column in gain.T])
    shown = ends[:, 0] > 0
    unclear = ~shown & (ends[:, 1] > 0) & (ends[:, 1] >= mean[0])

    def of(rows: NDArray[np.bool_], otherwise: Any = 0.0) -> float:
        whole, *widths = np.where(shown, gain[rows].mean(axis=0), otherwise).tolist()
        return hypervolume(np.clip(widths, 0.0, whole), privacy[rows].mean(axis=0)) / whole if whole > 0 else 0.0

    value, every = of(np.ones(n, dtype=bool)), np.arange(n)
    if unclear[0] or (unclear.any() and value == 0):
        return Volume(None, [], 1.0)
    by_seed = [n * value - (n - 1) * of(every != seed) for seed in every] if n > 1 else [value]
    return Volume(value, by_seed, of(every >= 0, np.clip(ends[:, 1], 0.0, None)))


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
