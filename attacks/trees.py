"""Randomized trees on the adversary's own columns: what its auxiliary labels are worth without the federation."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier

from vflsec.core.attack import Attack
from vflsec.core.checks import positive
from vflsec.core.view import Guess, Need, View


class Trees(Attack):
    """Extremely randomized trees from own columns to labels, fitted on the auxiliary samples alone.

    It reads neither the model nor a message, so its leak is a prior: an adversary who never joined reaches it. Beside
    the logistic regression it is a candidate for *alone*, for columns of several kinds, whose scales differ.

    Costs a fraction of a second. Fails where a class is a smooth function of many columns.

    Source: Geurts, Ernst, Wehenkel 2006, "Extremely randomized trees", Machine Learning 63.

    Args:
        trees: how many.
        leaf: fewest samples in a leaf.
    """

    name = "trees"
    baseline = True
    side: ClassVar[Literal["passive", "active", "either", "any"]] = "either"
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    reference = "Geurts, Ernst, Wehenkel 2006, Machine Learning 63"
    verified = "scikit-learn's own estimator"
    differs: ClassVar[tuple[str, ...]] = (
        "Leaves hold at least two samples (leaf); the paper grows trees of classes until leaves are pure.",
    )

    def __init__(self, *, trees: int = 200, leaf: int = 2) -> None:
        positive(trees=trees, leaf=leaf)
        self.trees = trees
        self.leaf = leaf

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the share of trees (n, C) for each class, for every split."""
        seed = int(torch.randint(2**31, (), generator=rng))
        model = ExtraTreesClassifier(self.trees, min_samples_leaf=self.leaf, random_state=seed)
        model.fit(view.features[view.aux_split][view.aux_rows].cpu().numpy(), view.aux_labels.cpu().numpy())
        scores = {}
        for split, own in view.features.items():
            scores[split] = torch.zeros(len(own), view.n_classes, dtype=torch.float64)
            scores[split][:, torch.as_tensor(model.classes_)] = torch.from_numpy(
                np.asarray(model.predict_proba(own.cpu().numpy()))
            )
        return Guess(scores, budget={"trees": self.trees})
