"""The messages of the encrypted linear layer, integers of fixed width as bytes, and the order of those of a batch.

    passive -> active   Features          [[mu]]
    active -> passive   MaskedScores      [[mu W~ + r1]]
    passive -> active   Scores            mu W + r1 mod 2^L
    active -> passive   MaskedGradient    [[mu^T delta + r2]]
    passive -> active   NoisedGradient    mu^T delta + r2 + n, and [[e]]
    active -> passive   EncryptedDelta    [[delta W^T]]

Ciphertexts are little-endian, each of twice the key's bytes.

Each step calls the role that sends, and delivers its message to the role that receives: of two roles in a process, or
of one in each of two. A role that lives in another process is None: its part is done there, by the same code.

Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

RoleName = Literal["passive", "active"]
ROLES: tuple[RoleName, RoleName] = ("passive", "active")


class PaillierMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One message; ``msgspec.msgpack`` encodes it, and decodes a union of these by their tags.

    Attributes:
        agreement: what stands for key and layout, 16 bytes; a message under others is refused.
        turn: number of the forward pass that it belongs to, from 1.
    """

    agreement: bytes
    turn: int

    @property
    def nbytes(self) -> int:
        """Size of what it carries, in bytes."""
        values = (getattr(self, field) for field in self.__struct_fields__)
        return sum(len(value) if isinstance(value, bytes) else 8 for value in values)


class Features(PaillierMessage, frozen=True):
    """The encrypted features.

    Attributes:
        rows: the number B of samples.
        updates: number of updates of the sender's share; the receiver's must be equal.
        columns: ciphertexts, one feature of many samples in each: blocks of samples, in each the features in order.
        packs: ciphertexts of whole samples, for the gradient of the weights: blocks of features, in each the samples
            in order; empty at inference.
    """

    rows: int
    updates: int
    columns: bytes
    packs: bytes = b""


class MaskedScores(PaillierMessage, frozen=True):
    """The active party's part of the scores under masks: ciphertexts of each block of samples and each output."""

    ciphers: bytes


class Scores(PaillierMessage, frozen=True):
    """The scores (B, C) under the active party's masks, each 8 bytes modulo 2^L."""

    values: bytes


class MaskedGradient(PaillierMessage, frozen=True):
    """The gradient of the weights under masks: ciphertexts of each block of features, output and row in a pack."""

    ciphers: bytes


class NoisedGradient(PaillierMessage, frozen=True):
    """The gradient of the weights (g, C), summed over the batch, under masks and noise.

    Attributes:
        rate: the learning rate of the passive party's update.
        values: integers of ``CipherLayout.gradient_bytes`` each.
        share: ciphertexts of the passive party's share of the weights, for each block of features and each output.
    """

    rate: float
    values: bytes
    share: bytes


class EncryptedDelta(PaillierMessage, frozen=True):
    """Rows of delta W^T, encrypted.

    Attributes:
        rank: number of encrypted rows, which follows from layout and B; rows of zeros fill up a delta of smaller rank.
        coefficients: (B, rank) of all rows by those sent, float32; empty if every row was sent.
        ciphers: ciphertexts, blocks of features, in each the rows in order.
    """

    rank: int
    coefficients: bytes
    ciphers: bytes


Message = Features | MaskedScores | Scores | MaskedGradient | NoisedGradient | EncryptedDelta


M = TypeVar("M")


class Port(Protocol):
    """A party's connection to the other; ``note`` adds what it has computed to its recording, if there is one."""

    def send(self, message: Any) -> None: ...  # noqa: D102
    def receive(self, expected: type[Any]) -> Any: ...  # noqa: D102
    def note(self, name: str, values: Any) -> None: ...  # noqa: D102


class Seat(NamedTuple):
    """A role and its port."""

    role: Any
    port: Port


class Exchange:
    """One batch of the encrypted linear layer: scores, then the update of the weights, then the gradient delta^C.

    A seat is None if its role, a ``PassiveRole``, an ``ActiveRole`` or another with its methods, is in another process.
    """

    def __init__(self, *, passive: Seat | None = None, active: Seat | None = None) -> None:
        self._passive: Any = passive
        self._active: Any = active

    def scores(self, mu: Any = None, noise: Any = None, *, learns: bool = True) -> Any:
        """Return the scores z (B, C) to the active party, of features mu (B, g) and with noise (B, C) of the other."""
        passive, active = self._passive, self._active
        features = self._deliver(passive, active, Features, lambda: passive.role.features(mu, learns=learns))
        if passive:
            passive.port.note("mu", passive.role.mu)
            passive.port.note("share", passive.role.share)
        if active:
            active.port.note("share", active.role.share)
        masked = self._deliver(active, passive, MaskedScores, lambda: active.role.mask_scores(features))
        scores = self._deliver(passive, active, Scores, lambda: passive.role.scores(masked, noise))
        if not active:
            return None
        z = active.role.scores(scores)
        active.port.note("scores", z)
        return z

    def weights(self, delta: Any = None, *, rate: float) -> Any:
        """Update both shares of the weights by delta (B, C), loss gradients of the active party, not divided by B.

        Return the message from which delta^C is computed.
        """
        passive, active = self._passive, self._active
        if active:
            active.port.note("delta", delta)
        masked = self._deliver(active, passive, MaskedGradient, lambda: active.role.mask_gradient(delta))
        noised = self._deliver(passive, active, NoisedGradient, lambda: passive.role.gradient(masked, rate))
        if active:
            active.role.update(noised, rate)
        return noised

    def embedding_gradient(
        self, noised: Any, delta: Any = None, noise: Any = None, before_sending: Callable[[], object] = lambda: None
    ) -> Any:
        """Return delta^C (B, g) to the passive party, not divided by B, by what ``weights`` returned.

        The active party releases delta (B, C), adds noise (B, g) to delta^C, and calls ``before_sending`` once its last
        message is ready.
        """
        passive, active = self._passive, self._active

        def last() -> EncryptedDelta:
            message: EncryptedDelta = active.role.embedding_gradient(delta, noised, noise)
            before_sending()
            return message

        encrypted = self._deliver(active, passive, EncryptedDelta, last)
        if not passive:
            return None
        gradient = passive.role.embedding_gradient(encrypted)
        passive.port.note("embedding_gradient", gradient)
        return gradient

    def _deliver(self, sender: Seat | None, receiver: Seat | None, kind: type[M], make: Callable[[], M]) -> Any:
        message = None
        if sender:
            message = make()
            sender.port.send(message)
        return receiver.port.receive(kind) if receiver else message
