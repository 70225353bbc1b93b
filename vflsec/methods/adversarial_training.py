"""Split learning with a source party, with adversarial domain adaptation at each passive party."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vflsec.base.seeds import drawing, generator
from vflsec.core.federation import Federation
from vflsec.core.message import Step
from vflsec.core.method import Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.settings import TrainSpec
from vflsec.methods.epochs import Epochs, set_rate
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.batches import batches
from vflsec.nn.domain_discriminators import DomainDiscriminators
from vflsec.nn.feature_groups import FeatureGroups


def reversal(q: float) -> float:
    """Return the factor of the adaptation weight after the share ``q`` of its ramp."""
    return 2 / (1 + math.exp(-10 * q)) - 1


def decay(q: float) -> float:
    """Return the factor of the learning rate after the share ``q`` of its decay."""
    return float((1 + 10 * q) ** -0.75)


class AdversarialTraining(SplitTraining):
    """Pre-training of PrADA: learns the source's labels and, in the same steps, adapts the two domains to each other.

    Each step is one exchange on rows of the source, as in split learning. Besides, each passive party takes as many
    rows to adapt to. Its discriminators learn to distinguish the two, its extractors to prevent that, by a reversed
    gradient of weight alpha. Or, ``alternating``, algorithm 1 as printed: first that step alone, then mu is computed
    with the changed extractors for the exchange.

    Alpha is ``adaptation``, the constant lambda of eq. 4. With ``ramp_epochs`` it is multiplied by
    2 / (1 + exp(-10 q)) - 1, q being the share of the ramp that is over. The learning rate is multiplied by
    (1 + 10 q)^-0.75, q being the share of ``decay_epochs`` that is over. Both schedules come from the authors' code,
    which has 600 epochs for either and runs at most a third of them; the paper does not mention them.

    Source: PrADA (Kang et al. 2022), section 6.1 and algorithm 1; Ganin and Lempitsky 2015 for the schedules.

    Args:
        federation: of the source, the passive parties and the wire.
        bottoms: each party's bottom model by name.
        top: the source's top model.
        boundaries: the protocol to each passive party by name.
        spec: how to fit; ``epochs`` is a number.
        discriminators: by passive party.
        adaptation: lambda; with 0 discriminators learn without effect on the extractors.
        ramp_epochs: length of the ramp of alpha; None for a constant alpha.
        decay_epochs: epochs after which the learning rate has fallen to a sixth.
        alternating: take the two steps one after the other.
    """

    def __init__(
        self,
        federation: Federation,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        boundaries: Mapping[str, Boundary],
        spec: TrainSpec,
        discriminators: Mapping[str, DomainDiscriminators],
        *,
        adaptation: float,
        ramp_epochs: int | None,
        decay_epochs: int,
        alternating: bool,
    ) -> None:
        super().__init__(federation, bottoms, top, boundaries, spec)
        self.targets = federation.active.labels["source"]
        self.discriminators = discriminators
        self.adaptation = adaptation
        self.ramp_epochs = ramp_epochs
        self.decay_epochs = decay_epochs
        self.alternating = alternating
        self._alpha = 0.0
        self._targets: dict[tuple[str, int], Sequence[Tensor]] = {}

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train in place; return the mean loss on the source's labels by epoch.

        Raises:
            Diverged: a loss is not finite.
        """
        federation, spec = self.federation, self.spec
        labels, optimizers = self._prepare_targets("source", phase), self._optimizers()
        assert spec.epochs is not None
        epochs = Epochs(
            federation,
            phase,
            progress,
            spec.epochs,
            kept={party.name: party.modules for party in federation.parties.values()},
            optimizers=optimizers,
            boundaries=self.boundaries.values(),
        )
        self._switch(training=True)
        for epoch in epochs:
            federation.begin(phase, epoch)
            order = generator(federation.seed, "batches", phase, epoch)
            total = torch.zeros((), device=federation.device)
            parts = batches(len(labels), spec.batch, order, federation.device)
            with drawing(federation.seed, "dropout", phase, epoch):
                for number, rows in enumerate(parts, epoch * len(parts)):
                    rate = self._schedule(number / len(parts), optimizers)
                    step = Step(number, phase, rows, labels[rows], split="source", rate=rate)
                    total += self._update(step, optimizers) * len(rows)
            epochs.end(float(total) / len(labels))
        return epochs.losses

    def _schedule(self, epochs: float, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        """Set alpha and the learning rate after so many ``epochs``, the last one in part; return the rate."""
        ramp = 1.0 if self.ramp_epochs is None else reversal(epochs / self.ramp_epochs)
        self._alpha, rate = self.adaptation * ramp, self.spec.lr * decay(epochs / self.decay_epochs)
        set_rate(optimizers[: 2 if self.alternating else 1], rate)  # a malicious party keeps its own rate
        return rate

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        if not self.alternating:
            return super()._update(step, optimizers)
        first, own, *malicious = optimizers
        own.zero_grad()
        for party in self.federation.passive:
            bottom = self._bottom(party)
            bottom.extracted = bottom.extract(self._fed(party, step))
            self._domain_loss(party, step).backward()  # type: ignore[no-untyped-call]
        own.step()
        return super()._update(step, [first, *malicious])

    def _besides(self, party: Party, step: Step) -> Sequence[Tensor]:
        return () if self.alternating else (self._domain_loss(party, step),)

    def _domain_loss(self, party: Party, step: Step) -> Tensor:
        """Return the loss of the party's discriminators; its gradient is reversed below them."""
        bottom = self._bottom(party)
        target = bottom.extract(party.features["adaptation"][self._target_rows(party, step.number)])
        return self.discriminators[party.name].loss(bottom.extracted, target, self._alpha)

    def _bottom(self, party: Party) -> FeatureGroups:
        bottom = self.bottoms[party.name]
        assert isinstance(bottom, FeatureGroups)
        return bottom

    def _target_rows(self, party: Party, number: int) -> Tensor:
        """Return the batch of a step: the party goes through its rows again and again, each time in another order."""
        count = len(party.features["adaptation"])
        several = max(1, math.ceil(count / self.spec.batch) - (count % self.spec.batch == 1))
        turn, place = divmod(number, several)
        if (party.name, turn) not in self._targets:
            order = generator(self.federation.seed, "batches", "adaptation", party.name, turn)
            self._targets = {key: rows for key, rows in self._targets.items() if key[0] != party.name}
            self._targets[party.name, turn] = batches(count, self.spec.batch, order, self.federation.device)
        return self._targets[party.name, turn][place]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """That of all honest parties; where steps alternate also one for what passive parties do alone; malicious ones.

        Each has a momentum of its own. What gets no gradient in a step is left alone by it.
        """
        honest, *malicious = super()._optimizers()
        if not self.alternating:
            return [honest, *malicious]
        alone = (p for party in self.federation.passive for p in party.modules.parameters())
        return [honest, self.spec.optimize(alone), *malicious]
