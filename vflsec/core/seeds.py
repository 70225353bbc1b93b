"""One user seed, many independent streams: split, model, noise and the attacker's draw.

Python's own ``hash`` is salted per process, so streams are named through SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *names: object) -> int:
    """Return a 63-bit seed for the stream called ``names``; equal in every process and on every machine."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh torch generator for the stream called ``names``."""
    return torch.Generator(device).manual_seed(derive(seed, *names))


@contextmanager
def drawing(seed: int, *names: object) -> Iterator[None]:
    """Draw the initial weights of layers that are made in this context from the stream called ``names``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, *names))
        yield
