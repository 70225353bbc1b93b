"""Splits of trees as choices: labels under which each observed split beats the splits at the party's own bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.layout import Layout
from vflsec.core.view import View
from vflsec.inference.trees.nodes import partners, told
from vflsec.trees.bins import Bins

Ints = NDArray[np.int64]

BINS, LEAF_ROWS = 32, 20
"""Defaults of the method ``secureboost``, for whoever does not know what the parties agreed on."""

TINY = 1e-12


class Round(NamedTuple):
    """The K splits of one round of boosting that a party knows, at L levels of trees.

    Attributes:
        outputs: (L,) the logit to which the tree adds.
        node: (n, L) the position of each row's node among all K; K for nodes without a known split.
        right: (n, L) whether the row goes right.
        possible: (V, K) whether each own bin could have split each node.
    """

    outputs: Tensor
    node: Tensor
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
        beyond: (V, n) float, whether each row goes right at each own bin.
    """

    def __init__(self, view: View, drawn: Mapping[int, NDArray[np.bool_]], most: int) -> None:
        self.beyond = _beyond(view, most).float()
        least = view.agreed.get("leaf_rows", LEAF_ROWS)
        self.rounds: dict[int, Round] = {}
        for number, levels in _known_splits(view).items():
            outputs, node, right = (torch.from_numpy(one).to(self.beyond.device) for one in _joined(levels))
            counted = self.beyond.new_ones(node.shape)
            if number in drawn:
                counted *= torch.from_numpy(drawn[number]).to(counted)[:, None]
            sizes = _spread(counted, node, sum(level.size for level in levels))
            rows = self.beyond @ sizes
            self.rounds[number] = Round(outputs, node, right.float(), (rows >= least) & (sizes.sum(0) - rows >= least))

    @property
    def n_splits(self) -> int:
        """Number of known splits."""
        return sum(one.possible.shape[1] for one in self.rounds.values())

    def surprise(self, round_: int, derivatives: Tensor, *, temperature: float, l2: float) -> Tensor:
        """Return minus the log likelihood of the splits of a round; 0 if none is known.

        The likelihood of a split is its share of exp(gain / temperature) over itself and all own bins.

        Args:
            round_: of boosting.
            derivatives: (2, n, C') first and second ones under the labels in question.
            temperature: difference of gains at which a choice is e times as likely.
            l2: of the training.
        """
        if round_ not in self.rounds:
            return derivatives.new_zeros(())
        known = self.rounds[round_]
        own, count = derivatives[:, :, known.outputs], known.possible.shape[1]  # (2, n, L)
        spread = [_spread(one, known.node, count) for one in own]
        whole = [one.sum(dim=0) for one in spread]
        chosen = [_spread(one * known.right, known.node, count).sum(dim=0) for one in own]
        others = [self.beyond @ one for one in spread]
        of_bins = _gain(others, whole, l2).masked_fill(~known.possible, -torch.inf)
        gains = torch.cat([_gain(chosen, whole, l2)[None], of_bins]) / temperature
        return -gains.log_softmax(dim=0)[0].sum()


def _spread(values: Tensor, node: Tensor, count: int) -> Tensor:
    """Return values (n, L) of rows in the columns of their nodes (n, L), (n, K), with 0 in all other columns."""
    return values.new_zeros(len(values), count + 1).scatter_add(1, node, values)[:, :count]


def _gain(right: Sequence[Tensor], whole: Sequence[Tensor], l2: float) -> Tensor:
    """Return the gains of splits with sums of first and second derivatives on the right and in the whole node.

    Source: Chen and Guestrin 2016 (XGBoost), equation 7.
    """
    left = [all_ - one for all_, one in zip(whole, right, strict=True)]
    of_right, of_left, of_whole = (g**2 / (h + l2).clamp_min(TINY) for g, h in (right, left, whole))
    return of_right + of_left - of_whole


def _beyond(view: View, most: int) -> Tensor:
    """Return whether each training row is beyond each own bin, (V, n).

    An encoded category has two values and so one bin that divides rows, as in the training.
    """
    x = view.features[view.aux_split]
    bins = Bins(Layout.numeric(x.shape[1]), x, int(view.agreed.get("bins", BINS)))
    inner = np.flatnonzero(np.diff(bins.column, append=-1) == 0)  # beyond the last bin of a column there is no row
    inner = inner[np.unique(np.linspace(0, len(inner) - 1, min(most, len(inner))).round().astype(np.int64))]
    return torch.from_numpy((bins.of(x)[:, bins.column[inner]] > inner).T.copy()).to(x.device)


class _Level(NamedTuple):
    """One level of one tree: output, node (n,) and side (n,) of the rows, and the number of nodes."""

    output: int
    node: Ints
    right: NDArray[np.bool_]
    size: int


def _known_splits(view: View) -> dict[int, list[_Level]]:
    """Return the levels with known splits by round."""
    outputs = view.n_classes if view.n_classes > 2 else 1
    found: dict[int, list[_Level]] = {}
    for other in partners(view):
        known = told(view, other)
        if known is None or view.aux_split not in known.nodes:
            continue
        nodes = known.nodes[view.aux_split]
        for t, tree in enumerate(known.trees.tolist()):
            for level in range(nodes.shape[2] - 1):
                node, right, count = _split_of(nodes[:, t, level], nodes[:, t, level + 1])
                if count:
                    found.setdefault(int(known.rounds[t]), []).append(_Level(tree % outputs, node, right, count))
    return found


def _joined(levels: Sequence[_Level]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return outputs (L,), nodes (n, L) and sides (n, L); nodes are numbered over all levels."""
    starts = np.cumsum([0, *(level.size for level in levels)])
    nodes = [
        np.where(level.node < level.size, level.node + start, starts[-1])
        for level, start in zip(levels, starts, strict=False)
    ]
    outputs = np.array([level.output for level in levels], dtype=np.int64)
    return outputs, np.stack(nodes, axis=1), np.stack([level.right for level in levels], axis=1)


def _split_of(parents: Ints, children: Ints) -> tuple[Ints, NDArray[np.bool_], int]:
    """Return the position of each row's node, its side, and the number of nodes with a known child.

    Of two children, one may be too small to be told. Rows of the node that are not in the other child are in it.
    """
    numbers = np.unique(children[children > 0])
    split = np.unique(numbers // 2)
    split = split[split > 0]
    place = np.searchsorted(split, parents).clip(max=max(0, len(split) - 1))
    inside = np.isin(parents, split)
    unknown_is_right = np.isin(2 * parents, numbers)
    right = np.where(children > 0, children % 2 == 1, unknown_is_right) & inside
    return np.where(inside, place, len(split)), right, len(split)
