"""Rank-one attack: under a linear head, gradients of a batch are multiples of one vector, with the label as sign."""

import torch

from vflsec.core.attack import Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import orient
from vflsec.inference.releases import project_batches, read_releases


class RankOne(Attack):
    """Label inference from the sign of each gradient along their common axis. Two classes, a linear head.

    A row's gradient is delta_i · w, where w is the direction of the head (with two logits, their difference) and
    delta_i the residual p - y: negative for class 1, positive for class 0. The gradients of a batch are a matrix of
    rank one, whose right singular vector is the head up to a factor. Its sign is chosen to agree with the batch before,
    because the head changes slowly. Auxiliary labels tell which sign is class 1; without any, class 1 is assumed to be
    rarer. A row's scores, divided by their mean size in the batch, are averaged over its releases.

    PrADA's passive party decrypts this value (delta^C). Encryption hides embeddings from the active party; it does not
    hide labels.

    Source: derived from PrADA (arXiv 2111.10120), algorithm 5; its section 7.3 admits a leak of this class.
    """

    name = "rank-one"
    version = 2
    needs = frozenset({Need.GRADIENTS})
    classes = 2
    head = "linear"
    reference = "derived from PrADA, algorithm 5, and Li et al. 2022 (Marvell), section 3.2"
    verified = "exact: all labels are recovered without a defense"
    differs = (
        "PrADA describes no attack: this one is derived from its algorithm 5.",
        "The axis comes from received gradients, which include noise; Li et al. use a noiseless reference gradient.",
    )
    costs = "one eigenvalue decomposition for each batch; no auxiliary label"
    fails = "under noise that is longer than the gradients in all directions; without a defense it recovers all labels"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT)
        scores = project_batches(releases.values, releases.group_by_message())
        score = releases.mean(scores[:, None])[:, 0]
        rarer = score if (score > 0).double().mean() < 0.5 else -score
        return Guess({"train": orient(view, rarer)}, budget={"releases": len(scores)})
