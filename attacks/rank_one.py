"""Rank-one attack: under a linear head all gradients of a batch are multiples of one vector, by sign the label."""

from __future__ import annotations

import torch

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import oriented
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.directions import multiples
from vflsec.inference.releases import received


class RankOne(Attack):
    """Label inference from the sign of what each gradient is a multiple of. Two classes, a linear head.

    A row's gradient is delta_i · w, where w is the head's direction (of two logits, their difference) and delta_i the
    residual p - y: negative for class 1, positive for class 0. So the batch, a matrix of rank one, falls into its
    classes, and its right singular vector is the head up to a factor. Batch after batch the vector is turned to agree
    with the one before, because the head moves slowly; which side is class 1 say the auxiliary labels, without any the
    prior that class 1 is the rarer. A row's scores, in units of its batch, are averaged over its releases.

    This is what PrADA's passive party decrypts (delta^C): encryption hides embeddings from the active party, and
    labels from nobody.

    Costs one eigenvalue decomposition for each batch, and needs not one label. Recovers all labels without a defense.
    Fails under noise that is longer than the gradients in all directions, and above two classes or a deeper head.

    Source: derived from PrADA (arXiv 2111.10120), algorithm 5; its section 7.3 admits a leak of this class.
    """

    name = "rank-one"
    needs = frozenset({Need.GRADIENTS})
    classes = 2
    head = "linear"
    reference = "derived from PrADA, algorithm 5, and Li et al. 2022 (Marvell), section 3.2"
    verified = "exact: all labels are recovered without a defense"
    differs = (
        "PrADA describes no attack: this one is derived from its algorithm 5.",
        "The axis comes from what was received, noise included; Li et al. use a clean reference gradient.",
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = received(view, Kind.GRADIENT)
        scores = multiples(releases.values, releases.by_message())
        score = releases.mean(scores[:, None])[:, 0]
        rarer = score if (score > 0).double().mean() < 0.5 else -score
        return Guess({"train": oriented(view, rarer)}, budget={"releases": len(scores)})
