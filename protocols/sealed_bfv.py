"""Sealed sums over a batch under a lattice cipher: the messages of ``sealed-plain``, encrypted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vflsec.cipher.lattice import LatticeKeys, LatticePublic, SumsLayout, draw_mask, estimate_seconds
from vflsec.protocols.sealed_plain import SealedSums


@dataclass(frozen=True)
class SealedBytes:
    """SealedBytes as they would be sent.

    Attributes:
        layout: how numbers lie in them, which both parties know.
        data: all of them.
        public: the key, before the first; else empty.
    """

    layout: SumsLayout
    data: bytes = field(repr=False)
    public: bytes = field(default=b"", repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes that are sent."""
        return len(self.data) + len(self.public)


class EncryptedSums(SealedSums):
    """The boundary of sealed training under encryption: every message is what two companies would send.

    The active party encrypts the numbers of a batch under its own key, made for this run: BFV (Fan and Vercauteren
    2012) with 128-bit security. The passive party computes with ciphertexts, masks the sums uniformly, and hides its
    weights by a fresh encryption of zero and by noise that is larger by 2^40. Keys, masks and that noise come from the
    operating system. The noise on the sums, which epsilon is about, comes from a seeded generator here, so that a run
    can be repeated and gives what ``sealed-plain`` gives, bit for bit: two companies draw it with
    ``draw_rounded_normal``.

    It protects the numbers against a passive party, and the weights against an active party that follows the protocol;
    see ``LatticePublic`` for the proof and its bounds.

    Source: this project; BFV: Fan and Vercauteren 2012, as in Microsoft SEAL.

    Args:
        passive: the party with the model below the cut layer.
        active: the party with the labels, and the key.
        plan: what both agree on; by default without noise.

    Raises:
        UsageError: tenseal is not installed.
    """

    name = "sealed-bfv"
    reference = "this project; BFV: Fan and Vercauteren 2012; noise on sums: Abadi et al. 2016"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keys = LatticeKeys()
        self._unsent = self._keys.public
        self._public: LatticePublic | None = None

    def seal(self, values: Tensor, sums: int) -> SealedBytes:
        """Return ciphertexts, the first time with the key."""
        layout, public, self._unsent = SumsLayout(values.numel(), sums), self._unsent, b""
        return SealedBytes(layout, self._keys.seal(values.cpu().numpy(), layout), public)

    def draw_mask(self, like: Tensor) -> Tensor:
        """Return a mask (P,) of the operating system's generator."""
        return torch.from_numpy(draw_mask(len(like))).to(like.device)

    def weigh(self, sealed: SealedBytes, blocks: Iterable[Tensor], mask: Tensor) -> SealedBytes:
        """Return ciphertexts of the masked sums."""
        if sealed.public:
            self._public = LatticePublic(sealed.public)
        assert self._public is not None, "the key comes before the first exchange"
        arrays = (block.flatten(0, 1).cpu().numpy() for block in blocks)
        return SealedBytes(sealed.layout, self._public.weigh(sealed.data, arrays, mask.cpu().numpy(), sealed.layout))

    def open(self, sums: SealedBytes) -> Tensor:
        """Return the masked sums (P,)."""
        return torch.from_numpy(self._keys.open(sums.data, sums.layout))

    def count_bytes(self, values: Sequence[int], sums: int) -> int:
        """Return the bytes of exchanges of so many ``values`` each, and of the key."""
        layouts = [SumsLayout(number, sums) for number in values]
        sizes = (layout.size_of_values + layout.size_of_sums + 8 * sums for layout in layouts)
        return len(self._keys.public) + sum(sizes)

    def time_exchanges(self, values: Sequence[int], sums: int) -> float:
        """Return the CPU seconds of both parties for such exchanges, by a calibration of half a second."""
        return estimate_seconds([SumsLayout(number, sums) for number in values])
