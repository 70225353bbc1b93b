"""The epochs of a phase: which are left to run, when they end, which is taken, and how an interrupted phase goes on."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vflsec.base.errors import Diverged, NotStackable, UsageError
from vflsec.core.federation import Checkpoint, Federation
from vflsec.core.message import Kind
from vflsec.core.method import Progress
from vflsec.core.protocol import Boundary
from vflsec.core.settings import TrainSpec
from vflsec.methods import checkpoint
from vflsec.methods.checkpoint import Stateful
from vflsec.nn.stacked import Stacked, get_whole


class EarlyStopping:
    """A model in training, its best state so far, and the epoch of that state.

    A score must exceed the best one to count as better; training ends after ``patience`` further epochs without one.
    A checkpoint can keep all of it.

    Args:
        model: what is trained.
        epochs: at most.
        patience: epochs without a better score after which training stops, or None.
    """

    def __init__(self, model: nn.Module, *, epochs: int, patience: int | None) -> None:
        self.model = model
        self.epochs = epochs
        self.patience = patience
        self.epoch = self.best_epoch = 0
        self.best_score = float("-inf")
        self._best: dict[str, Tensor] = {}

    @property
    def is_done(self) -> bool:
        """Whether training is over."""
        return self.epoch >= self.epochs or (self.patience is not None and self.epoch > self.best_epoch + self.patience)

    def count(self, score: float | None = None) -> None:
        """Count one more epoch, with the score of the model after it, the larger the better; None if not scored."""
        if score is not None and score > self.best_score:
            self._best = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
            self.best_epoch, self.best_score = self.epoch, score
        self.epoch += 1

    def take_best(self) -> None:
        """Put the model back to its best state."""
        if self._best:
            self.model.load_state_dict(self._best)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model, its best state, and the counts."""
        return {
            "counts": torch.tensor([self.epoch, self.best_epoch]),
            "score": torch.tensor(self.best_score, dtype=torch.float64),
            **{f"model.{key}": value for key, value in self.model.state_dict().items()},
            **{f"best.{key}": value for key, value in self._best.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that ``state_dict`` returned."""
        self.epoch, self.best_epoch = (int(count) for count in state["counts"])
        self.best_score = float(state["score"])
        model, best = (
            {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
            for start in ("model.", "best.")
        )
        self.model.load_state_dict(model)
        self._best = best


def get_selection(spec: TrainSpec, federation: Federation) -> str | None:
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


UPWARD = (Kind.EMBEDDING, Kind.CIPHERTEXT)


def count_traffic(federation: Federation, epochs: int) -> dict[str, float]:
    """Return the bytes sent until now: all of them, and as SS-VFL (section 5.1) counts them.

    The paper counts embeddings to the server alone, and has a server apart from all K parties, so that the active
    party's embeddings are sent as well.
    """
    trained = {
        route: n for route, n in federation.channel.traffic.items() if route.phase not in ("predict", "validate")
    }
    up = sum(n for route, n in trained.items() if route.kind in UPWARD and route.receiver == federation.active.name)
    parties = len(federation.parties)
    return {"epochs": epochs, "paper_bytes": up * parties / (parties - 1), "true_bytes": sum(trained.values())}


class Epochs:
    """The epochs that a phase still has to run; the trainer loops over them and reports the loss of each.

    ::

        epochs = Epochs(federation, phase, progress, total, kept={"model": model}, optimizers=[optimizer])
        for epoch in epochs:
            ...
            epochs.end(loss)
        return epochs.losses

    After each epoch, the state is written to the federation's checkpoint, and progress is reported. A phase that was
    interrupted starts from there and gives, bit for bit, what it would have given. Where training changes something
    that is not kept, it starts from its first epoch instead: an attack that acts in training, a boundary that holds
    more than its parties (encrypted weights), a defense whose attributes change but for its modules and generators.

    Args:
        federation: parties, wire and checkpoint.
        phase: the method's phase.
        progress: called with the phase, the epochs done, and those in all.
        total: the number of epochs, at most.
        kept: models, and whatever else changes from one epoch to the next; not the streams of parties and defenses.
        optimizers: of the models.
        boundaries: that the phase trains through.
        done: whether to stop early, asked before each epoch.
    """

    def __init__(
        self,
        federation: Federation,
        phase: str,
        progress: Progress,
        total: int,
        *,
        kept: Mapping[str, Stateful],
        optimizers: Sequence[torch.optim.Optimizer],
        boundaries: Iterable[Boundary] = (),
        done: Callable[[], bool] = lambda: False,
    ) -> None:
        self.federation = federation
        self.phase = phase
        self.total = total
        self._progress, self._done = progress, done
        self._kept = {**kept, "run": _RunState(federation)}
        self._optimizers = optimizers
        holding = [boundary for boundary in boundaries if not vars(boundary).keys() <= {"passive", "active", "plan"}]
        self._checkpoint = Checkpoint() if federation.malicious or holding else federation.checkpoint
        self._written = time.monotonic()
        self._defenses = _copy_all(federation)
        self.losses = checkpoint.restore(self._checkpoint, self._kept, optimizers, federation.channel)

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each epoch, from 0; keep the state and report progress after it."""
        while len(self.losses) < self.total and not self._done():
            yield len(self.losses)
            if self._checkpoint.path is not None and not _are_equal(self._defenses, _copy_all(self.federation)):
                self._checkpoint = Checkpoint()
            path = self._checkpoint.path
            if path is not None and time.monotonic() - self._written >= self._checkpoint.every:
                checkpoint.save(path, self._kept, self._optimizers, self.losses, self.federation.channel)
                self._written = time.monotonic()
            self._progress(self.phase, len(self.losses), self.total)

    def end(self, loss: Tensor | float) -> None:
        """Record the mean loss of an epoch, of several runs that of each.

        Raises:
            Diverged: it is not finite.
            NotStackable: it is not finite in one of several runs.
        """
        if isinstance(loss, Stacked):
            self.losses.append(cast("float", get_whole(loss).tolist()))
            if not get_whole(loss).isfinite().all():
                raise NotStackable("a run has diverged")
            return
        self.losses.append(float(loss))
        if not self.losses[-1] < float("inf"):
            lr = "train.pretrain.lr" if self.phase == "pretrain" else "train.lr"
            raise Diverged(f"the loss is {self.losses[-1]} after epoch {len(self.losses)}: lower {lr}")


def set_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


class Streams(dict[str, torch.Generator]):
    """Random streams by name, as a checkpoint keeps them."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of each."""
        return {name: stream.get_state() for name, stream in self.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that ``state_dict`` returned."""
        for name, stream in self.items():
            stream.set_state(state[name])


class _RunState:
    """The streams of parties and defenses, and whether ``train.target`` was reached."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation

    def state_dict(self) -> dict[str, Tensor]:
        reached = {f"reached/{key}": torch.tensor(x, dtype=torch.float64) for key, x in self.federation.reached.items()}
        return {**reached, **self._streams().state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._streams().load_state_dict(state)
        reached = {key.removeprefix("reached/"): float(x) for key, x in state.items() if key.startswith("reached/")}
        self.federation.reached.update(reached)

    def _streams(self) -> Streams:
        streams = Streams()
        for party in self.federation.all_parties:
            streams[f"noise/{party.name}"] = party.rng
            for number, defense in enumerate(party.defenses):
                generators = {key: value for key, value in vars(defense).items() if isinstance(value, torch.Generator)}
                streams |= {f"defense/{party.name}/{number}/{key}": stream for key, stream in generators.items()}
        return streams


def _copy_all(federation: Federation) -> list[dict[str, Any]]:
    """Return a copy of all attributes of the parties' defenses, but for modules and generators."""
    stay = nn.Module | torch.Generator
    defenses = (defense for party in federation.all_parties for defense in party.defenses)
    return [{k: copy.deepcopy(x) for k, x in vars(defense).items() if not isinstance(x, stay)} for defense in defenses]


def _are_equal(before: object, now: object) -> bool:
    try:
        return bool(before == now)
    except (RuntimeError, ValueError):  # of tensors and arrays, whose entries are compared one by one
        return False
