"""Histograms of federated trees in clear."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.message import Kind
from vflsec.trees.histograms import FRACTION_BITS, HistogramExchange, Histograms, sum_bins

UNITS = np.array([2.0**FRACTION_BITS, 2.0**FRACTION_BITS, 1.0])


class PlainHistograms(HistogramExchange):
    """Derivatives go to the passive party in clear, and sums come back.

    The sign of a first derivative is the label: it protects nothing. Sums are those of the other exchanges.

    Source: Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1, without encryption.
    """

    name = "histograms-plain"
    reference = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithm 1, without encryption"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "active": (
            "sums of first and second derivatives in each node and bin of the passive party's columns",
            "the number of rows in each of them",
        ),
        "passive": ("first and second derivatives of every row that is sampled, and so its label",),
    }

    def share(self, derivatives: NDArray[np.int64], rows: Tensor, *, step: int, phase: str) -> None:
        """Send the derivatives (B, 2 C) in units of the loss; the active party's defenses have acted on them."""
        message = self.active.send(
            Kind.GRADIENT,
            {"value": torch.from_numpy(derivatives / 2.0**FRACTION_BITS)},
            to=self.passive.name,
            step=step,
            phase=phase,
            rows=rows,
            defended=True,
        )
        value = message.payload["value"].numpy()
        self._kept: NDArray[np.int64] = np.rint(value * 2.0**FRACTION_BITS).astype(np.int64)

    def sums(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], n_bins: int, place: Histograms
    ) -> NDArray[np.int64]:
        """Return the sums (N, n_bins, 3) that the passive party sends."""
        sums = sum_bins(bins, nodes, select_output(self._kept, place.output), len(place.numbers), n_bins)
        message = self.passive.send(
            Kind.HISTOGRAM,
            build_payload(sums, place),
            to=self.active.name,
            step=place.tree,
            phase=place.phase,
        )
        return np.asarray(np.rint(message.payload["value"].numpy() * UNITS).astype(np.int64))


def build_payload(sums: NDArray[np.int64], place: Histograms) -> dict[str, Tensor]:
    """Return the payload of histograms in clear: ``value`` (N, n_bins, 3) in units of the loss, and ``nodes``."""
    return {"value": torch.from_numpy(sums / UNITS), "nodes": torch.from_numpy(place.numbers)}


def select_output(derivatives: NDArray[np.int64], output: int) -> NDArray[np.int64]:
    """Return the first and second derivatives (B, 2) by one of C logits, from those by all (B, 2 C)."""
    return derivatives[:, [output, derivatives.shape[1] // 2 + output]]
