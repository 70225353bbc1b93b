"""Weighted means of the predictions of several models, with weights from held-out known rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
from torch import Tensor
from torch.nn import functional as F

TEMPERATURES = torch.logspace(-1, 2, 16, dtype=torch.float64)
"""Candidate factors that turn scores of classes into logits."""

MIN_TREE_SHARE = 1e-3
"""Lower bound of the share of trees, so that its logarithm is finite."""

STEPS = 10
"""Weights are multiples of 1 / STEPS."""

TREES, LEAF = 200, 2
"""Of a forest that votes for classes."""

BAGGED_TREES, BAGGED_LEAF = 100, 3
"""Of a forest whose out-of-bag predictions count."""

CHUNK = 1 << 16


class Opinion(NamedTuple):
    """Scores of one model.

    Attributes:
        scores: (m, C) of the rows to predict.
        held_out: (n, C) of the known rows, each from a model that was fitted without that row.
    """

    scores: Tensor
    held_out: Tensor

    def is_informative(self, labels: Tensor) -> bool:
        """Whether the known labels (n,) are likeliest with more than the smallest factor."""
        return self._find_factor(labels) > float(TEMPERATURES[0])

    def _find_factor(self, labels: Tensor) -> float:
        log_p = [(self.held_out * t).log_softmax(dim=1).gather(1, labels[:, None]).sum() for t in TEMPERATURES.tolist()]
        return float(TEMPERATURES[int(torch.stack(log_p).argmax())])

    def calibrate(self, labels: Tensor) -> Opinion:
        """Return the softmax of the scores times the factor with the highest likelihood of the known labels (n,)."""
        best = self._find_factor(labels)
        return Opinion((self.scores * best).softmax(dim=1), (self.held_out * best).softmax(dim=1))


def pool_opinions(opinions: Sequence[Opinion], labels: Tensor) -> Tensor:
    """Return the weighted mean (m, C) of calibrated opinions.

    The weights are the posterior mean under a uniform prior; the likelihood of a choice of weights is that of the known
    labels (n,) under the weighted mean of the held-out probabilities. Stacking (Yao et al. 2018) takes the most likely
    weights instead, which a few rows do not determine.

    Source: Stone 1961, "The opinion pool"; Yao, Vehtari, Simpson, Gelman 2018, Bayesian Analysis 13.
    """
    calibrated = [opinion.calibrate(labels) for opinion in opinions]
    weights = _list_weights(len(opinions)).to(labels.device)  # (k, opinions)
    # of_labels: (opinions, n)
    of_labels = torch.stack([opinion.held_out.gather(1, labels[:, None])[:, 0] for opinion in calibrated])
    posterior = (weights @ of_labels).clamp_min(torch.finfo(of_labels.dtype).tiny).log().sum(dim=1).softmax(dim=0)
    return torch.einsum("o,omc->mc", posterior @ weights, torch.stack([opinion.scores for opinion in calibrated]))


def blend_opinions(opinions: Sequence[Opinion], targets: Tensor, *, by_column: bool = True) -> Opinion:
    """Return the weighted mean of predictions of numbers (m, d), with weights for each column or the same for all.

    The weights are the posterior mean under a uniform prior, if the errors at the known rows, whose ``targets`` are
    (n, d), are Gaussian with a variance of their own for each choice of weights.
    """
    weights = _list_weights(len(opinions)).to(targets.device)  # (k, opinions)
    held_out = torch.stack([opinion.held_out for opinion in opinions])
    errors = (torch.einsum("ko,ond->knd", weights, held_out) - targets).square().mean(dim=1)  # (k, d)
    log_p = -len(targets) / 2 * errors.clamp_min(torch.finfo(errors.dtype).tiny).log()
    log_p = log_p if by_column else log_p.sum(dim=1, keepdim=True).expand_as(log_p)
    posterior = torch.einsum("kd,ko->od", log_p.softmax(dim=0), weights)
    scores = torch.stack([opinion.scores for opinion in opinions])
    return Opinion(*(torch.einsum("od,omd->md", posterior, part) for part in (scores, held_out)))


class Forest:
    """Randomized trees, with out-of-bag probabilities of the known rows.

    Source: Geurts, Ernst, Wehenkel 2006, "Extremely randomized trees", Machine Learning 63; out-of-bag estimates:
    Breiman 2001, "Random forests", Machine Learning 45.

    Args:
        known: (n, k) the known rows.
        labels: (n,) of the known rows.
        n_classes: C.
        rng: draws the trees.
    """

    def __init__(self, known: Tensor, labels: Tensor, n_classes: int, rng: torch.Generator) -> None:
        seed = int(torch.randint(2**31, (), generator=rng))
        rows, y = known.cpu().numpy(), labels.cpu().numpy()
        self.n_classes = n_classes
        self.trees = ExtraTreesClassifier(TREES, min_samples_leaf=LEAF, random_state=seed).fit(rows, y)
        bagged = ExtraTreesClassifier(TREES, min_samples_leaf=LEAF, random_state=seed, bootstrap=True, oob_score=True)
        with warnings.catch_warnings():  # a single row is in every sample
            warnings.simplefilter("ignore")
            shares = bagged.fit(rows, y).oob_decision_function_
        self.held_out = self._log_shares(np.nan_to_num(shares, nan=1 / shares.shape[1]))

    def vote(self, x: Tensor) -> Opinion:
        """Return the log share of trees (m, C) that vote for each class, of rows ``x`` (m, k)."""
        shares = [np.asarray(self.trees.predict_proba(part.cpu().numpy())) for part in torch.split(x, CHUNK)]
        return Opinion(self._log_shares(np.concatenate(shares)).to(x.device), self.held_out.to(x.device))

    def _log_shares(self, shares: np.ndarray) -> Tensor:
        by_class = torch.zeros(len(shares), self.n_classes, dtype=torch.float64)
        by_class[:, torch.as_tensor(self.trees.classes_)] = torch.as_tensor(shares)
        return by_class.clamp_min(MIN_TREE_SHARE).log()


def fit_out_of_bag(
    x: np.ndarray,
    y: np.ndarray,
    seed: int,
    *,
    share: float | Literal["sqrt"],
    weights: np.ndarray | None = None,
    trees: int | None = None,
    leaf: int = BAGGED_LEAF,
) -> tuple[ExtraTreesRegressor, np.ndarray]:
    """Return randomized trees that regress ``y`` (n, k) on ``x``, and their out-of-bag predictions (n, k).

    Args:
        x: (n, p) rows.
        y: (n, k) targets.
        seed: of the trees.
        share: of the columns among which each split is chosen, or ``sqrt`` for the square root of their number.
        weights: (n,) of the rows; None for equal ones.
        trees: their number; None for ``BAGGED_TREES``.
        leaf: the fewest rows in a leaf of them.
    """
    forest = ExtraTreesRegressor(
        trees or BAGGED_TREES,
        min_samples_leaf=leaf,
        max_features=share,
        bootstrap=True,
        oob_score=True,
        random_state=seed,
    )
    with warnings.catch_warnings():  # few rows can all be in every sample
        warnings.simplefilter("ignore")
        forest.fit(x, y, sample_weight=weights)
    return forest, forest.oob_prediction_.reshape(y.shape)


def _list_weights(n: int) -> Tensor:
    """Return every vector of n weights, (k, n), that are multiples of 1 / STEPS and sum to one."""
    places = list(combinations(range(STEPS + n - 1), n - 1))
    bars = torch.tensor(places, dtype=torch.long).view(-1, n - 1) if n > 1 else torch.zeros(1, 0, dtype=torch.long)
    edges = F.pad(F.pad(bars, (1, 0), value=-1), (0, 1), value=STEPS + n - 1)
    return (edges.diff(dim=1) - 1).double() / STEPS
