"""All messages between two parties, how large each may be, and the handshake.

The parties compare job, rows and run, and agree on the batch after which they resume.

The active party saves its new state before it sends the last message of a batch, and the passive party saves its own
when that message has arrived. Whichever of them is killed, the active party is thus level or ahead by one batch. Both
keep their last two states and resume after the last batch that both have; the active party goes back by one if need be,
and the batch is done again with fresh masks. In sealed training it does not go back: its state holds the answer, which
it sends again, and the passive party has kept the mask. A party whose newest states are damaged or unusable declares
them ``lost``, and both go back to the last common state, at worst the end of an epoch. A digest over the messages of
every batch tells whether both states have one history, so that a batch counts exactly once on both sides.
"""

from typing import Annotated, Any

import msgspec

from vflsec.base.errors import PeerRefused
from vflsec.cipher.arithmetic.keys import PublicKey
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.roles.exchange import (
    EncryptedDelta,
    Features,
    MaskedGradient,
    MaskedScores,
    NoisedGradient,
    RoleName,
    Scores,
)

Text = Annotated[str, msgspec.Meta(max_length=1000)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of either party on every connection.

    Attributes:
        role: of the sender.
        settings: of the job, by dotted name.
        counts: rows by split.
        rows: digest of the row ids by split.
        run: the run that the state belongs to; empty for a new active party.
        history: digest after each number of batches of which the state is kept.
        predicted: whether the active party has its predictions.
        lost: whether newer states than those in the history were damaged or dropped, so that more than one batch has
            to be done again.
        layout: from the passive party, which alone knows the width of its embedding, or its number of parameters.
        key: from the passive party.
    """

    role: RoleName
    settings: Annotated[dict[Text, Text], msgspec.Meta(max_length=200)]
    counts: Annotated[dict[Text, Count], msgspec.Meta(max_length=4)]
    rows: Digest
    run: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
    history: Annotated[dict[Count, Digest], msgspec.Meta(min_length=1, max_length=4)]
    predicted: bool = False
    lost: bool = False
    layout: Annotated[dict[Text, Any], msgspec.Meta(max_length=100)] = {}
    key: PublicKey | None = None


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The active party has saved the batch, and there is no gradient to send."""


class LatticeKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The active party's public key of sealed training."""

    public: bytes


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scores (B, m) of the passive party's model, float32."""

    values: bytes


class SealedResiduals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The residuals (B, m) of a batch, sealed by the active party's key."""

    ciphertexts: bytes


class MaskedSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sums (P,) of the weighed residuals under masks, sealed by the active party's key."""

    ciphertexts: bytes


class NoisedSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sums (P,) with noise, under masks, each 8 bytes modulo t."""

    values: bytes


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender needs nothing more."""


KINDS: tuple[type[msgspec.Struct], ...] = (
    Hello,
    Features,
    MaskedScores,
    Scores,
    MaskedGradient,
    NoisedGradient,
    EncryptedDelta,
    Committed,
    Done,
    LatticeKey,
    Numbers,
    SealedResiduals,
    MaskedSums,
    NoisedSums,
)
"""The types by their numbers on the wire; a change here is another version there."""

FIRST: dict[type[msgspec.Struct], int] = {Hello: 1 << 16, Committed: 16, Done: 16}
"""Largest payloads in bytes before the layout is known."""


def get_limits(layout: CipherLayout) -> dict[type[msgspec.Struct], int]:
    """Return the largest payload of each type in bytes: a full batch, and room for the fields beside the numbers."""
    cipher, fields = layout.bits // 4, 512
    rows, outputs, scores, gradients, deltas = (
        layout.batch,
        layout.outputs,
        layout.scores,
        layout.gradients,
        layout.deltas,
    )
    rank = min(rows, outputs) if layout.low_rank else rows
    return {
        **FIRST,
        Features: fields + (scores.count(rows) * layout.width + gradients.count(rows)) * cipher,
        MaskedScores: fields + scores.count(rows) * outputs * cipher,
        Scores: fields + 8 * rows * outputs,
        MaskedGradient: fields + gradients.blocks * outputs * min(rows, gradients.rows) * cipher,
        NoisedGradient: fields + layout.width * outputs * layout.gradient_bytes + deltas.blocks * outputs * cipher,
        EncryptedDelta: fields + deltas.count(rank) * cipher + 4 * rows * rank,
    }


def agree(ours: Hello, theirs: Hello) -> int:
    """Return the number of batches after which both resume.

    Raises:
        PeerRefused: another role, job, set of rows, run or history; both values are named.
    """
    if theirs.role == ours.role:
        raise PeerRefused(f"expected a party of the other role, got {theirs.role} on both sides: give one --role")
    differences = [
        f"{name} = {ours.settings.get(name, 'none')} here and {theirs.settings.get(name, 'none')} there"
        for name in sorted({*ours.settings, *theirs.settings})
        if ours.settings.get(name) != theirs.settings.get(name)
    ]
    if differences:
        raise PeerRefused(f"expected one job on both sides, got {'; '.join(differences)}")
    if ours.counts != theirs.counts:
        raise PeerRefused(
            f"expected the same rows on both sides, got {_show_counts(ours)} here and {_show_counts(theirs)} there: "
            "match the ids first, and give both files the same"
        )
    if ours.rows != theirs.rows:
        raise PeerRefused(
            f"expected the same rows on both sides, got other ids (digest {ours.rows[:12]} here and "
            f"{theirs.rows[:12]} there): match the ids first, and give both files the same"
        )
    return _find_common(ours, theirs)


def _find_common(ours: Hello, theirs: Hello) -> int:
    """Return the last batch of one run and history of which both have the state."""
    here, there = max(ours.history), max(theirs.history)
    if ours.run != theirs.run:
        if here or there:
            raise PeerRefused(
                f"expected one run on both sides, got {_run(ours)} here and {_run(theirs)} there: give both the "
                "--out of that run, or two new ones"
            )
        return 0  # nothing is lost: the active party joins the run
    common = {*ours.history} & {*theirs.history}
    if not common or (max(here, there) - max(common) > 1 and not (ours.lost or theirs.lost)):
        raise PeerRefused(
            f"expected states at most one batch apart, got {here} batches here and {there} there: one side has gone "
            "back to an old copy; restore its latest --out, or give both new ones"
        )
    step = max(common)
    if ours.history[step] != theirs.history[step]:
        raise PeerRefused(
            f"expected one history of {step} batches, got {ours.history[step][:12]} here and "
            f"{theirs.history[step][:12]} there: give both the --out of one run, or two new ones"
        )
    return step


def _show_counts(hello: Hello) -> str:
    return " and ".join(f"{count} {split}" for split, count in hello.counts.items())


def _run(hello: Hello) -> str:
    return f"{hello.run[:8] or 'none'} after {max(hello.history)} batches"
