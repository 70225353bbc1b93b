"""A model split between parties: how the embeddings of rows reach the active party, and what it predicts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vflsec.core.federation import Federation
from vflsec.core.integrity import integrity_attacks
from vflsec.core.message import Step
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary

PREDICTION_BATCH = 4096


class SplitModel:
    """K bottom models, a boundary for each passive party, one top model.

    A malicious party may change what it computes on, sends and learns from.

    Args:
        federation: parties and wire.
        bottoms: each party's bottom model by name.
        top: the active party's top model.
        boundaries: the protocol to each passive party by name.
    """

    def __init__(
        self,
        federation: Federation,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        boundaries: Mapping[str, Boundary],
    ) -> None:
        self.federation = federation
        self.bottoms = bottoms
        self.top = top
        self.boundaries = boundaries
        self.malicious = integrity_attacks(federation.malicious)

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return logits (n, C) for ``split``."""
        self._switch(training=False)
        active, logits = self.federation.active, []
        everybody = torch.arange(self.federation.n_rows(split), device=self.federation.device)
        for number, rows in enumerate(torch.split(everybody, PREDICTION_BATCH)):
            step = Step(number, phase, rows, split=split)
            own = self.bottoms[active.name](active.features[split][rows])
            arrived = {
                party.name: self._up(party.name, self.bottoms[party.name](self._fed(party, step)), step)
                for party in self.federation.passive
            }
            logits.append(self.top([own, *self._received(arrived)]))
        return active.defenses.decode_logits(torch.cat(logits))

    def _changed(self, hook: str, name: str, value: Tensor, step: Step) -> Tensor:
        """Return ``value``, or what a malicious party has in its place."""
        attack = self.malicious.get(name)
        return getattr(attack, hook)(value.detach(), step._replace(labels=None)) if attack else value

    def _fed(self, party: Party, step: Step) -> Tensor:
        """Return what ``party`` feeds its own bottom model."""
        return self._changed("on_features", party.name, party.features[step.split][step.rows], step)

    def _up(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Return what arrives of the embedding ``h``."""
        return self.boundaries[name].forward(self._changed("on_embedding", name, h, step), step)

    def _down(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Return what the party feeds its bottom model of the gradient with respect to ``h``, as it arrived."""
        assert h.grad is not None
        return self._changed("on_gradient", name, self.boundaries[name].backward(h.grad, step), step)

    def _received(self, arrived: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the inputs of the top model: each received embedding after the active party's own defenses."""
        return [self.federation.active.defenses.received(h, name) for name, h in arrived.items()]

    def _switch(self, *, training: bool) -> None:
        modules = self.federation.active.modules
        learned = [modules["defenses"]] if "defenses" in modules else []
        for module in (*self.bottoms.values(), self.top, *learned):
            module.train(training)
