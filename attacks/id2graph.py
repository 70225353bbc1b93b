"""ID2Graph: communities of rows that share nodes, joined to own columns and clustered into classes."""

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from vflsec.base.checks import check_positive_or_none, share
from vflsec.base.sparse_rows import to_matrix
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import standardize
from vflsec.inference.trees.nodes import get_components, list_partners

STARTS = 5
"""Of each clustering; the tightest result is used."""


class ID2Graph(Attack):
    """Label inference without any label, by clustering rows that trees send to the same nodes.

    Rows are vertices of a graph. Edges between two rows of a node are the heavier, the smaller the node is, and the
    earlier its tree was grown. Communities of this graph are found in its leading eigenvectors, by k-means. Their
    one-hot columns are joined to the party's own columns, both scaled to the same total variance, and k-means divides
    the rows into C clusters.

    Clusters are named by auxiliary labels, if there are any. Else the largest is taken to be class 0, the next class 1.

    Source: Takahashi, Liu, Liu 2023 (arXiv 2307.10318).

    Args:
        communities: number of communities; None for 2 C.
        columns: weight of the variance of own columns, between 0 and 1.
    """

    name = "id2graph"
    version = 2
    needs = frozenset({Need.NODES, Need.FEATURES})
    wants = frozenset({Need.AUX_LABELS})
    reference = "Takahashi, Liu, Liu 2023, arXiv 2307.10318"
    verified = "planted communities, whose labels it recovers without knowing any"
    differs = (
        "Communities come from leading eigenvectors and k-means; the source uses Louvain's method, whose graph has an "
        "edge for each two rows of a node: too many for tens of thousands of rows.",
        "Auxiliary labels, if there are any, name the clusters; the source leaves them unnamed.",
        THRESHOLD,
    )
    costs = "principal components of a sparse matrix of rows and nodes, and two clusterings"
    fails = "if nodes are withheld, or if the largest difference between rows is not that between classes"

    def __init__(self, *, communities: int | None = None, columns: float = 0.5) -> None:
        check_positive_or_none(communities=communities)
        share(columns=columns)
        self.communities = communities
        self.columns = columns

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows: the negative squared distance to the center of each cluster."""
        split, n_classes = view.aux_split, view.n_classes
        seed = int(torch.randint(2**31, (), generator=rng))
        x = np.asarray(to_matrix(view.features[split]), dtype=np.float64)
        parts = [_scale_columns(x, self.columns)]
        wanted = min(self.communities or 2 * n_classes, len(x))
        for other in list_partners(view):
            for points, values in get_components(view, other).values():
                leading = (points * values**2)[:, : max(1, n_classes)]  # an eigenvector times its eigenvalue
                communities = _cluster(leading, wanted, seed).labels_
                parts.append(_scale_columns(np.eye(wanted)[communities], 1 - self.columns))
        joined = np.concatenate(parts, axis=1)
        clusters = _cluster(joined, n_classes, seed)
        distances = clusters.transform(joined) ** 2
        order = self._name_clusters(view, clusters.labels_)
        return Guess({split: torch.from_numpy(-distances[:, order])}, budget={"communities": wanted})

    def _name_clusters(self, view: View, cluster: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the cluster of each class, (C,)."""
        n_classes = view.n_classes
        if not len(view.aux_rows):
            return np.argsort(-np.bincount(cluster, minlength=n_classes), kind="stable")
        table = np.zeros((n_classes, n_classes))
        np.add.at(table, (view.aux_labels.cpu().numpy(), cluster[view.aux_rows.cpu().numpy()]), 1)
        table /= table.sum(axis=1, keepdims=True).clip(1)  # the share of each class
        return np.asarray(linear_sum_assignment(-table)[1])


def _cluster(x: NDArray[np.float64], clusters: int, seed: int) -> KMeans:
    """Return a clustering of rows (n, k); some clusters are alike if there are fewer different rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=STARTS, random_state=seed).fit(x)


def _scale_columns(x: NDArray[np.float64], variance: float) -> NDArray[np.float64]:
    """Return columns ``x`` (n, k), each standardized, with the given total variance."""
    z = standardize(torch.from_numpy(x))
    return (z * (variance / z.any(dim=0).sum().clamp_min(1)).sqrt()).numpy()
