"""Received predictions: whoever gets the joint model's prediction of a row takes it for the label."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vflsec.base.errors import InsufficientView
from vflsec.core.attack import THRESHOLD, Attack, apply_threshold
from vflsec.core.view import Guess, Need, View
from vflsec.inference.regression import regress_classes


class ReceivedPredictions(Attack):
    """Label inference from predictions of the joint model that the adversary receives.

    A prediction is one number for each class, or one number alone for two classes. The adversary may not know which
    column stands for which class. It matches them with the auxiliary labels, if it got predictions of these rows, and
    otherwise with the classes that a logistic regression on its own columns guesses.

    Source: this project; the guess of a receiver who trusts the joint model.
    """

    name = "prediction"
    version = 2
    needs = frozenset({Need.PREDICTIONS})
    wants = frozenset({Need.FEATURES, Need.AUX_LABELS})
    reference = "this project"
    verified = "as accurate as the joint model itself"
    differs = (THRESHOLD,)
    costs = "one assignment of columns to classes"
    fails = "where the joint model is wrong"
    contrib = True

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the received scores (n, C) of each split.

        Raises:
            InsufficientView: neither C numbers of a row nor one of two classes.
        """
        received = {split: view.predictions[split] for split in view.features if split in view.predictions}
        first = next(iter(received.values()))
        if first.shape[1] == 1 and view.n_classes == 2:
            middle = first.median()
            received = {split: torch.cat([middle - z, z - middle], dim=1) for split, z in received.items()}
        elif first.shape[1] != view.n_classes:
            expected = f"{view.n_classes} numbers in a prediction, one for each class, got {first.shape[1]}"
            raise InsufficientView(f"attack 'prediction' expects {expected}")
        order = _order(view, received, rng)
        return apply_threshold(view, Guess({split: scores[:, order] for split, scores in received.items()}))


def _order(view: View, received: dict[str, Tensor], rng: torch.Generator) -> Tensor:
    """Return the column (C,) of each class: as many rows as possible have their largest score in that of their own."""
    split = view.aux_split
    if not len(view.aux_rows):
        return torch.arange(view.n_classes)
    if split in received:
        scores, labels = received[split][view.aux_rows], view.aux_labels
    else:
        split, scores = next(iter(received.items()))
        labels = regress_classes(view, folds=5, rng=rng).scores[split].argmax(dim=1)
    hits = torch.zeros(view.n_classes, view.n_classes)
    hits.index_put_((labels, scores.argmax(dim=1)), torch.ones(len(labels)), accumulate=True)
    return torch.as_tensor(linear_sum_assignment(hits.numpy(), maximize=True)[1])
