"""PrADA: feature extractors learned with a source party serve an active party that has few labels."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vflsec.base.checks import check_non_negative, check_positive, check_positive_or_none
from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core.federation import Federation
from vflsec.core.message import SOURCE, Kind, Step
from vflsec.core.method import RATES, Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.methods.epochs import Epochs, set_rate
from vflsec.methods.feature_group_method import FeatureGroupMethod
from vflsec.methods.split_method import SPLIT
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.feature_groups import DomainDiscriminators, FeatureGroups
from vflsec.nn.stacked import draw_batches
from vflsec.nn.wide import create_optimizer
from vflsec.nn.wrappers import Columns
from vflsec.protocols.plain import PlainBoundary


def scale_reversal(q: float) -> float:
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

    Args, besides those of ``SplitTraining``, of the source's federation:
        discriminators: by passive party.
        adaptation: lambda; with 0 discriminators learn without effect on the extractors.
        ramp_epochs: length of the ramp of alpha; None for a constant alpha.
        decay_epochs: epochs after which the learning rate has fallen to a sixth.
        alternating: take the two steps one after the other.
    """

    def __init__(
        self,
        federation: Federation,
        *split: Any,
        discriminators: Mapping[str, DomainDiscriminators],
        adaptation: float,
        ramp_epochs: int | None,
        decay_epochs: int,
        alternating: bool,
    ) -> None:
        super().__init__(federation, *split)
        self.targets = federation.active.labels["source"]
        self.discriminators = discriminators
        self.adaptation = adaptation
        self.ramp_epochs = ramp_epochs
        self.decay_epochs = decay_epochs
        self.alternating = alternating
        self._alpha = 0.0
        self._targets: dict[tuple[str, int], Sequence[Tensor]] = {}

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train in place; return the mean loss on the source's labels by epoch."""
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
            order = make_rng(federation.seed, "batches", phase, epoch)
            total = torch.zeros((), device=federation.device)
            parts = draw_batches(len(labels), spec.batch, order, federation.device)
            with seed_weights(federation.seed, "dropout", phase, epoch):
                for number, rows in enumerate(parts, epoch * len(parts)):
                    rate = self._set_schedule(number / len(parts), optimizers)
                    step = Step(number, phase, rows, labels[rows], split="source", rate=rate)
                    total += self._update(step, optimizers) * len(rows)
            epochs.end(float(total) / len(labels))
        return epochs.losses

    def _set_schedule(self, epochs: float, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        """Set alpha and the learning rate after so many ``epochs``, the last one in part; return the rate."""
        ramp = 1.0 if self.ramp_epochs is None else scale_reversal(epochs / self.ramp_epochs)
        self._alpha, rate = self.adaptation * ramp, self.spec.lr * decay(epochs / self.decay_epochs)
        set_rate(optimizers[: 2 if self.alternating else 1], rate)  # a malicious party keeps its own rate
        return rate

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        if not self.alternating:
            return super()._update(step, optimizers)
        first, passive, *malicious = optimizers
        passive.zero_grad()
        for party in self.federation.passive:
            bottom = self._get_bottom(party)
            bottom.extracted = bottom.extract(self._feed(party, step))
            self._compute_domain_loss(party, step).backward()  # type: ignore[no-untyped-call]
        passive.step()
        return super()._update(step, [first, *malicious])

    def _list_extra_losses(self, party: Party, step: Step) -> Sequence[Tensor]:
        return () if self.alternating else (self._compute_domain_loss(party, step),)

    def _compute_domain_loss(self, party: Party, step: Step) -> Tensor:
        """Return the loss of the party's discriminators; its gradient is reversed below them."""
        bottom = self._get_bottom(party)
        target = bottom.extract(party.features["adaptation"][self._draw_target_rows(party, step.number)])
        return self.discriminators[party.name].loss(bottom.extracted, target, self._alpha)

    def _get_bottom(self, party: Party) -> FeatureGroups:
        bottom = self.bottoms[party.name]
        assert isinstance(bottom, FeatureGroups)
        return bottom

    def _draw_target_rows(self, party: Party, number: int) -> Tensor:
        """Return the batch of a step: the party goes through its rows again and again, each time in another order."""
        count = len(party.features["adaptation"])
        several = max(1, math.ceil(count / self.spec.batch) - (count % self.spec.batch == 1))
        turn, place = divmod(number, several)
        if (party.name, turn) not in self._targets:
            order = make_rng(self.federation.seed, "batches", "adaptation", party.name, turn)
            self._targets = {key: rows for key, rows in self._targets.items() if key[0] != party.name}
            self._targets[party.name, turn] = draw_batches(count, self.spec.batch, order, self.federation.device)
        return self._targets[party.name, turn][place]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """That of all honest parties; where steps alternate also one for what passive parties do alone; malicious ones.

        Each has a momentum of its own. What gets no gradient in a step is left alone by it.
        """
        honest, *malicious = super()._optimizers()
        if not self.alternating:
            return [honest, *malicious]
        alone = (p for party in self.federation.passive for p in party.modules.parameters())
        return [honest, create_optimizer(alone, self.spec), *malicious]


UNGROUPED: dict[str, Any] = {"width": 36, "spectral": False}
"""The discriminator of all columns together, as in the authors' code."""


class PrADA(FeatureGroupMethod):
    """Adversarial domain adaptation over feature groups from a source, then a logistic regression of few labels.

    1. Pre-training of the source B with the passive party C, on the source's labeled rows: a logistic regression of
       B's, and C's extractors and aggregators, one for each feature group and each pair of groups. At the same time C
       trains its extractors to return similar values for B's people and for A's, which takes no message.
    2. Fine-tuning of the active party A with C: a new logistic regression of A's own columns and C's g numbers, on A's
       labeled rows.

    Attacks are on A's people. Messages of pre-training are about B's people: an attack on labels that reads gradients
    at ``@pretrain`` is on B's labels, and ``--adversary source`` attacks C's columns of B's people there. Attacks on
    integrity begin in pre-training.

    Source: PrADA (Kang et al. 2022, "Privacy-preserving Federated Adversarial Domain Adaptation over Feature Groups for
    Interpretability"), sections 5 and 6, algorithms 1 and 2; its authors' code.

    Args:
        model: the head must be linear on concatenated inputs; encoders are not read.
        boundary: the protocol at the cut layer, to both active parties.
        alternating: pre-train as algorithm 1 is printed; else all in one step, as the code does.
        adaptation: lambda of eq. 4, the weight of the reversed gradient; 0 adapts nothing.
        ramp_epochs: epochs over which that weight grows from 0, as in the authors' code, which has 600; no more than
            those of pre-training, if it is to be reached. None for a constant weight, as in eq. 4.
        decay_epochs: epochs over which the learning rate of pre-training falls to a sixth.
        finetune_extractors: whether C's models learn in fine-tuning.
    """

    name = "prada"
    version = 2
    reference = "Kang et al. 2022 (PrADA), IEEE Transactions on Big Data, sections 5 and 6, algorithms 1 and 2"
    differs: ClassVar[tuple[str, ...]] = (
        *FeatureGroupMethod.differs,
        "The weight lambda of eq. 4 is constant (adaptation), and 0.01 by default, so that little is adapted. The "
        "paper names no value; within the few epochs of pre-training a larger weight costs utility on Census-Income. "
        "The authors' code lets it grow from 0 to 1 over 600 epochs (ramp_epochs=600, adaptation=1), and stops by "
        "labels after at most 200, at 0.93; in the 3 epochs of the default it stays below 0.03, and adapts nothing.",
        "L_adv is the mean of cross-entropy over the rows of both domains, as in the authors' code: half of eq. 2, "
        "which sums the means of both. So eq. 4's lambda is half of adaptation.",
        "Lambda weighs the extractors alone, as in the authors' code; in eq. 5 it weighs the discriminators' step too.",
        "Both losses of pre-training are minimized in one step through a reversed gradient, as in the authors' "
        "code. Algorithm 1 takes two steps (alternating=true).",
        "Discriminators of feature groups have layers of 24, 10 and 2, the first with spectral normalization, as in "
        "the authors' code; the paper mentions neither.",
        "The learning rate of pre-training falls as (1 + 10 q)^-0.75 with q the share of decay_epochs, 600, that "
        "is over, as in the authors' code; the paper mentions no decay.",
        "Pre-training has the paper's rate 0.0005 and batches of 128 (it has 64 for Loan Default), with momentum 0.99 "
        "and weight decay 1e-5 as in the authors' code. It takes 3 epochs by default; the authors' code stops by the "
        "target's validation labels, which no party of this phase has.",
        "BatchNorm reads each domain's batch by itself, as in the authors' code.",
        "Fine-tuning trains passive models too, as algorithm 2 prints; the authors' code trains the logistic "
        "regression alone (finetune_extractors=false).",
        "No loss is weighted by class; the authors' code weighs positives three times when it pre-trains on loans.",
        "Encryption (phe) corrects algorithms 4 and 5: gradients by the weights before the update, fresh masks, "
        "and momentum.",
    )
    ungrouped_differs = (
        *FeatureGroupMethod.ungrouped_differs,
        "The discriminator is 36 wide and has no spectral normalization, as in the authors' code.",
    )
    phases = ("pretrain", "finetune")
    messages = {"pretrain": SPLIT, "finetune": SPLIT}  # noqa: RUF012  (declared ClassVar in the base class)
    stored_modules = frozenset({"bottom"})
    last_phase_options = frozenset({"finetune_extractors"})
    source_phases = frozenset({"pretrain"})
    search = {**RATES, "train.pretrain.lr": (1e-4, 1e-2), "adaptation": (1e-3, 0.1)}  # noqa: RUF012

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        alternating: bool = False,
        adaptation: float = 0.01,
        ramp_epochs: int | None = None,
        decay_epochs: int = 600,
        finetune_extractors: bool = True,
    ) -> None:
        super().__init__(train, model, boundary=boundary)
        check_non_negative(adaptation=adaptation)
        check_positive(decay_epochs=decay_epochs)
        check_positive_or_none(ramp_epochs=ramp_epochs)
        given = train.pretrain
        self.pretrain_spec = TrainSpec(
            epochs=given.epochs or 3,
            batch=given.batch or 128,
            lr=given.lr or 5e-4,
            optimizer="sgd",
            momentum=0.99,
            weight_decay=1e-5 if given.weight_decay is None else given.weight_decay,
        )
        if self.pretrain_spec.batch < 2:
            raise UsageError("expected train.pretrain.batch >= 2, got 1: one row tells BatchNorm nothing")
        self.alternating = alternating
        self.adaptation = adaptation
        self.ramp_epochs = ramp_epochs
        self.decay_epochs = decay_epochs
        self.finetune_extractors = finetune_extractors
        self._source_boundaries: dict[str, Boundary] = {}

    @property
    def pretraining(self) -> PretrainSpec:
        """Epochs, batch, first learning rate and weight decay."""
        spec = self.pretrain_spec
        return PretrainSpec(epochs=spec.epochs, batch=spec.batch, lr=spec.lr, weight_decay=spec.weight_decay)

    @classmethod
    def messages_in(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:
        """Return the kinds of messages: with extractors that stay, no gradient comes back in fine-tuning."""
        stay = phase != "pretrain" and not options.get("finetune_extractors", True)
        return frozenset({Kind.EMBEDDING}) if stay else super().messages_in(phase, options)

    def build(self, federation: Federation) -> None:
        """Draw A's and C's models, C's discriminators, and B's logistic regression."""
        super().build(federation)
        if federation.source is None:
            raise UsageError(f"{self.name} expects a source to learn from, got none: add --dataset census-domains")
        source = self.make_source(federation)
        source.active.modules["bottom"] = Columns(source.active.n_features)
        self._source_boundaries = self.connect(source, self.pretrain_spec, _count_rows(source), "top", "source")
        for party in federation.passive:
            with seed_weights(federation.seed, "model", party.name, "discriminators"):
                party.modules["discriminators"] = self.discriminators(party)
        for party in federation.all_parties:
            party.modules.to(federation.device)

    def discriminators(self, party: Party) -> DomainDiscriminators:
        """Draw the discriminators of the outputs of a passive party's extractors."""
        widths = party.module("bottom", FeatureGroups).widths
        return DomainDiscriminators(widths, **({} if self.grouped else UNGROUPED))

    def make_source(self, federation: Federation) -> Federation:
        """Return the federation of pre-training: the source is its active party."""
        assert federation.source is not None
        parties = {party.name: party for party in (federation.source, *federation.passive)}
        return Federation(
            parties,
            federation.channel,
            federation.n_classes,
            federation.metric,
            federation.seed,
            federation.device,
            malicious=federation.malicious,
            checkpoint=federation.checkpoint,
        )

    def observers(self) -> tuple[str, ...]:
        """Return the source."""
        return (SOURCE,)

    def max_releases(self, phase: str, federation: Federation) -> int | None:
        """Return the number of epochs: in each, every row of that phase crosses once."""
        return self.pretrain_spec.epochs if phase == "pretrain" else super().max_releases(phase, federation)

    def record(self, folder: Path) -> None:
        """Record every boundary; those of the source in a folder ``source``."""
        super().record(folder)
        for name, boundary in self._source_boundaries.items():
            boundary.record(folder / "source" / name)

    def close(self) -> None:
        """Close every boundary."""
        super().close()
        for boundary in self._source_boundaries.values():
            boundary.close()

    def is_frozen(self, party: Party) -> bool:
        """Return whether fine-tuning leaves the extractors."""
        return not self.finetune_extractors

    def cryptography(self, federation: Federation) -> float:
        """Return about how many CPU seconds the protocols at the cut layer take for the batches of both phases."""
        batches = self.pretrain_spec.count_batches(_count_rows(self.make_source(federation)))
        return sum(boundary.seconds(batches) for boundary in self._source_boundaries.values()) + super().cryptography(
            federation
        )

    def pretrain(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Learn from the source while domains are adapted; return the mean loss on the source's labels by epoch."""
        return self.make_adversarial(federation).fit(phase, progress)

    def make_adversarial(self, federation: Federation) -> AdversarialTraining:
        """Return the pre-training."""
        source = self.make_source(federation)
        return AdversarialTraining(
            source,
            {party.name: self.representation(party) for party in source.parties.values()},
            source.active.modules["top"],
            self._source_boundaries,
            self.pretrain_spec,
            discriminators={
                party.name: party.module("discriminators", DomainDiscriminators) for party in federation.passive
            },
            adaptation=self.adaptation,
            ramp_epochs=self.ramp_epochs,
            decay_epochs=self.decay_epochs,
            alternating=self.alternating,
        )

    def split(self, federation: Federation) -> SplitTraining:
        """Return the fine-tuning."""
        return super().split(federation) if self.finetune_extractors else self.build_head_training(federation)


def _count_rows(source: Federation) -> int:
    """How many the source learns from."""
    return len(source.active.labels["source"])
