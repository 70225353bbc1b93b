"""All messages between two parties, and how large each may be."""

from __future__ import annotations

import msgspec

from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.roles.messages import (
    EncryptedDelta,
    Features,
    MaskedGradient,
    MaskedScores,
    NoisedGradient,
    Scores,
)
from vflsec.companies.handshake import Hello


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The active party has saved the batch, and there is no gradient to send."""


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
)
"""The types by their numbers on the wire; a change here is another version there."""

FIRST: dict[type[msgspec.Struct], int] = {Hello: 1 << 16, Committed: 16, Done: 16}
"""Largest payloads in bytes before the layout is known."""


def limits(layout: CipherLayout) -> dict[type[msgspec.Struct], int]:
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
