"""The order of the messages of one batch, for two roles in one process and for one role in each of two.

Each step calls the role that sends, and delivers its message to the role that receives. A role that lives in another
process is None: its part of a step is done there, by the same code.

Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from vflsec.cipher.roles.messages import EncryptedDelta, Features, MaskedGradient, MaskedScores, NoisedGradient, Scores

M = TypeVar("M")


class Port(Protocol):
    """One party's connection to the other."""

    def send(self, message: Any) -> None:
        """Send ``message``."""

    def receive(self, expected: type[Any]) -> Any:
        """Return the next message, which must be an ``expected`` one."""

    def note(self, name: str, values: Any) -> None:
        """Add what this party has computed to its recording, if there is one."""


class Seat(NamedTuple):
    """A role and its port."""

    role: Any
    port: Port


class Exchange:
    """One batch of the encrypted linear layer: scores, then the update of the weights, then the gradient delta^C.

    Args:
        passive: a ``PassiveRole`` or another one with its methods; None if it lives in another process.
        active: an ``ActiveRole``, likewise.
    """

    def __init__(self, *, passive: Seat | None = None, active: Seat | None = None) -> None:
        self._passive: Any = passive
        self._active: Any = active

    def scores(self, mu: Any = None, noise: Any = None, *, learns: bool = True) -> Any:
        """Return the scores z (B, C) to the active party.

        Args:
            mu: (B, g) features of the passive party.
            noise: (B, C) added to the scores by the passive party.
            learns: whether the batch trains the model.
        """
        passive, active = self._passive, self._active
        features = self._deliver(passive, active, Features, lambda: passive.role.features(mu, learns=learns))
        if passive:
            passive.port.note("mu", passive.role.mu)
            passive.port.note("share", passive.role.share)
        if active:
            active.port.note("share", active.role.share)
        masked = self._deliver(active, passive, MaskedScores, lambda: active.role.masked_scores(features))
        scores = self._deliver(passive, active, Scores, lambda: passive.role.scores(masked, noise))
        if not active:
            return None
        z = active.role.scores(scores)
        active.port.note("scores", z)
        return z

    def weights(self, delta: Any = None, *, rate: float) -> Any:
        """Update both shares of the weights; return the message from which delta^C is computed.

        Args:
            delta: (B, C) loss gradients at the active party, not divided by B.
            rate: learning rate.
        """
        passive, active = self._passive, self._active
        if active:
            active.port.note("delta", delta)
        masked = self._deliver(active, passive, MaskedGradient, lambda: active.role.masked_gradient(delta))
        noised = self._deliver(passive, active, NoisedGradient, lambda: passive.role.gradient(masked, rate))
        if active:
            active.role.update(noised, rate)
        return noised

    def embedding_gradient(
        self, noised: Any, delta: Any = None, noise: Any = None, before_sending: Callable[[], object] = lambda: None
    ) -> Any:
        """Return delta^C (B, g) to the passive party, not divided by B.

        Args:
            noised: what ``weights`` returned.
            delta: (B, C) loss gradients that the active party releases.
            noise: (B, g) added to delta^C by the active party.
            before_sending: called once the active party's last message is ready.
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
