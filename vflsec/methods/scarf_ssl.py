"""Scarf: self-supervised learning of one party on all its own rows, clean against corrupted."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vflsec.base.errors import Diverged
from vflsec.base.seeds import generator
from vflsec.core.party import Party
from vflsec.methods.early_stopping import EarlyStopping
from vflsec.methods.local_training import own_rows
from vflsec.nn.augment.scarf import ScarfCorruption
from vflsec.nn.batches import batches
from vflsec.nn.losses.scarf import scarf_loss

HELD_OUT, PATIENCE = 0.1, 3
LEAST_ROWS = 4
"""Two to learn from and two to validate on: a loss needs a second row to compare with."""


class ScarfSSL:
    """Step 2 of VFLHLP: the encoder learns to match each corrupted row of a batch with its clean row.

    Rows are those of the party itself, aligned or not; nothing is sent. A tenth of them is held out, always corrupted
    in the same way: training stops when their loss has not fallen for three epochs, and the best state is taken.

    Source: Bahri et al. 2022 (Scarf), arXiv 2106.15147, algorithm 1, whose settings VFLHLP (Li et al. 2024, arXiv
    2405.11884, section 4.2.2) leaves as they are: Adam, early stopping with patience 3.

    Args:
        party: whose rows; only its own are read.
        model: encoder and projection head, (B, d) -> (B, width).
        seed: of the run; streams are named by party and epoch.
        epochs: at most.
        batch: rows per update, N in the loss.
        lr: learning rate.
        rate: share of a row's raw columns that is corrupted.
        temperature: tau.

    Attributes:
        state: the model, its best state, and how far training is.
        optimizer: of the model.
    """

    def __init__(
        self,
        party: Party,
        model: nn.Module,
        *,
        seed: int,
        epochs: int,
        batch: int,
        lr: float,
        rate: float,
        temperature: float,
    ) -> None:
        own = own_rows(party)
        order = torch.randperm(len(own), generator=generator(seed, "held out", party.name)).to(own.device)
        held_out, rest = order.tensor_split([max(2, round(HELD_OUT * len(own)))])
        self.rows, self.held_out = own[rest], own[held_out]
        self.model = model
        self.batch = batch
        self.temperature = temperature
        self.corrupt = ScarfCorruption(party.layout, self.rows, rate)
        self.state = EarlyStopping(model, epochs=epochs, patience=PATIENCE)
        self.optimizer = torch.optim.Adam(model.parameters(), lr, fused=True)
        self._streams = (seed, party.name)

    def epoch(self) -> float:
        """Make one pass over the rows, and return its mean loss.

        Raises:
            Diverged: the loss, or that of the rows held out, is not finite.
        """
        number, (seed, name) = self.state.epoch, self._streams
        order = generator(seed, "batches", "scarf", name, number)
        noise = generator(seed, "corruption", name, number, device=self.rows.device)
        self.model.train()
        total = torch.zeros((), device=self.rows.device)
        for batch in batches(len(self.rows), self.batch, order, self.rows.device):
            loss = self._loss(self.rows[batch], noise)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total += loss.detach() * len(batch)
        mean, held_out = float(total) / len(self.rows), self.held_out_loss()
        if not math.isfinite(mean + held_out):
            raise Diverged(
                f"the loss of Scarf at {name} is {mean}, {held_out} on rows held out, after epoch {number + 1}: "
                "lower train.pretrain.lr"
            )
        self.state.count(-held_out)
        return mean

    def finish(self) -> None:
        """Put the model into its best state."""
        self.state.take_best()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss of the rows held out, in evaluation mode."""
        seed, name = self._streams
        noise = generator(seed, "corruption", name, "held out", device=self.rows.device)
        self.model.eval()
        losses = [self._loss(rows, noise) * len(rows) for rows in torch.split(self.held_out, self.batch)]
        return float(torch.stack(losses).sum()) / len(self.held_out)

    def _loss(self, rows: Tensor, noise: torch.Generator) -> Tensor:
        return scarf_loss(self.model(rows), self.model(self.corrupt(rows, noise)), self.temperature)
