"""Bottom models: what a party computes on its own columns before anything leaves it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


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
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], cut))


def untrained(model: M, seed: int) -> M:
    """Return a copy of ``model`` with every layer drawn anew from ``seed``: the same shape, nothing learned."""
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    fresh = copy.deepcopy(model).cpu()  # drawn there, so that every device gets the same
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh.to(where)
