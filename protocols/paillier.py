"""The PHE-masked linear layer under Paillier encryption."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.codec import encode
from vflsec.cipher.arithmetic.cost import estimate
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.recording import Header, RecordingWriter
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.exchange import ROLES
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.core.message import Kind
from vflsec.core.settings import TrainSpec
from vflsec.protocols.masked_linear import MaskedLinearBoundary, RolePair

NOISE_BITS = 10  # that defenses may add to a loss gradient by noise
PENALTY_BITS = 4  # that any other defense of the active party may add, by a penalty or by what it does to labels


class PaillierBoundary(MaskedLinearBoundary):
    """The masked linear layer between two real ends: every message is what two companies would send.

    The key is made for this run, and masks, keys and randomizers come from the operating system's generator.

    Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected; Paillier 1999.

    Args:
        passive: holds the key and the features.
        active: holds the labels.
        cipher: the fields of ``CipherSpec``. ``delta_bits=None`` stands for 0, which is what cross-entropy needs,
            NOISE_BITS where a defense of the active party changes gradients, or PENALTY_BITS where it has one of
            another kind.
    """

    name = "paillier"

    @property
    def delta_bits(self) -> int:
        """The bits of a loss gradient that ``delta_bits=None`` stands for, by what the active party's defenses do."""
        others = [defense for defense in self.active.defenses if defense.protocol() is None]
        if any(Kind.GRADIENT in defense.kinds for defense in others):
            return NOISE_BITS
        return PENALTY_BITS if others else 0

    def start(self, weight: np.ndarray, share: np.ndarray, train: TrainSpec) -> RolePair:
        """Return roles with a fresh key."""
        optimizer = LinearSgd.build(
            train.optimizer, momentum=train.momentum, weight_decay=train.weight_decay, clip=train.clip
        )
        width, outputs = weight.shape
        self.layout = layout = self.spec.layout(
            width=width, outputs=outputs, batch=self.batch, delta_bits=self.delta_bits
        )
        keys = Keys.generate(layout.bits, layout.mode)
        return RolePair(
            PassiveRole(keys, layout, optimizer=optimizer, share0=share, batches=self.batches),
            ActiveRole(keys.public, layout, weight, optimizer=optimizer, batches=self.batches),
        )

    def check(self, h: Tensor, columns: Sequence[str] | None) -> None:
        """Raise UsageError if a feature lies beyond 2^feature_bits; the line names its column and the value to set."""
        numbers = h.detach().double().cpu().numpy()
        encode(numbers, self.spec.feature_precision, self.spec.feature_bits, "features", columns)

    def record(self, folder: Path) -> None:
        """Record what each party sees until ``close``, in ``passive.recording`` and ``active.recording``."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror or error}") from None
        passive = self._get_current().passive
        for name, role in zip(self.shares, ROLES, strict=True):
            header = Header(
                role=role,
                layout=self.layout,
                n=passive.keys.public.n,
                momentum=float(passive.optimizer.momentum),
                weight_decay=float(passive.optimizer.weight_decay),
            )
            self.recorders[name] = RecordingWriter(folder / f"{role}.recording", header)

    def close(self) -> None:
        """End the recordings."""
        for recorder in self.recorders.values():
            recorder.close()
        self.recorders.clear()

    def seconds(self, batches: int) -> float:
        """Return the CPU seconds of both parties for ``batches`` full batches, by a calibration of two seconds."""
        return batches * estimate(self.layout, batches)
