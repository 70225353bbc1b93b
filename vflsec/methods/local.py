"""The active party alone, the baseline of every federation."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core.defense import DefenseStack
from vflsec.core.federation import Federation
from vflsec.core.method import Method, Progress
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.epochs import EarlyStopping, Epochs, get_selection, set_rate
from vflsec.methods.split_training import PREDICTION_BATCH
from vflsec.nn.encoders import build_encoder
from vflsec.nn.stacked import draw_batches
from vflsec.nn.top import build_top
from vflsec.nn.wide import create_optimizer
from vflsec.results.metrics import METRICS


class Learner(ABC):
    """A model that one party fits to its own rows (n, d) by itself.

    Random streams are named by epoch: a checkpoint of ``state`` and ``optimizer`` is all that it takes to resume.

    Attributes:
        state: the model, its best state, and how far training is.
    """

    state: EarlyStopping
    optimizer: torch.optim.Optimizer
    rows: Tensor

    @abstractmethod
    def epoch(self) -> float:
        """Make one pass over the rows, and return its mean loss.

        Raises:
            Diverged: it, or what is measured on held-out rows, is not finite.
        """

    @abstractmethod
    def finish(self) -> None:
        """Put the model into the state that the settings choose."""

    def _make_pass(self, parts: Sequence[Tensor], loss_of: Callable[[Tensor], Tensor], clip: float | None) -> float:
        """Make an update on each batch of ``parts``; return the mean of the loss that ``loss_of`` gives for it."""
        self.state.model.train()
        total = torch.zeros((), device=self.rows.device)
        for batch in parts:
            loss = loss_of(batch)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(self.state.model.parameters(), clip)
            self.optimizer.step()
            total += loss.detach() * len(batch)
        return float(total) / len(self.rows)


def learn(federation: Federation, phase: str, progress: Progress, learners: Mapping[str, Learner]) -> list[float]:
    """Train all learners, each until it is done; return the mean loss of those that still learn, by epoch."""
    epochs = Epochs(
        federation,
        phase,
        progress,
        max(learner.state.epochs for learner in learners.values()),
        kept={name: learner.state for name, learner in learners.items()},
        optimizers=[learner.optimizer for learner in learners.values()],
        done=lambda: all(learner.state.is_done for learner in learners.values()),
    )
    for _ in epochs:
        losses = [learner.epoch() for learner in learners.values() if not learner.state.is_done]
        epochs.end(sum(losses) / len(losses))
    for learner in learners.values():
        learner.finish()
    return epochs.losses


class LocalTraining(Learner):
    """Fits the active party's model, by the rules of ``SplitTraining`` for what both can do.

    Args:
        federation: for its seed, device and metric, and the active party's held-out rows to choose an epoch on.
        model: maps rows (B, d) to logits (B, C).
        rows: (n, d).
        labels: (n,) class numbers, or (n, C) probabilities.
        spec: how to fit.
        defenses: those that changed the labels; they decode the model's logits.

    Raises:
        UsageError: early stopping or selection without validation rows.
    """

    def __init__(
        self,
        federation: Federation,
        model: nn.Module,
        rows: Tensor,
        labels: Tensor,
        spec: TrainSpec,
        *,
        defenses: DefenseStack | None = None,
    ) -> None:
        self.federation = federation
        self.defenses = defenses or DefenseStack()
        self.model, self.rows, self.labels, self.spec = model, rows, labels, spec
        self.selection = get_selection(spec, federation)
        self.state = EarlyStopping(model, epochs=spec.count_epochs(len(labels)), patience=spec.patience)
        self.optimizer = create_optimizer(model.parameters(), spec)

    def epoch(self) -> float:
        """Make one pass; the validation rows choose the epoch, if they are asked to."""
        number, spec = self.state.epoch, self.spec
        set_rate([self.optimizer], spec.rate(number, self.state.epochs))
        order = make_rng(self.federation.seed, "batches", "local", number)
        parts = draw_batches(len(self.labels), spec.batch, order, self.federation.device)
        mean = self._make_pass(parts, lambda b: F.cross_entropy(self.model(self.rows[b]), self.labels[b]), spec.clip)
        if not mean < float("inf"):
            raise Diverged(f"the loss of the local model is {mean} after epoch {number + 1}: lower train.lr")
        self.state.count(self._score(self.selection) if self.selection else None)
        return mean

    def finish(self) -> None:
        """Put the model into the state that the settings choose."""
        if self.spec.select != "last":
            self.state.take_best()

    def _score(self, split: str) -> float:
        """The headline metric on the active party's own columns of ``split``."""
        active = self.federation.active
        z = predict_logits(self.model, active.features[split])
        if not torch.isfinite(z).all():
            raise Diverged(f"the local model predicts values that are not finite on {split} rows: lower train.lr")
        read = self.defenses.decode_logits(z)
        return METRICS[self.federation.metric](read.cpu().numpy(), active.labels[split].cpu().numpy())


def build_local(federation: Federation, spec: ModelSpec) -> nn.Sequential:
    """Draw the active party's model of its own: ``encoder``, and a ``head`` as it would follow if there were no others.

    Its stream is not that of the federation's models, so that two models of the active party are independent draws.
    """
    with seed_weights(federation.seed, "model", federation.active.name, "alone"):
        encoder = build_encoder(federation.active.layout, spec, federation.n_classes)
        top = build_top([encoder.width], federation.n_classes, spec)
    return nn.Sequential(OrderedDict(encoder=encoder, head=top.head)).to(federation.device)


def get_rows(party: Party) -> Tensor:
    """Return all training rows (n, d) that ``party`` may learn from without labels, aligned or not."""
    return torch.cat([party.features["aligned"], party.features["local"]])


def select_labeled_rows(federation: Federation) -> tuple[Tensor, Tensor]:
    """Return the active party's columns (n, d) and labels (n,) of all rows that it may learn from, aligned or not.

    Of its unaligned rows, where it knows their labels; of no row that is kept for validation.
    """
    active = federation.active
    known = len(active.labels["local"])  # none where labels are scarce
    rows = torch.cat([active.features["train"], active.features["local"][:known]])
    return rows, torch.cat([active.labels["train"], active.labels["local"]])


@torch.no_grad()
def predict_logits(model: nn.Module, rows: Tensor) -> Tensor:
    """Return what ``model`` makes of ``rows`` (n, d) in evaluation mode, (n, C)."""
    model.eval()
    return torch.cat([model(part) for part in torch.split(rows, PREDICTION_BATCH)])


class Local(Method):
    """Supervised training of the active party on its own columns of all its labeled rows, aligned or not.

    A reference for utility, and no federation: no message is sent, so that there is no adversary, and no defense acts.
    Passive parties have no model; their representation is their columns.

    Source: VFLHLP (Li et al. 2024, arXiv 2405.11884), section 5, the baseline Local-A; its step 1 fits the same model.

    Args:
        train: how the model is fitted; ``local_steps``, ``target`` and ``pretrain`` mean nothing here.
        model: the shape of the network; the head reads the active party's embedding alone.
    """

    name = "local"
    reference = "Li et al. 2024 (VFLHLP), arXiv 2405.11884, section 5, baseline Local-A"
    differs = ("Encoder and training follow model and train; the paper names no settings for Local-A.",)
    messages = {"train": frozenset()}  # noqa: RUF012  (declared ClassVar in the base class)
    receives = {}  # noqa: RUF012

    def build(self, federation: Federation) -> None:
        """Draw the active party's encoder and head."""
        federation.active.modules["local"] = build_local(federation, self.model_spec)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if validation rows are needed, and there are none."""
        get_selection(self.train_spec, federation)

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Fit the model and return its mean loss by epoch."""
        rows, labels = select_labeled_rows(federation)
        model = federation.active.modules["local"]
        training = LocalTraining(federation, model, rows, labels, self.train_spec)
        return learn(federation, phase, progress, {"local": training})

    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return logits (n, C) from the active party's columns alone."""
        return predict_logits(federation.active.modules["local"], federation.active.features[split])

    def representation(self, party: Party) -> nn.Module:
        """Return the active party's encoder; any other party has its columns and no model."""
        return party.modules["local"].get_submodule("encoder") if party.active else nn.Identity()
