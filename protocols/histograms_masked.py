"""Encrypted histograms of federated trees without encryption: the same messages, sealed; for experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vflsec.protocols.histograms_encrypted import EncryptedHistograms
from vflsec.protocols.histograms_plain import of_output
from vflsec.protocols.masked_plain import Sealed
from vflsec.trees.histograms import histogram


class MaskedHistograms(EncryptedHistograms):
    """The messages of an encrypted exchange, with numbers sealed for the active party instead of ciphertexts.

    Who learns what is as under encryption, and so are the trees, at a small part of the time. It protects nothing: use
    it to see what encrypted trees leak, and ``histograms-paillier`` to see what they cost.

    Source: Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1.
    """

    name = "histograms-masked"

    def encrypted(self, derivatives: NDArray[np.int64]) -> Mapping[str, Any]:
        """Return sealed derivatives, each time with a new key."""
        self._key = object()
        return {"value": SealedDerivatives(derivatives.copy(), self._key)}

    def keep(self, payload: Mapping[str, Any]) -> None:
        """Keep the sealed derivatives."""
        self._kept: SealedDerivatives = payload["value"]

    def added(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], shape: tuple[int, int], output: int
    ) -> tuple[Sealed, NDArray[np.int64]]:
        """Return sealed sums, and numbers of rows."""
        return self._kept.added(bins, nodes, shape, output)

    def decrypted(self, answer: Sealed, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums."""
        return answer.open(self._key)


@dataclass(frozen=True)
class SealedDerivatives(Sealed):
    """Derivatives (B, 2 C) that can be added up by bin, and read by whoever has the key."""

    def added(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], shape: tuple[int, int], output: int
    ) -> tuple[Sealed, NDArray[np.int64]]:
        """Return sums of one output's (N, n_bins, 2), sealed under the same key, and numbers of rows."""
        found = histogram(bins, nodes, of_output(self._values, output), *shape)
        return Sealed(found[..., :2], self._key), found[..., 2]
