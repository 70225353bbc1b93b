"""Under the true labels, no own bin of a party beats a split that was chosen."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.inference.test_replay import trained
from vflsec.base.layout import Layout
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.trees.choices import Choices, infer_drawn_columns
from vflsec.inference.trees.labels import fit_labels_by_row
from vflsec.inference.trees.replay import Ensemble, Rates, observe_trees, replay_boosting
from vflsec.trees.bins import Bins

TEMPERATURE = 2.0


def choices(view, most=100):
    object.__setattr__(view, "agreed", {"leaf_rows": 4, "bins": 8})
    return Choices(view, {}, most)


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("secureboost", {}),
        ("secureboost-turns", {}),
        ("secureboost", {"columns": 0.5}),
        ("secureboost", {"columns": 0.5, "exchange": "plain"}),
    ],
)
def test_each_split_is_the_likeliest_choice_under_the_true_labels(classes, name, options):
    view, leaves, targets, _ = trained(classes, name=name, **options)
    found = choices(view)
    outputs, numbers = targets.shape[1], np.arange(leaves.shape[1])
    whole = Ensemble({"train": leaves}, numbers // outputs, numbers % outputs, {})

    def noted(round_, derivatives):
        return found.score_surprise(round_, derivatives.float(), temperature=TEMPERATURE, l2=1.0)

    true = replay_boosting(whole, targets, "train", Rates(0.3, 1.0), noted=noted).notes
    assert {r for r, one in enumerate(true) if one > 0} == set(found.rounds)
    for r, one in found.rounds.items():
        most = (1 + one.possible.sum(dim=1)).log().sum()
        assert true[r] <= most + 1e-3, "the best of V + 1 choices has a share of at least 1 / (V + 1)"
    mixed = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))]
    other = replay_boosting(whole, mixed, "train", Rates(0.3, 1.0), noted=noted).notes
    assert sum(other) > sum(true) + 1


@pytest.mark.sampled
@pytest.mark.parametrize("most", [100, 5])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_surprise_is_that_of_a_loop_over_nodes_and_bins(classes, most):
    view, *_ = trained(classes)
    found, rng = choices(view, most), np.random.default_rng(0)
    n = len(view.features["train"])
    derivatives = torch.from_numpy(np.stack([rng.normal(size=(n, classes)), rng.random((n, classes))])).float()

    def gain(right, inside, k):
        g, h = (one[:, k].double() for one in derivatives)
        sides = [inside & right, inside & ~right, inside]
        a, b, whole = (float(g[rows].sum() ** 2 / (h[rows].sum() + 1)) for rows in sides)
        return a + b - whole

    x = view.features["train"]
    bins = Bins(Layout.numeric(x.shape[1]), x, 8)
    beyond = [x[:, c] > t for c, t in zip(bins.place, bins.threshold, strict=True) if t < np.inf]
    beyond = [beyond[k] for k in np.unique(np.linspace(0, len(beyond) - 1, min(most, len(beyond))).round().astype(int))]
    for r, known in found.rounds.items():
        total = 0.0
        for t, output in enumerate(known.outputs.tolist()):
            for k in torch.nonzero(known.nodes[t].any(dim=0))[:, 0].tolist():
                group = known.group[:, t] - t * known.nodes.shape[1]
                inside, right = (one[t, group, k].bool() for one in (known.nodes, known.right))
                fits = [own for own in beyond if min(int((inside & s).sum()) for s in (own, ~own)) >= 4]
                gains = [gain(side, inside, output) / TEMPERATURE for side in (right, *fits)]
                total -= gains[0] - math.log(sum(math.exp(x) for x in gains))
        assert float(found.score_surprise(r, derivatives, temperature=TEMPERATURE, l2=1.0)) == pytest.approx(
            total, rel=1e-3
        )


@pytest.mark.parametrize("exchange", ["masked", "plain"])
@pytest.mark.parametrize("parties", [2, 3])
def test_a_party_knows_the_columns_that_it_draws(exchange, parties):
    view, *_ = trained(2, parties=parties, columns=0.5, exchange=exchange)
    d = view.features["train"].shape[1]
    if parties == 3:  # colluding parties have their columns side by side
        view = replace(view, features={"train": view.features["train"].repeat(1, 2)})
        d *= 2
    found = infer_drawn_columns(view)
    assert sorted(found) == [0, 1, 2, 3]
    assert {(len(own), own.sum()) for own in found.values()} == {(d, d // 2)}
    assert len({own.tobytes() for own in found.values()}) > 1
    assert infer_drawn_columns(replace(view, messages=())) == {}


def test_a_category_is_drawn_with_all_its_values():
    column, ordered = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True, True, True, False, False, False])
    messages = (
        Message(Kind.CONTROL, "passive_1", "active", 0, "train", {"column": column, "ordered": ordered}),
        *(
            Message(Kind.CIPHERTEXT, "passive_1", "active", tree, "train", {"rows": torch.tensor([rows])})
            for tree, rows in enumerate([[2, 0, 1, 0, 0, 0], [0, 0, 0, 0, 3, 0], [1, 1, 1, 1, 2, 0]])
        ),
    )
    none = torch.zeros(0, dtype=torch.long)
    view = View("passive_1", "passive", 2, {"train": torch.zeros(3, 4)}, None, none, none, messages)
    assert {tree: own.tolist() for tree, own in infer_drawn_columns(view).items()} == {
        0: [True, False, False, False],
        1: [False, True, True, True],
        2: [True, True, True, True],
    }
    assert infer_drawn_columns(replace(view, features={"train": torch.zeros(3, 5)})) == {}


def test_a_round_without_known_splits_says_nothing():
    view, *_ = trained(2, name="secureboost-rl")
    found = choices(view)
    assert 0 not in found.rounds
    assert float(found.score_surprise(0, torch.ones(2, 240, 1), temperature=TEMPERATURE, l2=1.0)) == 0


def test_who_knows_no_labels_of_other_rows_still_sees_all_splits_that_are_told():
    view, *_ = trained(2)
    told = observe_trees(view)
    assert set(choices(view).rounds) <= set(told.rounds.tolist())


@pytest.mark.long
@pytest.mark.parametrize("classes", [2, 3])
def test_splits_of_few_rows_tell_labels_of_rows_that_nobody_knows(classes):
    view, _, targets, _ = trained(classes, rounds=20)
    truth = targets.argmax(dim=1) if classes == 3 else targets[:, 0].long()
    known = torch.arange(0, len(truth), 8)
    view = replace(view, aux_rows=known, aux_labels=truth[known], agreed={"leaf_rows": 4, "bins": 8})
    start = torch.full_like(targets, 1 / classes)
    found = fit_labels_by_row([view], observe_trees(view), [start], Rates(0.3, 1.0))[0]
    guessed = found.argmax(dim=1) if classes == 3 else (found[:, 0] > 0.5).long()
    others = torch.ones(len(truth), dtype=torch.bool).index_fill(0, known, False)
    assert float((guessed == truth)[others].double().mean()) > 0.75
    assert torch.equal(guessed[known], truth[known])


@pytest.mark.parametrize(("name", "value"), [("ROWS_PER_SPLIT", 0), ("MAX_ROWS", 100)])
def test_too_many_rows_give_no_labels(monkeypatch, name, value):
    view, _, targets, _ = trained(2)
    view = replace(view, aux_rows=torch.arange(4), aux_labels=targets[:4, 0].long())
    monkeypatch.setattr(f"{fit_labels_by_row.__module__}.{name}", value)
    assert fit_labels_by_row([view], observe_trees(view), [targets], Rates(0.3, 1.0)) is None


def test_bins_that_drawn_rows_cannot_fill_are_no_candidates():
    view, *_ = trained(2, rows=0.5)
    drawn = observe_trees(view).drawn
    object.__setattr__(view, "agreed", {"leaf_rows": 4, "bins": 8})
    some, all_ = Choices(view, drawn, 100).rounds, Choices(view, {}, 100).rounds
    for r, one in all_.items():
        assert not (some[r].possible & ~one.possible).any()
    assert any((one.possible & ~some[r].possible).any() for r, one in all_.items())
