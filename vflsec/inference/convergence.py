"""Whether a fit had settled when its budget ended."""

from __future__ import annotations

import numpy as np


def still_falling(losses: list[float]) -> bool:
    """Whether the loss had not settled: its last tenth lies below the tenth before by over 1 % of the whole fall.

    Of fewer than four epochs nobody can tell, so they count as falling.
    """
    if len(losses) < 4:
        return True
    tenth = max(1, len(losses) // 10)
    last, before = float(np.mean(losses[-tenth:])), float(np.mean(losses[-2 * tenth : -tenth]))
    return before > last and before - last > 0.01 * (losses[0] - last)
