"""The growth of one tree, level by level, from the histograms of all parties."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.seeds import make_rng
from vflsec.core.federation import Federation
from vflsec.core.message import Kind, Step
from vflsec.core.party import Party
from vflsec.trees.bins import Bins
from vflsec.trees.ensemble import Shape, Splits
from vflsec.trees.histograms import Best, HistogramExchange, Histograms, Rule, find_splits, sum_bins

Candidates = Callable[[int, int, int, int], list[int]]
"""Returns whose columns may split a level, given tree, level, number of outputs and of parties."""


@dataclass
class TreeGrowing:
    """Grows trees; every party keeps its own splits, and the active party the shape.

    Attributes:
        bins: of each party's columns, by name.
        exchanges: of histograms, by passive party.
        shape: the active party's part of the trees.
        phase: the method's phase.
        rule: when a node may be split.
        depth: levels of splits.
        candidates: whose columns may split a level.
        columns: share of its columns that each party draws for each tree.
    """

    federation: Federation
    bins: Mapping[str, Bins]
    exchanges: Mapping[str, HistogramExchange]
    shape: Shape
    phase: str
    rule: Rule
    depth: int
    candidates: Candidates
    columns: float

    def __post_init__(self) -> None:
        """Code the training rows of all parties."""
        self.parties = list(self.federation.parties.values())
        self.codes = [self.bins[party.name].assign(party.features["train"]) for party in self.parties]
        self.all_rows = torch.arange(self.federation.n_rows("train"), device=self.federation.device)

    def announce(self) -> None:
        """Tell the active party which bins belong to one column, and which are in order."""
        for party in self.parties[1:]:
            bins = self.bins[party.name]
            payload = {"column": torch.from_numpy(bins.column), "ordered": torch.from_numpy(bins.ordered)}
            party.send(Kind.CONTROL, payload, to=self.federation.active.name, step=0, phase=self.phase)

    def grow(self, tree: int, output: int, rows: Tensor, derivatives: NDArray[np.int64], labels: Tensor) -> Tensor:
        """Grow one tree and return the leaf (n,) of each training row.

        Args:
            tree: its number.
            output: the logit that it adds to.
            rows: (B,) those whose derivatives count.
            derivatives: (B, 2 C') in units of 2^-FRACTION_BITS.
            labels: (n,) class numbers, which defenses of the active party may read.
        """
        nodes = np.ones(len(self.all_rows), dtype=np.int64)
        drawn = rows.cpu().numpy()
        sources = [
            _Source(self, number, tree, output, drawn, derivatives, labels) for number in range(len(self.parties))
        ]
        for level in range(self.depth):
            all_here = np.where(nodes >= 2**level, nodes, 0)  # the others are in leaves
            counts = np.bincount(_take(all_here, drawn), minlength=2 ** (level + 1))
            numbers = 2**level + np.flatnonzero(counts[2**level :] >= 2 * self.rule.least_rows)
            if not len(numbers):
                break
            here = all_here * _mark(numbers, len(counts)).take(all_here)
            asked = self.candidates(tree, level, self.shape.outputs, len(self.parties))
            best = [
                source.best(here, numbers, all_here) if source.number in asked else source.none(numbers)
                for source in sources
            ]
            gains = np.stack([choice.gain for choice in best])
            winner = np.where(np.isfinite(gains).any(axis=0), gains.argmax(axis=0), -1)
            for source, choice in zip(sources, best, strict=True):
                mine = winner == source.number
                if mine.any():
                    children = source.split(here, numbers[mine], choice.bin[mine])
                    nodes = np.where(children > 0, children, nodes)
            self.shape.owner[tree, torch.from_numpy(numbers)] = torch.from_numpy(winner).to(self.shape.owner)
        return torch.from_numpy(nodes).to(self.all_rows.device)


class _Source:
    """The columns of one party as candidates for the splits of one tree."""

    def __init__(
        self,
        growing: TreeGrowing,
        number: int,
        tree: int,
        output: int,
        drawn: NDArray[np.int64],
        derivatives: NDArray[np.int64],
        labels: Tensor,
    ) -> None:
        self.growing, self.number, self.tree, self.output = growing, number, tree, output
        self.party: Party = growing.parties[number]
        self.bins, codes = growing.bins[self.party.name], growing.codes[number]
        self.exchange = growing.exchanges.get(self.party.name)
        self.drawn, self.labels = drawn, labels
        outputs = derivatives.shape[1] // 2
        self.derivatives = derivatives[:, [output, outputs + output]]
        columns = self._columns(codes.shape[1])
        everyone = len(drawn) == len(codes)
        self.codes = codes if everyone and len(columns) == codes.shape[1] else codes[np.ix_(drawn, columns)]
        self.sums: dict[int, NDArray[np.int64]] = {}
        """Of the nodes of the level before, by number."""
        self.withheld = torch.zeros_like(growing.all_rows, dtype=torch.bool)[:, None]
        """Rows (n, 1) that the party is told nothing more of in this tree."""

    def _columns(self, count: int) -> NDArray[np.integer]:
        growing = self.growing
        if growing.columns == 1 or count == 0:
            return np.arange(count)
        rng = make_rng(growing.federation.seed, "columns", self.party.name, self.tree)
        return np.sort(torch.randperm(count, generator=rng)[: count_drawn_columns(count, growing.columns)].numpy())

    def none(self, numbers: NDArray[np.int64]) -> Best:
        """Return no split of any node."""
        self.sums = {}
        return Best(np.full(len(numbers), -np.inf), np.zeros(len(numbers), dtype=np.int64))

    def best(self, here: NDArray[np.int64], numbers: NDArray[np.int64], all_here: NDArray[np.int64]) -> Best:
        """Return the party's best split of each node.

        Args:
            here: (n,) the node of each training row, or 0 if it is in none of those that may be split.
            numbers: of the nodes that may be split.
            all_here: (n,) the same, with nodes of the level that are too small to be split.
        """
        before = self.sums
        choice = self.none(numbers)
        disclosed = here if self.exchange is None else self._tell(here, all_here)
        at = _take(disclosed, self.drawn)
        counts = np.bincount(at, minlength=2 * int(numbers.max()) + 2)
        known = numbers[counts[numbers] > 0]
        if not len(known) or not self.codes.shape[1]:
            return choice
        is_known = _mark(known, len(counts))
        asked = [n for n in known if not self._can_subtract(int(n), is_known, before, counts)]
        position = np.full(len(counts), -1, dtype=np.int64)
        position[asked] = np.arange(len(asked))
        sums = self._sum(position.take(at), np.array(asked))
        self.sums = dict(zip(map(int, asked), sums, strict=True))
        for n in known:
            if int(n) not in self.sums:
                self.sums[int(n)] = before[int(n) // 2] - self.sums[int(n) ^ 1]
        best = find_splits(
            np.stack([self.sums[int(n)] for n in known]), self.bins.column, self.bins.ordered, self.growing.rule
        )
        place = np.searchsorted(numbers, known)
        choice.gain[place], choice.bin[place] = best
        return choice

    @staticmethod
    def _can_subtract(
        node: int, known: NDArray[np.bool_], before: Mapping[int, NDArray[np.int64]], counts: NDArray[np.integer]
    ) -> bool:
        """Whether the histogram of ``node`` is that of its parent minus that of its smaller sibling."""
        sibling = node ^ 1
        if node // 2 not in before or not known[sibling]:
            return False
        return (counts[node], node) > (counts[sibling], sibling)

    def _tell(self, here: NDArray[np.int64], all_here: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tell a passive party the node of each row; return what it is told.

        Defenses see nodes that are too small to be split as well: who is told the sibling of one knows its rows.
        Below a node that they withhold nothing is told: all nodes below it together are the node.
        """
        growing, active = self.growing, self.growing.federation.active
        value, splittable = (
            torch.from_numpy(nodes.astype(np.int16))[:, None].to(growing.all_rows.device) for nodes in (all_here, here)
        )
        place = Step(self.tree, growing.phase, growing.all_rows, self.labels)
        defended = active.defend(Kind.NODES, value, place, to=self.party.name)
        if defended is not value:
            self.withheld |= (defended == 0) & (value > 0)
            splittable = torch.where(self.withheld, 0, splittable)
        message = active.send(
            Kind.NODES,
            {"value": torch.where(splittable > 0, defended, 0)},
            to=self.party.name,
            step=self.tree,
            phase=growing.phase,
            rows=growing.all_rows,
            defended=True,
        )
        return np.asarray(message.payload["value"][:, 0].cpu().numpy().astype(np.int64))

    def _sum(self, nodes: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums (N, V, 3) over the drawn rows of nodes ``asked``, at whose positions ``nodes`` (B,) are."""
        if self.exchange is None:
            return sum_bins(self.codes, nodes, self.derivatives, len(asked), len(self.bins))
        place = Histograms(self.tree, self.growing.phase, self.output, asked)
        return self.exchange.sums(self.codes, nodes, len(self.bins), place)

    def split(
        self, here: NDArray[np.int64], numbers: NDArray[np.int64], chosen: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """Keep the chosen splits of nodes; return the child (n,) of each row in them, else 0."""
        growing, active = self.growing, self.growing.federation.active
        nodes, picked = torch.from_numpy(numbers), torch.from_numpy(chosen.astype(np.int64))
        if self.exchange is not None:
            chosen_here = {"nodes": nodes, "bins": picked}
            received = active.send(
                Kind.CONTROL, chosen_here, to=self.party.name, step=self.tree, phase=growing.phase
            ).payload
            nodes, picked = received["nodes"], received["bins"]
        splits = self.party.module("splits", Splits)
        bins = picked.numpy()
        splits.add(
            self.tree, nodes, torch.from_numpy(self.bins.place[bins]), torch.from_numpy(self.bins.threshold[bins])
        )
        rows = np.flatnonzero(_mark(nodes.numpy(), 2 ** (growing.depth + 1)).take(here))
        child = self._children(here.take(rows), nodes.numpy(), bins, rows)
        if self.exchange is not None:
            inside = torch.from_numpy(rows).to(growing.all_rows.device)
            value = torch.from_numpy(child.astype(np.int16))[:, None].to(inside.device)
            answer = self.party.send(
                Kind.NODES, {"value": value}, to=active.name, step=self.tree, phase=growing.phase, rows=inside
            )
            child = answer.payload["value"][:, 0].cpu().numpy()
        children = np.zeros(len(here), dtype=np.int64)
        children[rows] = child
        return children

    def _children(
        self, at: NDArray[np.int64], nodes: NDArray[np.int64], bins: NDArray[np.int64], rows: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """Return the child (m,) of each of ``rows``, which are in nodes ``at`` (m,) that are split at ``bins``."""
        chosen = np.zeros(2 ** (self.growing.depth + 1), dtype=np.int64)
        chosen[nodes] = bins
        split = chosen.take(at)
        codes = self.growing.codes[self.number]
        code = codes.take(rows * codes.shape[1] + self.bins.column[chosen].take(at))
        right: NDArray[np.bool_] = np.where(self.bins.ordered[chosen].take(at), code > split, code == split)
        return 2 * at + right


def count_drawn_columns(count: int, share: float) -> int:
    """Return how many of a party's ``count`` columns are drawn for a tree."""
    return max(1, round(share * count)) if count else 0


def _mark(numbers: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Return (length,) whether each number is among ``numbers``."""
    marks = np.zeros(length, dtype=bool)
    marks[numbers] = True
    return marks


def _take(values: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values of some rows, sorted and each once: of all rows as they are."""
    return values if len(rows) == len(values) else values.take(rows)
