"""Training of the active party's head on frozen bottom models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vflsec.base.seeds import generator
from vflsec.core.message import Step
from vflsec.core.method import Progress
from vflsec.methods.early_stopping import selection_split
from vflsec.methods.epochs import Streams
from vflsec.methods.split_training import SplitTraining

Alter = Callable[[Tensor, torch.Generator], Tensor]
Embedded = tuple[Tensor, dict[str, Tensor]]
"""The active party's own embeddings (B, d) and, by name, those that arrived from each passive party."""


class HeadTraining(SplitTraining):
    """Training of the top model alone, on embeddings that are sent once; no gradient is sent.

    Args, besides those of ``SplitTraining``:
        alter: by party, what changes rows before each transfer; without it, rows are sent once, as they are.
    """

    def __init__(self, *args: Any, alter: Mapping[str, Alter] | None = None) -> None:
        super().__init__(*args)
        self.alter = alter or {}
        self._noise = Streams()
        self._sent: dict[str, Embedded] = {}  # by split
        self.kept["noise"] = self._noise

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Have rows sent once, and train the head on them; return the mean loss of each epoch."""
        self._switch(training=False)
        if not self.alter:
            self._sent["train"] = self._all("train", phase)
        for name in self.alter:
            self._noise[name] = generator(self.federation.seed, "views", phase, name, device=self.federation.device)
        selection = selection_split(self.spec, self.federation)
        if selection:
            self._sent[selection] = self._all(selection, "validate")
        return super().fit(phase, progress)

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return logits (n, C) for ``split``; where it chooses the epoch, from what was sent before training."""
        if phase == "predict" or split not in self._sent:
            return super().predict(split, phase)
        self._switch(training=False)
        own, arrived = self._sent[split]
        return self.federation.active.defenses.decode_logits(self.top([own, *self._received(arrived)]))

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """Take as many steps of the head on one batch as there are local steps."""
        if self.alter:
            own, arrived = self._exchange(step)
        else:
            own, arrived = self._sent["train"]
            own, arrived = own[step.rows], {name: h[step.rows] for name, h in arrived.items()}
        losses = []
        for _ in range(self.spec.local_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = self._loss(own, arrived, step)
            loss.backward()  # type: ignore[no-untyped-call]
            self._clip()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        return losses[0]

    def _all(self, split: str, phase: str) -> Embedded:
        """Have every row of ``split`` sent, in batches and in order."""
        everybody = torch.arange(self.federation.n_rows(split), device=self.federation.device)
        steps = [Step(k, phase, rows, split=split) for k, rows in enumerate(torch.split(everybody, self.spec.batch))]
        own, arrived = zip(*map(self._exchange, steps), strict=True)
        return torch.cat(own), {name: torch.cat([h[name] for h in arrived]) for name in arrived[0]}

    @torch.no_grad()
    def _exchange(self, step: Step) -> Embedded:
        """Every party embeds the rows of ``step``, those that train the head altered if need be; they go up."""
        embedded = {}
        for party in self.federation.parties.values():
            x = self._fed(party, step)
            if party.name in self.alter and step.split == "train":
                x = self.alter[party.name](x, self._noise[party.name])
            embedded[party.name] = self.bottoms[party.name](x)  # (B, d)
        own = embedded.pop(self.federation.active.name)
        return own, {name: self._up(name, h, step) for name, h in embedded.items()}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of what the active party holds besides its bottom model; there is no other."""
        held = self.federation.active.modules
        return [self.spec.optimize(p for role, module in held.items() if role != "bottom" for p in module.parameters())]

    def _switch(self, *, training: bool) -> None:
        super()._switch(training=False)
        self.top.train(training)
