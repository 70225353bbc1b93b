"""The path restriction attack on trees in clear, beside what the active party is told of branches by protocol.

    python benchmarks/path_restriction.py            compute, about two minutes, and print the table
    python benchmarks/path_restriction.py --write    write it into docs/trees.md as well

Luo et al. 2021 (arXiv 2010.10152): the active party has a tree with all thresholds, its own columns and the predicted
class of a row. It draws a path among those that agree with both. The correct branching rate (CBR) is the share of the
branches at passive columns on that path that the row would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import torch
from pages import replace_table
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor

from vflsec.base.seeds import make_rng
from vflsec.core.federation import Federation
from vflsec.core.message import Kind, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.secureboost import SecureBoost
from vflsec.run.federation import build_federation
from vflsec.run.plan import list_trials
from vflsec.run.spec import read
from vflsec.testing.federations import build_from_numbers
from vflsec.trees.ensemble import Splits

PAGE = Path(__file__).parents[1] / "docs" / "trees.md"
SHARES, DEPTH, SEEDS = (0.2, 0.3, 0.4, 0.5, 0.6), 5, 10
"""Shares of the columns that the passive party holds, the depth of the tree, and how often columns are dealt."""


class Tree(NamedTuple):
    """A tree of M nodes, the children of node i 2 i and 2 i + 1, and what n test rows do in it.

    Attributes:
        owner: (M,) the party that splits each node, the active one 0; -1 for none.
        sides: (n, M) to which child each row would go, 0 or 1, whether it reaches the node or not.
        classes: the class of each leaf, by its number.
    """

    owner: Tensor
    sides: Tensor
    classes: dict[int, int]

    @property
    def paths(self) -> list[list[int]]:
        """The nodes of each path from the root to a leaf."""
        return self.list_paths(1)

    def list_paths(self, node: int) -> list[list[int]]:
        """Return the nodes of each path from ``node`` to a leaf."""
        if node >= len(self.owner) or self.owner[node] < 0:
            return [[node]]
        return [[node, *path] for child in (2 * node, 2 * node + 1) for path in self.list_paths(child)]

    def agree(self, path: Sequence[int], parties: Sequence[int]) -> Tensor:
        """Return which rows (n,) would take the branches of ``path`` at the splits of some parties."""
        agreeing = torch.ones(len(self.sides), dtype=torch.bool)
        for node, child in pairwise(path):
            if int(self.owner[node]) in parties:
                agreeing &= self.sides[:, node] == child % 2
        return agreeing

    def rate(self, chosen: Tensor) -> float:
        """Return the share of right branches at passive columns on the path that is ``chosen`` (n,) for each row."""
        right = total = 0
        for number, path in enumerate(self.paths):
            for node, child in pairwise(path):
                if self.owner[node] > 0:
                    taken = self.sides[chosen == number, node] == child % 2
                    right, total = right + int(taken.sum()), total + len(taken)
        return right / total if total else float("nan")

    def attack(self, seed: int) -> tuple[float, float]:
        """Return the CBR of path restriction, and of a path drawn among all."""
        true = torch.stack([self.agree(path, (0, 1)) for path in self.paths], dim=1).long().argmax(dim=1)
        classes = torch.tensor([self.classes[path[-1]] for path in self.paths])
        possible = torch.stack([self.agree(path, (0,)) for path in self.paths], dim=1)
        possible &= classes == classes[true][:, None]
        rng = make_rng(seed, "paths")
        weights = (possible.float(), torch.ones(possible.shape))
        restricted, drawn = (self.rate(torch.multinomial(each, 1, generator=rng)[:, 0]) for each in weights)
        return restricted, drawn


@cache
def load() -> Federation:
    """Return the federation whose columns are dealt anew."""
    settings = {"dataset": "credit-default", "attacks": [{"name": "split-order"}], "adversary": "active"}
    return build_federation(next(iter(list_trials(read(settings)))).cell, "cpu")


def deal(share: float, seed: int) -> Federation:
    """Return two parties with the encoded columns of ``credit-default``, a share of them passive, drawn at random."""
    whole, splits = load(), ("train", "test")
    x = {s: torch.cat([party.features[s] for party in whole.parties.values()], dim=1) for s in splits}
    order = torch.randperm(x["train"].shape[1], generator=make_rng(seed, "columns"))
    passive = max(1, round(share * len(order)))
    columns = {"active": order[passive:], "passive_1": order[:passive]}
    dealt = {name: {s: x[s][:, at] for s in splits} for name, at in columns.items()}
    return build_from_numbers(dealt, {s: whole.active.labels[s] for s in splits}, seed=seed)


def grow_cart(federation: Federation, seed: int) -> Tree:
    """Return a classification tree on all columns, the model of the paper."""
    parties = federation.parties.values()
    x = {s: torch.cat([party.features[s] for party in parties], dim=1).numpy() for s in ("train", "test")}
    fitted = DecisionTreeClassifier(max_depth=DEPTH, random_state=seed)
    grown = fitted.fit(x["train"], federation.active.labels["train"].numpy()).tree_
    tree = Tree(torch.full((2**DEPTH,), -1), torch.zeros(len(x["test"]), 2**DEPTH, dtype=torch.long), {})
    waiting = [(0, 1)]
    for number, node in waiting:
        if grown.children_left[number] < 0:
            tree.classes[node] = int(grown.value[number][0].argmax())
            continue
        column = grown.feature[number]
        tree.owner[node] = int(column >= federation.active.n_features)
        tree.sides[:, node] = torch.from_numpy(x["test"][:, column] > grown.threshold[number])
        waiting += [(grown.children_left[number], 2 * node), (grown.children_right[number], 2 * node + 1)]
    return tree


def grow_boosted(federation: Federation) -> tuple[Tree, float]:
    """Return the first tree of ``secureboost``, and the share of the branches at passive columns that are told.

    These are branches on the way of a test row that the active party receives at prediction, and that are right.
    """
    method = SecureBoost(TrainSpec(), ModelSpec(), rounds=1, depth=DEPTH)
    trained = method.fit(federation)
    tap = Transcript(frozenset({"active"}), frozenset({Kind.NODES}))
    federation.channel.taps.append(tap)
    trained.predict("test")
    shape = method.shape(federation)
    tree = Tree(shape.owner[0], torch.zeros(federation.n_rows("test"), 2**DEPTH, dtype=torch.long), {})
    for party in federation.parties.values():
        splits = party.module("splits", Splits)
        for node in torch.nonzero(splits.column[0] >= 0)[:, 0].tolist():
            values = party.features["test"][:, int(splits.column[0, node])]
            tree.sides[:, node] = (values > splits.threshold[0, node]).long()
    tree.classes.update({p[-1]: int(shape.start[0] + shape.value[0, p[-1]] > 0) for p in tree.paths})
    told = passed = 0
    for message in tap.messages:
        said = message.payload["value"][:, 0].long()
        reached = said > 0
        if message.receiver == "active":
            told += int((tree.sides[reached].gather(1, said[reached, None] // 2)[:, 0] == said[reached] % 2).sum())
    for path in tree.paths:
        passed += int(tree.agree(path, (0, 1)).sum()) * sum(int(tree.owner[node]) > 0 for node in path[:-1])
    return tree, told / passed if passed else float("nan")


def measure(share: float, seed: int) -> list[float]:
    """Return the CBR of path restriction and of a random path in both trees, and what is told in the boosted one."""
    federation = deal(share, seed)
    boosted, told = grow_boosted(federation)
    return [*grow_cart(federation, seed).attack(seed), *boosted.attack(seed), told]


def make_table() -> str:
    """Return the table: means over the seeds."""
    lines = [
        "| passive columns | one tree: path restriction | random path | boosted tree: path restriction | random path "
        "| told |",
        "|---|---|---|---|---|---|",
    ]
    for share in SHARES:
        rates = torch.tensor([measure(share, seed) for seed in range(SEEDS)]).nanmean(dim=0)
        lines.append(f"| {share:.0%} | " + " | ".join(f"{rate:.3f}" for rate in rates.tolist()) + " |")
    return "\n".join(lines)


@click.command()
@click.option("--write", is_flag=True, help="Write the table into docs/trees.md.")
def main(write: bool) -> None:
    """Compute and print the table."""
    table = make_table()
    if write:
        replace_table(PAGE, "paths", table)
    click.echo(table)


if __name__ == "__main__":
    main()
