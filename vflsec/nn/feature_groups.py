"""PrADA's networks of groups of columns: feature extractors, aggregators and domain discriminators."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from vflsec.base.layout import Group, Grouping, Layout


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
        return torch.cat([linear(part) for linear, part in zip(self.maps, parts, strict=True)], dim=1)


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


def build_layers(
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


DROPOUT = 0.1


class FeatureGroups(nn.Module):
    """One output for each group of a passive party's columns, (B, d) -> mu (B, g), or (B, g · aggregated).

    Categories are embedded once, N(0, 0.01^2), and each group's extractor reads the embeddings and numbers of its own
    columns: Linear-BatchNorm-Dropout(0.1)-LeakyReLU, the same again, Linear-BatchNorm-LeakyReLU, and rows f_i of length
    one. An aggregator turns each f_i into a number by a linear map, without activation.

    All groups go through one layer at a time, so that layers without weights act on all of them at once.

    Source: PrADA (Kang et al. 2022), eq. 1 and table II; its authors' code for BatchNorm, Dropout and activations.

    Args:
        layout: of the party's matrix.
        groups: of columns; one may be in several. A group without widths has layers of 2 n, n and n / 2 for n inputs,
            as most of table II has.
        embeddings: width of the embedding of a category, by column; by default half the number of categories, at most
            8.
        aggregated: outputs for each group; 4 in the released code if all columns are one group.

    Attributes:
        width: of mu.
        widths: of each group's f_i.
        extracted: f of the last training batch, (B, sum of ``widths``), with its graph.
    """

    inputs: Tensor

    def __init__(
        self, layout: Layout, groups: Sequence[Group], embeddings: Mapping[str, int], *, aggregated: int = 1
    ) -> None:
        super().__init__()
        self.embedding = _Embedding(layout, embeddings)
        inputs = [self.embedding.places(group.columns) for group in groups]
        sizes = [
            (len(places), *(group.widths or (2 * len(places), len(places), max(1, len(places) // 2))))
            for group, places in zip(groups, inputs, strict=True)
        ]
        self.register_buffer("inputs", torch.cat(inputs), persistent=False)
        self.names = tuple(group.name for group in groups)
        self.widths = tuple(last for *_, last in sizes)
        self.extractors = nn.Sequential(*build_layers(sizes, dropout=DROPOUT), UnitLength(self.widths))
        self.aggregators = ParallelLinear(self.widths, [aggregated] * len(groups))
        self.width = aggregated * len(groups)
        self.extracted = torch.empty(0)

    def extract(self, x: Tensor) -> Tensor:
        """Return f (B, sum of widths), the concatenated outputs of all extractors."""
        f: Tensor = self.extractors(self.embedding(x)[:, self.inputs])
        return f

    def forward(self, x: Tensor) -> Tensor:
        """Return mu (B, width)."""
        f = self.extract(x)
        if self.training:
            self.extracted = f
        mu: Tensor = self.aggregators(f)
        return mu

    def __getstate__(self) -> dict[str, object]:
        """Leave out ``extracted``: a tensor with a graph cannot be copied."""
        return {**self.__dict__, "extracted": torch.empty(0)}


def group_all(layout: Layout) -> Grouping:
    """Return the default grouping: one group, ``all``, and no pairs."""
    whole = Group("all", tuple(column.name for column in layout.columns))
    return Grouping((whole,), (), whole, {})


class _Embedding(nn.Module):
    """Embeds each one-hot block and keeps numbers, in the order of the columns.

    One product with the tables as a block-diagonal matrix, so that mixtures of categories work and have a gradient.
    """

    number: Tensor

    def __init__(self, layout: Layout, widths: Mapping[str, int]) -> None:
        super().__init__()
        self.register_buffer("number", torch.ones(1, 1), persistent=False)
        self.tables = nn.ParameterDict()
        self._names = [column.name for column in layout.columns]
        self._places: dict[str, list[int]] = {}
        start = 0
        for column in layout.columns:
            width = 1
            if column.kind == "categorical":
                width = widths.get(column.name, min(8, (column.width + 1) // 2))
                self.tables[column.name] = nn.Parameter(torch.empty(column.width, width))
            self._places[column.name] = list(range(start, start + width))
            start += width
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the embeddings."""
        for table in self.tables.values():
            nn.init.normal_(table, std=0.01)

    def places(self, columns: Sequence[str]) -> Tensor:
        """Return the positions of these columns in the output of ``forward``."""
        return torch.tensor([place for column in columns for place in self._places[column]], dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        tables = (self.tables[name] if name in self.tables else self.number for name in self._names)  # noqa: SIM401
        blocks: Tensor = torch.block_diag(*tables)  # type: ignore[no-untyped-call]
        return x @ blocks


def reverse(x: Tensor, alpha: float) -> Tensor:
    """Return ``x``; in the backward pass a gradient g becomes -alpha g.

    Source: Ganin and Lempitsky 2015, "Unsupervised domain adaptation by backpropagation", section 3.1.
    """
    reversed_: Tensor = _Reversal.apply(x, alpha)  # type: ignore[no-untyped-call]
    return reversed_


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.alpha * gradients[0], None


HIDDEN = 10


class DomainDiscriminators(nn.Module):
    """D_i: Linear(d_i, width)-BatchNorm-LeakyReLU-Linear(10)-BatchNorm-LeakyReLU-Linear(2) on each f_i.

    Source: PrADA (Kang et al. 2022), eq. 2; layers of its authors' code for Census-Income.

    Args:
        widths: d_i of each f_i.
        width: of the first layer.
        spectral: bring the first layer's largest singular value to one.
    """

    def __init__(self, widths: Sequence[int], *, width: int = 24, spectral: bool = True) -> None:
        super().__init__()
        g = len(widths)
        layers = build_layers(
            [(size, width, HIDDEN) for size in widths], wrap_first=spectral_norm if spectral else None
        )
        self.layers = nn.Sequential(*layers, ParallelLinear([HIDDEN] * g, [2] * g))

    def forward(self, f: Tensor) -> Tensor:
        """Return logits (B, g, 2) that rows f (B, sum of widths) are the source's (0) or the target's (1)."""
        logits: Tensor = self.layers(f)
        return logits.view(len(f), -1, 2)

    def loss(self, source: Tensor, target: Tensor, alpha: float) -> Tensor:
        """Return L_adv, the sum over groups of the mean cross-entropy; its gradient is multiplied by -alpha.

        The mean is over the rows of both domains, as in the authors' code: half of eq. 2, which adds a mean of each.

        Args:
            source: f of the source's rows, (B, sum of widths).
            target: f of the target's rows.
            alpha: weight of the reversed gradient; the discriminators themselves learn with weight one.
        """
        logits: Tensor = self(reverse(torch.cat([source, target]), alpha))
        domain = (torch.arange(len(logits), device=logits.device) >= len(source)).long()
        each: Tensor = F.cross_entropy(logits.transpose(1, 2), domain[:, None].expand(-1, logits.shape[1]))
        return each * logits.shape[1]
