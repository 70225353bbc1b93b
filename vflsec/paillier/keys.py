"""Key pairs: phe's objects with what the fast arithmetic must know beside them."""

from __future__ import annotations

from typing import Literal

import msgspec
from phe import PaillierPrivateKey, PaillierPublicKey, generate_paillier_keypair

from vflsec.core.checks import one_of

Mode = Literal["standard", "short", "subgroup"]
MODES = ("standard", "short", "subgroup")


class PublicKey(msgspec.Struct, frozen=True):
    """What p gets of a key.

    Attributes:
        n: the modulus, little-endian.
        generator: in subgroup mode, of the randomisers' subgroup modulo n^2, little-endian; else empty.
    """

    n: bytes
    generator: bytes = b""

    @property
    def phe(self) -> PaillierPublicKey:
        """The key as an object of ``phe``."""
        return PaillierPublicKey(int.from_bytes(self.n, "little"))


class Keys:
    """A key pair.

    Attributes:
        private: the key, an object of ``phe``; ``private.public_key`` is its public part.
        mode: how randomisers are drawn.
    """

    def __init__(self, private: PaillierPrivateKey, mode: Mode = "standard") -> None:
        self.private, self.mode = private, mode

    @classmethod
    def generate(cls, bits: int, mode: Mode = "standard") -> Keys:
        """Return a fresh pair of ``bits`` bits."""
        one_of(MODES, mode=mode)
        return cls(generate_paillier_keypair(n_length=bits)[1], mode)

    @property
    def public(self) -> PublicKey:
        """What the other party may know."""
        return PublicKey(self.private.public_key.n.to_bytes(self.private.public_key.n.bit_length() // 8, "little"))
