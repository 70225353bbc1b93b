"""Bottom models: networks of a party on its own columns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from vflsec.core.sparse_rows import WIDE
from vflsec.nn.wide import WideLinear

M = TypeVar("M", bound=nn.Module)


class Encoder(nn.Module):
    """A bottom model in two parts, (B, features) -> (B, width).

    The shape of ``bottom`` depends on the party's columns. Partial model aggregation averages ``top`` over parties, if
    it has the same shape.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section IV-B, local bottom and local top encoder.

    Args:
        bottom: the part that never leaves the party.
        top: the part that follows; its output is the embedding.
        width: of the embedding.
    """

    def __init__(self, bottom: nn.Module, top: nn.Module, width: int) -> None:
        super().__init__()
        self.bottom = bottom
        self.top = top
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings (B, width) of rows (B, features)."""
        embedding: Tensor = self.top(self.bottom(x))
        return embedding


class MLPBottom(nn.Sequential):
    """Fully connected ReLU network (B, features) -> (B, cut); no activation after the last layer.

    Args:
        features: number of input columns.
        hidden: widths of the hidden layers.
        cut: width of the cut layer.
    """

    def __init__(self, features: int, hidden: Sequence[int], cut: int) -> None:
        widths = [features, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [linear(before, after), nn.ReLU()]
        super().__init__(*layers, linear(widths[-1], cut))


def linear(features: int, width: int) -> nn.Module:
    """Return a linear layer, for many columns one that reads sparse rows in less time."""
    return WideLinear(features, width) if features > WIDE else nn.Linear(features, width)


def dense(features: int, hidden: Sequence[int], cut: int | None = None) -> list[nn.Module]:
    """Return Linear-BatchNorm-ReLU for each hidden width, then a plain Linear of width ``cut`` if there is one."""
    layers: list[nn.Module] = []
    for before, after in pairwise([features, *hidden]):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return layers if cut is None else [*layers, nn.Linear([features, *hidden][-1], cut)]


def untrained(model: M, seed: int) -> M:
    """Return a copy of ``model`` with all layers reinitialized from ``seed``."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    fresh = copy.deepcopy(model).cpu()  # drawn there, so that all devices get the same
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh.to(device)
