"""Sealed sums over a batch in place of a gradient for each row; sealed numbers, without encryption."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.cipher.lattice import MODULUS
from vflsec.cipher.noise import SealedPlan
from vflsec.core.message import Kind, Step
from vflsec.core.party import Party
from vflsec.protocols.plain import PlainBoundary


@dataclass(frozen=True)
class SealedIntegers:
    """Integers that can be weighed, added and masked, and that only the key's owner can read."""

    _values: Tensor = field(repr=False)
    _key: object = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Size of the numbers."""
        return self._values.nbytes

    def open(self, key: object) -> Tensor:
        """Return the numbers.

        Raises:
            PermissionError: not with this key.
        """
        if key is not self._key:
            raise PermissionError("sealed numbers can be read with the key alone, which the active party holds")
        return self._values

    def weigh(self, blocks: Iterable[Tensor], mask: Tensor) -> SealedIntegers:
        """Return the sum (P,) of these numbers (B, m) with weights (b, m, P) of consecutive rows, plus ``mask``."""
        total, first = torch.zeros((), dtype=torch.float64), 0
        for block in blocks:  # exact: sums stay below 2^53
            part = self._values[first : first + len(block)].double().flatten()
            total = total + part @ block.double().flatten(0, 1)
            first += len(block)
        assert first == len(self._values), "each row has weights"
        return SealedIntegers((total.long() + mask) % MODULUS, self._key)


class SealedSums(PlainBoundary):
    """The boundary of sealed training: embeddings go up, and only noised sums over a batch come down.

    The active party seals one row of numbers for each sample; the passive party weighs them with the Jacobians of its
    model, masks the sums and returns them; the active party opens them, adds noise, and returns them. So the passive
    party learns one noised sum for each of its parameters, and the active party nothing.

    Here sealed numbers are not encrypted, and masks and noise come from seeded generators: this measures what the
    protocol would leak, and protects no real data. ``sealed-bfv`` sends the same messages, encrypted.

    Source: this project.

    Args:
        passive: the party with the model below the cut layer.
        active: the party with the labels, and the key.
        plan: what both agree on; by default without noise.
    """

    name = "sealed-plain"
    reference = "this project; noise on sums: Abadi et al. 2016; composition: Dong et al. 2019 (arXiv 1905.02383)"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "active": PlainBoundary.reveals["active"],
        "passive": (
            "of each batch, the sum over its rows of its own weighted gradients, with noise; no gradient of a row",
            "the part of a linear head that reads its embedding, which learns from noised sums as well",
        ),
    }
    instead = frozenset({Kind.SUM})

    def __init__(self, passive: Party, active: Party, *, plan: SealedPlan | None = None) -> None:
        super().__init__(passive, active)
        self.plan = plan or SealedPlan()
        self._key = object()

    def backward(self, g: Tensor, step: Step) -> Tensor:
        """Raise UsageError: no gradient of a row is sent."""
        raise UsageError(
            "expected a method whose last phase is split learning for sealed training, got one that sends a gradient "
            "for each row: choose --method fedsplitnn"
        )

    def sum(
        self, values: Tensor, blocks: Iterable[Tensor], noise: Tensor, known: Mapping[str, Tensor], step: Step
    ) -> Tensor:
        """Return the noised sums (P,) that the passive party learns, in units of ``2^-2 bits``.

        Args:
            values: (B, m) integers, known to the active party.
            blocks: (b, m, P) integers for consecutive rows, known to the passive party.
            noise: (P,) integers, known to the active party.
            known: what the passive party knows of these sums besides, for attacks on them.
            step: the place of the exchange.
        """
        place = {"to": self.passive.name, **step.place}
        sealed = self.active.send(Kind.CIPHERTEXT, {"values": self.seal(values, len(noise))}, **place)
        mask = self.draw_mask(noise)  # whatever it is, the sums are the same
        sums = self.weigh(sealed.payload["values"], blocks, mask)
        back = self.passive.send(Kind.CIPHERTEXT, {"sums": sums}, to=self.active.name, **step.place)
        answer = (self.open(back.payload["sums"]).to(noise) + noise) % MODULUS
        masked = self.active.send(Kind.CIPHERTEXT, {"sums": answer}, **place).payload["sums"]
        result = (masked - mask + MODULUS // 2) % MODULUS - MODULUS // 2
        noised: Tensor = result * 4.0**-self.plan.bits
        self.passive.note(
            Kind.SUM,
            {"sum": noised.float(), **known},
            sender=self.active.name,
            step=step.number,
            phase=step.phase,
            rows=step.rows,
        )
        return noised

    def seal(self, values: Tensor, sums: int) -> Any:
        """Return what the active party sends of its ``values``, of which P ``sums`` will come back."""
        return SealedIntegers(values, self._key)

    def draw_mask(self, like: Tensor) -> Tensor:
        """Return the passive party's mask (P,), uniform modulo ``MODULUS``."""
        return torch.randint(MODULUS, like.shape, device=like.device)

    def weigh(self, sealed: Any, blocks: Iterable[Tensor], mask: Tensor) -> Any:
        """Return what the passive party sends back: sums of sealed values with weights, plus its mask."""
        return sealed.weigh(blocks, mask)

    def open(self, sums: Any) -> Tensor:
        """Return the masked sums (P,) that the active party reads."""
        opened: Tensor = sums.open(self._key)
        return opened

    def count_bytes(self, values: Sequence[int], sums: int) -> int:
        """Return the bytes of exchanges of so many ``values`` each, sealed, masked and answered."""
        return 8 * sum(number + 2 * sums for number in values)

    def time_exchanges(self, values: Sequence[int], sums: int) -> float:
        """Return an estimate of the CPU seconds of cryptography of such exchanges; 0 without any."""
        return 0.0
