"""An ensemble of trees of which each party holds its own splits, and the active party shape and leaves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vflsec.trees.bins import select_columns


class Splits(nn.Module):
    """The splits that one party owns in T trees of depth D, (B, features) -> (B, S).

    Nodes have numbers: the root 1, the children of node i 2 i and 2 i + 1. A row goes to the second child if its value
    in the split's column exceeds the threshold.

    Args:
        trees: T.
        depth: D.
        features: d, of the party's encoded rows.
    """

    column: Tensor
    threshold: Tensor

    def __init__(self, trees: int, depth: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("column", torch.full((trees, 2**depth), -1, dtype=torch.int32))
        self.register_buffer("threshold", torch.zeros(trees, 2**depth))
        self.register_load_state_dict_post_hook(_check_loaded)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise ValueError unless splits are at columns of the party and at finite thresholds."""
        _check_range("column", self.column, -1, self.features - 1)
        _check_range("threshold", self.threshold, -torch.inf, torch.inf)

    @property
    def width(self) -> int:
        """S, at least one."""
        return max(1, int((self.column >= 0).sum()))

    def add(self, tree: int, nodes: Tensor, columns: Tensor, thresholds: Tensor) -> None:
        """Own the splits of ``nodes`` (k,) of a tree."""
        self.column[tree, nodes] = columns.to(self.column)
        self.threshold[tree, nodes] = thresholds.to(self.threshold)

    def send_down(self, x: Tensor, first: int, nodes: Tensor) -> Tensor:
        """Return the child (n, T') that each row (n, d) goes to, or 0 where this party owns no split.

        ``nodes`` (n, T') has the node of each row, or 0, in T' trees of which ``first`` is the number of the first.
        """
        children = torch.zeros_like(nodes)
        for tree in range(nodes.shape[1]):
            column = self.column[first + tree]
            rows = torch.nonzero(column[nodes[:, tree]] >= 0)[:, 0]
            rows = rows[nodes[rows, tree] > 0]
            at = nodes[rows, tree]
            children[rows, tree] = 2 * at + self._compare(x, rows, column[at], self.threshold[first + tree][at])
        return children

    def forward(self, x: Tensor) -> Tensor:
        """Return on which side of each own split a row is, -1 or 1; one column of zeros without any split."""
        splits = self.column >= 0
        if not splits.any():
            return torch.zeros(len(x), 1, device=x.device)
        used, place = np.unique(self.column[splits].cpu().numpy(), return_inverse=True)
        values = select_columns(x, used)[:, torch.from_numpy(place).to(x.device)]
        return 2 * (values > self.threshold[splits]).float() - 1

    def reset_parameters(self) -> None:
        """Draw columns and thresholds at random, as a party could without a federation."""
        splits = self.column >= 0
        self.column[splits] = torch.randint(self.features, (int(splits.sum()),), dtype=torch.int32)
        self.threshold[splits] = torch.randn(int(splits.sum()))

    def _compare(self, x: Tensor, rows: Tensor, columns: Tensor, thresholds: Tensor) -> Tensor:
        used, place = np.unique(columns.cpu().numpy(), return_inverse=True)
        values = select_columns(x, used)[rows, torch.from_numpy(place).to(rows.device)]
        return (values > thresholds).long()


def _check_loaded(module: Splits | Shape, _: object) -> None:
    module.check()


def _check_range(name: str, values: Tensor, least: float, most: float) -> None:
    wrong = ~((values >= least) & (values <= most) & values.isfinite())
    if wrong.any():
        raise ValueError(f"expected {name} from {least} to {most}, found {values[wrong][0]}")


class Shape(nn.Module):
    """What the active party knows of T trees of depth D: who splits each node, and the values of leaves.

    Args:
        trees: T, C of each round.
        depth: D.
        outputs: C logits.
        parties: who may own splits, the active party among them.
    """

    owner: Tensor
    value: Tensor
    start: Tensor
    grown: Tensor

    def __init__(self, trees: int, depth: int, outputs: int, parties: int) -> None:
        super().__init__()
        self.depth, self.outputs, self.parties = depth, outputs, parties
        self.register_buffer("owner", torch.full((trees, 2**depth), -1, dtype=torch.int16))
        self.register_buffer("value", torch.zeros(trees, 2 ** (depth + 1), dtype=torch.float64))
        self.register_buffer("start", torch.zeros(outputs, dtype=torch.float64))
        self.register_buffer("grown", torch.zeros((), dtype=torch.long))
        self.register_load_state_dict_post_hook(_check_loaded)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise ValueError unless owners are parties, the number of trees fits, and leaves have finite values."""
        _check_range("owner", self.owner, -1, self.parties - 1)
        _check_range("grown", self.grown, 0, len(self.owner))
        _check_range("value", self.value, -torch.inf, torch.inf)
        _check_range("start", self.start, -torch.inf, torch.inf)

    def logits(self, leaves: Tensor, first: int = 0, value: Tensor | None = None) -> Tensor:
        """Return the sums (n, C) of the values of ``leaves`` (n, T'), in trees from number ``first`` on.

        ``value`` (T, N) of all nodes takes the place of the ensemble's own.
        """
        trees = torch.arange(first, first + leaves.shape[1], device=leaves.device)
        values = (self.value if value is None else value)[trees, leaves]
        return values.view(len(leaves), -1, self.outputs).sum(dim=1)
