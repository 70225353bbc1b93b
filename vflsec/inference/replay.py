"""Boosting on guessed labels: what rows score in trees whose nodes are known, with and without their own guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from vflsec.core.message import AFTERWARDS, Kind
from vflsec.core.view import View
from vflsec.inference.trees.nodes import partners, told, told_everywhere

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST = 1e-6
"""Smallest share of a class at the start, as in the training."""

TINY = 1e-12


class Ensemble(NamedTuple):
    """T trees of boosting, as far as a party is told.

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


class Replayed(NamedTuple):
    """Logits, one for two classes.

    Attributes:
        scores: (n, C') by split.
        left_out: (n, C') of training rows, by values of nodes from which a row's own target is taken out.
    """

    scores: Mapping[str, Floats]
    left_out: Floats


def observed(view: View, *, everywhere: bool = False) -> Ensemble | None:
    """Return the trees whose nodes a passive party is told, once for a view and its copies; None without any.

    Two classes have one tree in each round, C classes one for each class, in order. Who is sent derivatives, encrypted
    or not, knows the rows that a round has drawn.

    Args:
        view: of a passive party.
        everywhere: whether only nodes count that are told of rows of every split. Node i then has the number i + 1, and
            rows that are in none of these nodes are together in 1: here that says something of a row.
    """
    key = ("observed trees", everywhere)
    if key not in view.memo:
        view.memo[key] = _observed(view, everywhere=everywhere)
    found: Ensemble | None = view.memo[key]
    return found


def replayed(trees: Ensemble, targets: Floats, split: str, *, learning_rate: float, l2: float) -> Replayed:
    """Return what boosting on ``targets`` would make rows score, in trees of which the nodes are given.

    As in the training, all scores start from the logits of the shares of classes. In each round p are the
    probabilities of all earlier trees. The value of a node is - learning_rate G / (H + l2), where G and H are the sums
    of p - q and p (1 - p) over its rows with targets q. A row whose node is not known gets no value.

    Source: Chen and Guestrin 2016 (XGBoost), equation 5.

    Args:
        trees: with the nodes of T trees.
        targets: (n, C') shares of classes, of the last of two classes only.
        split: of the training rows.
        learning_rate: of the training.
        l2: of the training.
    """
    share = targets.mean(axis=0).clip(LEAST, 1 - LEAST)
    start = np.log(share / (1 - share)) if len(share) == 1 else np.log(share)
    scores = {s: np.tile(start, (len(nodes), 1)) for s, nodes in trees.nodes.items()}
    left_out = scores[split].copy()
    for round_ in np.unique(trees.rounds).tolist():
        p = expit(scores[split]) if len(share) == 1 else softmax(scores[split], axis=1)
        derivatives = np.stack([p - targets, p * (1 - p)])  # (2, n, C')
        if round_ in trees.drawn:
            derivatives *= trees.drawn[round_][:, None]
        for t in np.flatnonzero(trees.rounds == round_).tolist():
            k, own = trees.outputs[t], trees.nodes[split][:, t]
            length = max(int(nodes[:, t].max(initial=0)) for nodes in trees.nodes.values()) + 1
            sums: Floats = np.stack([np.bincount(own, one, length) for one in derivatives[:, :, k]])
            values = _values(sums, learning_rate, l2)
            for s, nodes in trees.nodes.items():
                scores[s][:, k] += np.where(nodes[:, t] > 0, values[nodes[:, t]], 0)
            others = _values(sums[:, own] - derivatives[:, :, k], learning_rate, l2)
            left_out[:, k] += np.where(own > 0, others, 0)
    return Replayed(scores, left_out)


def _values(sums: Floats, learning_rate: float, l2: float) -> Floats:
    """Return the values of nodes with sums (2, k) of first and second derivatives."""
    found: Floats = -learning_rate * sums[0] / (sums[1] + l2).clip(TINY)
    return found


def _observed(view: View, *, everywhere: bool) -> Ensemble | None:
    columns: dict[str, dict[int, Ints]] = {}
    for other in partners(view):
        known = told(view, other)
        if known is None or view.aux_split not in known.nodes:
            continue
        kept = told_everywhere(view, other)
        for split, nodes in known.nodes.items() if everywhere else [(view.aux_split, known.nodes[view.aux_split])]:
            of_split = columns.setdefault(split, {})
            for t, tree in enumerate(known.trees.tolist()):
                own = nodes[:, t]
                if everywhere:
                    own = np.where(np.isin(own, list(kept.get(tree, ()))), own + 1, 1)
                deepest = own.max(axis=1)  # of nodes on one path, the deepest has the largest number
                of_split[tree] = np.maximum(of_split[tree], deepest) if tree in of_split else deepest
    if not columns:
        return None
    outputs = view.n_classes if view.n_classes > 2 else 1
    trees = np.array(sorted(columns[view.aux_split]), dtype=np.int64)
    told_nodes = {
        s: np.stack([own[t] for t in trees.tolist()], axis=1) for s, own in columns.items() if len(own) == len(trees)
    }
    return Ensemble(told_nodes, trees // outputs, trees % outputs, _drawn(view, outputs))


def _drawn(view: View, outputs: int) -> dict[int, NDArray[np.bool_]]:
    """Return by round whether each training row (n,) was drawn, of rounds with messages of derivatives."""
    names = view.party.split("+")
    found: dict[int, NDArray[np.bool_]] = {}
    for m in view.messages:
        if m.kind not in (Kind.GRADIENT, Kind.CIPHERTEXT) or m.rows is None or m.receiver not in names:
            continue
        if m.split == view.aux_split and m.phase not in AFTERWARDS:
            drawn = found.setdefault(m.step // outputs, np.zeros(len(view.features[view.aux_split]), dtype=bool))
            drawn[m.rows.cpu().numpy()] = True
    return found
