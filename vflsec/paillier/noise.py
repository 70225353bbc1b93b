"""Gaussian noise that can be drawn again by whoever has the key of its stream, and by nobody else."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

KEY_BITS = 256


def normal(key: int, *names: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return standard normal numbers: equal for equal ``key`` and ``names``, unpredictable without the key.

    A batch that is done again gets the same noise, so that its receiver cannot average noise out by breaking the
    connection. The stream is SHAKE-256: the state of a statistical generator could be computed from what it has drawn.

    Args:
        key: of ``KEY_BITS`` secret bits.
        names: of the stream, such as the number of the batch.
        shape: of the result.
    """
    stream = hashlib.shake_256("/".join(map(str, (key, *names))).encode()).digest(8 * math.prod(shape))
    uniform = ((np.frombuffer(stream, "<u8") >> np.uint64(12)) + 0.5) * 2.0**-52  # 52 bits: never 0, never 1
    found: NDArray[np.float64] = ndtri(uniform).reshape(shape)
    return found
