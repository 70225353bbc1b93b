"""PrADA's feature extractors and aggregators: one number for each group of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vflsec.core.layout import Group, Grouping, Layout
from vflsec.nn.parallel import ParallelLinear, UnitLength, parallel_layers

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
        self.extractors = nn.Sequential(*parallel_layers(sizes, dropout=DROPOUT), UnitLength(self.widths))
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


def ungrouped(layout: Layout) -> Grouping:
    """Return the default grouping: one group, ``all``, and no pairs."""
    whole = Group("all", tuple(column.name for column in layout.columns))
    return Grouping((whole,), (), whole, {})


class _Embedding(nn.Module):
    """Embeds each one-hot block and keeps numbers, in the order of the columns.

    One product with the tables as a block-diagonal matrix, so that mixtures of categories work and have a gradient.
    """

    one: Tensor

    def __init__(self, layout: Layout, widths: Mapping[str, int]) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1, 1), persistent=False)
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
        tables = (self.tables[name] if name in self.tables else self.one for name in self._names)  # noqa: SIM401
        blocks: Tensor = torch.block_diag(*tables)  # type: ignore[no-untyped-call]
        return x @ blocks
