"""Secure aggregation: the server learns the mean of the parties' models, and nothing else about a single one."""

from collections.abc import Mapping

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.errors import Diverged
from vflsec.core.message import Kind
from vflsec.protocols.model_average import ModelAverage

FRACTION_BITS = 36
"""A parameter is rounded to a multiple of 2^-36, and the sum over all parties must stay below 2^26."""

Words = NDArray[np.uint64]


class SecureAverage(ModelAverage):
    """Each pair of parties agrees on a mask; one adds it to its model, the other subtracts it, and the sum is exact.

    In every exchange each party draws a new X25519 key pair and sends the public key to all others through the server.
    Each pair derives a key from its shared secret with HKDF-SHA256 and expands it with AES-256 in counter mode to one
    word of 64 bits for each parameter. Arithmetic is in fixed point modulo 2^64, where a uniform mask hides a value
    perfectly: what the server receives from a party looks uniform, and only the sum over all parties means anything.

    The server and the parties follow the protocol (honest but curious): nobody drops out, and the server passes public
    keys on unchanged. Messages differ from run to run, because the masks are secret. The mean does not: it equals the
    plain mean of the parameters after rounding to multiples of 2^-36. Defenses of parameters act before rounding.

    Source: Bonawitz et al., CCS 2017, "Practical secure aggregation for privacy-preserving machine learning", section
    4.0.1, one mask for each pair, without recovery of parties that drop out.

    Args:
        parties: all K parties.
        server: the party that adds; it has no data.
    """

    name = "secure-average"
    reference = "Bonawitz et al., CCS 2017, section 4, without dropouts"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "server": ("the mean over all parties of their shared modules, and nothing else of a single party's",),
        "party": (
            "the mean over all parties of their shared modules",
            "with two parties, therefore, those of the other party: twice the mean less its own",
            "parties that collude learn the sum of all others' modules",
        ),
    }

    def _average(
        self, tensors: Mapping[str, Mapping[str, Tensor]], *, step: int, phase: str, buffers: bool
    ) -> dict[str, Tensor]:
        """Return the mean, as the server computes it from masked sums."""
        names = [party.name for party in self.parties]
        private = {name: X25519PrivateKey.generate() for name in names}
        public = self._exchange_keys(private, step=step, phase=phase)
        total: Words | None = None
        for party in self.parties:
            defended = party.defend_payload(
                Kind.PARAMETERS, tensors[party.name], to=self.server.name, step=step, phase=phase, buffers=buffers
            )
            party.note(Kind.PARAMETERS, defended, sender=party.name, step=step, phase=phase)
            words = _to_fixed(defended, len(names))
            for other in names:
                if other != party.name:
                    mask = _draw_mask(private[party.name], public[party.name][other], len(words))
                    words = words + mask if names.index(party.name) < names.index(other) else words - mask
            message = party.send(
                Kind.CIPHERTEXT,
                {"words": torch.from_numpy(words.view(np.int64))},
                to=self.server.name,
                step=step,
                phase=phase,
            )
            received = message.payload["words"].numpy().view(np.uint64)
            total = received if total is None else total + received
        assert total is not None
        mean = _from_fixed(total, len(names), tensors[names[0]])
        self.server.note(Kind.PARAMETERS, mean, sender="+".join(names), step=step, phase=phase)
        return mean

    def _exchange_keys(
        self, private: Mapping[str, X25519PrivateKey], *, step: int, phase: str
    ) -> dict[str, dict[str, bytes]]:
        """Return, by party, the public keys of all parties as the server passes them on."""
        keys = {}
        for party in self.parties:
            key = torch.tensor(list(private[party.name].public_key().public_bytes_raw()), dtype=torch.uint8)
            message = party.send(Kind.CONTROL, {"key": key}, to=self.server.name, step=step, phase=phase)
            keys[party.name] = message.payload["key"]
        heard = {}
        for party in self.parties:
            others = {name: key for name, key in keys.items() if name != party.name}
            message = self.server.send(Kind.CONTROL, others, to=party.name, step=step, phase=phase)
            heard[party.name] = {name: bytes(key.tolist()) for name, key in message.payload.items()}
        return heard


def _to_fixed(values: Mapping[str, Tensor], parties: int) -> Words:
    """Return all entries in order as fixed-point numbers modulo 2^64.

    Raises:
        Diverged: an entry is not finite, or too large for the sum over all parties to be exact.
    """
    flat = torch.cat([value.detach().double().flatten() for value in values.values()]).cpu().numpy()
    limit = 2.0 ** (62 - FRACTION_BITS) / parties
    if not (np.abs(flat) < limit).all():  # NaN too
        raise Diverged(f"expected parameters below {limit:g} in absolute value for secure-average: lower the rate")
    return np.rint(flat * 2.0**FRACTION_BITS).astype(np.int64).view(np.uint64)


def _from_fixed(total: Words, parties: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean from the sum (P,), in the names and shapes of ``like``."""
    flat = torch.from_numpy(total.view(np.int64).astype(np.float64) / (parties * 2.0**FRACTION_BITS))
    parts = torch.split(flat, [value.numel() for value in like.values()])
    return {name: part.view_as(value).to(value) for part, (name, value) in zip(parts, like.items(), strict=True)}


def _draw_mask(private: X25519PrivateKey, public: bytes, size: int) -> Words:
    """Return the words (size,) that both parties of a pair derive from their keys."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    key = HKDF(SHA256(), 32, salt=None, info=b"vflsec secure-average").derive(secret)
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype=np.uint64)
