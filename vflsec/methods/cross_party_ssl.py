"""Cross-party self-supervised learning: the parties' embeddings of an aligned row are views of one person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from vflsec.base.seeds import generator
from vflsec.core.federation import Federation
from vflsec.core.message import Kind
from vflsec.core.party import Party
from vflsec.nn.batches import batches
from vflsec.nn.siamese import Siamese


class CrossPartySSL:
    """Step 1 of FedHSSL's algorithm 1, and equation 5.

    On raw aligned rows, without augmentation, every party projects its columns; the active party and each passive one
    exchange projections, and each pulls its prediction towards what it received: the active party towards all others,
    in the mean, a passive one towards the active party's. No gradient crosses.

    Args:
        federation: parties and wire.
        towers: each party's cross-party tower by name.
        optimizers: theirs, by name.
        batch: rows per exchange.
        updates: of every party on one exchange; the received projections stay, its own are computed anew.
    """

    def __init__(
        self,
        federation: Federation,
        towers: Mapping[str, Siamese],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        batch: int,
        updates: int,
    ) -> None:
        self.federation = federation
        self.towers = towers
        self.optimizers = optimizers
        self.batch = batch
        self.updates = updates

    def steps(self, phase: str, iteration: int) -> Iterator[Tensor]:
        """Yield the active party's loss on each batch of one pass over the aligned rows."""
        federation, active = self.federation, self.federation.active
        order = generator(federation.seed, "batches", phase, "cross", iteration)
        for tower in self.towers.values():
            tower.train()
        per_pass = batches(federation.n_rows("aligned"), self.batch, order, federation.device)
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
        """Every update of one party on one exchange; return its loss before them."""
        tower, optimizer = self.towers[party.name], self.optimizers[party.name]
        first = None
        for _ in range(self.updates):
            z = self._project(party, rows) if first is not None else z
            p = tower.predict(z)
            loss = torch.stack([tower.cross_loss(p, other) for other in received]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            first = loss.detach() if first is None else first
        assert first is not None
        return first
