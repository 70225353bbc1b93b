"""Randomized trees on the adversary's own columns, without the federation."""

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier

from vflsec.base.checks import check_positive
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View


class Trees(Attack):
    """Extremely randomized trees on own columns, fitted to the auxiliary samples only.

    It reads neither the model nor messages. Its leak is a baseline that an adversary reaches without joining, and a
    candidate for *alone* beside logistic regression, for columns of different kinds and scales.

    Source: Geurts, Ernst, Wehenkel 2006, "Extremely randomized trees", Machine Learning 63.

    Args:
        trees: number of trees.
        leaf: smallest number of samples in a leaf.
    """

    name = "trees"
    version = 2
    baseline = True
    by_row = True
    side = "either"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "Geurts, Ernst, Wehenkel 2006, Machine Learning 63"
    verified = "scikit-learn's own estimator"
    differs = ("Leaves hold at least two samples (leaf); the paper grows trees of classes until leaves are pure.",)
    costs = "one forest on the auxiliary samples"
    fails = "if the class is a smooth function of many columns"

    def __init__(self, *, trees: int = 200, leaf: int = 2) -> None:
        check_positive(trees=trees, leaf=leaf)
        self.trees = trees
        self.leaf = leaf

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the share of trees (n, C) for each class, for every split."""
        seed = int(torch.randint(2**31, (), generator=rng))
        model = ExtraTreesClassifier(self.trees, min_samples_leaf=self.leaf, random_state=seed)
        model.fit(view.features[view.aux_split][view.aux_rows].cpu().numpy(), view.aux_labels.cpu().numpy())
        scores, classes = {}, torch.as_tensor(model.classes_)
        for split, x in view.features.items():
            shares = torch.from_numpy(np.asarray(model.predict_proba(x.cpu().numpy())))
            scores[split] = shares.new_zeros(len(x), view.n_classes).index_copy(1, classes, shares)
        return Guess(scores, budget={"trees": self.trees})
