"""Gaussian noise that nobody can predict."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from vflsec.cipher.arithmetic.codec import Randbits

KEY_BITS = 256


def normal(randbits: Randbits, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return standard normal numbers, drawn anew at every call.

    The stream is SHAKE-256 under a fresh key: the state of a statistical generator could be computed from what it has
    drawn. An answer that is given again gets other noise. With the same noise, a receiver who asks twice in different
    ways would cancel it; with other noise, it averages over the few answers that it gets.

    Args:
        randbits: source of the key; ``secrets`` but in tests.
        shape: of the result.
    """
    stream = hashlib.shake_256(randbits(KEY_BITS).to_bytes(KEY_BITS // 8, "little")).digest(8 * math.prod(shape))
    uniform = ((np.frombuffer(stream, "<u8") >> np.uint64(12)) + 0.5) * 2.0**-52  # 52 bits: never 0, never 1
    found: NDArray[np.float64] = ndtri(uniform).reshape(shape)
    return found
