"""SimSiam: two views, one network, a stopped gradient."""

from __future__ import annotations

from torch import Tensor

from vflsec.nn.losses.negative_cosine import negative_cosine
from vflsec.nn.siamese import Siamese


class SimSiam(Siamese):
    """Predictions of one view against the other view's projections, -cos, gradient stopped.

    Source: Chen and He 2021, arXiv 2011.10566, algorithm 1; FedHSSL (arXiv 2208.08934), eq. 4.
    """

    name = "simsiam"
    cross_differs = ()
    local_differs = ()

    def _ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        return negative_cosine(p, z)
