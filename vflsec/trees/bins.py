"""Bins of a party's columns: what histograms are made of, and where a split can be."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.sparse_rows import SparseRows


class Bins:
    """The bins of a party's raw columns, chosen on its training rows.

    A number has up to ``most`` bins of about as many rows each, in order; a value of more rows has a bin of its own, as
    has each of fewer values. A category has a bin for each of its values, in no order.

    Args:
        layout: of the columns.
        x: (n, d) encoded training rows.
        most: bins of a number.

    Attributes:
        column: (V,) the raw column of each of the V bins.
        ordered: (V,) whether the bin is one of a number.
        place: (V,) the encoded column that tells whether a row is beyond the bin.
        threshold: (V,) the value above which it is.
    """

    def __init__(self, layout: Layout, x: Tensor, most: int) -> None:
        self.layout = layout
        self._edges: dict[int, NDArray[np.floating]] = {}
        widths = []
        place, threshold, ordered = [], [], []
        for number, column in enumerate(layout.columns):
            if column.kind == "numeric":
                edges = self._edges[number] = _find_edges(_get_numbers(x, column.start), most)
                widths.append(len(edges) + 1)
                place.append(np.full(widths[-1], column.start))
                threshold.append(np.append(edges, np.inf))
            else:
                widths.append(column.width)
                place.append(column.start + np.arange(column.width))
                threshold.append(np.full(column.width, 0.5))
            ordered.append(np.full(widths[-1], column.kind == "numeric"))
        self.start = np.cumsum([0, *widths[:-1]])
        self.column = np.repeat(np.arange(len(widths)), widths)
        self.ordered = np.concatenate([np.zeros(0, dtype=bool), *ordered])
        self.place = np.concatenate([np.zeros(0, dtype=np.int64), *place])
        self.threshold = np.concatenate([np.zeros(0), *threshold]).astype(np.float32)

    def __len__(self) -> int:
        """Return V."""
        return len(self.column)

    def assign(self, x: Tensor) -> NDArray[np.int32]:
        """Return the bin (n, columns) of each row in each raw column."""
        codes = [self._code(x, number, column) for number, column in enumerate(self.layout.columns)]
        bins = np.stack(codes, axis=1) if codes else np.zeros((len(x), 0))
        return np.ascontiguousarray(bins + self.start, dtype=np.int32)

    def _code(self, x: Tensor, number: int, column: EncodedColumn) -> NDArray[np.integer]:
        if column.kind == "numeric":
            return np.searchsorted(self._edges[number], _get_numbers(x, column.start), side="left")
        part = select_columns(x, np.arange(column.start, column.start + column.width))
        return part.argmax(dim=1).cpu().numpy()


def select_columns(x: Tensor, columns: NDArray[np.integer]) -> Tensor:
    """Return encoded columns of ``x`` (n, d) as a dense tensor (n, len(columns))."""
    if isinstance(x, SparseRows):
        return torch.from_numpy(x.csr()[:, columns].toarray()).to(x.device)
    return x[:, torch.from_numpy(columns).to(x.device)]


def _get_numbers(x: Tensor, column: int) -> NDArray[np.floating]:
    return select_columns(x, np.array([column]))[:, 0].cpu().numpy()


def _find_edges(values: NDArray[np.floating], most: int) -> NDArray[np.floating]:
    """Return the edges between at most ``most`` bins, each halfway between two values that occur."""
    distinct, counts = np.unique(values, return_counts=True)
    lower, upper = distinct[:-1], distinct[1:]
    between: NDArray[np.floating] = ((lower.astype(np.float64) + upper) / 2).astype(values.dtype)
    between[between >= upper] = lower[between >= upper]  # between neighbors there is no other number
    return between if len(distinct) <= most else between[_find_last_of_bins(counts, most)]


def _find_last_of_bins(counts: NDArray[np.integer], most: int) -> list[int]:
    """Return the number of the last value of each of at most ``most`` bins but the last, of values in order.

    Values with as many rows as a bin should have get one of their own, and the others share the bins that are left. A
    bin that such a value cuts off with less than half of its rows is joined with it.
    """
    large = counts * most >= counts.sum()
    next_large, before = np.flatnonzero(large), np.concatenate([[0], np.cumsum(counts)])
    rows, bins = int(counts[~large].sum()), most - len(next_large)
    ends: list[int] = []
    start = 0
    while len(ends) < most - 1:
        if large[start]:
            end = start + 1
        else:
            place = np.searchsorted(next_large, start)
            stop = int(next_large[place]) if place < len(next_large) else len(counts)
            share = rows / max(1, bins)
            end = min(int(np.searchsorted(before, before[start] + share)), stop)
            here = int(before[end] - before[start])
            rows, bins = rows - here, bins - 1
            if end == stop and here < share / 2:
                end += 1
        if end >= len(counts):
            break
        ends.append(end - 1)
        start = end
    return ends
