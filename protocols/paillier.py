"""The PHE-masked linear layer under Paillier encryption."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from vflsec.protocols.masked_linear import MaskedLinearBoundary, Roles

from vflsec.core.errors import UsageError
from vflsec.core.message import Kind
from vflsec.core.method import TrainSpec
from vflsec.core.party import Party
from vflsec.paillier.codec import rounded
from vflsec.paillier.cost import estimate
from vflsec.paillier.key_holder import KeyHolder
from vflsec.paillier.keys import Keys, Mode
from vflsec.paillier.label_holder import LabelHolder
from vflsec.paillier.layout import Layout
from vflsec.paillier.linear_sgd import LinearSgd
from vflsec.paillier.recording import Header, Recorder

NOISE_BITS = 10  # that defences may add to a loss gradient by noise
PENALTY_BITS = 4  # that any other defence of the active party may add, by a penalty or by what it does to labels


class PaillierBoundary(MaskedLinearBoundary):
    """The masked linear layer between two real ends: every message is what two companies would send.

    The key is made for this run, and masks, keys and randomisers come from the operating system's generator.

    Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected; Paillier 1999.

    Args:
        passive: holds the key and the features.
        active: holds the labels.
        bits: of the key.
        mode: ``standard`` (decisional composite residuosity alone), ``short`` or ``subgroup`` (faster, each with an
            assumption of its own: see ``vflsec.paillier.keys``).
        sigma: masks are 2^sigma times as wide as what they hide.
        delta: ``rank1`` or ``outer``, how delta^C is sent.
        order: ``current`` or ``paper``, from which weights delta^C is made.
        ring: scores are taken modulo 2^ring.
        delta_bits: |B · gradient| <= 2^delta_bits; None for 0, which is what cross-entropy needs, NOISE_BITS where a
            defence of the active party changes gradients, or PENALTY_BITS where it has one of another kind.
        noise: deviation of what the active party adds to delta^C, relative to the largest row of delta.
    """

    name = "paillier"

    def __init__(
        self,
        passive: Party,
        active: Party,
        *,
        bits: int = 2048,
        mode: Mode = "standard",
        sigma: int = 40,
        delta: Literal["rank1", "outer"] = "rank1",
        order: Literal["current", "paper"] = "current",
        ring: int = 64,
        delta_bits: int | None = None,
        noise: float = 0.0,
    ) -> None:
        super().__init__(passive, active, noise=noise)
        if noise and delta != "outer":
            raise UsageError(f"expected delta=outer with noise on every coordinate of delta^C, got {delta}: set it")
        self.mode: Mode = mode
        if delta_bits is None:
            others = [defense for defense in active.defenses if defense.protocol() is None]
            noised = any(Kind.GRADIENT in defense.at for defense in others)
            delta_bits = NOISE_BITS if noised else PENALTY_BITS if others else 0
        self.agreed = {
            "delta_bits": delta_bits,
            "bits": bits,
            "sigma": sigma,
            "delta": delta,
            "order": order,
            "ring": ring,
        }

    def start(self, weight: np.ndarray, own: np.ndarray, train: TrainSpec) -> Roles:
        """Return roles with a fresh key."""
        optimizer = _optimizer(train)
        width, outputs = weight.shape
        self.layout = layout = Layout(width=width, outputs=outputs, batch=self.batch, **self.agreed)  # type: ignore[arg-type]
        keys = Keys.generate(layout.bits, self.mode)
        return Roles(
            KeyHolder(keys, layout, optimizer=optimizer, share0=own, batches=self.batches),
            LabelHolder(keys.public, layout, weight, optimizer=optimizer, batches=self.batches),
        )

    def record(self, folder: Path) -> None:
        """Write down what C and p see from now on, in ``C.recording`` and ``p.recording``; ``close`` ends it.

        Raises:
            UsageError: there is a recording already, or none can be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror or error}") from None
        roles: tuple[Literal["C", "p"], ...] = ("C", "p")
        holder = self._current().key_holder
        momentum, weight_decay = float(holder.optimizer.momentum), float(holder.optimizer.weight_decay)
        n = holder.keys.public.n
        for name, role in zip(self.shares, roles, strict=True):
            header = Header(role=role, layout=self.layout, n=n, momentum=momentum, weight_decay=weight_decay)
            self.recorders[name] = Recorder(folder / f"{role}.recording", header)

    def close(self) -> None:
        """End the recordings."""
        for recorder in self.recorders.values():
            recorder.close()
        self.recorders.clear()

    def _note(self, party: Party, **arrays: np.ndarray) -> None:
        """Record features as they are encrypted, rounded."""
        if "mu" in arrays:
            arrays["mu"] = rounded(arrays["mu"], self.layout.feature_precision)
        super()._note(party, **arrays)

    def seconds(self, batches: int) -> float:
        """Return the CPU seconds of both parties for ``batches`` full batches, by a calibration of two seconds."""
        return batches * estimate(self.layout, self.mode, batches)


def _optimizer(train: TrainSpec) -> LinearSgd:
    return LinearSgd.of(train.optimizer, momentum=train.momentum, weight_decay=train.weight_decay, clip=train.clip)
