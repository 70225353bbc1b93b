"""What can be known about a federation: the only list of it.

A view, ``vflsec.run.mounting``, ``vflsec.inference.sources``, *alone* and the conformance suites read it. Methods
declare only which kinds of messages each side receives (``Method.receives``).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vflsec.core.message import Kind


@dataclass(frozen=True, order=True)
class Knowledge:
    """One kind of knowledge: in messages, in attributes of ``View``, or what ``read`` returns.

    Attributes:
        name: in texts and in ``View.further``.
        way_out: how a user can give it to the adversary.
        kinds: of messages that it is read from, any of them.
        sent: whether the adversary sends these messages itself; else it receives them.
        held_by: attributes of ``View`` that hold it.
        read: takes a ``Trained`` and the names of the adversary's parties and returns it, or None without it.
        sides: of the adversary who has it without a message, whatever the method is.
        setting: of ``aux``, without which these sides do not have it.
        at_end: whether nobody has it before the last phase ends.
        tables: function (``module:name``) that takes a view and yields names and tables (n, k) by split for ``fusion``,
            or each table as a ``SourceTable``; none if the view lacks it. Tables stand in the order of ``Need``.
    """

    name: str
    way_out: str
    kinds: frozenset[Kind] = frozenset()
    sent: bool = False
    held_by: tuple[str, ...] = ()
    read: Callable[[Any, Sequence[str]], Any] | None = None
    sides: tuple[str, ...] = ()
    setting: str = ""
    at_end: bool = False
    tables: str = ""

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    @property
    def is_local(self) -> bool:
        """Whether every party has it, also without the federation."""
        return self.sides == PARTIES

    def select_kinds(self, side: str, receives: Mapping[str, Collection[Kind]]) -> frozenset[Kind]:
        """Return the kinds of messages that an adversary on ``side`` reads it from, by what each side ``receives``."""
        return self.kinds & {k for other, kinds in receives.items() if (other != side) == self.sent for k in kinds}


PARTIES, _ACTIVE = ("passive", "active"), ("active",)
_AS_PASSIVE, _AS_ACTIVE = "choose --adversary passive_1", "choose --adversary active"
_GROWING = "a method that grows trees, such as secureboost"
_LOCAL, _RELEASES, _TREES = (f"vflsec.inference.sources:tabulate_{what}" for what in ("local", "releases", "trees"))

_SUMS = "vflsec.inference.sums:tabulate_sums"


class Need:
    """The kinds that vflsec knows, which an attack may require of a view."""

    FEATURES = Knowledge("own features", _AS_PASSIVE, held_by=("features",), sides=PARTIES)
    MODEL = Knowledge("own model", _AS_PASSIVE, held_by=("model",), sides=PARTIES, tables=_LOCAL)
    AUX_LABELS = Knowledge(
        "auxiliary labels", "add --set aux.n=80", held_by=("aux_rows", "aux_labels"), sides=PARTIES, setting="n"
    )
    PARAMETERS = Knowledge(
        "received parameters",
        "choose a method that averages models, such as fedhssl-simsiam",
        frozenset({Kind.PARAMETERS}),
        held_by=("models",),  # which are assembled from them
        tables=_LOCAL,
    )
    PREDICTIONS = Knowledge(
        "predictions",
        "choose --adversary active, without a phase, or audit a transcript that has them",
        held_by=("predictions",),
        sides=_ACTIVE,
        at_end=True,
        tables=_LOCAL,
    )
    GRADIENTS = Knowledge(
        "received gradients",
        f"{_AS_PASSIVE} and a method that sends gradients in clear, of trees exchange=plain",
        frozenset({Kind.GRADIENT}),
        tables=_RELEASES,
    )
    EMBEDDINGS = Knowledge("received embeddings", _AS_ACTIVE, frozenset({Kind.EMBEDDING}), tables=_RELEASES)
    SUMS = Knowledge("noised sums", f"{_AS_PASSIVE} and --defense sealed", frozenset({Kind.SUM}), tables=_SUMS)
    NODES = Knowledge("node memberships", f"choose {_GROWING}", frozenset({Kind.NODES}), tables=_TREES)
    HISTOGRAMS = Knowledge(
        "histograms",
        f"{_AS_ACTIVE} and {_GROWING}",
        frozenset({Kind.HISTOGRAM, Kind.CONTROL}),  # the latter says what bins there are
        tables=_TREES,
    )
    VICTIM_MODEL = Knowledge(
        "the victim's bottom model",
        "choose --adversary active and add --set aux.victim_model=true",
        held_by=("victim_model",),
        sides=_ACTIVE,
        setting="victim_model",
    )
    TOP = Knowledge(
        "the joint model's top",
        "choose --adversary active and a method that trains a top model, such as fedsplitnn",
        held_by=("top",),
        sides=_ACTIVE,
        at_end=True,
    )
    SHADOWS = Knowledge(
        "shadow federations",
        "evaluate the job with vflsec eval, which trains them",
        held_by=("shadows",),
        sides=_ACTIVE,
        at_end=True,
    )
    RECORDING = Knowledge(
        "a recording of an encrypted layer",
        "record an encrypted layer with vflsec train --record, then vflsec audit X.recording",
        held_by=("recording",),
    )


KNOWLEDGE = tuple(known for known in vars(Need).values() if isinstance(known, Knowledge))
"""All kinds that vflsec knows, in order."""
