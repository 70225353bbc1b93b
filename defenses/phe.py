"""Encryption of the linear layer at the cut: the protocol in place of messages in clear."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from vflsec.core.defense import Defense
from vflsec.core.errors import UsageError
from vflsec.core.options import shares_options
from vflsec.paillier.layout import CipherSpec


@shares_options(CipherSpec)
class EncryptedBoundary(Defense):
    """Puts the PHE-masked linear layer in place of the plain boundary; training is the same, messages are not.

    It hides embeddings from the active party, which gets one score z = h W a class and row instead. Where there are as
    many classes as the embedding is wide, the scores are the embedding up to one linear map: set model.cut well above
    the number of classes. It does not hide labels from the passive party, which decrypts the gradient delta W^T of
    every row. It acts where a linear head is trained across the cut layer: what other phases say stays in clear. The
    weights follow SGD with momentum and weight decay, for nothing else can be done on shares.

    Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected.

    Args:
        strength: 1 for on, 0 for off.
        at: none; it changes no release, but who learns what.
        backend: ``paillier``, or ``plain``: the same messages, sealed but not encrypted, for experiments. It sends
            every row, as ``delta=outer`` does, and ignores key and widths.
        cipher: the fields of ``CipherSpec``.

    Raises:
        UsageError: another strength, or a setting out of range.
    """

    name = "phe"
    reference = "Kang et al. 2022 (PrADA), Algorithms 4 and 5, corrected; Paillier 1999"
    guarantee = (
        "embeddings: semantic security of Paillier (standard mode: decisional composite residuosity) and masks within "
        "2^-sigma of uniform, against a party that follows the protocol; but scores are in clear. With as many "
        "classes as the embedding is wide they give it up to a linear map, over many steps on bottom models at rest "
        "up to a rotation, and features that depend on each other or have few values are read from fewer scores. "
        "Labels: none"
    )
    points = ()
    strength_name = "on"
    strengths = (1.0,)

    def __init__(
        self,
        strength: float = 1.0,
        *,
        at: Iterable[str] | None = None,
        backend: Literal["paillier", "plain"] = "paillier",
        **cipher: Any,
    ) -> None:
        super().__init__(strength, at=at)
        if self.strength not in (0.0, 1.0):
            raise UsageError(f"phe is on or off, and has no strength: expected 1 or 0, got {strength:g}")
        self.backend = backend
        self.spec = CipherSpec(**{**({"delta": "outer"} if backend == "plain" else {}), **cipher})

    def protocol(self) -> tuple[str, dict[str, Any]]:
        """Return the encrypted linear layer."""
        name = "masked-plain" if self.backend == "plain" else "paillier"
        return name, msgspec.structs.asdict(self.spec)
