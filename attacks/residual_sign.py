"""Residual signs: the derivative of the loss by a logit is negative for the class of the row, and for no other."""

import torch

from vflsec.core.attack import THRESHOLD
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import OnReleases, read_releases


class ResidualSign(OnReleases):
    """Label inference from the derivatives p - y that federated boosting sends to passive parties in clear.

    With two classes the derivative is p - 1 < 0 for class 1, and p > 0 for class 0. With C classes its entry for the
    row's class is the only negative one. So a single release gives every label away.

    Against noise, releases are averaged in units of the root mean square of their round. This is about the weight of
    the likelihood where noise dominates: it has the variance of the round, and the difference between classes is one
    in the first rounds, whatever the row.

    Source: Cheng et al. 2021 (SecureBoost, arXiv 1901.08755), which encrypts derivatives for that reason.

    Args:
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "residual-sign"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.NODES})
    reference = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755"
    verified = "exact labels from derivatives in clear, closed-form AUC under known noise"
    differs = ("The source states that derivatives reveal labels; averaging over rounds is added here.", THRESHOLD)
    costs = "one pass over the messages"
    fails = "if derivatives are encrypted or masked, and if labels were changed before training"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        outputs = 1 if view.n_classes == 2 else view.n_classes
        releases = releases._replace(values=-releases.values[:, :outputs]).to_steady()
        score = releases.mean(releases.values)
        scores = torch.cat([-score, score], dim=1) if outputs == 1 else score
        return Guess({"train": scores}, budget={"releases": len(releases.rows)})
