"""Splits of trees as choices: labels under which each observed split beats the splits at the party's own bins."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.layout import Layout
from vflsec.core.message import AFTERWARDS, Kind
from vflsec.core.view import View
from vflsec.inference.trees.nodes import Ints, collect_nodes, list_partners, sum_by_place, take_at_place
from vflsec.trees.bins import Bins

Floats = NDArray[np.float32]

BINS, LEAF_ROWS = 32, 20
"""Defaults of the method ``secureboost``, for whoever does not know what the parties agreed on."""

TINY = 1e-12


class Round(NamedTuple):
    """The T trees of a round of which a party knows splits, at most K of each.

    Training rows that share nodes and sides of a tree are a group, of which a tree has at most M. Trees with fewer
    groups or splits are filled with zeros.

    Attributes:
        outputs: (T,) the logit to which each adds.
        group: (n, T) of each row, numbered from M times its tree.
        place: (n T c,) of each row in each tree and column, by group and interval.
        nodes: (T, M, K) float, whether a group is in each node that is split.
        right: (T, M, K) float, whether it goes right there.
        possible: (T, V, K) whether each own bin could have split each node.
    """

    outputs: Tensor
    group: Tensor
    place: Tensor
    nodes: Tensor
    right: Tensor
    possible: Tensor


class Choices:
    """The splits that a passive party knows, its own ones and those of others.

    A node is split at the bin with the largest gain, of all parties. So the party knows that none of its own bins has
    a larger gain than the split that was chosen.

    Args:
        view: of a passive party.
        drawn: (n,) by round, whether the training drew each row; of other rounds it drew all.
        most: largest number of own bins that are compared, evenly spaced over all.

    Attributes:
        rounds: with known splits, by number.
    """

    def __init__(self, view: View, drawn: Mapping[int, NDArray[np.bool_]], most: int) -> None:
        device = view.features[view.aux_split].device
        place, bins, column, self.shape = _make_bins(view, most)
        self.place, self.bins = torch.from_numpy(place).to(device), torch.from_numpy(bins).to(device)
        least = view.agreed.get("leaf_rows", LEAF_ROWS)
        self.rounds: dict[int, Round] = {}
        candidates = infer_drawn_columns(view)
        for number, trees in _collect_known_splits(view).items():
            numbers, levels = zip(*trees, strict=True)
            group, nodes, right = (torch.from_numpy(x).to(device) for x in _join_trees(levels))
            outputs = torch.tensor(numbers, device=device) % (view.n_classes if view.n_classes > 2 else 1)
            counted = nodes.new_ones(group.shape)
            if number in drawn:
                counted *= torch.from_numpy(drawn[number]).to(counted)[:, None]
            group += nodes.shape[1] * torch.arange(len(numbers), device=device)
            places = (group[:, :, None] * (self.shape[0] * self.shape[1]) + self.place[:, None]).flatten()
            (beyond,), (whole,) = self._sum(group, places, nodes, counted[None])
            possible = (beyond >= least) & (whole - beyond >= least)
            for t, tree in enumerate(numbers):
                if tree in candidates:
                    possible[t, torch.from_numpy(~candidates[tree][column]).to(device)] = False
            self.rounds[number] = Round(outputs, group, places, nodes, right, possible)

    def score_surprise(self, round_: int, derivatives: Tensor, *, temperature: float, l2: float) -> Tensor:
        """Return minus the log likelihood of the splits of a round; 0 if none is known.

        The likelihood of a split is its share of exp(gain / temperature) over itself and all own bins.

        Args:
            round_: of boosting.
            derivatives: (2, ..., n, C') first and second ones under the labels in question. The surprise is summed
                over further dimensions.
            temperature: difference of gains at which a choice is e times as likely.
            l2: of the training.
        """
        if round_ not in self.rounds:
            return derivatives.new_zeros(())
        known = self.rounds[round_]
        has_all = known.outputs.tolist() == list(range(derivatives.shape[-1]))
        of_trees = derivatives[..., slice(None) if has_all else known.outputs]
        beyond, whole = self._sum(known.group, known.place, known.nodes, of_trees)
        chosen = _sum_by_group(known.group, known.right.shape[1], of_trees) @ known.right
        of_bins = _compute_gain(beyond, whole, l2).masked_fill(~known.possible, -torch.inf)
        gains = torch.cat([_compute_gain(chosen, whole, l2), of_bins], dim=-2) / temperature
        return -gains.log_softmax(dim=-2)[..., 0, :].sum()

    def _sum(self, group: Tensor, place: Tensor, nodes: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of values (..., n, T) over rows beyond each own bin, (..., T, V, K), and all, (..., T, 1, K)."""
        (trees, count, _), (columns, width) = nodes.shape, self.shape
        whole = _sum_by_group(group, count, values)
        spread = values[..., None].expand(*values.shape, columns)
        sums = sum_by_place(spread.flatten(-3), place, trees * count * columns * width)
        sums = sums.view(*sums.shape[:-1], trees, count, columns, width).cumsum(dim=-1)
        up_to = take_at_place(sums.flatten(-2), self.bins)
        return (whole - up_to.transpose(-1, -2)) @ nodes, whole @ nodes


def _sum_by_group(group: Tensor, count: int, values: Tensor) -> Tensor:
    """Return the sums (..., T, 1, M) of values (..., n, T) over groups."""
    trees = group.shape[1]
    sums = sum_by_place(values.flatten(-2), group.flatten(), trees * count)
    return sums.view(*sums.shape[:-1], trees, 1, count)


def _compute_gain(right: Tensor, whole: Tensor, l2: float) -> Tensor:
    """Return the gains of splits with sums of first and second derivatives, (2, ...), on the right and in the node.

    Source: Chen and Guestrin 2016 (XGBoost), equation 7.
    """
    of_right, of_left, of_node = (s[0] ** 2 / (s[1] + l2).clamp_min(TINY) for s in (right, whole - right, whole))
    return of_right + of_left - of_node


def _make_bins(view: View, most: int) -> tuple[Ints, Ints, Ints, tuple[int, int]]:
    """Return intervals of rows (n, c) and of bins (V,), the column of each bin (V,), and the shape (c, W) of intervals.

    The V bins divide each of the c columns that have any into intervals; a bin ends the interval that it is in. W is
    the largest number of intervals, and those of a column are numbered from W times its position. An encoded category
    has two values and so one bin that divides rows, as in the training.
    """
    x = view.features[view.aux_split]
    bins = Bins(Layout.numeric(x.shape[1]), x, int(view.agreed.get("bins", BINS)))
    inner = np.flatnonzero(np.diff(bins.column, append=-1) == 0)  # beyond the last bin of a column there is no row
    inner = inner[np.unique(np.linspace(0, len(inner) - 1, min(most, len(inner))).round().astype(np.int64))]
    kept = [inner[bins.column[inner] == column] for column in np.unique(bins.column[inner])]
    width = 1 + max(map(len, kept), default=0)
    codes = bins.assign(x)
    place = np.zeros((len(x), len(kept)), dtype=np.int64)
    for c, ends in enumerate(kept):
        place[:, c] = c * width + np.searchsorted(ends, codes[:, bins.column[ends[0]]], side="left")
    intervals = [c * width + np.arange(len(ends)) for c, ends in enumerate(kept)]
    return place, np.concatenate([np.zeros(0, dtype=np.int64), *intervals]), bins.column[inner], (len(kept), width)


class _Level(NamedTuple):
    """One level of one tree: node (n,) and side (n,) of the rows, and the number of nodes, which is that of no node."""

    node: Ints
    right: NDArray[np.bool_]
    size: int


def _collect_known_splits(view: View) -> dict[int, list[tuple[int, list[_Level]]]]:
    """Return the number of each tree with known splits and its levels, by round."""
    by_round: dict[int, list[tuple[int, list[_Level]]]] = {}
    for other in list_partners(view):
        known = collect_nodes(view, other)
        if known is None or view.aux_split not in known.nodes:
            continue
        nodes = known.nodes[view.aux_split]
        for t, tree in enumerate(known.trees.tolist()):
            levels = [_split_level(nodes[:, t, k], nodes[:, t, k + 1]) for k in range(nodes.shape[2] - 1)]
            levels = [level for level in levels if level.size]
            if levels:
                by_round.setdefault(int(known.rounds[t]), []).append((tree, levels))
    return by_round


def _join_trees(trees: Sequence[Sequence[_Level]]) -> tuple[Ints, Floats, Floats]:
    """Return groups (n, T), and the nodes and right sides (T, M, K) in which groups are."""
    grouped = [_group_rows(levels) for levels in trees]
    shape = [len(trees), *np.max([nodes.shape for _, nodes, _ in grouped], axis=0)]
    nodes, right = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for t, (_, inside, beyond) in enumerate(grouped):
        m, k = inside.shape
        nodes[t, :m, :k], right[t, :m, :k] = inside, beyond
    return np.stack([group for group, *_ in grouped], axis=1), nodes, right


def _group_rows(levels: Sequence[_Level]) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return groups (n,) of rows in a tree, and the nodes (M, K) and right sides (M, K) in which they are."""
    sides = np.stack([2 * level.node + level.right for level in levels], axis=1)
    distinct, group = np.unique(sides, axis=0, return_inverse=True)
    nodes = [distinct[:, k, None] // 2 == np.arange(level.size) for k, level in enumerate(levels)]
    right = [inside & (distinct[:, k, None] % 2 == 1) for k, inside in enumerate(nodes)]
    return group.reshape(-1), np.concatenate(nodes, axis=1), np.concatenate(right, axis=1)


def _split_level(parents: Ints, children: Ints) -> _Level:
    """Return the split nodes of a level, those with a known child.

    Of two children, one may be too small to be told. Rows of the node that are not in the other child are in it.
    """
    numbers = np.unique(children[children > 0])
    split = np.unique(numbers // 2)
    split = split[split > 0]
    place = np.searchsorted(split, parents).clip(max=max(0, len(split) - 1))
    inside = np.isin(parents, split)
    unknown_is_right = np.isin(2 * parents, numbers)
    right = np.where(children > 0, children % 2 == 1, unknown_is_right) & inside
    return _Level(np.where(inside, place, len(split)), right, len(split))


def infer_drawn_columns(view: View) -> dict[int, NDArray[np.bool_]]:
    """Return whether each own column (d,) could split a tree, by tree; a tree of which nothing is known is left out.

    A party knows the columns that it draws for a tree. In its histograms, other columns have no rows.
    """
    names = view.party.split("+")
    by_tree: dict[int, list[NDArray[np.bool_]]] = {}
    for name in names:
        messages = [m for m in view.messages if m.sender == name and m.phase not in AFTERWARDS]
        bins = next((m.payload for m in messages if m.kind is Kind.CONTROL and "column" in m.payload), None)
        if bins is None:
            return {}
        column, ordered = (bins[key].cpu().numpy() for key in ("column", "ordered"))
        counts: dict[int, NDArray[np.float64]] = {}
        for m in messages:
            in_clear = m.kind is Kind.HISTOGRAM
            if in_clear or (m.kind is Kind.CIPHERTEXT and "rows" in m.payload):
                rows = m.payload["value"][..., 2] if in_clear else m.payload["rows"]
                counts[m.step] = rows.double().sum(dim=0).cpu().numpy() + counts.get(m.step, 0)
        first = np.flatnonzero(np.diff(column, prepend=-1))
        widths = np.where(ordered[first], 1, np.diff(first, append=len(column)))  # a category is encoded by its values
        for tree, n_rows in counts.items():
            drawn = np.add.reduceat(n_rows, first) > 0 if len(first) else np.zeros(0, dtype=bool)
            by_tree.setdefault(tree, []).append(np.repeat(drawn, widths))
    d = view.features[view.aux_split].shape[1]
    joined = {tree: np.concatenate(parts) for tree, parts in by_tree.items() if len(parts) == len(names)}
    return {tree: drawn for tree, drawn in joined.items() if len(drawn) == d}
