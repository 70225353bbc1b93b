"""One user seed, many independent streams: split, model, noise and the attacker's draw.

Python's own ``hash`` is salted per process, so streams are named through SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from vflsec.base.errors import NotStackable


class Seeds(int):
    """The seeds of several runs that train as one, where code of one run expects its seed.

    Attributes:
        each: the seed of each run.
    """

    each: tuple[int, ...]

    def __new__(cls, each: Iterable[int]) -> Seeds:
        """Return them; as a number it is -1, which is no seed."""
        made = super().__new__(cls, -1)
        made.each = tuple(each)
        return made


class Generators(tuple[torch.Generator, ...]):
    """The generators of several runs that train as one, where code of one run expects its generator.

    Operations of torch refuse them; a function of vflsec that draws from them does so for each run.
    """

    def get_state(self) -> torch.Tensor:
        """Return the states of all."""
        return torch.stack([generator.get_state() for generator in self])


def derive(seed: int, *names: object) -> int:
    """Return a 63-bit seed for the stream called ``names``; equal in every process and on every machine.

    Raises:
        NotStackable: there are several seeds.
    """
    if isinstance(seed, Seeds):
        raise NotStackable(f"{'/'.join(map(str, names))} is drawn for one run")
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def make_rng(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh torch generator for the stream called ``names``; for ``Seeds``, ``Generators`` of each run."""
    if isinstance(seed, Seeds):
        return cast("torch.Generator", Generators(make_rng(number, *names, device=device) for number in seed.each))
    return torch.Generator(device).manual_seed(derive(seed, *names))


def seed_torch(seed: int) -> None:
    """Seed torch's global generators; for accelerators that are not there ``torch.manual_seed`` would keep stacks."""
    seed_all = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_all(seed)


@contextmanager
def seed_weights(seed: int, *names: object) -> Iterator[None]:
    """Draw the initial weights of layers that are made in this context from the stream called ``names``."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(derive(seed, *names))
        yield
