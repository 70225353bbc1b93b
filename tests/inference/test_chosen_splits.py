"""Under the true labels, no own bin of a party beats a split that was chosen."""

import math

import numpy as np
import pytest
import torch

from tests.inference.test_replay import trained
from vflsec.inference.replay import Ensemble, observed, replayed
from vflsec.inference.trees.choices import TEMPERATURE, Choices


def choices(view):
    object.__setattr__(view, "agreed", {"leaf_rows": 4, "bins": 8, "l2": 1.0})
    return Choices(view)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["secureboost", "secureboost-turns"])
def test_each_split_is_the_likeliest_choice_under_the_true_labels(classes, name):
    view, leaves, targets, _ = trained(classes, name=name)
    found = choices(view)
    outputs, numbers = targets.shape[1], np.arange(leaves.shape[1])
    whole = Ensemble({"train": leaves}, numbers // outputs, numbers % outputs, {})

    def noted(round_, derivatives):
        return found.surprise(round_, derivatives.float())

    true = replayed(whole, targets, "train", learning_rate=0.3, l2=1.0, noted=noted).notes
    assert {r for r, one in enumerate(true) if one > 0} == set(found.rounds)
    for r, one in found.rounds.items():
        most = (1 + one.possible.sum(dim=0)).log().sum()
        assert true[r] <= most + 1e-3, "the best of V + 1 choices has a share of at least 1 / (V + 1)"
    mixed = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))]
    other = replayed(whole, mixed, "train", learning_rate=0.3, l2=1.0, noted=noted).notes
    assert sum(other) > sum(true) + 1


@pytest.mark.parametrize("classes", [2, 3])
def test_the_surprise_is_that_of_a_loop_over_nodes_and_bins(classes):
    view, *_ = trained(classes)
    found, rng = choices(view), np.random.default_rng(0)
    n = len(view.features["train"])
    derivatives = torch.from_numpy(np.stack([rng.normal(size=(n, classes)), rng.random((n, classes))])).float()

    def gain(right, inside, k):
        g, h = (one[:, k].double() for one in derivatives)
        sides = [inside & right, inside & ~right, inside]
        a, b, whole = (float(g[rows].sum() ** 2 / (h[rows].sum() + 1)) for rows in sides)
        return a + b - whole

    for r, one in found.rounds.items():
        total = 0.0
        for place, k in enumerate(one.outputs.tolist()):
            for node in set(one.node[:, place].tolist()) - {one.possible.shape[1]}:
                inside = one.node[:, place] == node
                others = [own.bool() for own in found.beyond]
                fits = [own for own in others if min(int((inside & s).sum()) for s in (own, ~own)) >= 4]
                gains = [gain(side, inside, k) / TEMPERATURE for side in (one.right[:, place].bool(), *fits)]
                total -= gains[0] - math.log(sum(math.exp(x) for x in gains))
        assert float(found.surprise(r, derivatives)) == pytest.approx(total, rel=1e-3)


def test_a_round_without_known_splits_says_nothing():
    view, *_ = trained(2, name="secureboost-rl")
    found = choices(view)
    assert 0 not in found.rounds
    assert float(found.surprise(0, torch.ones(2, 240, 1))) == 0


def test_who_knows_no_labels_of_other_rows_still_sees_all_splits_that_are_told():
    view, *_ = trained(2)
    told = observed(view)
    assert set(choices(view).rounds) <= set(told.rounds.tolist())
