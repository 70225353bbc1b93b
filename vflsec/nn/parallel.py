"""Networks of unequal width in parallel, as one network; layers without weights act on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class ParallelLinear(nn.Module):
    """g linear maps, each of its own part of the columns: (B, sum of inputs) -> (B, sum of outputs).

    Args:
        inputs: number of input columns of each map.
        outputs: number of outputs of each map.
        wrap: applied to each ``nn.Linear``, for example spectral normalization.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        wrap: Callable[[nn.Module], nn.Module] = lambda linear: linear,
    ) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.maps = nn.ModuleList(wrap(nn.Linear(n, m)) for n, m in zip(inputs, outputs, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of all maps."""
        parts = torch.split(x, self.inputs, dim=1)
        return torch.cat([one(part) for one, part in zip(self.maps, parts, strict=True)], dim=1)


class UnitLength(nn.Module):
    """Scale each of g parts of every row to unit length: (B, sum of widths) -> the same shape.

    Args:
        widths: of the parts.
    """

    member: Tensor

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        part = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))
        self.register_buffer("member", torch.eye(len(widths))[part], persistent=False)  # (sum of widths, g)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled rows; a part of zeros is unchanged."""
        square = x.square() @ self.member
        return x * (square.clamp_min(1e-24).rsqrt() @ self.member.T)


def parallel_layers(
    widths: Sequence[Sequence[int]], *, dropout: float = 0.0, wrap_first: Callable[[nn.Module], nn.Module] | None = None
) -> list[nn.Module]:
    """Return Linear-BatchNorm-Dropout-LeakyReLU for each layer of g parallel networks; the last has no Dropout.

    Args:
        widths: of each network's input and layers; all have as many layers.
        dropout: rate, between layers.
        wrap_first: as ``wrap`` of ``ParallelLinear``, for the first layer.
    """
    layers: list[nn.Module] = []
    by_layer = list(zip(*widths, strict=True))
    for number, (inputs, outputs) in enumerate(pairwise(by_layer)):
        linear = ParallelLinear(inputs, outputs, *([wrap_first] if wrap_first and not number else []))
        layers += [linear, nn.BatchNorm1d(sum(outputs))]
        if dropout and number < len(by_layer) - 2:
            layers.append(nn.Dropout(dropout))
        layers.append(nn.LeakyReLU())
    return layers
