"""Heads of self-supervised learning: the projector behind an encoder, the predictor behind a projector."""

from __future__ import annotations

from torch import nn


class Projector(nn.Sequential):
    """Linear-BN-ReLU, Linear-BN-ReLU, Linear-BN: (B, width) -> (B, out).

    Source: Chen and He 2021 (SimSiam), arXiv 2011.10566, section 3; FedHSSL (arXiv 2208.08934), whose widths are 512,
    512 and 512 (MoCo: 128). Only the last Linear has a bias, as in FedHSSL's code.

    Args:
        width: of the input.
        hidden: width of both hidden layers.
        out: width of the projection.
    """

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__(
            *(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()),
            *(nn.Linear(hidden, out), nn.BatchNorm1d(out)),
        )


class Predictor(nn.Sequential):
    """A bottleneck, Linear-BN-ReLU, Linear: (B, width) -> (B, width).

    Source: Chen and He 2021 (SimSiam), arXiv 2011.10566, section 3; FedHSSL (arXiv 2208.08934): 512 - 128 - 512.

    Args:
        width: of the projection.
        hidden: width of the bottleneck.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(
            *(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()),
            nn.Linear(hidden, width),
        )
