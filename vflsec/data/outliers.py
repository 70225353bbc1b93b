"""The middle and the spread of a column, which a few rows cannot move."""

from __future__ import annotations

import numpy as np

SPREAD = 0.98
"""This quantile of the distances from the median is the spread of a column; fewer than 2 % of rows cannot move it."""

ROUNDING = 1e-12
"""Values that differ from the median by less than this share of it are equal to it, as computed."""


def center_and_spread(values: np.ndarray) -> tuple[float, float]:
    """Return the median, and how far 98 % of the values are from it at most.

    Where so many are equal to it, the spread is the median distance of the others, such as 1 of a rare indicator; it is
    0 of a constant.
    """
    center = float(np.median(values))
    distances = np.abs(values - center)
    apart = distances[distances > ROUNDING * abs(center)]
    spread = float(np.quantile(distances, SPREAD, method="lower"))
    if spread > ROUNDING * abs(center):
        return center, spread
    return center, float(np.median(apart)) if len(apart) else 0.0
