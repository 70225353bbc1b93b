"""What both sides of a run have in common: the order of batches, and a state that can be saved."""

import hashlib
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor, nn

from vflsec.base.seeds import make_rng
from vflsec.base.sparse_rows import to_tensor
from vflsec.cipher.arithmetic.codec import Randbits
from vflsec.cipher.arithmetic.keys import PublicKey
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.recording import Header, SealedHeader
from vflsec.cipher.roles.exchange import Port, RoleName
from vflsec.companies.job import JobFile
from vflsec.companies.messages import Hello
from vflsec.companies.party_rows import PartyRows
from vflsec.companies.snapshots import Snapshots
from vflsec.methods.checkpoint import State
from vflsec.nn.stacked import draw_batches
from vflsec.nn.wide import create_optimizer

KEY_BITS = 256
"""Of the key from which noise is drawn."""

Commit = Callable[[msgspec.Struct], object]
"""Saves the state after a batch; the message, new in every attempt, identifies the batch in both histories."""


class Batch(NamedTuple):
    """The number of an update, its rows, and its learning rate."""

    number: int
    rows: Tensor
    rate: float


class Schedule:
    """The batches of all epochs, the same at both parties, as every method of split learning draws them.

    Args:
        job: the agreement.
        rows: number of training rows.
    """

    def __init__(self, job: JobFile, rows: int) -> None:
        self._job, self._rows, self._spec = job, rows, job.get_training(rows)
        self._epoch, self._batches = 0, self._draw(1)
        self.per_epoch = len(self._batches)

    def __len__(self) -> int:
        """Return the number of batches of the whole job."""
        return self.per_epoch * self._spec.count_epochs(self._rows)

    def __getitem__(self, step: int) -> Batch:
        """Return batch ``step``, from 0."""
        epoch, number = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._draw(epoch + 1)
        return Batch(step, self._batches[number], self._spec.rate(epoch, self._spec.count_epochs(self._rows)))

    @property
    def sizes(self) -> set[int]:
        """The numbers of rows that batches have: one row left over joins the batch before."""
        return {len(rows) for rows in self._batches}

    @property
    def largest(self) -> int:
        """Rows of the largest batch."""
        return max(self.sizes)

    def _draw(self, epochs: int) -> list[Tensor]:
        """Return the batches of the last of ``epochs`` epochs; one stream runs through all of them."""
        order = make_rng(self._job.seed, "batches", "train")
        for _ in range(epochs):
            drawn = draw_batches(self._rows, self._spec.batch, order, torch.device("cpu"))
        return drawn


class StatePort(Port, Protocol):
    """A port in training, by which a party can write its state before the batch again."""

    def keep(self) -> None: ...  # noqa: D102


Limits = dict[type[msgspec.Struct], int]
"""The largest payload of each type of message, in bytes."""


class Side(ABC):
    """One party's models, its role in the boundary, and its part of every batch.

    Args:
        data: its columns of the common rows.
        job: the agreement.
        seed: of the first weights of its own models, for tests; None draws one. Shares and noise do not depend on it.
        batches: expected number of batches, by which tables are sized; None for the whole job.
        workers: processes that prepare randomizers.
        randbits: source of masks, of the first share and of the noise; ``secrets`` but in tests.

    Class attributes:
        role: of this party.
        repeats: how often a batch is answered again, unless the user says otherwise.
        resends: whether a batch that the active party has kept is not done again: what it has sent is sent again.
        cost: of an answer that is given again, for whoever may allow it.
    """

    role: ClassVar[RoleName]
    repeats: ClassVar[int] = 3
    resends: ClassVar[bool] = False
    cost: ClassVar[str] = ""

    def __init__(
        self,
        data: PartyRows,
        job: JobFile,
        *,
        seed: int | None = None,
        batches: int | None = None,
        workers: int = 0,
        randbits: Randbits = secrets.randbits,
    ) -> None:
        self.data = data
        self.job = job
        self.schedule = Schedule(job, len(data.ids["train"]))
        self.x = {split: to_tensor(x) for split, x in data.features.items()}
        self._seed = secrets.randbits(62) if seed is None else seed
        self._batches = len(self.schedule) if batches is None else batches
        self._workers, self._randbits = workers, randbits

    @property
    @abstractmethod
    def later(self) -> list[tuple[str, Tensor]]:
        """What is done after training, in order: the split, and which of its rows."""

    def samples(self, step: int) -> np.ndarray:
        """Return the samples (B,) of batch ``step``; test rows are numbered after training rows."""
        if step < len(self.schedule):
            return self.schedule[step].rows.numpy()
        split, rows = self.later[step - len(self.schedule)]
        return rows.numpy() + (split != "train") * len(self.data.ids["train"])

    def introduce(self) -> dict[str, Any]:
        """Return what the greeting says of the layout and the key."""
        return {}

    def exchange_keys(self, port: Port) -> None:  # noqa: B027  (a side may have none)
        """Send or receive a key that is too large for a greeting."""

    def save_keys(self, snapshots: Snapshots) -> None:  # noqa: B027  (a side may have none)
        """Keep what must last for the whole run."""

    @abstractmethod
    def make_header(self, run: str) -> Header | SealedHeader:
        """Return the header of this party's recording; after ``meet``."""

    @abstractmethod
    def meet(self, theirs: Hello) -> Limits:
        """Read what the role needs from the peer's greeting, and return how large messages may be.

        Raises:
            PeerRefused: it does not fit the job.
        """

    @abstractmethod
    def learn(self, port: StatePort, batch: Batch, commit: Commit) -> None:
        """Take part in one update; call ``commit`` when the batch is done."""

    @abstractmethod
    def infer(self, port: Port, split: str, rows: Tensor) -> None:
        """Take part in what is done after training."""

    def resend(self, port: Port, batch: Batch, commit: Commit) -> None:
        """Send, or receive, the last message of a batch that the active party has kept."""
        raise NotImplementedError("a batch is done again")

    @abstractmethod
    def state(self) -> State:
        """Return what is needed to resume."""

    @abstractmethod
    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore ``state``."""

    @abstractmethod
    def models(self) -> State:
        """Return the trained models of this party."""

    def close(self) -> None:  # noqa: B027  (a side may have none)
        """End the processes that it has started."""


class PaillierSide(Side):
    """A side of the encrypted linear layer.

    Attributes:
        agreed: the layout, once it is known.
    """

    agreed: CipherLayout

    @property
    def gradients(self) -> bool:
        """Whether the passive party gets delta^C; without a network it needs none, and learns nothing of the labels."""
        return self.job.model.encoder != "identity"

    def layout(self, width: int) -> CipherLayout:
        """Return the layout for an embedding of ``width``."""
        return self.job.paillier.layout(width=width, outputs=self.job.model.outputs, batch=self.schedule.largest)

    @property
    def later(self) -> list[tuple[str, Tensor]]:
        """The test rows, in batches that the layout admits."""
        rows = torch.arange(len(self.data.ids["test"]))
        return [("test", part) for part in torch.split(rows, self.schedule.largest)]

    def _make_header(self, key: PublicKey) -> Header:
        train = self.job.train
        return Header(
            role=self.role, layout=self.agreed, n=key.n, momentum=train.momentum, weight_decay=train.weight_decay
        )

    def _make_linear_sgd(self) -> LinearSgd:
        return LinearSgd(self.job.train.momentum, self.job.train.weight_decay)

    def _make_sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return create_optimizer(model.parameters(), self.job.train.spec)


def step(optimizer: torch.optim.Optimizer, output: Tensor, gradient: Tensor, rate: float) -> None:
    """Move a model that returned ``output`` along the ``gradient`` of the loss with respect to it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    output.backward(gradient)  # type: ignore[no-untyped-call]
    optimizer.step()


def draw_first_share(randbits: Randbits, width: int, outputs: int, inputs: int | None = None) -> np.ndarray:
    """Return a first share of the weights (g, C), in the range of a linear layer of ``inputs`` columns.

    It comes from the source of the masks, so that no seed reveals it.
    """
    drawn = np.array([randbits(53) for _ in range(width * outputs)], np.float64).reshape(width, outputs)
    return (np.ldexp(drawn, -52) - 1) / math.sqrt(inputs or width)


def draw_normal(randbits: Randbits, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return standard normal numbers that nobody can predict, drawn anew at every call.

    The stream is SHAKE-256 under a fresh key: the state of a statistical generator could be computed from what it has
    drawn. An answer that is given again gets other noise. With the same noise, a receiver who asks twice in different
    ways would cancel it; with other noise, it averages over the few answers that it gets.

    Args:
        randbits: source of the key; ``secrets`` but in tests.
        shape: of the result.
    """
    stream = hashlib.shake_256(randbits(KEY_BITS).to_bytes(KEY_BITS // 8, "little")).digest(8 * math.prod(shape))
    uniform = ((np.frombuffer(stream, "<u8") >> np.uint64(12)) + 0.5) * 2.0**-52  # 52 bits: never 0, never 1
    numbers: NDArray[np.float64] = ndtri(uniform).reshape(shape)
    return numbers
