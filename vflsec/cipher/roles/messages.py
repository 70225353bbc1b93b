"""The messages of the encrypted linear layer: integers of fixed width, as bytes.

    passive -> active   Features          [[mu]]
    active -> passive   MaskedScores      [[mu W~ + r1]]
    passive -> active   Scores            mu W + r1 mod 2^L
    active -> passive   MaskedGradient    [[mu^T delta + r2]]
    passive -> active   NoisedGradient    mu^T delta + r2 + n, and [[e]]
    active -> passive   EncryptedDelta    [[delta W^T]]

Ciphertexts are little-endian, each of twice the key's bytes.
"""

from __future__ import annotations

from typing import Literal

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
