"""Base classes of protocols: fixed exchanges of messages that declare what each role learns."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.core.message import Kind, Step
from vflsec.core.party import Party
from vflsec.core.settings import TrainSpec


class Protocol(ABC):
    """An exchange of messages that keeps something secret, or by which parties agree.

    Class attributes:
        name: registry name.
        roles: of the parties that take part.
        reveals: what each role learns, in words.
        reference: paper and section.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    reveals: ClassVar[Mapping[str, tuple[str, ...]]]
    reference: ClassVar[str]
    version: ClassVar[int] = 1


class Boundary(Protocol):
    """The protocol between one passive party's bottom model and the active party's top model.

    One instance serves one passive party, so that a boundary may hold state (an encrypted layer holds weights).

    Class attributes:
        instead: what the passive party receives in place of gradients; empty for gradients.
    """

    roles: ClassVar[tuple[str, ...]] = ("passive", "active")
    instead: ClassVar[frozenset[Kind]] = frozenset()

    def __init__(self, passive: Party, active: Party) -> None:
        self.passive = passive
        self.active = active

    @abstractmethod
    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Send the passive party's embedding (B, d); return the input (B, d') of the active party."""

    @abstractmethod
    def backward(self, g: Tensor, step: Step) -> Tensor:
        """Send the loss gradient w.r.t. the output of ``forward`` (B, d'); return the one w.r.t. h (B, d)."""

    def seconds(self, batches: int) -> float:
        """Return an estimate of the CPU seconds of cryptography for ``batches`` batches; 0 without any."""
        return 0.0

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the boundary's own learned modules by the name of the party that holds them."""
        return {}

    def record(self, folder: Path) -> None:
        """Record what each role sees from now on, one file for each in ``folder``, for ``vflsec audit``.

        Raises:
            UsageError: this boundary has nothing to record.
        """
        raise UsageError(f"expected an encrypted boundary to record, got {self.name}: add --defense phe")

    def close(self) -> None:
        """End helper processes and recordings; the boundary can still be used."""


class Averaging(Protocol):
    """The protocol by which parties replace modules of one shape by their mean, with a server.

    Args:
        parties: all K parties.
        server: the party that averages; it has no data.
    """

    roles: ClassVar[tuple[str, ...]] = ("party", "server")

    def __init__(self, parties: Sequence[Party], server: Party) -> None:
        self.parties = parties
        self.server = server

    @abstractmethod
    def check(self, shared: Mapping[str, Mapping[str, nn.Module]]) -> None:
        """Raise UsageError unless all parties share modules of the same names and shapes."""

    @abstractmethod
    def run(self, shared: Mapping[str, Mapping[str, nn.Module]], *, step: int, phase: str) -> None:
        """Average in place.

        Args:
            shared: by party name, its shared modules by name; the same names and shapes at every party.
            step: number of the global iteration.
            phase: the method's phase.
        """


class LinearBoundary(Boundary):
    """A boundary that computes the passive party's part of a linear head: ``forward`` returns z = h W, (B, C).

    W is learned inside the protocol, so that the top model keeps only the active party's part.
    """

    @abstractmethod
    def join(self, weight: Tensor, train: TrainSpec, *, batches: int = 100, epochs: int = 1) -> None:
        """Start from W_0 = ``weight`` (d, C), and learn as ``train`` says.

        Args:
            weight: W_0.
            train: how W learns.
            batches: about how many will follow; cryptography sizes what it prepares by it.
            epochs: passes over the training rows that will follow.

        Raises:
            UsageError: the protocol does not support this optimizer, or so many passes.
        """

    def check(self, h: Tensor, columns: Sequence[str] | None) -> None:
        """Raise UsageError if embeddings (n, d) cannot be sent; called before training if they are known.

        Args:
            h: embeddings of all rows of a split.
            columns: their names, or None.
        """

    @abstractmethod
    def learn(self, g: Tensor, step: Step) -> None:
        """Update W as ``backward`` does, without a gradient for the passive party, whose model is frozen."""
