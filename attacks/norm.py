"""Norm attack: the gradient of a rare class is long."""

import torch

from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import separate
from vflsec.inference.releases import OnReleases, rank_releases, read_releases


class Norm(OnReleases):
    """Label inference from the length of the gradient of each row. Two classes.

    A model that has learned that one class is rare predicts the other with more confidence, so that errors on the rare
    class have longer gradients. Lengths are ranked within each epoch, because they decrease during training. A row's
    ranks are averaged over epochs, which also averages the noise that a defense adds to each release.

    The longer gradient is guessed to be class 1, the rare one; auxiliary labels can reverse this.

    Source: Li et al. 2022 (arXiv 2102.08504), section 3.1.

    Args:
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "norm"
    version = 2
    needs = frozenset({Need.GRADIENTS})
    classes = 2
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, section 3.1"
    verified = "closed-form AUC on Gaussian gradients"
    differs = (
        "Lengths are ranked within each epoch and averaged over epochs; the source scores each batch separately.",
        "Auxiliary labels, if there are any, choose the sign and the threshold; the source takes the longer gradient "
        "to be class 1.",
    )
    costs = "one pass over the messages"
    fails = (
        "if classes are balanced, if the model is confident on all rows, and under noise that makes all rows equally "
        "long (max-norm)"
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        lengths = torch.linalg.vector_norm(releases.values, dim=1)
        score = releases.mean(rank_releases(releases, lengths)[:, None])[:, 0]
        return Guess({"train": separate(view, score)}, budget={"releases": len(lengths)})
