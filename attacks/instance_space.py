"""Instance spaces: rows that trees send to the same nodes tend to be of one class."""

import torch

from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.trees.guesses import regress_on_nodes


class InstanceSpaces(Attack):
    """Label inference from the node of each row in each tree, and from nothing else.

    A passive party must know the rows of a node to add up their derivatives or to split it. Nodes are grown so that
    their rows agree in the label, and the first trees follow it most closely. Rows are compared by the nodes that they
    share: small ones and those of the first trees count most (``vflsec.inference.trees.nodes``). Classes of the
    auxiliary rows are regressed on principal components of these similarities (a Gaussian process for each of several
    ways to weigh components, averaged by how well they explain the auxiliary rows). Test rows are compared by the nodes
    that the party splits itself, which are all that it is told at prediction.

    Source: Cheng et al. 2021 (SecureBoost, arXiv 1901.08755), whose discussion of security names the leak.
    """

    name = "instance-space"
    version = 2
    needs = frozenset({Need.NODES, Need.AUX_LABELS})
    reference = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755; Rasmussen and Williams 2006, chapter 2"
    verified = "labels of a tree whose leaves are pure, chance for trees that were grown at random"
    differs = (
        "The source bounds the purity of leaves of the first tree; all trees are read here, and classes are regressed.",
        THRESHOLD,
    )
    costs = "principal components of a sparse matrix of rows and nodes, and a few regressions on auxiliary rows"
    fails = "if nodes are withheld or drawn at random, or if leaves do not differ in the label"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows, and of test rows if the party is told any node of them."""
        result = regress_on_nodes(view, rng)
        return Guess(result.scores, budget={"candidates": result.tried})
