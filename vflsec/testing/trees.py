"""Trees that ``secureboost`` grows on a small federation, with all messages, for tests of attacks."""

from __future__ import annotations

from typing import Any, NamedTuple

from vflsec.core.federation import Federation
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.secureboost import SecureBoost

SMALL = {"exchange": "plain", "rounds": 10, "depth": 3, "bins": 16, "leaf_rows": 5}


class Grown(NamedTuple):
    """A federation with trees.

    Attributes:
        trained: the method and the parties.
        messages: of training and of the prediction of test rows, of all parties in order.
    """

    trained: Trained
    messages: tuple[Message, ...]

    def heard(self, name: str) -> tuple[Message, ...]:
        """Return the messages that a party, or those of ``passive_1+passive_2``, sent or received."""
        names = set(name.split("+"))
        return tuple(m for m in self.messages if m.known_to & names)


def grown(federation: Federation, **options: Any) -> Grown:
    """Train ``secureboost`` and predict the test rows.

    Args:
        federation: without models.
        options: of the method; those of ``SMALL`` by default, with derivatives in clear.
    """
    tap = Transcript(frozenset(federation.parties), frozenset(Kind))
    federation.channel.taps.append(tap)
    trained = SecureBoost(TrainSpec(), ModelSpec(), **{**SMALL, **options}).fit(federation)
    trained.predict("test")
    return Grown(trained, tuple(tap.messages))
