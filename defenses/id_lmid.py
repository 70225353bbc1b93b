"""ID-LMID: passive parties are not told about nodes whose rows give their labels away."""

import math

import torch
from torch import Tensor

from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


class NodeInformation(Defense):
    """Withholds nodes of trees that tell more about labels than a threshold; the active party splits them alone.

    What a node tells of each of its rows is the divergence KL(p(y | node) || p(y)) of the labels in it from those of
    all rows, in bits. A passive party is told about a node if neither the node nor its sibling exceeds 1 / strength.
    The sibling counts because its rows are those of the parent that are not in the node. Nodes below one that is
    withheld are withheld as well.

    Source: Takahashi et al. 2023 (ID-LMID), arXiv 2307.10318, which bounds the mutual information of labels and
    instance space.

    Args:
        strength: one over the largest number of bits that a node may tell of a row.
        at: the kinds of release to act on.
    """

    name = "id-lmid"
    strength_name = "1/bits"
    strengths = (4.0, 20.0, 100.0)
    points = (Kind.NODES,)
    reference = "Takahashi et al. 2023 (ID-LMID), arXiv 2307.10318, by the divergence of each node"
    guarantee = "none, empirical only"
    hides = "from passive parties: which rows are in a node of few classes, unless they split its parent themselves"
    costs = "one count of labels for each node; utility, since passive parties cannot split such nodes"
    fails = (
        "where a passive party splits the parent itself, and so knows the children; and over many trees, each of which "
        "may tell as much"
    )

    def on_nodes(self, nodes: Tensor, release: Release) -> Tensor:
        """Return ``nodes`` (B, T) with 0 for each row in a node that tells too much."""
        if not self.strength or release.labels is None or not nodes.numel():
            return nodes
        released = nodes.clone()
        for tree, node in enumerate(nodes.long().T):
            bits = _count_bits(node, release.labels)
            pairs = bits.view(-1, 2).amax(dim=1).repeat_interleave(2) if len(bits) > 2 else bits
            released[pairs[node] > 1 / self.strength, tree] = 0
        return released


def _count_bits(nodes: Tensor, labels: Tensor) -> Tensor:
    """Return the divergence (M,) of the labels in each node from those of all rows; 0 for an empty one and node 0."""
    most = max(2, 2 ** (int(nodes.max()).bit_length()))
    classes = int(labels.max()) + 1
    counts = torch.zeros(most, classes, dtype=torch.float64, device=nodes.device)
    counts.index_put_((nodes, labels), counts.new_ones(len(nodes)), accumulate=True)
    total = torch.bincount(labels, minlength=classes).double() / len(labels)
    share = counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
    bits: Tensor = torch.special.xlogy(share, share / total.clamp_min(1e-300)).sum(dim=1) / math.log(2)
    bits[0] = 0
    return bits
