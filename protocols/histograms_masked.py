"""Encrypted histograms of federated trees: who says what to whom; and the same messages sealed, for experiments."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.message import Kind
from vflsec.protocols.histograms_plain import build_payload, select_output
from vflsec.protocols.masked_plain import Sealed
from vflsec.trees.histograms import HistogramExchange, Histograms, sum_bins


class EncryptedHistograms(HistogramExchange):
    """The exchange in which the active party holds a key, and the passive party adds up what it cannot read.

        active -> passive  [[g]], [[h]] of each row        passive -> active  [[sums]], and numbers of rows in clear

    Source: Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1.
    """

    reference = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "active": (
            "sums of first and second derivatives in each node and bin of the passive party's columns",
            "the number of rows in each of them",
        ),
        "passive": (
            "which rows are sampled in each round, and nothing of their derivatives; the method itself tells it nodes",
        ),
    }

    def share(self, derivatives: NDArray[np.int64], rows: Tensor, *, step: int, phase: str) -> None:
        """Send the derivatives (B, 2 C), encrypted."""
        message = self.active.send(
            Kind.CIPHERTEXT,
            self.encrypt_derivatives(derivatives),
            to=self.passive.name,
            step=step,
            phase=phase,
            rows=rows,
        )
        self.keep(message.payload)

    def sums(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], n_bins: int, place: Histograms
    ) -> NDArray[np.int64]:
        """Return the sums (N, n_bins, 3) that the active party decrypts."""
        answer, counts = self.add_derivatives(bins, nodes, (len(place.numbers), n_bins), place.output)
        message = self.passive.send(
            Kind.CIPHERTEXT,
            {
                "value": answer,
                "rows": torch.from_numpy(counts.astype(np.int32)),
                "nodes": torch.from_numpy(place.numbers),
            },
            to=self.active.name,
            step=place.tree,
            phase=place.phase,
        )
        heard = message.payload["rows"].numpy().astype(np.int64)
        sums = np.concatenate([self.decrypt_sums(message.payload["value"], heard), heard[..., None]], axis=2)
        payload = build_payload(sums, place)  # what the active party has decrypted, for the taps
        self.active.note(Kind.HISTOGRAM, payload, sender=self.passive.name, step=place.tree, phase=place.phase)
        return sums

    @abstractmethod
    def encrypt_derivatives(self, derivatives: NDArray[np.int64]) -> Mapping[str, Any]:
        """Return what the active party sends instead of derivatives (B, 2 C)."""

    @abstractmethod
    def keep(self, payload: Mapping[str, Any]) -> None:
        """Keep at the passive party what it received."""

    @abstractmethod
    def add_derivatives(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], shape: tuple[int, int], output: int
    ) -> tuple[Any, NDArray[np.int64]]:
        """Return what the passive party sends instead of sums (N, n_bins, 2), and the numbers of rows (N, n_bins).

        Args:
            bins: of the shared rows, as in ``sums``.
            nodes: as in ``sums``.
            shape: N and n_bins.
            output: the logit whose derivatives are added up.
        """

    @abstractmethod
    def decrypt_sums(self, answer: Any, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums (N, n_bins, 2) that the active party reads in the answer."""


class MaskedHistograms(EncryptedHistograms):
    """The messages of an encrypted exchange, with numbers sealed for the active party instead of ciphertexts.

    Who learns what is as under encryption, and so are the trees, at a small part of the time. It protects nothing: use
    it to see what encrypted trees leak, and ``histograms-paillier`` to see what they cost.

    Source: Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1.
    """

    name = "histograms-masked"

    def encrypt_derivatives(self, derivatives: NDArray[np.int64]) -> Mapping[str, Any]:
        """Return sealed derivatives, each time with a new key."""
        self._key = object()
        return {"value": SealedDerivatives(derivatives.copy(), self._key)}

    def keep(self, payload: Mapping[str, Any]) -> None:
        """Keep the sealed derivatives."""
        self._kept: SealedDerivatives = payload["value"]

    def add_derivatives(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], shape: tuple[int, int], output: int
    ) -> tuple[Sealed, NDArray[np.int64]]:
        """Return sealed sums, and numbers of rows."""
        return self._kept.add_derivatives(bins, nodes, shape, output)

    def decrypt_sums(self, answer: Sealed, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums."""
        return answer.open(self._key)


@dataclass(frozen=True)
class SealedDerivatives(Sealed):
    """Derivatives (B, 2 C) that can be added up by bin, and read by whoever has the key."""

    def add_derivatives(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], shape: tuple[int, int], output: int
    ) -> tuple[Sealed, NDArray[np.int64]]:
        """Return sums of one output's (N, n_bins, 2), sealed under the same key, and numbers of rows."""
        sums = sum_bins(bins, nodes, select_output(self._values, output), *shape)
        return Sealed(sums[..., :2], self._key), sums[..., 2]
