"""Sealed sums over a batch under a lattice cipher: the messages of ``sealed-plain``, encrypted."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vflsec.cipher.lattice import LatticeKeys, LatticePublic, SumsLayout, draw_mask, estimate_seconds
from vflsec.protocols.sealed_plain import SealedSums


class EncryptedSums(SealedSums):
    """The boundary of sealed training under encryption: every message is what two companies would send.

    The active party encrypts the numbers of a batch under its own key, made for this run: BFV with 128-bit security.
    ``LatticePublic`` says what hides the passive party's weights. The noise that epsilon is about comes from a seeded
    generator here, so that a run gives what ``sealed-plain`` gives, bit for bit; ``draw_rounded_normal`` protects data.

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

    def seal(self, values: Tensor, sums: int) -> np.ndarray:
        """Return ciphertexts as bytes, the first time after the key."""
        self._layout = SumsLayout(values.numel(), sums)  # both parties know it
        sent, self._unsent = self._unsent + self._keys.seal(values.cpu().numpy(), self._layout), b""
        return np.frombuffer(sent, np.uint8)

    def draw_mask(self, like: Tensor) -> Tensor:
        """Return a mask (P,) of the operating system's generator."""
        return torch.from_numpy(draw_mask(len(like))).to(like.device)

    def weigh(self, sealed: np.ndarray, blocks: Iterable[Tensor], mask: Tensor) -> np.ndarray:
        """Return ciphertexts of the masked sums as bytes."""
        key, data = np.split(sealed, [-self._layout.size_of_values])
        if key.size:
            self._public = LatticePublic(key.tobytes())
        arrays = (block.flatten(0, 1).cpu().numpy() for block in blocks)
        sums = self._public.weigh(data.tobytes(), arrays, mask.cpu().numpy(), self._layout)
        return np.frombuffer(sums, np.uint8)

    def open(self, sums: np.ndarray) -> Tensor:
        """Return the masked sums (P,)."""
        return torch.from_numpy(self._keys.open(sums.tobytes(), self._layout))

    def count_bytes(self, values: Sequence[int], sums: int) -> int:
        """Return the bytes of exchanges of so many ``values`` each, and of the key."""
        layouts = [SumsLayout(number, sums) for number in values]
        sizes = (layout.size_of_values + layout.size_of_sums + 8 * sums for layout in layouts)
        return len(self._keys.public) + sum(sizes)

    def time_exchanges(self, values: Sequence[int], sums: int) -> float:
        """Return the CPU seconds of both parties for such exchanges, by a calibration."""
        return estimate_seconds([SumsLayout(number, sums) for number in values])
