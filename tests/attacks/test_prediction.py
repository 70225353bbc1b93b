"""The guess of a receiver of predictions is the joint model's own."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from vflsec.attacks.prediction import ReceivedPredictions
from vflsec.base.errors import InsufficientView
from vflsec.core.view import View
from vflsec.results.metrics import auc

LABELS = torch.randint(3, (60,), generator=torch.Generator().manual_seed(1))
PROBABILITIES = F.one_hot(LABELS, 3) + 0.1 * torch.rand(60, 3, generator=torch.Generator().manual_seed(2))
ORDERS = [[2, 0, 1], [1, 0, 2], [0, 1, 2]]


def view(predictions, classes=3):
    """Return a view with two noisy own columns, which tell classes apart a little."""
    noise = torch.randn(2, 60, 3, generator=torch.Generator().manual_seed(0))
    own = {split: F.one_hot(LABELS, 3) + x for split, x in zip(("train", "test"), noise, strict=True)}
    rows = torch.arange(30)
    return View(
        party="passive_1",
        side="passive",
        n_classes=classes,
        features=own,
        model=None,
        aux_rows=rows,
        aux_labels=LABELS[rows] % classes,
        predictions=predictions,
    )


@pytest.mark.parametrize("order", ORDERS)
def test_own_columns_tell_which_column_is_of_which_class(order):
    guess = ReceivedPredictions()(view({"test": PROBABILITIES[:, order]}), seed=0)
    assert set(guess.scores) == {"test"}
    assert torch.equal(guess.scores["test"], PROBABILITIES)


def test_without_known_labels_columns_are_taken_as_they_are():
    blind = replace(view({"test": PROBABILITIES[:, [2, 0, 1]]}), aux_rows=torch.arange(0), aux_labels=torch.arange(0))
    assert torch.equal(ReceivedPredictions()(blind, seed=0).scores["test"], PROBABILITIES[:, [2, 0, 1]])


@pytest.mark.parametrize("order", ORDERS)
def test_known_labels_tell_which_column_is_of_which_class(order):
    mixed = {split: PROBABILITIES[:, order] for split in ("train", "test")}
    guess = ReceivedPredictions()(view(mixed), seed=0)
    assert torch.equal(guess.scores["test"], PROBABILITIES)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("splits", [("train", "test"), ("test",)])
def test_one_number_is_a_score_of_two_classes_of_either_sign(sign, splits):
    labels = LABELS % 2
    score = sign * (labels + 0.1 * torch.rand(60, generator=torch.Generator().manual_seed(3)))[:, None]
    guess = ReceivedPredictions()(view(dict.fromkeys(splits, score), classes=2), seed=0)
    assert auc(guess.scores["test"].numpy(), labels.numpy()) == 1.0
    if "train" in splits:  # known labels choose the threshold, too
        assert torch.equal(guess.scores["test"].argmax(dim=1), labels)


def test_other_widths_are_refused():
    with pytest.raises(InsufficientView, match="3 numbers.*class, got 2"):
        ReceivedPredictions()(view({"test": PROBABILITIES[:, :2]}), seed=0)
    with pytest.raises(InsufficientView, match="predictions"):
        ReceivedPredictions()(replace(view({}), predictions={}), seed=0)
