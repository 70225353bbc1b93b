"""Sums of derivatives over the rows of each node and bin, and the choice of splits from them."""

from abc import abstractmethod
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core.party import Party
from vflsec.core.protocol import Protocol

FRACTION_BITS = 24
"""Derivatives of a loss are multiples of 2^-24 in every exchange of histograms, so that all choose the same splits."""

EXACT = 2.0**53
"""Sums of integers in float64 are exact below it."""


def sum_bins(
    bins: NDArray[np.int32], nodes: NDArray[np.int64], weights: NDArray[np.int64], n_nodes: int, n_bins: int
) -> NDArray[np.int64]:
    """Return exact sums (n_nodes, n_bins, k + 1) of integer weights; the last of them counts rows.

    They are a product with a sparse matrix of ones, one for each row and column: faster than a pass for each weight.

    Args:
        bins: (B, d) the bin of each row in each of d columns; no two columns share a bin.
        nodes: (B,) the node of each row, or -1 for none.
        weights: (B, k), each of them below 2^53 / B.
        n_nodes: of all nodes.
        n_bins: of all columns.

    Raises:
        UsageError: a weight above that: sums may not be exact in float64.
    """
    most = max(int(weights.max(initial=0)), -int(weights.min(initial=0)))
    if most * len(weights) >= EXACT:
        raise UsageError(
            f"expected integers below {int(EXACT / len(weights))} for exact sums over {len(weights)} rows, got {most}: "
            "lower the noise on derivatives, or share fewer rows"
        )
    inside = np.flatnonzero(nodes >= 0)
    rows, columns = len(inside), bins.shape[1]
    cells = n_nodes * n_bins
    index = np.int32 if max(cells, rows * columns) < 2**31 else np.int64
    place = bins.take(inside, axis=0).astype(index, copy=False)
    np.add(place, (nodes[inside] * n_bins).astype(index)[:, None], out=place)
    place = place.ravel()
    assert not place.size or (place.min() >= 0 and place.max() < cells), "a bin or a node is out of range"
    starts = np.arange(0, rows * columns + 1, columns, dtype=index) if columns else np.zeros(rows + 1, index)
    # new memory for these ones would take longer to get than to add up
    ones = csc_array((_create_ones(1 << place.size.bit_length())[: place.size], place, starts), shape=(cells, rows))
    right = np.ones((rows, weights.shape[1] + 1))
    right[:, :-1] = weights.take(inside, axis=0)
    return np.asarray((ones @ right).astype(np.int64).reshape(n_nodes, n_bins, -1))


@lru_cache(maxsize=1)
def _create_ones(size: int) -> NDArray[np.float64]:
    ones = np.ones(size)
    ones.flags.writeable = False
    return ones


UNIT = 2.0**-FRACTION_BITS


class Rule(NamedTuple):
    """When a node may be split.

    Attributes:
        l2: penalty on the values of leaves.
        least_rows: of each child.
        least_hessian: sum of second derivatives of each child.
        least_gain: that a split must exceed.
    """

    l2: float
    least_rows: int
    least_hessian: float
    least_gain: float


class Best(NamedTuple):
    """The best split of each of N nodes.

    Attributes:
        gain: (N,), -inf for a node without a split.
        bin: (N,).
    """

    gain: NDArray[np.floating]
    bin: NDArray[np.integer]


def find_splits(sums: NDArray[np.int64], column: NDArray[np.integer], ordered: NDArray[np.bool_], rule: Rule) -> Best:
    """Return the best split of each node: of a number the rows up to a bin go left, of a category all other rows.

    The gain is G_L^2 / (H_L + l2) + G_R^2 / (H_R + l2) - G^2 / (H + l2).

    Source: Chen and Guestrin 2016 (XGBoost), equation 7; Cheng et al. 2021 (SecureBoost), algorithm 2.

    Args:
        sums: (N, V, 3) of first and second derivatives in units of 2^-FRACTION_BITS, and of rows.
        column: (V,) of each bin; bins of a column stand together.
        ordered: (V,) whether it is a number's.
        rule: when a node may be split.
    """
    if not len(column):
        return Best(np.full(len(sums), -np.inf), np.zeros(len(sums), dtype=np.int64))
    first = np.flatnonzero(np.diff(column, prepend=-1))  # the first bin of each column
    before = np.cumsum(sums, axis=1)
    start = before[:, first] - sums[:, first]
    of_column = before[:, np.append(first[1:], len(column)) - 1] - start
    drawn = of_column[..., 2].argmax(axis=1)  # a column that was not drawn has no rows; all others have the same
    whole = of_column[np.arange(len(sums)), drawn][:, None]
    left = before - np.repeat(start, np.diff(np.append(first, len(column))), axis=1)
    left = np.where(ordered[:, None], left, whole - sums)
    sides = np.stack([left, whole - left])
    g, h, rows = (sides[..., k] * unit for k, unit in enumerate((UNIT, UNIT, 1)))
    g_whole, h_whole = whole[..., 0] * UNIT, whole[..., 1] * UNIT
    allowed = (rows.min(axis=0) >= rule.least_rows) & (h.min(axis=0) >= rule.least_hessian)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_side = g**2 / (h + rule.l2)
        gain = of_side[0] + of_side[1] - g_whole**2 / (h_whole + rule.l2)
    gain = np.where(allowed & (gain > rule.least_gain), gain, -np.inf)
    chosen = gain.argmax(axis=1)
    return Best(gain[np.arange(len(gain)), chosen], chosen)


class Histograms(NamedTuple):
    """The place of histograms in the run.

    Attributes:
        tree: its number.
        phase: the method's phase.
        output: the logit that the tree adds to, from 0.
        numbers: (N,) of the nodes, as in messages.
    """

    tree: int
    phase: str
    output: int
    numbers: NDArray[np.int64]


class HistogramExchange(Protocol):
    """The protocol by which the active party learns sums of its derivatives over a passive party's bins.

    One instance serves one passive party.

    Args:
        passive: holds columns, in bins.
        active: holds labels, and so derivatives of the loss.
    """

    roles: ClassVar[tuple[str, ...]] = ("passive", "active")

    def __init__(self, passive: Party, active: Party) -> None:
        self.passive = passive
        self.active = active

    @abstractmethod
    def share(self, derivatives: NDArray[np.int64], rows: Tensor, *, step: int, phase: str) -> None:
        """Send the derivatives of one round of boosting to the passive party, which keeps them until the next round.

        Args:
            derivatives: (B, 2 C) in units of 2^-FRACTION_BITS: the first derivatives by each of C logits, then the
                second ones. One logit if there are two classes.
            rows: (B,) sample positions.
            step: number of the first tree of the round.
            phase: the method's phase.
        """

    @abstractmethod
    def sums(
        self, bins: NDArray[np.int32], nodes: NDArray[np.int64], n_bins: int, place: Histograms
    ) -> NDArray[np.int64]:
        """Return the sums (N, n_bins, 3) of first and second derivatives, and of rows, that the active party learns.

        The passive party computes them and sends them; numbers of rows are in clear in every exchange.

        Args:
            bins: (B, d) the bin of each shared row in each of d columns; no two columns share a bin.
            nodes: (B,) the position in ``place.numbers`` of each shared row's node, or -1 for a row in none of them.
            n_bins: of all columns.
            place: in the run.
        """

    def seconds(self, rounds: int, outputs: int, rows: int, columns: int, n_bins: int, passes: float) -> float:
        """Return an estimate of the CPU seconds of cryptography in training; 0 without any.

        Args:
            rounds: of boosting.
            outputs: C, trees in each round.
            rows: that are shared in each round.
            columns: d.
            n_bins: of all columns.
            passes: over all of these rows, for the histograms of one tree.
        """
        return 0.0
