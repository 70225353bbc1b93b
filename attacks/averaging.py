"""Averaging attack: noise that is drawn anew for each release of a row is gone from the mean of its releases."""

from __future__ import annotations

import torch

from vflsec.core.attack import Attack
from vflsec.core.auxiliary import references
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import received


class Averaging(Attack):
    """Label inference by an adversary who knows that what it received is a row's gradient plus noise.

    Lines are brought to the noise's own scale, message by message (``Releases.steady``), and averaged over the releases
    of each row: after n of them noise has 1/n of its variance. The means x (d,) are whitened by their covariance S over
    all training rows, and class c scores m_c' S^-1 x - m_c' S^-1 m_c / 2, with m_c the mean of its auxiliary samples.
    That is Fisher's discriminant: S holds the scatter between classes too, which leaves the direction S^-1 (m_1 - m_0)
    as it is, and all rows tell S better than the few whose label is known.

    Costs one pass over the messages and one small linear system. Fails where each row is released once, where noise is
    drawn once for each row, and where gradients change their direction in training.

    Source: common practice against additive noise; the discriminant is Fisher's (1936).
    """

    name = "averaging"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "common practice; Fisher's linear discriminant, 1936"
    verified = "closed-form AUC on Gaussian gradients under known noise"
    differs = (
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return discriminant scores (n, C) of the training rows; a class without a sample is the least likely."""
        releases = received(view, Kind.GRADIENT).steady()
        means = releases.mean(releases.values).double()
        means = means - means.mean(dim=0)
        inverse = torch.linalg.pinv(means.T @ means / len(means), hermitian=True)
        known = references(view, None, rng)
        centers = torch.stack([means[rows].mean(dim=0) if len(rows) else means[0] for rows in known])  # (C, d)
        scores = means @ inverse @ centers.T - ((centers @ inverse) * centers).sum(dim=1) / 2
        for c, rows in enumerate(known):
            if not len(rows):
                scores[:, c] = scores.min() - 1
        return Guess({"train": scores}, budget={"releases": len(releases.rows)})
