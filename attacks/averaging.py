"""Averaging attack: noise that is drawn anew for each release of a row averages out."""

import torch

from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import draw_references
from vflsec.inference.releases import read_releases


class AveragedGradients(Attack):
    """Label inference by an adversary who knows that a received gradient is the row's gradient plus noise.

    Observations are divided by the scale of the noise, message by message (``Releases.steady``), and averaged over the
    releases of each row: the mean of n has 1/n of the noise variance. The means x (d,) are whitened by their covariance
    S over all training rows. The score of class c is m_c' S^-1 x - m_c' S^-1 m_c / 2, with m_c the mean of its
    auxiliary samples. This is Fisher's discriminant: S contains the scatter between classes too, which does not change
    the direction S^-1 (m_1 - m_0), and all rows give a better estimate of S than the few labeled ones.

    Source: common practice against additive noise; the discriminant is Fisher's (1936).
    """

    name = "averaging"
    version = 3
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "common practice; Fisher's linear discriminant, 1936"
    verified = "closed-form AUC on Gaussian gradients under known noise"
    differs = (THRESHOLD,)
    costs = "one pass over the messages and one small linear system"
    fails = (
        "if each row is released once, if noise is drawn once for each row, and if gradients change their direction "
        "during training"
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return discriminant scores (n, C) of the training rows; a class without a sample is the least likely."""
        releases = read_releases(view, Kind.GRADIENT).to_steady()
        means = releases.mean(releases.values).double()
        means = means - means.mean(dim=0)
        inverse = torch.linalg.pinv(means.T @ means / len(means), hermitian=True)
        known = draw_references(view, None, rng)
        centers = torch.stack([means[rows].mean(dim=0) if len(rows) else means[0] for rows in known])  # (C, d)
        scores = means @ inverse @ centers.T - ((centers @ inverse) * centers).sum(dim=1) / 2
        for c, rows in enumerate(known):
            if not len(rows):
                scores[:, c] = scores.min() - 1
        return Guess({"train": scores}, budget={"releases": len(releases.rows)})
