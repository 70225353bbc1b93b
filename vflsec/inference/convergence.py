"""Whether a fit had converged when its budget was spent."""

from __future__ import annotations

import numpy as np


def still_falling(losses: list[float]) -> bool:
    """Whether the mean of the last tenth of ``losses`` is below that of the tenth before by over 1 % of the whole fall.

    Fewer than four losses count as falling.
    """
    if len(losses) < 4:
        return True
    tenth = max(1, len(losses) // 10)
    last, before = float(np.mean(losses[-tenth:])), float(np.mean(losses[-2 * tenth : -tenth]))
    return before > last and before - last > 0.01 * (losses[0] - last)
