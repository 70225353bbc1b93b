"""One batch on the connection, and in the recording if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from vflsec.cipher.recording import RecordingWriter
from vflsec.cipher.roles.messages import EncryptedDelta, MaskedScores
from vflsec.companies.wire import Connection

M = TypeVar("M", bound=msgspec.Struct)


class BatchPort:
    """A party's port in one batch.

    Args:
        wire: the connection.
        step: number of the batch.
        recorder: of this party's messages and notes, or None.
        answer: called with the number of the batch when the passive party receives a request for scores, and before
            the active party sends delta^C; returns how often the batch has been answered, or refuses.
    """

    def __init__(
        self,
        wire: Connection,
        step: int,
        recorder: RecordingWriter | None,
        answer: Callable[[int], int] = lambda step: 1,
    ) -> None:
        self._wire, self._step, self._recorder, self._answer = wire, step, recorder, answer

    def send(self, message: msgspec.Struct) -> None:
        """Send ``message``."""
        if isinstance(message, EncryptedDelta):
            self._answer(self._step)
        if self._recorder:
            self._recorder.message("sent", message)
        self._wire.send(message, self._step)

    def receive(self, expected: type[M]) -> M:
        """Return the next message, which must be an ``expected`` one."""
        message = self._wire.receive(expected, self._step)
        if self._recorder:
            self._recorder.message("received", message)
        if isinstance(message, MaskedScores):  # once they are decrypted, even a refusal gives information
            self.note("answers", np.array([self._answer(self._step)]))
        return message

    def note(self, name: str, values: object) -> None:
        """Record an array."""
        if self._recorder:
            self._recorder.note(name, values)
