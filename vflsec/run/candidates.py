"""The candidates of attacks on membership: training rows and as many test rows, shuffled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vflsec.base.seeds import generator
from vflsec.core.method import Trained

MEMBER = {"train": 1, "test": 0}


class Candidates(NamedTuple):
    """Where the candidates are, in the attacked federation or in a shadow of it.

    Attributes:
        rows: (n_train + n_test,) the training and test rows of this federation, by their positions in the training and
            test rows of the attacked one together; only candidates are elsewhere.
        places: (2 n,) the position of each candidate in ``rows``.
        seed: of the draw.
    """

    rows: Tensor
    places: Tensor
    seed: int

    @classmethod
    def draw(cls, seed: int, n_train: int, n_test: int) -> Candidates:
        """Draw the candidates of an attacked federation: all rows of the smaller split, and as many of the other."""
        rng, n = generator(seed, "candidates"), min(n_train, n_test)
        members, others = torch.randperm(n_train, generator=rng)[:n], torch.randperm(n_test, generator=rng)[:n]
        order = torch.randperm(2 * n, generator=rng)
        return cls(torch.arange(n_train + n_test), torch.cat([members, n_train + others])[order], seed)

    def dealt(self, shadow: int) -> Candidates:
        """Return where the candidates are in a shadow, which trains on a random half of them.

        Shadows 2k and 2k + 1 train on complementary halves, so that each candidate is in one half of all shadows.
        The draw does not depend on where the candidates are now.
        """
        n = len(self.places) // 2
        order = torch.randperm(2 * n, generator=generator(self.seed, "halves", shadow // 2))
        order = order.roll(n) if shadow % 2 else order
        slots = self.places.sort().values  # as many among training rows as among test rows
        rows, places = self.rows.clone(), torch.empty_like(self.places)
        rows[slots], places[order] = self.places[order], slots
        return Candidates(rows, places, self.seed)

    def of(self, by_split: Mapping[str, Tensor]) -> Tensor:
        """Return the values (2 n, ...) of the candidates, given those of training and test rows."""
        values = torch.cat([by_split[split] for split in MEMBER])
        return values[self.places.to(values.device)]


def asked(trained: Trained) -> dict[str, Tensor]:
    """Return the logits (n, C) of the joint model for training and test rows, without leaving a trace."""
    with trained.federation.without_recording(), torch.no_grad():
        return {split: trained.method.predict(trained.federation, split) for split in MEMBER}
