"""Instance spaces: rows that trees send to the same nodes tend to be of one class."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import THRESHOLD
from vflsec.core.view import Guess, Need, View
from vflsec.inference.fused import of_classes
from vflsec.inference.kernel_mixture import Kernel, Mixture, standardized
from vflsec.inference.trees.components import components, weighed
from vflsec.inference.trees.nodes import partners


class InstanceSpaces(Attack):
    """Label inference from the node of each row in each tree, and from nothing else.

    A passive party must know the rows of a node to add up their derivatives or to split it. Nodes are grown so that
    their rows agree in the label, and the first trees follow it most closely. Rows are compared by the nodes that they
    share: small ones and those of the first trees count most (``vflsec.inference.trees.components``). Classes of the
    auxiliary rows are regressed on principal components of these similarities (a Gaussian process for each of several
    ways to weigh components, averaged by how well they explain the auxiliary rows). Test rows are compared by the nodes
    that the party splits itself, which are all that it is told at prediction.

    Source: Cheng et al. 2021 (SecureBoost, arXiv 1901.08755), whose discussion of security names the leak.
    """

    name = "instance-space"
    needs = frozenset({Need.NODES, Need.AUX_LABELS})
    reference = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755; Rasmussen and Williams 2006, chapter 2"
    verified = "labels of a tree whose leaves are pure, chance for trees that were grown at random"
    differs: ClassVar[tuple[str, ...]] = (
        "The source bounds the purity of leaves of the first tree; all trees are read here, and classes are regressed.",
        THRESHOLD,
    )
    costs = "principal components of a sparse matrix of rows and nodes, and a few regressions on auxiliary rows"
    fails = "if nodes are withheld or drawn at random, or if leaves do not differ in the label"

    powers: ClassVar[tuple[int, ...]] = (1, 3, 9)
    """Exponents of singular values: from shared nodes as they are to hardly more than the first component."""

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows, and of test rows if the party is told any node of them."""
        targets = F.one_hot(view.aux_labels, view.n_classes).double()
        scores: dict[str, Tensor] = {}
        tried = 0
        for everywhere in (False, True):
            tables = self._tables(view, everywhere=everywhere)
            splits = [s for s in view.features if tables and all(s in table for table in tables.values())]
            if not set(splits) - scores.keys():
                continue
            x = {
                name: {s: standardized(table[s], table[view.aux_split]) for s in splits}
                for name, table in tables.items()
            }
            kernels = {name: Kernel(own[view.aux_split]) for name, own in x.items()}
            mixture = Mixture(kernels, view.aux_rows, targets, of_classes(view.aux_labels), rng)
            tried += mixture.n_tried
            for s in splits:
                scores.setdefault(s, mixture.predict({name: own[s] for name, own in x.items()}))
        if view.aux_split not in scores:  # all nodes were withheld
            scores[view.aux_split] = targets.mean(dim=0).expand(len(view.features[view.aux_split]), -1)
        return Guess(scores, budget={"candidates": tried})

    def _tables(self, view: View, *, everywhere: bool) -> dict[str, dict[str, Tensor]]:
        """Return tables (n, k) by split, for each party that tells nodes and each power."""
        device = view.aux_rows.device
        found = {}
        for other in partners(view):
            own = components(view, other, everywhere=everywhere)
            for power in self.powers if own else ():
                found[f"{other} {power}"] = {s: weighed(*one, power).to(device) for s, one in own.items()}
        return found
