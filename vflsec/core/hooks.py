"""The hooks of a defense: who runs each of them, when, and what it changes.

This is their only list. A defense uses the hooks that it overrides (``vflsec.core.defense.list_hooks``). A method
declares the hooks that each of its phases runs (``Method.runs``). Stage keys, cards, errors and ``DefenseStack``, which
calls the hooks, all read these declarations.
"""

from dataclasses import dataclass
from enum import StrEnum

from vflsec.core.message import Kind


class Runs(StrEnum):
    """Who runs a hook."""

    SENDER = "the party that sends"
    ACTIVE = "the active party"
    CARRIER = "the party that carries it"


class Changes(StrEnum):
    """Whether a hook changes training; the strongest answer first."""

    TRAINING = "yes"
    MESSAGES = "only through the messages it changes"
    READING = "no, only how predictions are read"


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook.

    Attributes:
        name: of the method of ``Defense``.
        acts_at: what it acts on, for the card of a defense; empty if the card has nothing to add.
        run_by: who runs it.
        when: in which phases.
        changes: whether it changes training.
        kind: the messages whose sending runs it; None for a hook of training.
    """

    name: str
    acts_at: str
    run_by: Runs
    when: tuple[str, ...]
    changes: Changes
    kind: Kind | None = None


def _make_sending(kind: Kind) -> Hook:
    when = ("every phase that sends such messages", "prediction")
    return Hook(f"on_{kind.value}", kind.value, Runs.SENDER, when, Changes.MESSAGES, kind)


def _make_active(name: str, acts_at: str, *when: str, changes: Changes = Changes.TRAINING) -> Hook:
    return Hook(name, acts_at, Runs.ACTIVE, when, changes)


_LEARNING, _CROSSING = "learning from labels", "training across the cut layer"

EMBEDDING = _make_sending(Kind.EMBEDDING)
GRADIENT = _make_sending(Kind.GRADIENT)
PARAMETERS = _make_sending(Kind.PARAMETERS)
NODES = _make_sending(Kind.NODES)
LABELS = _make_active("on_labels", "labels", _LEARNING)
PREDICTIONS = _make_active("on_predictions", "", _LEARNING, "prediction", changes=Changes.READING)
BATCH = _make_active("on_batch", "labels", _CROSSING)
RECEIVED = _make_active("on_received", "the received embeddings", _CROSSING, "prediction")
PENALTY = _make_active("penalty", "the loss", _CROSSING)
TEXT = Hook("on_text", "the words of a text", Runs.CARRIER, (_CROSSING, "prediction"), Changes.TRAINING)
PROTOCOL = _make_active(
    "protocol", "the cut layer, in place of the plain protocol", _CROSSING, "prediction", changes=Changes.MESSAGES
)
TRAINING = Hook("training_hooks", "", Runs.CARRIER, ("every phase",), Changes.TRAINING)
UPDATE = Hook(
    "on_update", "the updates of its party's own models", Runs.CARRIER, ("updates of split learning",), Changes.TRAINING
)
PLAN_RELEASES = Hook("plan_releases", "", Runs.CARRIER, ("every phase",), Changes.MESSAGES)

_OF_MESSAGES = (EMBEDDING, GRADIENT, PARAMETERS, NODES)

HOOKS = (*_OF_MESSAGES, LABELS, PREDICTIONS, BATCH, RECEIVED, PENALTY, PROTOCOL, TRAINING, UPDATE, TEXT)
"""All hooks that change something. ``PLAN_RELEASES`` only passes on how often rows are sent."""

OF_KIND = {hook.kind: hook for hook in HOOKS if hook.kind}
"""The hook that each kind of message runs; histograms, ciphertexts and control messages run none."""

ON_LABELS = frozenset({LABELS, PREDICTIONS})
"""The hooks that learning from labels runs at the active party."""

ACROSS = frozenset({BATCH, RECEIVED, PENALTY, PROTOCOL})
"""The hooks that training a top model on received embeddings runs at the active party."""

SPLIT_LEARNING = ON_LABELS | ACROSS | {UPDATE}
"""The hooks that split learning runs, besides those of its messages."""
