"""Base classes of protocols: fixed exchanges of messages that declare what each role learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
    """

    roles: ClassVar[tuple[str, ...]] = ("passive", "active")

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


FRACTION_BITS = 24
"""Derivatives of a loss are multiples of 2^-24 in every exchange of histograms, so that all choose the same splits."""


MIN_KEY_BITS, MAX_KEY_BITS = 1024, 4096
"""Sizes of the key of an exchange of encrypted histograms, in whole bytes."""


class Histograms(NamedTuple):
    """The place of histograms in the run.

    Attributes:
        tree: its number.
        phase: the method's phase.
        output: the logit that the tree adds to, from 0.
        numbers: (N,) of the nodes, as in messages.
    """

    tree: int
    phase: str
    output: int
    numbers: NDArray[np.int64]


class HistogramExchange(Protocol):
    """The protocol by which the active party learns sums of its derivatives over a passive party's bins.

    One instance serves one passive party.

    Args:
        passive: holds columns, in bins.
        active: holds labels, and so derivatives of the loss.
    """

    roles: ClassVar[tuple[str, ...]] = ("passive", "active")

    def __init__(self, passive: Party, active: Party) -> None:
        self.passive = passive
        self.active = active

    @abstractmethod
    def share(self, derivatives: NDArray[np.int64], rows: Tensor, *, step: int, phase: str) -> None:
        """Send the derivatives of one round of boosting to the passive party, which keeps them until the next round.

        Args:
            derivatives: (B, 2 C) in units of 2^-FRACTION_BITS: the first derivatives by each of C logits, then the
                second ones. One logit if there are two classes.
            rows: (B,) sample positions.
            step: number of the first tree of the round.
            phase: the method's phase.
        """

    @abstractmethod
    def sums(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], n_bins: int, place: Histograms
    ) -> NDArray[np.int64]:
        """Return the sums (N, n_bins, 3) of first and second derivatives, and of rows, that the active party learns.

        The passive party computes them and sends them; numbers of rows are in clear in every exchange.

        Args:
            bins: (B, d) the bin of each shared row in each of d columns; no two columns share a bin.
            nodes: (B,) the position in ``place.numbers`` of each shared row's node, or -1 for a row in none of them.
            n_bins: of all columns.
            place: in the run.
        """

    def seconds(self, rounds: int, outputs: int, rows: int, columns: int, n_bins: int, passes: float) -> float:
        """Return an estimate of the CPU seconds of cryptography in training; 0 without any.

        Args:
            rounds: of boosting.
            outputs: C, trees in each round.
            rows: that are shared in each round.
            columns: d.
            n_bins: of all columns.
            passes: over all of these rows, for the histograms of one tree.
        """
        return 0.0

    def build_payload(self, sums: NDArray[np.int64], place: Histograms) -> dict[str, Tensor]:
        """Return the payload of histograms in clear: ``value`` (N, n_bins, 3) in units of the loss, and ``nodes``."""
        value = torch.from_numpy(sums / np.array([2.0**FRACTION_BITS, 2.0**FRACTION_BITS, 1.0]))
        return {"value": value, "nodes": torch.from_numpy(place.numbers)}

    def note(self, sums: NDArray[np.int64], place: Histograms) -> None:
        """Pass to the taps the histograms that the active party has decrypted."""
        self.active.note(
            Kind.HISTOGRAM,
            self.build_payload(sums, place),
            sender=self.passive.name,
            step=place.tree,
            phase=place.phase,
        )
