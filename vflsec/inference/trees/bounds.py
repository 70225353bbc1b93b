"""Bounds on the columns of a party, from the sides of its splits on which rows are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vflsec.core.message import Kind
from vflsec.core.view import View, memoize
from vflsec.inference.trees.histograms import PossibleBins, Unit, find_units, list_exact, peel_bins
from vflsec.inference.trees.nodes import Floats, Ints, list_messages


class ColumnBounds(NamedTuple):
    """What splits say about the columns of a party.

    Attributes:
        units: U of them.
        lowest: (n, U) by split, the least number that a unit can have: the quantile of the middle of a bin, or 0 or 1.
            Of training rows histograms tell more than sides of splits.
        highest: (n, U) by split.
        expected: (n, U) by split, the mean over the bins that the sides of splits leave, so that it means the same of
            rows of every split.
        weights: (V, U) the number of each unit in each bin.
        mass: (V,) the share of rows in each bin of a column.
    """

    units: tuple[Unit, ...]
    lowest: Mapping[str, Floats]
    highest: Mapping[str, Floats]
    expected: Mapping[str, Floats]
    weights: Floats
    mass: Floats


@memoize
def find_bounds(view: View, victim: str) -> ColumnBounds | None:
    """Return the bounds that the directions of rows at splits of ``victim`` imply; None if nothing was said of bins."""
    declared = [m.payload for m in list_messages(view, victim, Kind.CONTROL) if "column" in m.payload]
    if not declared:
        return None
    column, ordered = (declared[0][key].cpu().numpy() for key in ("column", "ordered"))
    units = tuple(_make_units(column, ordered))
    mass = _find_masses(view, victim, column)
    places = _get_places(units)
    least = np.array([unit.first if unit.ordered else 0 for unit in units])
    most = np.array([unit.last if unit.ordered else 1 for unit in units])
    low, high = (
        {s: np.asfortranarray(np.broadcast_to(bins, (len(x), len(bins)))) for s, x in view.features.items()}
        for bins in (least, most)
    )
    splits = {
        (m.step, node): int(b)
        for m in list_messages(view, victim, Kind.CONTROL)
        if "nodes" in m.payload
        for node, b in zip(m.payload["nodes"].tolist(), m.payload["bins"].tolist(), strict=True)
    }
    for split, rows, node, b in _list_sides(view, victim, splits):
        u, right = places[b], node % 2 == 1
        if units[u].ordered and right:
            low[split][rows, u] = np.maximum(low[split][rows, u], b + 1)
        elif units[u].ordered:
            high[split][rows, u] = np.minimum(high[split][rows, u], b)
        elif right:
            low[split][rows, u] = 1
        else:
            high[split][rows, u] = 0
    for j in {unit.column for unit in units if not unit.ordered}:
        here = find_units(units, j)
        for split in view.features:  # a row that is of one category is of no other
            rows = np.flatnonzero(low[split][:, here].any(axis=1))
            high[split][rows[:, None], here] = low[split][rows[:, None], here]
    weights = np.zeros((len(column), len(units)))
    lowest: dict[str, Floats] = {}
    highest: dict[str, Floats] = {}
    expected: dict[str, Floats] = {}
    for u, unit in enumerate(units):
        share = mass[unit.first : unit.last + 1]
        # quantile of its middle
        weights[unit.first : unit.last + 1, u] = share.cumsum() - share / 2 if unit.ordered else 1
    for split in view.features:
        *_, expected[split] = _bound_numbers(units, mass, weights, low[split], high[split])
    _set_exactly(view, victim, column, units, low[view.aux_split], high[view.aux_split])
    for split in view.features:
        lowest[split], highest[split], _ = _bound_numbers(units, mass, weights, low[split], high[split])
    return ColumnBounds(units, lowest, highest, expected, weights, mass)


def _get_places(units: Sequence[Unit]) -> dict[int, int]:
    """Return the unit of each bin."""
    return {b: u for u, unit in enumerate(units) for b in range(unit.first, unit.last + 1)}


def _make_units(column: Ints, ordered: NDArray[np.bool_]) -> Iterator[Unit]:
    for j in np.unique(column).tolist():
        bins = np.flatnonzero(column == j)
        if ordered[bins[0]]:
            yield Unit(j, int(bins[0]), int(bins[-1]), ordered=True)
        else:
            yield from (Unit(j, b, b, ordered=False) for b in bins.tolist())


def _find_masses(view: View, victim: str, column: Ints) -> Floats:
    """Return the share of rows in each bin (V,): from histograms of roots, else the same for all bins of a column."""
    total = np.zeros(len(column))
    for m in list_messages(view, victim, Kind.HISTOGRAM):
        total += m.payload["value"][m.payload["nodes"] == 1][:, :, 2].sum(dim=0).cpu().numpy()
    total = total.clip(0)
    for j in np.unique(column):
        here = column == j
        total[here] = total[here] / total[here].sum() if total[here].sum() > 0 else 1 / here.sum()
    return total


def _list_sides(view: View, victim: str, splits: Mapping[tuple[int, int], int]) -> Iterator[tuple[str, Ints, int, int]]:
    """Yield split, rows and the child to which they go, with the bin at which their node is split."""
    first = min((m.step for m in list_messages(view, victim, Kind.NODES)), default=0)
    for m in list_messages(view, victim, Kind.NODES):
        if m.sender != victim or m.rows is None or m.split not in view.features:
            continue
        value, rows = m.payload["value"].cpu().numpy(), m.rows.cpu().numpy()
        for j in range(value.shape[1]):
            if m.step + j > first and not view.adaptive:
                break
            for node in np.unique(value[:, j]).tolist():
                if (m.step + j, node // 2) in splits:
                    yield m.split, rows[value[:, j] == node], node, splits[m.step + j, node // 2]


def _bound_numbers(
    units: Sequence[Unit], mass: Floats, weights: Floats, low: Ints, high: Ints
) -> tuple[Floats, Floats, Floats]:
    """Return the lowest, highest and expected number (n, U) of each unit, from the lowest and highest bin (n, U)."""
    high = np.maximum(low, high)  # a defense can make directions disagree
    lowest, highest, expected = (np.zeros(low.shape, order="F") for _ in range(3))  # columns are written
    for u, unit in enumerate(units):
        if unit.ordered:
            lowest[:, u], highest[:, u] = weights[low[:, u], u], weights[high[:, u], u]
            before = np.concatenate([[0], mass[unit.first : unit.last + 1].cumsum()])
            expected[:, u] = (before[low[:, u] - unit.first] + before[high[:, u] - unit.first + 1]) / 2
        else:
            lowest[:, u], highest[:, u] = low[:, u], high[:, u]
    for j in {unit.column for unit in units if not unit.ordered}:
        here = find_units(units, j)
        possible = mass[[units[u].first for u in here]] * highest[:, here]
        expected[:, here] = possible / possible.sum(axis=1, keepdims=True).clip(np.finfo(float).tiny)
    return lowest, highest, expected


def _set_exactly(view: View, victim: str, column: Ints, units: Sequence[Unit], low: Ints, high: Ints) -> None:
    """Set the bounds (n, U) of training rows whose bins follow from histograms exactly."""
    if not (equations := list_exact(view, victim)):
        return
    places = _get_places(units)
    for bins in peel_bins(equations, column, len(low), PossibleBins(units, low, high)).T:
        rows = np.flatnonzero(bins >= 0)
        here = np.array([places[b] for b in bins[rows]], dtype=np.int64)
        if len(rows) and units[here[0]].ordered:
            low[rows, here], high[rows, here] = bins[rows], bins[rows]
        elif len(rows):
            high[rows[:, None], find_units(units, units[here[0]].column)] = 0
            low[rows, here], high[rows, here] = 1, 1
