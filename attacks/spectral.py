"""Spectral attack: the first principal component of the gradients separates two classes."""

import torch

from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import separate
from vflsec.inference.releases import OnReleases, find_component, rank_releases, read_releases


class Spectral(OnReleases):
    """Label inference from the first principal component of the received gradients. Two classes.

    In each epoch, gradients are centered and projected on their first right singular vector. The sign of each epoch is
    the one that agrees with the epochs before. A row's ranks are averaged over epochs. Auxiliary labels tell which end
    is class 1; without any, it is the end with the longer tail, as for a rare class.

    Source: Sun et al. 2022 (arXiv 2203.01451), who project embeddings; on gradients as in Li et al. 2022.

    Args:
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "spectral"
    version = 2
    needs = frozenset({Need.GRADIENTS})
    classes = 2
    reference = "Sun et al. 2022, arXiv 2203.01451"
    verified = "unverified: only the abstract could be read"
    differs = (
        "Gradients are projected; the source projects embeddings (see spectral-embedding).",
        "Each epoch has an axis of its own, and a row's ranks are averaged over epochs.",
        "Auxiliary labels choose the sign and the threshold; the source's rule could not be read.",
    )
    costs = "one singular value decomposition for each epoch"
    fails = (
        "if something else than the class has the largest effect on gradients, and under noise longer than their spread"
    )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        scores = torch.zeros_like(releases.values[:, 0])
        agreed = scores.new_zeros(releases.n_rows)
        for indices in releases.group_by_epoch():
            projected, rows = find_component(releases.values[indices]), releases.rows[indices]
            sign = torch.sign(projected @ agreed[rows])
            scores[indices] = projected * (sign if sign else 1.0)
            agreed[rows] += scores[indices] / scores[indices].std().clamp_min(torch.finfo(scores.dtype).tiny)
        score = releases.mean(rank_releases(releases, scores)[:, None])[:, 0]
        return Guess({"train": separate(view, score)}, budget={"releases": len(scores)})
