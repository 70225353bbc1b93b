"""Boosting on guessed labels: what rows score in trees whose nodes are known, with and without their own guesses."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.core.message import AFTERWARDS, Kind
from vflsec.core.view import View, memoize
from vflsec.inference.trees.nodes import Ints, collect_nodes, list_new_nodes, list_partners, sum_by_place, take_at_place

MIN_CLASS_SHARE = 1e-6
"""Smallest share of a class at the start, as in the training."""

TINY = 1e-12


class Ensemble(NamedTuple):
    """T trees of boosting, as far as a party knows them.

    Attributes:
        nodes: (n, T) by split, the deepest node of each row in each tree that is known; 0 for none.
        rounds: (T,) in which each was grown.
        outputs: (T,) the logit to which each adds.
        drawn: (n,) by round, whether the values of leaves count each training row; of other rounds they count all.
    """

    nodes: Mapping[str, Ints]
    rounds: Ints
    outputs: Ints
    drawn: Mapping[int, NDArray[np.bool_]]


class Rates(NamedTuple):
    """The learning rate and the L2 penalty of boosting."""

    learning_rate: float
    l2: float


class Replay(NamedTuple):
    """Logits, one for two classes.

    Attributes:
        scores: (..., n, C') by split.
        left_out: (..., n, C') of training rows, by values of nodes from which a row's own target is taken out.
        notes: what ``noted`` returned in each round.
    """

    scores: Mapping[str, Tensor]
    left_out: Tensor
    notes: list[Tensor]


@memoize
def observe_trees(view: View, *, everywhere: bool = False) -> Ensemble | None:
    """Return the trees whose nodes a passive party knows; None without any.

    Two classes have one tree in each round, C classes one for each class, in order. Who is sent derivatives, encrypted
    or not, knows the rows that a round has drawn.

    Args:
        view: of a passive party.
        everywhere: whether only nodes count that are told of rows of every split. Node i then has the number i + 1, and
            rows that are in none of these nodes are together in 1: here that says something of a row.
    """
    columns: dict[str, dict[int, Ints]] = {}
    for other in list_partners(view):
        known = collect_nodes(view, other)
        if known is None or view.aux_split not in known.nodes:
            continue
        kept = list_new_nodes(view, other)
        for split, nodes in known.nodes.items() if everywhere else [(view.aux_split, known.nodes[view.aux_split])]:
            by_tree = columns.setdefault(split, {})
            for t, tree in enumerate(known.trees.tolist()):
                path = nodes[:, t]
                if everywhere:
                    path = np.where(np.isin(path, list(kept.get(tree, ()))), path + 1, 1)
                deepest = path.max(axis=1)  # of nodes on one path, the deepest has the largest number
                by_tree[tree] = np.maximum(by_tree[tree], deepest) if tree in by_tree else deepest
    if not columns:
        return None
    outputs = view.n_classes if view.n_classes > 2 else 1
    trees = np.array(sorted(columns[view.aux_split]), dtype=np.int64)
    nodes_of = {s: np.stack([x[t] for t in trees.tolist()], axis=1) for s, x in columns.items() if len(x) == len(trees)}
    return Ensemble(nodes_of, trees // outputs, trees % outputs, _find_drawn_rows(view, outputs))


def replay_boosting(
    trees: Ensemble, targets: Tensor, split: str, rates: Rates, noted: Callable[[int, Tensor], Tensor] | None = None
) -> Replay:
    """Return what boosting on ``targets`` would make rows score, in trees of which the nodes are given.

    As in the training, all scores start from the logits of the shares of classes. In each round p are the
    probabilities of all earlier trees. The value of a node is - learning_rate G / (H + l2), where G and H are the sums
    of p - q and p (1 - p) over its rows with targets q. A row whose node is not known gets no value. Everything is a
    differentiable function of the targets.

    Source: Chen and Guestrin 2016 (XGBoost), equation 5.

    Args:
        trees: with the nodes of T trees.
        targets: (..., n, C') shares of classes, of the last of two classes only. Further dimensions are replays of
            their own.
        split: of the training rows.
        rates: of the training.
        noted: called with each round and its first and second derivatives (2, ..., n, C'), 0 for rows that were not
            drawn.
    """
    share = targets.mean(dim=-2, keepdim=True).clamp(MIN_CLASS_SHARE, 1 - MIN_CLASS_SHARE)
    binary = targets.shape[-1] == 1
    start = share.logit() if binary else share.log()
    scores = {s: start.expand(*start.shape[:-2], len(nodes), -1) for s, nodes in trees.nodes.items()}
    left_out = scores[split]
    notes: list[Tensor] = []
    for round_ in np.unique(trees.rounds).tolist():
        p = scores[split].sigmoid() if binary else scores[split].softmax(dim=-1)
        derivatives = torch.stack([p - targets, p * (1 - p)])
        if round_ in trees.drawn:
            derivatives = derivatives * torch.from_numpy(trees.drawn[round_]).to(p)[:, None]
        if noted is not None:
            notes.append(noted(round_, derivatives))
        here = np.flatnonzero(trees.rounds == round_)
        nodes = {s: torch.from_numpy(x[:, here]).to(p.device) for s, x in trees.nodes.items()}
        outputs = torch.from_numpy(trees.outputs[here]).to(p.device)
        has_all = trees.outputs[here].tolist() == list(range(targets.shape[-1]))  # needs no index, which is slow
        length = 1 + max(int(x.max()) for x in nodes.values() if x.numel())
        places = length * torch.arange(len(here), device=p.device)
        place = (nodes[split] + places).flatten()
        of_rows = (derivatives if has_all else derivatives[..., outputs]).flatten(-2)  # (2, ..., n T)
        sums = sum_by_place(of_rows, place, length * len(here))
        values = _compute_values(sums, rates)
        others = _compute_values(take_at_place(sums, place) - of_rows, rates).view(*left_out.shape[:-1], -1)
        for s, x in nodes.items():
            of_trees = take_at_place(values, x + places) * (x > 0)
            scores[s] = scores[s] + of_trees if has_all else scores[s].index_add(-1, outputs, of_trees)
        others = others * (nodes[split] > 0)
        left_out = left_out + others if has_all else left_out.index_add(-1, outputs, others)
    return Replay(scores, left_out, notes)


def _compute_values(sums: Tensor, rates: Rates) -> Tensor:
    """Return the values of nodes with sums (2, ...) of first and second derivatives."""
    return -rates.learning_rate * sums[0] / (sums[1] + rates.l2).clamp_min(TINY)


def _find_drawn_rows(view: View, outputs: int) -> dict[int, NDArray[np.bool_]]:
    """Return by round whether each training row (n,) was drawn, of rounds with messages of derivatives."""
    names = view.party.split("+")
    by_round: dict[int, NDArray[np.bool_]] = {}
    for m in view.messages:
        if m.kind not in (Kind.GRADIENT, Kind.CIPHERTEXT) or m.rows is None or m.receiver not in names:
            continue
        if m.split == view.aux_split and m.phase not in AFTERWARDS:
            drawn = by_round.setdefault(m.step // outputs, np.zeros(len(view.features[view.aux_split]), dtype=bool))
            drawn[m.rows.cpu().numpy()] = True
    return by_round
