"""Messages between parties, and the channel that carries them.

The channel detaches, counts and records messages; it never changes them. Defenses act at the sender (``core.party``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kind(StrEnum):
    """What a message carries; defenses name the kinds they act on."""

    EMBEDDING = "embedding"
    GRADIENT = "gradient"
    PARAMETERS = "parameters"
    NODES = "nodes"
    HISTOGRAM = "histogram"
    CIPHERTEXT = "ciphertext"
    SUM = "sum"
    CONTROL = "control"


OF_TREES = frozenset({Kind.NODES, Kind.HISTOGRAM})
"""What trees send."""

AFTERWARDS = ("predict", "validate")
"""Phases after training; their rows are others, unless their split was used in training as well."""

SERVER = "server"
"""Name of the party that averages models; it has no data."""

SOURCE = "source"
"""Name of the other active party, the source of a domain adaptation."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two parties.

    Attributes:
        kind: what it carries.
        sender: name of a party; the receiver itself if it only records what it masked for another party.
        receiver: name of a party.
        step: number of the training step, or of the batch at prediction.
        phase: the method's phase, or ``predict``.
        payload: named tensors, embeddings and gradients as (B, d), or of sequences as (B, T, d) with a ``mask`` (B, T)
            that is false at padding; or ciphertexts with an ``nbytes``. Of trees, nodes
            are (B, T), one column for each tree from number ``step`` on: the node that a row is in, numbered from 1 so
            that node i has the children 2 i and 2 i + 1, or 0 if the receiver is not told. Histograms are (N, V, 3),
            sums of first and second derivatives and of rows, of nodes (N,) and bins.
        rows: (B,) positions of the samples in ``split``, or None.
        split: the rows that the message is about, ``train``, ``val``, ``test``...
        noted: whether it was not sent: it is what the receiver alone found, by decryption for example.
    """

    kind: Kind
    sender: str
    receiver: str
    step: int
    phase: str
    payload: Mapping[str, Any]
    rows: Tensor | None = None
    split: str = "train"
    noted: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return sum(value.nbytes for value in self.payload.values())

    @property
    def readers(self) -> frozenset[str]:
        """Names of the parties that know the payload."""
        return frozenset({self.receiver} if self.noted else {self.sender, self.receiver})

    def as_table(self) -> Message:
        """Return this message with a sequence (B, T, d) as a row (B, T·d) that is zero at padding."""
        value, mask = self.payload.get("value"), self.payload.get("mask")
        if mask is None or value is None:
            return self
        return replace(self, payload={**self.payload, "value": (value * mask[..., None]).flatten(1)})

    def copy_private(self) -> Message:
        """Return the same message with tensors that share neither graph nor memory with this one."""
        payload = {k: x.detach().clone() if isinstance(x, Tensor) else x for k, x in self.payload.items()}
        rows = None if self.rows is None else self.rows.clone()
        return replace(self, payload=payload, rows=rows)


class Route(NamedTuple):
    """The key by which traffic is counted."""

    phase: str
    sender: str
    receiver: str
    kind: Kind


class ReleaseCount(NamedTuple):
    """The number of releases of the rows of one split on one route.

    Attributes:
        most: of the row that was released most often.
        total: of all rows together.
    """

    phase: str
    sender: str
    receiver: str
    kind: Kind
    split: str
    most: int
    total: int


class Step(NamedTuple):
    """The place of an exchange in the run.

    Attributes:
        number: the step, or the batch at prediction.
        phase: the method's phase, ``validate`` or ``predict``.
        rows: (B,) sample positions in ``split``.
        labels: (B,) their labels, known to the active party alone; None at prediction.
        split: that ``rows`` refers to.
        rate: the learning rate of this step; 0 at prediction.
    """

    number: int
    phase: str
    rows: Tensor
    labels: Tensor | None = None
    split: str = "train"
    rate: float = 0.0

    @property
    def place(self) -> dict[str, Any]:
        """The arguments of ``Party.send`` that name this place."""
        return {"step": self.number, "phase": self.phase, "rows": self.rows, "split": self.split}

    @property
    def learns(self) -> bool:
        """Whether the model learns from this exchange, rather than predicts or is validated."""
        return self.phase not in AFTERWARDS

    def is_part_of(self, when: str) -> bool:
        """Whether this exchange belongs to the part of the run called ``when``."""
        return when == "both" or self.learns == (when == "train")


class Channel:
    """Carries messages: cuts the autograd graph, counts bytes and rows by route, passes each message to its taps.

    Attributes:
        traffic: bytes by route.
        counts: releases of each row, (n,) by route and split.
        earlier: releases of stored phases, which were not run again.
        taps: called with every message.
    """

    def __init__(self) -> None:
        self.traffic: Counter[Route] = Counter()
        self.counts: dict[tuple[Route, str], Tensor] = {}
        self.earlier: list[ReleaseCount] = []
        self.taps: list[Callable[[Message], None]] = []
        self._muted = False

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Neither count nor record messages: for measurements that no party would make."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def deliver(self, message: Message) -> Message:
        """Return the copy that the receiver gets, which shares neither graph nor memory with the sender.

        With the graph of its tensors, gradients would reach the other party without passing any defense.
        """
        message = message.copy_private()
        if not self._muted:
            self.traffic[_get_route(message)] += message.nbytes
            self._record(message)
        return message

    def open(self, message: Message) -> Message:
        """Return the plaintext that the receiver decrypts, recorded as a release; its bytes count as ciphertext."""
        message = message.copy_private()
        if not self._muted:
            self._record(message)
        return message

    def count_release(self, message: Message) -> None:
        """Count a release that no tap sees: an encrypted one, from which the receiver learns what is computed of it."""
        if not self._muted and message.rows is not None and len(message.rows):
            self._count((_get_route(message), message.split), message.rows)

    def releases(self) -> list[ReleaseCount]:
        """Return the number of releases by route and split, by which a privacy budget is spent."""
        counts = [ReleaseCount(*route, split, int(n.max()), int(n.sum())) for (route, split), n in self.counts.items()]
        return [*self.earlier, *counts]

    def _record(self, message: Message) -> None:
        if message.rows is not None and len(message.rows):
            self._count((_get_route(message), message.split), message.rows)
        for tap in self.taps:
            tap(message)

    def _count(self, key: tuple[Route, str], rows: Tensor) -> None:
        before = self.counts.get(key, rows.new_zeros(0))
        lacking = int(rows.max()) + 1 - len(before)
        counts = torch.cat([before, before.new_zeros(lacking + len(before))]) if lacking > 0 else before
        self.counts[key] = counts.index_add_(0, rows, torch.ones_like(rows))


class Transcript:
    """A tap that records the messages that one adversary sent or received, with a row for each sequence.

    Args:
        parties: names of the party, or of the colluding parties.
        kinds: the kinds to record.
    """

    def __init__(self, parties: frozenset[str], kinds: frozenset[Kind]) -> None:
        self.parties = parties
        self.kinds = kinds
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        """Record ``message`` if the adversary sent or received it, but not what another party noted."""
        if message.kind in self.kinds and message.readers & self.parties:
            self.messages.append(message.as_table())


def _get_route(message: Message) -> Route:
    return Route(message.phase, message.sender, message.receiver, message.kind)
