"""Supervised training across a cut layer: the loop of split learning, which fine-tuning reuses."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged
from vflsec.base.seeds import make_rng
from vflsec.core import hooks
from vflsec.core.attack import HijackingAttack, list_integrity
from vflsec.core.federation import Federation
from vflsec.core.message import Step
from vflsec.core.method import Progress
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary, LinearBoundary
from vflsec.core.settings import TrainSpec
from vflsec.methods.checkpoint import Stateful
from vflsec.methods.epochs import EarlyStopping, Epochs, Streams, count_traffic, get_selection, set_rate
from vflsec.nn.stacked import draw_batches
from vflsec.nn.wide import allow_sparse_gradients, create_optimizer
from vflsec.nn.wrappers import Columns, Frozen
from vflsec.results.metrics import METRICS

PREDICTION_BATCH = 4096


class SplitTraining:
    """K bottom models, a boundary for each passive party and one top model, and their training.

    A malicious party may change what it computes on, sends and learns from, and has its own optimizer.

    Args:
        federation: parties and wire.
        bottoms: each party's bottom model by name.
        top: the active party's top model.
        boundaries: the protocol to each passive party by name.
        spec: how to fit.

    Attributes:
        constraint: an extra term of the active party's own loss, or None.
        targets: (n,) class numbers, or (n, C) probabilities, of the training rows; only the active party has them, so
            that no step holds them. ``fit`` replaces the labels by those of the active party's defenses.
        kept: what else changes from one epoch to the next, by name, for a checkpoint.
    """

    def __init__(
        self,
        federation: Federation,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        boundaries: Mapping[str, Boundary],
        spec: TrainSpec,
    ) -> None:
        self.federation = federation
        self.bottoms = bottoms
        self.top = top
        self.boundaries = boundaries
        self.integrity_attacks = list_integrity(federation.malicious)
        self.spec = spec
        self.constraint: Callable[[], Tensor] | None = None
        self.targets = federation.active.labels.get("train", torch.empty(0))  # a source has none
        self.kept: dict[str, Stateful] = {}

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train in place on the aligned labeled rows; return the mean loss of each epoch."""
        federation, spec = self.federation, self.spec
        selection = get_selection(spec, federation)
        labels = self._prepare_targets("train", phase)
        optimizers, order = self._optimizers(), make_rng(federation.seed, "batches", phase)
        dropout = torch.default_generator
        if federation.device.type == "cuda":
            dropout = torch.cuda.default_generators[federation.device.index or 0]
        models = nn.ModuleDict({party.name: party.modules for party in federation.parties.values()})
        best = EarlyStopping(models, epochs=spec.count_epochs(len(labels)), patience=spec.patience)
        epochs = Epochs(
            federation,
            phase,
            progress,
            best.epochs,
            kept={"models": best, "streams": Streams(order=order, torch=dropout), **self.kept},
            optimizers=optimizers,
            boundaries=self.boundaries.values(),
            done=lambda: best.is_done,
        )
        self._switch(training=True)
        for epoch in epochs:
            rate = spec.rate(epoch, epochs.total)
            set_rate(optimizers[:1], rate)  # a malicious party keeps its own rate
            total = torch.zeros((), device=federation.device)
            parts = draw_batches(len(labels), spec.batch, order, federation.device)
            with allow_sparse_gradients(models) if self._can_use_sparse() else nullcontext():
                for number, rows in enumerate(parts, epoch * len(parts)):
                    step = Step(number, phase, rows, labels[rows], rate=rate)
                    total = total + self._update(step, optimizers) * len(rows)  # stacked runs have one loss each
            epochs.end(total / len(labels))
            if spec.target and not federation.reached and self._measure_test() >= spec.target:
                federation.reached = count_traffic(federation, epoch + 1)
            best.count(self._score(selection) if selection else None)
        if spec.select != "last":
            best.take_best()
        return epochs.losses

    def _can_use_sparse(self) -> bool:
        """Whether nothing but Adam reads the gradients of the parties' own models."""
        federation, spec = self.federation, self.spec
        changed = any(party.defenses.select(hooks.UPDATE) for party in federation.parties.values())
        return spec.optimizer == "adam" and not (spec.clip or federation.malicious or changed)

    def _prepare_targets(self, split: str, phase: str) -> Tensor:
        """Let the active party's defenses set ``targets``; return the class numbers (n,) that it keeps."""
        federation, active = self.federation, self.federation.active
        rng = federation.get_label_stream(phase)
        labels, self.targets = active.defenses.training_targets(
            active.labels[split], active.features[split], n_classes=federation.n_classes, rng=rng
        )
        return labels

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """One exchange: embeddings forward, loss, gradients back; every party updates its own models.

        Further local steps (FedBCD) repeat the update on the embeddings and gradients of the same exchange, which are
        then stale, and send nothing.
        """
        fed, embedded, arrived = {}, {}, {}
        for party in self.federation.passive:
            fed[party.name] = self._feed(party, step)
            embedded[party.name] = self.bottoms[party.name](fed[party.name])  # (B, d)
            received = self._forward(party.name, embedded[party.name], step)
            arrived[party.name] = received.detach().requires_grad_()  # a leaf, and not the message that taps keep
        active, first, gradients = self.federation.active, torch.zeros(()), {}
        for local_step in range(self.spec.local_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = self._compute_loss(self.bottoms[active.name](active.features[step.split][step.rows]), arrived, step)
            loss.backward()  # type: ignore[no-untyped-call]
            if local_step == 0:
                first = loss.detach()
                gradients = {name: self._backward(name, h, step) for name, h in arrived.items()}
            for party in self.federation.passive:
                again = self.bottoms[party.name](fed[party.name]) if local_step else embedded[party.name]
                further = self._list_extra_losses(party, step)
                torch.autograd.backward([again, *further], [gradients[party.name], *(None for _ in further)])
            for name, party in self.federation.parties.items():
                if name not in self.federation.malicious:
                    party.defenses.update(party.modules, len(step.rows), party.rng)
            self._clip()
            for optimizer in optimizers:
                optimizer.step()
        return first

    def _list_extra_losses(self, party: Party, step: Step) -> Sequence[Tensor]:
        """Losses of a passive party's own, which it learns from together with the gradient that it received."""
        return ()

    def _clip(self) -> None:
        """Bound the gradients of each party by themselves; a common norm would reveal those of the others."""
        if self.spec.clip:
            for party in self.federation.parties.values():
                nn.utils.clip_grad_norm_(party.modules.parameters(), self.spec.clip)

    def _compute_loss(self, h: Tensor, arrived: Mapping[str, Tensor], step: Step) -> Tensor:
        defenses = self.federation.active.defenses
        embeddings, targets = defenses.batch([h, *self._receive(arrived)], self.targets[step.rows])
        loss = self._penalize(F.cross_entropy(self.top(embeddings), targets, reduction="none").mean(), arrived, step)
        return loss if self.constraint is None else loss + self.constraint()

    def _penalize(self, loss: Tensor, arrived: Mapping[str, Tensor], step: Step) -> Tensor:
        """Return the loss with the penalties of the active party's defenses."""
        assert step.labels is not None
        return self.federation.active.defenses.penalize(loss, arrived, step.labels)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer for all honest parties, then that of each malicious one.

        Optimizers treat every entry by itself: one over all parties does what one for each would do, in less time.
        """
        honest, others = [], []
        for party in self.federation.parties.values():
            parameters = list(party.modules.parameters())
            attack = self.federation.malicious.get(party.name)
            if attack and (optimizer := attack.optimizer(parameters, self.spec.lr)):
                others.append(optimizer)
            else:
                honest += parameters
        return [create_optimizer(honest, self.spec), *others]

    def _score(self, split: str) -> float:
        """Return the headline metric on ``split``; embeddings are sent for it, and are counted and seen."""
        logits = self.predict(split, phase="validate")
        self._switch(training=True)
        if not torch.isfinite(logits).all():
            raise Diverged(f"the model predicts values that are not finite on {split} rows: lower train.lr")
        return METRICS[self.federation.metric](logits.cpu().numpy(), self.federation.active.labels[split].cpu().numpy())

    def _measure_test(self) -> float:
        """Return the headline metric on test rows, for ``train.target``; nothing is sent or chosen."""
        with self.federation.pause_recording():
            return self._score("test")

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return logits (n, C) for ``split``."""
        self._switch(training=False)
        active, logits = self.federation.active, []
        everybody = torch.arange(self.federation.n_rows(split), device=self.federation.device)
        for number, rows in enumerate(torch.split(everybody, PREDICTION_BATCH)):
            step = Step(number, phase, rows, split=split)
            h = self.bottoms[active.name](active.features[split][rows])
            arrived = {
                party.name: self._forward(party.name, self.bottoms[party.name](self._feed(party, step)), step)
                for party in self.federation.passive
            }
            logits.append(self.top([h, *self._receive(arrived)]))
        return active.defenses.decode_logits(torch.cat(logits))

    def _change(self, hook: str, name: str, value: Tensor, step: Step) -> Tensor:
        """Return ``value``, or what a malicious party has in its place."""
        attack = self.integrity_attacks.get(name)
        return getattr(attack, hook)(value.detach(), step._replace(labels=None)) if attack else value

    def _feed(self, party: Party, step: Step) -> Tensor:
        """Return what ``party`` feeds its own bottom model."""
        return self._change("on_features", party.name, party.features[step.split][step.rows], step)

    def _forward(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Return what arrives of the embedding ``h``."""
        return self.boundaries[name].forward(self._change("on_embedding", name, h, step), step)

    def _backward(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Return what the party feeds its bottom model of the gradient with respect to ``h``, as it arrived."""
        assert h.grad is not None
        g, attack = h.grad, self.federation.malicious.get(self.federation.active.name)
        if isinstance(attack, HijackingAttack):
            g = attack.replace_gradient(name, h.detach(), g, step)
        return self._change("on_gradient", name, self.boundaries[name].backward(g, step), step)

    def _receive(self, arrived: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the inputs of the top model: each received embedding after the active party's own defenses."""
        return [self.federation.active.defenses.apply_to_received(h, name) for name, h in arrived.items()]

    def _switch(self, *, training: bool) -> None:
        modules = self.federation.active.modules
        learned = [modules["defenses"]] if "defenses" in modules else []
        for module in (*self.bottoms.values(), self.top, *learned):
            module.train(training)


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
            self._sent["train"] = self._send_all("train", phase)
        for name in self.alter:
            self._noise[name] = make_rng(self.federation.seed, "views", phase, name, device=self.federation.device)
        selection = get_selection(self.spec, self.federation)
        if selection:
            self._sent[selection] = self._send_all(selection, "validate")
        return super().fit(phase, progress)

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return logits (n, C) for ``split``; where it chooses the epoch, from what was sent before training."""
        if phase == "predict" or split not in self._sent:
            return super().predict(split, phase)
        self._switch(training=False)
        h, arrived = self._sent[split]
        return self.federation.active.defenses.decode_logits(self.top([h, *self._receive(arrived)]))

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """Take as many steps of the head on one batch as there are local steps."""
        if self.alter:
            active_h, arrived = self._exchange(step)
        else:
            active_h, arrived = self._sent["train"]
            active_h, arrived = active_h[step.rows], {name: h[step.rows] for name, h in arrived.items()}
        losses = []
        for _ in range(self.spec.local_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = self._compute_loss(active_h, arrived, step)
            loss.backward()  # type: ignore[no-untyped-call]
            self._clip()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        return losses[0]

    def _send_all(self, split: str, phase: str) -> Embedded:
        """Have every row of ``split`` sent, in batches and in order."""
        everybody = torch.arange(self.federation.n_rows(split), device=self.federation.device)
        steps = [Step(k, phase, rows, split=split) for k, rows in enumerate(torch.split(everybody, self.spec.batch))]
        active_h, arrived = zip(*map(self._exchange, steps), strict=True)
        return torch.cat(active_h), {name: torch.cat([h[name] for h in arrived]) for name in arrived[0]}

    @torch.no_grad()
    def _exchange(self, step: Step) -> Embedded:
        """Embed ``step`` at every party, training rows altered by ``alter``, and send the embeddings."""
        embedded = {}
        for party in self.federation.parties.values():
            x = self._feed(party, step)
            if party.name in self.alter and step.split == "train":
                x = self.alter[party.name](x, self._noise[party.name])
            embedded[party.name] = self.bottoms[party.name](x)  # (B, d)
        active_h = embedded.pop(self.federation.active.name)
        return active_h, {name: self._forward(name, h, step) for name, h in embedded.items()}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of what the active party holds besides its bottom model; there is no other."""
        held = self.federation.active.modules
        parameters = [p for role, module in held.items() if role != "bottom" for p in module.parameters()]
        return [create_optimizer(parameters, self.spec)]

    def _switch(self, *, training: bool) -> None:
        super()._switch(training=False)
        self.top.train(training)


class SharedHeadTraining(SplitTraining):
    """Weights that a protocol holds learn in exchanges: rows are sent in every epoch, and no gradient comes back.

    The arguments are those of ``SplitTraining``, with every bottom model ``Frozen``.
    """

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Check every row, since frozen embeddings are known before any is sent; then train as ``SplitTraining``."""
        self._switch(training=False)  # running statistics must not change
        for party in self.federation.passive:
            bottom, boundary = self.bottoms[party.name], self.boundaries[party.name]
            assert isinstance(bottom, Frozen)
            if isinstance(boundary, LinearBoundary):
                columns = party.layout.names if isinstance(bottom.model, Columns) else None
                for split in self.federation.active.labels:
                    boundary.check(bottom(party.features[split]), columns)
        return super().fit(phase, progress)

    def _backward(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Update the weights; the zeros that are returned end at the embedding, which is a leaf."""
        boundary, bottom = self.boundaries[name], self.bottoms[name]
        if not isinstance(boundary, LinearBoundary):  # one that learns only by sending
            return super()._backward(name, h, step)
        assert isinstance(bottom, Frozen)
        assert h.grad is not None
        boundary.learn(h.grad, step)
        return h.new_zeros(len(h), bottom.width)
