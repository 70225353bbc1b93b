"""Membership inference: which rows the federation was trained on."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_positive
from vflsec.base.errors import InsufficientView
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import list_embeddings
from vflsec.inference.regression import search_penalty, standardize

NEIGHBORS = 3


class MembershipInference(Attack):
    """Infers which candidates, half of which are training rows, the joint model was trained on.

    An active adversary has the labels of the candidates and the joint model's logits z (n, C) for them:

    * ``loss``: score = t - cross-entropy(z, y), because the model fits its training rows. The threshold t is the mean
      loss of the auxiliary members, and affects accuracy only.
    * ``calibrated``: logistic regression, fitted to auxiliary candidates, on the loss, log(p_y / (1 - p_y)), the
      largest probability and the entropy of p.

    A passive adversary has its own bottom model only, and is always ``calibrated``: on its embeddings h (n, d), their
    length, and how much closer the nearest auxiliary members are than the nearest others. Its own bottom model reveals
    little of the overfitting, even where an active party finds most members.

    Source: Yeom et al., CSF 2018, "Privacy risk in machine learning" (arXiv 1709.01604), adversary 1 (loss); Salem et
    al., NDSS 2019, "ML-Leaks" (arXiv 1806.01246), sections III and V (classifier of posteriors; fitted to auxiliary
    candidates here, not to shadow models). True positives at 0.1 and 1 % false positives: Carlini et al., S&P 2022.

    Args:
        mode: ``loss`` or ``calibrated``; None for ``loss`` if there are labels and predictions.
        folds: of the cross-validation that chooses the penalty.
    """

    name = "membership"
    version = 2
    side = "either"
    target = "membership"
    needs = frozenset({Need.MODEL, Need.AUX_LABELS})
    reference = "Yeom et al., CSF 2018, arXiv 1709.01604; Salem et al., NDSS 2019, arXiv 1806.01246"
    verified = "scores: equality with the formula; figures of the sources: unverified"
    differs = (
        "The threshold of loss is the mean loss of known members; Yeom et al. take the training loss.",
        "The classifier of calibrated is fitted to known candidates; Salem et al. fit it to shadow models.",
        "A passive party's features (embedding, its length, distances to known candidates) are ours.",
    )
    costs = "one evaluation of the loss; a few dozen small fits for calibrated"
    fails = "if the model generalizes, which is the usual case: training rows then look like any other"

    def __init__(self, *, mode: Literal["loss", "calibrated"] | None = None, folds: int = 5) -> None:
        check_positive(folds=folds)
        self.mode = mode
        self.folds = folds
        if mode == "loss":  # a passive party has no joint model; it is refused before training
            self.needs = self.needs | {Need.PREDICTIONS}  # type: ignore[misc]

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the candidates; the second is that of membership."""
        split = view.aux_split
        queried = split in view.predictions and split in view.labels
        if self.mode == "loss" and not queried:
            raise InsufficientView(
                f"attack 'membership' with mode=loss needs {Need.PREDICTIONS} and labels, got neither"
            )
        if queried and self.mode != "calibrated":
            loss = F.cross_entropy(view.predictions[split].double(), view.labels[split], reduction="none")
            known = loss[view.aux_rows]
            members = known[view.aux_labels == 1]
            score = (members if len(members) else known).mean() - loss
        else:
            features = (
                _compute_prediction_features(view, split) if queried else _compute_embedding_features(view, split)
            )
            score = self._classify(features, view, rng)
        return Guess({split: torch.stack([torch.zeros_like(score), score], dim=1)})

    def _classify(self, features: Tensor, view: View, rng: torch.Generator) -> Tensor:
        """Return the log odds (n,) of membership."""
        x = standardize(features).cpu().numpy()
        y = view.aux_labels.cpu().numpy()
        fewest = int(np.bincount(y, minlength=2).min())
        if fewest == 0:  # a single class
            return torch.zeros(len(x), dtype=torch.float64)
        seed = int(torch.randint(2**31, (), generator=rng))
        model = search_penalty(x[view.aux_rows.cpu().numpy()], y, min(self.folds, fewest), seed).model
        return torch.from_numpy(model.decision_function(x))


def _compute_prediction_features(view: View, split: str) -> Tensor:
    """Return loss, log odds of the true class, largest probability and entropy, (n, 4)."""
    log_p = F.log_softmax(view.predictions[split].double(), dim=1)
    p, y = log_p.exp(), view.labels[split][:, None]
    loss = -log_p.gather(1, y)[:, 0]
    others = log_p.scatter(1, y, -torch.inf).logsumexp(dim=1)  # log(1 - p_y), exactly
    return torch.stack([loss, -loss - others, p.amax(dim=1), -(p * log_p).sum(dim=1)], dim=1)


def _compute_embedding_features(view: View, split: str) -> Tensor:
    """Return own embeddings, their length, and how much closer the nearest auxiliary members are, (n, d + 2)."""
    h = torch.cat([embedded[split] for embedded in list_embeddings(view)], dim=1).double()
    distance = torch.cdist(h, h[view.aux_rows])  # (n, auxiliary)
    distance[view.aux_rows, torch.arange(len(view.aux_rows), device=h.device)] = torch.inf  # no row is its own neighbor
    nearest = []
    for member in (0, 1):
        among = distance[:, view.aux_labels == member]
        k = min(NEIGHBORS, among.shape[1] - 1)
        nearest.append(among.topk(k, dim=1, largest=False).values.mean(dim=1) if k > 0 else torch.zeros_like(h[:, 0]))
    return torch.cat([h, h.norm(dim=1, keepdim=True), (nearest[0] - nearest[1])[:, None]], dim=1)
