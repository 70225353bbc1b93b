"""Supervised training across a cut layer: the loop that split learning is, and that fine-tuning reuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.errors import Diverged, UsageError
from vflsec.core.federation import Federation
from vflsec.core.integrity import integrity_attacks
from vflsec.core.message import Kind, Step
from vflsec.core.method import Progress
from vflsec.core.metrics import METRICS
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.seeds import generator
from vflsec.core.settings import TrainSpec
from vflsec.nn.batches import batches

PREDICTION_BATCH = 4096
UPWARD = (Kind.EMBEDDING, Kind.CIPHERTEXT)


class SplitTraining:
    """K bottom models, a boundary for each passive party, one top model.

    A malicious party trains with its own optimizer, and may spoil what it computes on, sends and learns from.

    Args:
        federation: parties and wire.
        bottoms: each party's bottom model by name.
        top: the active party's top model.
        boundaries: the protocol to each passive party by name.
        spec: how to fit.
        constraint: an extra term of the active party's own loss, or None.

    Attributes:
        targets: (n,) class numbers, or (n, C) probabilities, that the training rows teach; the active party's alone,
            and therefore in no step. Until ``fit`` has asked its defenses, the labels.
    """

    def __init__(
        self,
        federation: Federation,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        boundaries: Mapping[str, Boundary],
        spec: TrainSpec,
        constraint: Callable[[], Tensor] | None = None,
    ) -> None:
        self.federation = federation
        self.bottoms = bottoms
        self.top = top
        self.boundaries = boundaries
        self.spec = spec
        self.constraint = constraint
        self.malicious = integrity_attacks(federation.malicious)
        self.targets = federation.active.labels.get("train", torch.empty(0))  # a source has none

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train in place on the aligned labeled rows; return the mean loss of each epoch.

        Raises:
            Diverged: a loss is not finite.
            UsageError: early stopping or selection without validation rows.
        """
        federation, spec = self.federation, self.spec
        selection = selection_split(spec, federation)
        active, rng = federation.active, generator(federation.seed, "labels", phase, device=federation.device)
        labels, self.targets = active.defenses.training_targets(
            active.labels["train"], active.features["train"], n_classes=federation.n_classes, rng=rng
        )
        optimizers = self._optimizers()
        self._switch(training=True)
        order = generator(federation.seed, "batches", phase)
        epochs, history = spec.n_epochs(len(labels)), []
        best, best_epoch, best_states = -1.0, 0, None
        step = 0
        for epoch in range(epochs):
            rate = spec.rate(epoch, epochs)
            for group in optimizers[0].param_groups:  # a malicious party keeps its own rate
                group["lr"] = rate
            total = torch.zeros((), device=federation.device)
            for rows in batches(len(labels), spec.batch, order, federation.device):
                loss = self._update(Step(step, phase, rows, labels[rows], rate=rate), optimizers)
                total += loss * len(rows)
                step += 1
            history.append(float(total) / len(labels))
            if not history[-1] < float("inf"):
                raise Diverged(f"the loss is {history[-1]} after epoch {epoch + 1}: lower train.lr")
            progress(phase, epoch + 1, epochs)
            if spec.target and not federation.reached and self._measured() >= spec.target:
                federation.reached = traffic_so_far(federation, epoch + 1)
            if selection:
                score = self._score(selection)
                if score > best:
                    best, best_epoch, best_states = score, epoch, self._states()
                if spec.patience and epoch - best_epoch >= spec.patience:
                    break
        if best_states and spec.select != "last":
            self._restore(best_states)
        return history

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """One exchange: embeddings up, loss, gradients down; every party updates its own models on what it brought.

        Further local steps (FedBCD) repeat the update on the embeddings and the gradients of the same exchange, which
        grow stale, and say nothing to anybody.
        """
        fed, embedded, arrived = {}, {}, {}
        for party in self.federation.passive:
            fed[party.name] = self._fed(party, step)
            embedded[party.name] = self.bottoms[party.name](fed[party.name])  # (B, d)
            received = self._up(party.name, embedded[party.name], step)
            arrived[party.name] = received.detach().requires_grad_()  # a leaf, and not the message that taps keep
        first, gradients = torch.zeros(()), {}
        for local_step in range(self.spec.local_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            own = self.bottoms[self.federation.active.name](
                self.federation.active.features[step.split][step.rows]
            )  # (B, d)
            loss = self._loss(own, arrived, step)
            loss.backward()  # type: ignore[no-untyped-call]
            if local_step == 0:
                first = loss.detach()
                gradients = {name: self._down(name, h, step) for name, h in arrived.items()}
            for party in self.federation.passive:
                again = self.bottoms[party.name](fed[party.name]) if local_step else embedded[party.name]
                own_loss = self._besides(party, step)
                torch.autograd.backward([again, *own_loss], [gradients[party.name], *(None for _ in own_loss)])
            self._defend(len(step.rows))
            self._clip()
            for optimizer in optimizers:
                optimizer.step()
        return first

    def _besides(self, party: Party, step: Step) -> Sequence[Tensor]:
        """Losses of a passive party's own, which it learns from together with the gradient that came back."""
        return ()

    def _fed(self, party: Party, step: Step) -> Tensor:
        """What ``party`` feeds its own bottom model: its columns, or what it makes of them against the rules."""
        x = party.features[step.split][step.rows]
        attack = self.malicious.get(party.name)
        return attack.on_features(x, step._replace(labels=None)) if attack else x

    def _up(self, name: str, h: Tensor, step: Step) -> Tensor:
        """What arrives of the embedding ``h``, or of what is sent in its place."""
        attack = self.malicious.get(name)
        h = attack.on_embedding(h.detach(), step._replace(labels=None)) if attack else h
        return self.boundaries[name].forward(h, step)

    def _down(self, name: str, h: Tensor, step: Step) -> Tensor:
        """What the party feeds its bottom model of the loss gradient that ``h``, as it arrived, has got."""
        assert h.grad is not None
        g = self.boundaries[name].backward(h.grad, step)
        attack = self.malicious.get(name)
        return attack.on_gradient(g, step._replace(labels=None)) if attack else g

    def _defend(self, rows: int) -> None:
        """Honest parties change their own update as their defenses have it."""
        for name, party in self.federation.parties.items():
            if name not in self.federation.malicious:
                party.defend_update(rows)

    def _clip(self) -> None:
        """Each party bounds its own gradients; a common norm would tell it of the others'."""
        if self.spec.clip:
            for party in self.federation.parties.values():
                nn.utils.clip_grad_norm_(party.modules.parameters(), self.spec.clip)

    def _loss(self, own: Tensor, arrived: Mapping[str, Tensor], step: Step) -> Tensor:
        embeddings: Sequence[Tensor] = [own, *self._received(arrived)]
        embeddings, targets = self.federation.active.defenses.batch(embeddings, self.targets[step.rows])
        loss = self._penalized(F.cross_entropy(self.top(embeddings), targets), arrived, step)
        return loss if self.constraint is None else loss + self.constraint()

    def _penalized(self, loss: Tensor, arrived: Mapping[str, Tensor], step: Step) -> Tensor:
        """The loss with what the active party's defenses add to it."""
        assert step.labels is not None
        return self.federation.active.defenses.penalized(loss, arrived, step.labels)

    def _received(self, arrived: Mapping[str, Tensor]) -> list[Tensor]:
        """What the top model is fed: each received embedding after the active party's own defenses."""
        return [self.federation.active.defenses.received(h, name) for name, h in arrived.items()]

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return logits (n, C) for ``split``."""
        self._switch(training=False)
        logits = []
        everybody = torch.arange(self.federation.n_rows(split), device=self.federation.device)
        for number, rows in enumerate(torch.split(everybody, PREDICTION_BATCH)):
            step = Step(number, phase, rows, split=split)
            own = self.bottoms[self.federation.active.name](self.federation.active.features[split][rows])
            arrived = {
                party.name: self._up(party.name, self.bottoms[party.name](self._fed(party, step)), step)
                for party in self.federation.passive
            }
            logits.append(self.top([own, *self._received(arrived)]))
        return self.federation.active.defenses.decode_logits(torch.cat(logits))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer for all honest parties, and its own for each malicious one.

        All of them treat every entry by itself: one over all parties does exactly what one for each would do, and
        saves a tenth of the time of a step.
        """
        spec, honest, found = self.spec, [], []
        for party in self.federation.parties.values():
            parameters = list(party.modules.parameters())
            own = self.federation.malicious.get(party.name)
            malicious = own.optimizer(parameters, spec.lr) if own else None
            found += [malicious] if malicious else []
            honest += [] if malicious else parameters
        return [spec.optimize(honest), *found]

    def _score(self, split: str) -> float:
        """The headline metric on ``split``; embeddings cross the wire for it, and are counted and seen."""
        logits = self.predict(split, phase="validate")
        self._switch(training=True)
        if not torch.isfinite(logits).all():
            raise Diverged(f"the model predicts values that are not finite on {split} rows: lower train.lr")
        return METRICS[self.federation.metric](logits.cpu().numpy(), self.federation.active.labels[split].cpu().numpy())

    def _measured(self) -> float:
        """The headline metric on test rows, for our own table: nothing is said on the wire, and nothing is chosen."""
        with self.federation.without_recording():
            return self._score("test")

    def _switch(self, *, training: bool) -> None:
        modules = self.federation.active.modules
        learned = [modules["defenses"]] if "defenses" in modules else []
        for module in (*self.bottoms.values(), self.top, *learned):
            module.train(training)

    def _states(self) -> dict[str, dict[str, Tensor]]:
        return {party.name: copy.deepcopy(party.modules.state_dict()) for party in self.federation.parties.values()}

    def _restore(self, states: dict[str, dict[str, Tensor]]) -> None:
        for name, state in states.items():
            self.federation.parties[name].modules.load_state_dict(state)


def traffic_so_far(federation: Federation, epochs: int) -> dict[str, float]:
    """Return what has been said until now, in bytes: truly, and as SS-VFL (section 5.1) counts it.

    The paper counts embeddings on their way up alone, and has a server apart from all K parties, so that the active
    party's embeddings travel as well.
    """
    trained = {
        route: n for route, n in federation.channel.traffic.items() if route.phase not in ("predict", "validate")
    }
    up = sum(n for route, n in trained.items() if route.kind in UPWARD and route.receiver == federation.active.name)
    parties = len(federation.parties)
    return {"epochs": epochs, "paper_bytes": up * parties / (parties - 1), "true_bytes": sum(trained.values())}


def selection_split(spec: TrainSpec, federation: Federation) -> str | None:
    """Return the split whose metric chooses the epoch, or None if the last one is taken.

    Raises:
        UsageError: validation rows are needed, and there are none.
    """
    if spec.select == "paper_best_on_test":
        return "test"
    if spec.select == "last" and not spec.patience:
        return None
    if not federation.n_rows("val"):
        raise UsageError("early stopping and best_on_val need validation rows, got none: add --set data.validation=0.1")
    return "val"
