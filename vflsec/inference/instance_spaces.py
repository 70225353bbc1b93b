"""Classes regressed on the nodes that rows share, and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View
from vflsec.inference.kernel_mixture import Kernel, Mixture, of_classes, unit_rows
from vflsec.inference.trees.components import components, weighed
from vflsec.inference.trees.nodes import partners

POWERS = (1, 3, 9)
"""Exponents of singular values: from shared nodes as they are to hardly more than the first component."""


class Regressed(NamedTuple):
    """Scores of classes.

    Attributes:
        scores: (n, C) by split; of the training rows, and of each other split of whose rows the party is told nodes.
        left_out: (m, C) of the auxiliary rows, each without its own label; None if all nodes were withheld.
        tried: number of candidates.
    """

    scores: Mapping[str, Tensor]
    left_out: Tensor | None
    tried: int


def regressed(view: View, rng: torch.Generator) -> Regressed:
    """Return the regression of the auxiliary rows' classes on principal components of shared nodes.

    It is computed once for a view and its copies with the same auxiliary rows and the same ``rng``, and must not be
    changed.

    Args:
        view: of a passive party.
        rng: draws the rows on which tables are chosen.
    """
    return view.once("instance spaces", rng, lambda: _regressed(view, rng))


def _regressed(view: View, rng: torch.Generator) -> Regressed:
    targets = F.one_hot(view.aux_labels, view.n_classes).double()
    scores: dict[str, Tensor] = {}
    left_out, tried = None, 0
    for everywhere in (False, True):
        tables = _tables(view, everywhere=everywhere)
        splits = [s for s in view.features if tables and all(s in table for table in tables.values())]
        if not set(splits) - scores.keys():
            continue
        x = {name: {s: unit_rows(table[s], table[view.aux_split]) for s in splits} for name, table in tables.items()}
        kernels = {name: Kernel(own[view.aux_split]) for name, own in x.items()}
        mixture = Mixture(kernels, view.aux_rows, targets, of_classes(view.aux_labels), rng)
        tried += mixture.n_tried
        if view.aux_split not in scores:
            left_out = mixture.left_out()
        for s in splits:
            scores.setdefault(s, mixture.predict({name: own[s] for name, own in x.items()}))
    if view.aux_split not in scores:  # all nodes were withheld
        scores[view.aux_split] = targets.mean(dim=0).expand(len(view.features[view.aux_split]), -1)
    return Regressed(scores, left_out, tried)


def _tables(view: View, *, everywhere: bool) -> dict[str, dict[str, Tensor]]:
    """Return tables (n, k) by split, for each party that tells nodes and each power."""
    device = view.aux_rows.device
    found = {}
    for other in partners(view):
        own = components(view, other, everywhere=everywhere)
        for power in POWERS if own else ():
            found[f"{other} {power}"] = {s: weighed(*one, power).to(device) for s, one in own.items()}
    return found
