"""Encryption of the linear layer at the cut, in place of messages in clear."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.layout import CipherSpec
from vflsec.core.defense import Defense
from vflsec.core.options import share_options
from vflsec.core.protocol import LinearBoundary
from vflsec.protocols.masked_plain import PlainMaskedBoundary
from vflsec.protocols.paillier import PaillierBoundary


@share_options(CipherSpec)
class EncryptedBoundary(Defense):
    """Replaces the plain boundary by the PHE-masked linear layer; training is the same, messages are not.

    The active party gets one score z = h W for each class and row instead of embeddings. With as many classes as the
    embedding is wide, the scores are the embedding up to a linear map: set model.cut well above the number of classes.
    The passive party decrypts the gradient delta W^T of every row. The defense acts where a linear head is trained
    across the cut layer; messages of other phases stay in clear. The weights follow SGD with momentum and weight decay,
    the only optimizer that works on shares.

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
        "classes as the embedding is wide they reveal it up to a linear map, or, over many steps on unchanged bottom "
        "models, up to a rotation; for features that depend on each other or have few values, fewer scores suffice. "
        "Labels: none"
    )
    points = ()
    strength_name = "on"
    strengths = (1.0,)
    hides = "from the active party: embeddings, except for one score of each class and row"
    costs = "Paillier operations and ciphertexts for every row and weight; backend=plain has neither"
    fails = "against label inference: the passive party decrypts the gradient of every row; and with a narrow embedding"

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

    def protocol(self) -> tuple[type[LinearBoundary], dict[str, Any]]:
        """Return the encrypted linear layer."""
        boundary = PlainMaskedBoundary if self.backend == "plain" else PaillierBoundary
        return boundary, msgspec.structs.asdict(self.spec)
