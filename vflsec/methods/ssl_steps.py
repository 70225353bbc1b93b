"""The steps of FedHSSL's pre-training: self-supervised learning across parties, and of one party."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vflsec.base.seeds import make_rng
from vflsec.core.federation import Federation
from vflsec.core.message import Kind
from vflsec.core.party import Party
from vflsec.nn.augmentation import TwoViews
from vflsec.nn.siamese import Siamese
from vflsec.nn.stacked import draw_batches

CLIP = 5.0


@dataclass
class CrossPartySSL:
    """Step 1 of FedHSSL's algorithm 1, and equation 5.

    On raw aligned rows, without augmentation, every party projects its columns; the active party and each passive one
    exchange projections, and each pulls its prediction towards what it received: the active party towards all others,
    in the mean, a passive one towards the active party's. No gradient crosses.

    Attributes:
        towers: each party's cross-party tower by name.
        optimizers: theirs, by name.
        batch: rows per exchange.
        updates: of every party on one exchange; the received projections stay, its own are computed anew.
    """

    federation: Federation
    towers: Mapping[str, Siamese]
    optimizers: Mapping[str, torch.optim.Optimizer]
    batch: int
    updates: int

    def steps(self, phase: str, iteration: int) -> Iterator[Tensor]:
        """Yield the active party's loss on each batch of one pass over the aligned rows."""
        federation, active = self.federation, self.federation.active
        order = make_rng(federation.seed, "batches", phase, "cross", iteration)
        for tower in self.towers.values():
            tower.train()
        per_pass = draw_batches(federation.n_rows("aligned"), self.batch, order, federation.device)
        for number, rows in enumerate(per_pass, start=iteration * len(per_pass)):
            z = {name: self._project(party, rows) for name, party in federation.parties.items()}
            send = partial(self._send, number=number, phase=phase, rows=rows)
            received = {party.name: [send(active, party, z[active.name])] for party in federation.passive}
            received[active.name] = [send(party, active, z[party.name]) for party in federation.passive]
            losses = {
                name: self._learn(party, z[name], received[name], rows) for name, party in federation.parties.items()
            }
            yield losses[active.name]

    def _project(self, party: Party, rows: Tensor) -> Tensor:
        return self.towers[party.name].project(party.features["aligned"][rows])  # (B, d)

    def _send(self, sender: Party, receiver: Party, z: Tensor, *, number: int, phase: str, rows: Tensor) -> Tensor:
        message = sender.send(
            Kind.EMBEDDING, {"value": z}, to=receiver.name, step=number, phase=phase, rows=rows, split="aligned"
        )
        received: Tensor = message.payload["value"]
        return received

    def _learn(self, party: Party, z: Tensor, received: list[Tensor], rows: Tensor) -> Tensor:
        """Make every update of one party on one exchange; return its loss before them."""
        tower, optimizer, losses = self.towers[party.name], self.optimizers[party.name], list[Tensor]()
        for _ in range(self.updates):
            p = tower.predict(self._project(party, rows) if losses else z)
            loss = torch.stack([tower.cross_loss(p, other) for other in received]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        return losses[0]


def draw_two_views(views: TwoViews, rows: Tensor, batch: int, *stream: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two views of each batch of one pass over ``rows`` (n, d); ``stream`` names its randomness, seed first."""
    seed, *names = stream
    assert isinstance(seed, int)
    order = make_rng(seed, "batches", *names)
    noise = make_rng(seed, "views", *names, device=rows.device)
    for part in draw_batches(len(rows), batch, order, rows.device):
        yield views(rows[part], noise)


@dataclass
class LocalSSL:
    """Step 2 of FedHSSL's algorithm 1: two views of every row, and equation 6.

    Rows are those of the party itself, aligned or not; nothing is sent. With gamma = 0, or without a guide, this is
    FedLocalSSL, bit for bit.

    Attributes:
        rows: (n, d) of the party.
        tower: what learns.
        views: gives two views of a batch.
        guide: the party's cross-party tower, in evaluation mode and without gradients; or None.
        gamma: weight of the guidance.
        optimizer: of the tower.
        batch: rows per update.
    """

    rows: Tensor
    tower: Siamese
    views: TwoViews
    guide: Siamese | None
    gamma: float
    optimizer: torch.optim.Optimizer
    batch: int

    def steps(self, *stream: object) -> Iterator[Tensor]:
        """Yield the loss of each update of one pass over the rows; ``stream`` names its randomness, seed first."""
        self.tower.train()
        for first, second in draw_two_views(self.views, self.rows, self.batch, *stream):
            loss = self.tower.two_views(first, second, guide=self._compute_guidance(first, second), gamma=self.gamma)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.tower.parameters(), CLIP)
            self.optimizer.step()
            self.tower.update_state()
            yield loss.detach()

    @torch.no_grad()
    def _compute_guidance(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return projections by the cross-party encoder, whose BatchNorm statistics must not drift here."""
        if self.guide is None or not self.gamma:
            return None
        self.guide.eval()
        projections = self.guide.project(first), self.guide.project(second)
        self.guide.train()
        return projections
