"""Clustering attack: rows of one class have similar gradients and similar embeddings."""

import warnings
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_positive
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import choose_guess, list_embeddings
from vflsec.inference.regression import standardize
from vflsec.inference.releases import read_releases


class Cluster(Attack):
    """Label inference by a mixture of C Gaussians, each matched to a class by the auxiliary labels.

    The mixture is fitted to the mean direction of each row's gradients, or to the embeddings of the adversary's own
    bottom model. The matching maximizes the auxiliary labels in their own cluster (Hungarian algorithm).

    Source: common practice; the two-cluster step of Sun et al. 2022 (arXiv 2203.01451), for C classes.

    Args:
        source: ``gradient`` or ``embedding``.
        starts: number of random starts of the mixture; the likeliest result is used.
    """

    name = "cluster"
    version = 3
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "Sun et al. 2022, arXiv 2203.01451, for C classes"
    verified = "scikit-learn's own estimator"
    differs = (
        "A mixture of C Gaussians replaces the source's two-cluster step, and auxiliary labels name the clusters.",
        "Gradients are clustered by default; the source clusters embeddings.",
        THRESHOLD,
    )
    costs = "one fit of a Gaussian mixture"
    fails = "if classes overlap, or if the clusters are not the classes"

    def __init__(self, *, source: Literal["gradient", "embedding"] = "gradient", starts: int = 5) -> None:
        check_positive(starts=starts)
        self.source = source
        self.starts = starts
        if source == "embedding":
            self.needs = frozenset({Need.FEATURES, Need.MODEL, Need.AUX_LABELS})  # type: ignore[misc]

    def alone(self) -> Attack | None:
        """Return the same attack for an untrained bottom model; None for gradients."""
        return self if self.source == "embedding" else None

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return log posteriors (n, C) of the clustered rows."""
        return choose_guess(view, [self._guess(view, points, rng) for points in self._list_points(view)])

    def _guess(self, view: View, points: Mapping[str, Tensor], rng: torch.Generator) -> Guess:
        mixture = GaussianMixture(
            view.n_classes,
            covariance_type="diag",
            n_init=self.starts,
            reg_covar=1e-5,
            random_state=int(torch.randint(2**31, (), generator=rng)),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the guess reports it
            mixture.fit(points["train"].cpu().double().numpy())
        posterior = {split: mixture.predict_proba(x.cpu().double().numpy()) for split, x in points.items()}
        order = _match_clusters(posterior["train"][view.aux_rows.cpu().numpy()], view.aux_labels.cpu().numpy())
        scores = {split: torch.from_numpy(np.log(p[:, order] + 1e-12)) for split, p in posterior.items()}
        return Guess(scores, converged=bool(mixture.converged_), budget={"starts": self.starts})

    def _list_points(self, view: View) -> list[Mapping[str, Tensor]]:
        if self.source == "gradient":
            releases = read_releases(view, Kind.GRADIENT)
            return [{"train": releases.mean(F.normalize(releases.values, dim=1))}]
        return [{split: standardize(h, x["train"]) for split, h in x.items()} for x in list_embeddings(view)]


def _match_clusters(posterior: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the cluster of each class, given posteriors (n, C) of rows with known labels."""
    mass = np.stack([posterior[labels == c].sum(axis=0) for c in range(posterior.shape[1])])  # (class, cluster)
    mass /= np.maximum(mass.sum(axis=1, keepdims=True), 1e-12)
    return np.asarray(linear_sum_assignment(-mass)[1])
