"""All messages between two parties, and how large each may be."""

from __future__ import annotations

import msgspec

from vflsec.paillier.layout import Layout
from vflsec.paillier.messages import (
    EncryptedDelta,
    Features,
    MaskedGradient,
    MaskedScores,
    NoisedGradient,
    Scores,
)
from vflsec.remote.hello import Hello


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """p has kept the batch, and C has no gradient to get."""


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


def limits(layout: Layout) -> dict[type[msgspec.Struct], int]:
    """Return the largest payload of each type in bytes: each number in a ciphertext of its own, nothing packed."""
    cipher, frame = layout.bits // 4, 4096
    samples, weights = layout.batch, layout.width * layout.outputs
    return {
        **FIRST,
        Features: frame + 2 * samples * layout.width * cipher,
        MaskedScores: frame + samples * layout.outputs * cipher,
        Scores: frame + 8 * samples * layout.outputs,
        MaskedGradient: frame + samples * weights * cipher,
        NoisedGradient: frame + 2 * weights * cipher,
        EncryptedDelta: frame + samples * (layout.width * cipher + 8 * layout.outputs),
    }
