"""The adversary's draw and its own test of an attack."""

import numpy as np
import pytest
import torch

from vflsec.core.attack import Attack
from vflsec.core.errors import UsageError
from vflsec.core.view import Guess, Need, View
from vflsec.evaluation.adversary import draw_auxiliary, fold_score
from vflsec.evaluation.spec import AuxSpec

LABELS = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)


def test_balanced_draw_has_as_many_of_each_class():
    rows = draw_auxiliary(LABELS, 3, AuxSpec(n=14), seed=0)
    assert torch.bincount(LABELS[rows]).tolist() == [5, 5, 4]
    assert len(rows.unique()) == 14


def test_a_draw_that_leaves_no_row_of_a_class_to_attack_is_refused():
    with pytest.raises(
        UsageError, match=r"over 10 labeled training rows of each class for aux.n=30, got 10 of class 2"
    ):
        draw_auxiliary(LABELS, 3, AuxSpec(n=30), seed=0)


def test_unbalanced_draw_follows_the_shares():
    counts = sum(
        torch.bincount(LABELS[draw_auxiliary(LABELS, 3, AuxSpec(n=30, balanced=False), seed=s)], minlength=3)
        for s in range(200)
    )
    assert np.allclose(counts / counts.sum(), [0.7, 0.2, 0.1], atol=0.02)


def test_draw_varies_with_the_seed_alone():
    spec = AuxSpec(n=20)
    first, again, other = (draw_auxiliary(LABELS, 3, spec, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_more_labels_than_rows():
    with pytest.raises(UsageError, match=r"expected fewer auxiliary labels than the 100 labeled training rows, got"):
        draw_auxiliary(LABELS, 3, AuxSpec(n=100), seed=0)


class NearestNeighbor(Attack):
    """Copies the label of the nearest auxiliary sample."""

    name = "nearest"
    needs = frozenset({Need.OWN_FEATURES, Need.AUX_LABELS})
    reference = "none"
    verified = "test"

    def run(self, view, *, rng):
        x = view.features["train"]
        nearest = torch.cdist(x, x[view.aux_rows]).argmin(dim=1)
        return Guess({"train": torch.eye(view.n_classes)[view.aux_labels[nearest]]})


def make_view(x):
    y = torch.arange(40) % 2
    return View("passive_1", "passive", 2, {"train": x, "test": x}, None, torch.arange(40), y)


def test_folds_hold_out_what_they_score():
    noise = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    assert fold_score(NearestNeighbor(), make_view(noise), "accuracy", 5, seed=0) < 0.8, "own label was not held out"
    apart = (torch.arange(40) % 2)[:, None] * 10.0 + noise
    assert fold_score(NearestNeighbor(), make_view(apart), "accuracy", 5, seed=0) == 1.0


@pytest.mark.parametrize("folds", [0, 5])
def test_no_folds_no_score(folds):
    view = make_view(torch.zeros(40, 1)).knowing(torch.tensor([0, 1]))
    assert fold_score(NearestNeighbor(), view, "auc", folds, seed=0) is None
