"""Gradient-boosted trees of several parties on a small scale, for tests of attacks: the messages of federated trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.message import Kind, Message

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Grown(NamedTuple):
    """Trees of several parties.

    Attributes:
        messages: of all parties, in order.
        logits: (n, C) of the joint model by split; (n, 1) for two classes.
        nodes: (n, T) the leaf of each training row in each tree.
    """

    messages: tuple[Message, ...]
    logits: dict[str, Tensor]
    nodes: Tensor


def boosted(
    columns: Mapping[str, Mapping[str, Tensor]],
    labels: Tensor,
    *,
    n_classes: int = 2,
    rounds: int = 10,
    depth: int = 3,
    bins: int = 16,
    rate: float = 0.3,
    leaf_rows: int = 5,
    plain: bool = True,
    told: bool = True,
    random: int | None = None,
) -> Grown:
    """Grow trees on numeric columns of all parties, without any cryptography.

    Args:
        columns: (n, d) of each party by split, ``train`` and ``test``; the active party is the first.
        labels: (n,) of the training rows.
        n_classes: C.
        rounds: of boosting.
        depth: of each tree.
        bins: of each column.
        rate: shrinkage of each tree.
        leaf_rows: at least, in each leaf.
        plain: whether passive parties receive derivatives in clear; else the active party notes them for itself.
        told: whether passive parties receive the node of each row; else they receive zeros only.
        random: seed from which splits are drawn, instead of the best by gain; None for the best.
    """
    return _Booster(columns, labels, n_classes, depth, bins, rate, leaf_rows, plain, told, random).grow(rounds)


class _Split(NamedTuple):
    party: str
    bin: int


class _Booster:
    """The state of ``boosted``, whose arguments these are."""

    def __init__(
        self,
        columns: Mapping[str, Mapping[str, Tensor]],
        labels: Tensor,
        n_classes: int,
        depth: int,
        bins: int,
        rate: float,
        leaf_rows: int,
        plain: bool,
        told: bool,
        random: int | None,
    ) -> None:
        self.active, *self.passive = columns
        self.depth, self.rate, self.leaf_rows, self.plain, self.told = depth, rate, leaf_rows, plain, told
        self.rng = None if random is None else np.random.default_rng(random)
        y = labels.numpy()
        self.targets = np.eye(n_classes)[y] if n_classes > 2 else y[:, None].astype(float)  # (n, C')
        self.n = len(y)
        self.column: dict[str, Ints] = {}
        self.bin_of: dict[str, dict[str, Ints]] = {}
        for name, tables in columns.items():
            self.column[name], self.bin_of[name] = _binned({s: x.double().numpy() for s, x in tables.items()}, bins)
        self.logits = {s: np.zeros((len(x), self.targets.shape[1])) for s, x in columns[self.active].items()}
        self.messages: list[Message] = []
        self.at_prediction: list[tuple[int, int, str, Ints, Ints]] = []
        self.leaves: list[Ints] = []

    def grow(self, rounds: int) -> Grown:
        for name in self.passive:
            column = torch.from_numpy(self.column[name])
            payload = {"column": column, "ordered": torch.ones_like(column, dtype=torch.bool)}
            self._send(Kind.CONTROL, name, self.active, 0, payload)
        outputs = self.targets.shape[1]
        for tree in range(rounds * outputs):
            if tree % outputs == 0:
                z = self.logits["train"]
                e = np.exp(np.concatenate([z, np.zeros_like(z)], axis=1) if outputs == 1 else z)
                p = (e / e.sum(axis=1, keepdims=True))[:, :outputs]
                g, h = p - self.targets, p * (1 - p)
                value = {"value": torch.from_numpy(np.concatenate([g, h], axis=1))}
                for name in self.passive if self.plain else [self.active]:
                    self._send(Kind.GRADIENT, self.active, name, tree, value, torch.arange(self.n))
            self._tree(tree, g[:, tree % outputs], h[:, tree % outputs])
        self._predicted(rounds * outputs)
        logits = {split: torch.from_numpy(z) for split, z in self.logits.items()}
        return Grown(tuple(self.messages), logits, torch.from_numpy(np.stack(self.leaves, axis=1)))

    def _tree(self, tree: int, g: Floats, h: Floats) -> None:
        nodes = {split: np.ones(len(z), dtype=np.int64) for split, z in self.logits.items()}
        done: set[int] = set()
        for level in range(self.depth):
            open_nodes = np.setdiff1d(np.unique(nodes["train"][nodes["train"] >= 2**level]), sorted(done))
            if not len(open_nodes):
                break
            told = np.where(np.isin(nodes["train"], open_nodes), nodes["train"], 0)
            sums = {}
            for name, own in self.bin_of.items():
                sums[name] = _histograms(own["train"], told, open_nodes, len(self.column[name]), g, h)
                if name != self.active:
                    shown = told if self.told else np.zeros_like(told)
                    self._send(Kind.NODES, self.active, name, tree, _column(shown), torch.arange(self.n))
                    asked = _smaller(open_nodes, sums[name], self.column[name])
                    payload = {
                        "value": torch.from_numpy(sums[name][asked]),
                        "nodes": torch.from_numpy(open_nodes[asked]),
                    }
                    self._send(Kind.HISTOGRAM, name, self.active, tree, payload)
            found = {int(node): self._best(i, sums) for i, node in enumerate(open_nodes)}
            done |= {node for node, split in found.items() if split is None}
            taken = {node: split for node, split in found.items() if split is not None}
            self._split(tree, nodes, taken)
        for split, reached in nodes.items():
            values = np.zeros(2 ** (self.depth + 1))
            for leaf in np.unique(nodes["train"]):
                inside = nodes["train"] == leaf
                values[leaf] = -g[inside].sum() / (h[inside].sum() + 1)
            self.logits[split][:, tree % self.targets.shape[1]] += self.rate * values[reached]
        self.leaves.append(nodes["train"])

    def _split(self, tree: int, nodes: dict[str, Ints], taken: Mapping[int, _Split]) -> None:
        """Move rows to the children of the nodes that are split, and say so."""
        before = {split: own.copy() for split, own in nodes.items()}
        for name, own in self.bin_of.items():
            mine = {node: split for node, split in taken.items() if split.party == name}
            if not mine:
                continue
            for node, (_, threshold) in mine.items():
                column = self.column[name][threshold]
                for split, reached in nodes.items():
                    inside = before[split] == node
                    reached[inside] = 2 * node + (own[split][inside, column] > threshold)
            if name == self.active:
                continue
            control = {"nodes": torch.tensor(list(mine)), "bins": torch.tensor([split.bin for split in mine.values()])}
            self._send(Kind.CONTROL, self.active, name, tree, control)
            rows = np.flatnonzero(np.isin(before["train"], list(mine)))
            self._send(Kind.NODES, name, self.active, tree, _column(nodes["train"][rows]), torch.from_numpy(rows))
            if "test" in nodes:
                asked = np.isin(before["test"], list(mine))
                level = int(np.log2(next(iter(mine))))
                pair = np.where(asked, before["test"], 0), np.where(asked, nodes["test"], 0)
                self.at_prediction.append((level, tree, name, *pair))

    def _best(self, i: int, sums: Mapping[str, Floats]) -> _Split | None:
        """Return the split of open node ``i`` with the largest gain, or a random one; None without any."""
        found: list[tuple[float, _Split]] = []
        for name, every in sums.items():
            own, column = every[i], self.column[name]
            total = own[column == 0].sum(axis=0)
            first = np.searchsorted(column, column)  # of each bin's column
            left = own.cumsum(axis=0)
            left -= np.where(first[:, None] > 0, left[first - 1], 0)
            right = total - left
            gain = _worth(left) + _worth(right) - _worth(total[None])
            gain[(left[:, 2] < self.leaf_rows) | (right[:, 2] < self.leaf_rows)] = -1
            found += [(float(gain[b]), _Split(name, int(b))) for b in np.flatnonzero(gain > 1e-9)]
        if not found:
            return None
        return found[self.rng.integers(len(found))][1] if self.rng else max(found, key=lambda pair: pair[0])[1]

    def _predicted(self, trees: int) -> None:
        """Send what passive parties see of test rows, level by level, of all trees at once."""
        for level in range(self.depth):
            for name in self.passive:
                asked = [one for one in self.at_prediction if (one[0], one[2]) == (level, name)]
                if asked:
                    value = np.zeros((2, len(self.logits["test"]), trees), dtype=np.int64)
                    for _, tree, _, before, after in asked:
                        value[0, :, tree], value[1, :, tree] = before, after
                    rows = torch.arange(value.shape[1])
                    for (sender, receiver), v in zip(((self.active, name), (name, self.active)), value, strict=True):
                        payload = {"value": torch.from_numpy(v)}
                        self.messages.append(Message(Kind.NODES, sender, receiver, 0, "predict", payload, rows, "test"))

    def _send(
        self, kind: Kind, sender: str, receiver: str, step: int, payload: dict[str, Any], rows: Tensor | None = None
    ) -> None:
        self.messages.append(Message(kind, sender, receiver, step, "train", payload, rows))


def _binned(tables: Mapping[str, Floats], bins: int) -> tuple[Ints, dict[str, Ints]]:
    """Return the column of each bin (V,), and the bin (n, d) of each row in each column, by split."""
    column: list[int] = []
    found = {split: np.zeros(x.shape, dtype=np.int64) for split, x in tables.items()}
    for j in range(tables["train"].shape[1]):
        own = tables["train"][:, j]
        cuts = np.unique(np.quantile(own, np.arange(1, bins) / bins, method="lower"))
        cuts = cuts[cuts < own.max()]  # a bin has the values up to its cut
        for split, x in tables.items():
            found[split][:, j] = len(column) + np.searchsorted(cuts, x[:, j], side="left")
        column += [j] * (len(cuts) + 1)
    return np.array(column, dtype=np.int64), found


def _histograms(bin_of: Ints, told: Ints, nodes: Ints, n_bins: int, g: Floats, h: Floats) -> Floats:
    """Return sums (N, V, 3) of ``g``, ``h`` and of rows in each node and bin."""
    inside = np.flatnonzero(told)
    place = np.searchsorted(nodes, told[inside])[:, None] * n_bins + bin_of[inside]
    size, columns = len(nodes) * n_bins, bin_of.shape[1]
    weights = [np.repeat(w[inside], columns) for w in (g, h, np.ones_like(g))]
    sums: Floats = np.stack([np.bincount(place.ravel(), w, size) for w in weights], axis=1)
    return sums.reshape(len(nodes), n_bins, 3)


def _smaller(nodes: Ints, sums: Floats, column: Ints) -> Ints:
    """Return the positions of the nodes with fewer rows than their sibling, the left one of equals, and of the root."""
    counts = dict(zip(nodes.tolist(), sums[:, column == 0, 2].sum(axis=1), strict=True))
    return np.array(
        [i for i, n in enumerate(nodes.tolist()) if (counts[n], n) < (counts.get(n ^ 1, np.inf), n ^ 1)], dtype=np.int64
    )


def _worth(sums: Floats) -> Floats:
    return sums[:, 0] ** 2 / (sums[:, 1] + 1)


def _column(values: Ints) -> dict[str, Tensor]:
    return {"value": torch.from_numpy(values.copy())[:, None]}
