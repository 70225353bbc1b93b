"""Self-supervised learning of one party on all its own rows, alone or guided by its cross-party encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from vflsec.base.seeds import generator
from vflsec.nn.batches import batches
from vflsec.nn.siamese import Siamese

CLIP = 5.0
Views = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]


class LocalSSL:
    """Step 2 of FedHSSL's algorithm 1: two views of every row, and equation 6.

    Rows are those of the party itself, aligned or not; nothing is sent. With gamma = 0, or without a guide, this is
    FedLocalSSL, bit for bit.

    Args:
        rows: (n, d) of the party.
        tower: what learns.
        views: gives two views of a batch.
        guide: the party's cross-party tower, in evaluation mode and without gradients; or None.
        gamma: weight of the guidance.
        optimizer: of the tower.
        batch: rows per update.
    """

    def __init__(
        self,
        rows: Tensor,
        tower: Siamese,
        views: Views,
        *,
        guide: Siamese | None,
        gamma: float,
        optimizer: torch.optim.Optimizer,
        batch: int,
    ) -> None:
        self.rows = rows
        self.tower = tower
        self.views = views
        self.guide = guide if gamma else None
        self.gamma = gamma
        self.optimizer = optimizer
        self.batch = batch

    def steps(self, *stream: object) -> Iterator[Tensor]:
        """Yield the loss of each update of one pass over the rows; ``stream`` names its randomness, seed first."""
        seed, *names = stream
        assert isinstance(seed, int)
        order = generator(seed, "batches", *names)
        noise = generator(seed, "views", *names, device=self.rows.device)
        self.tower.train()
        for rows in batches(len(self.rows), self.batch, order, self.rows.device):
            first, second = self.views(self.rows[rows], noise)
            loss = self.tower.two_views(first, second, guide=self._guidance(first, second), gamma=self.gamma)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.tower.parameters(), CLIP)
            self.optimizer.step()
            self.tower.after_step()
            yield loss.detach()

    def _guidance(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor] | None:
        """Projections of the two views by the cross-party encoder, whose BatchNorm statistics must not drift here."""
        if self.guide is None:
            return None
        self.guide.eval()
        with torch.no_grad():
            found = self.guide.project(first), self.guide.project(second)
        self.guide.train()
        return found
