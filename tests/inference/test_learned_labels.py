"""Labels that forests and splits agree on are nearer to the truth than those of either."""

from dataclasses import replace

import pytest
import torch
from sklearn.datasets import make_classification

from tests.attacks.test_tree_attacks import auc, passive, right, world
from vflsec.inference.trees import labels as module
from vflsec.inference.trees.guesses import regress_on_nodes
from vflsec.inference.trees.labels import (
    ROUNDS,
    draw_forests,
    fit_labels_by_columns,
    fit_labels_by_forest,
    fit_labels_by_row,
    score_by_forest,
)
from vflsec.inference.trees.replay import Rates, observe_trees, replay_boosting
from vflsec.testing.federations import build_from_numbers, grow_trees

RATES = Rates(0.3, 1.0)
KNOWN = 60


def generator():
    return torch.Generator().manual_seed(0)


def start(view):
    """The guess of instance-space, as probabilities of the last of two classes only."""
    scores = regress_on_nodes(view, generator()).scores["train"].softmax(dim=1)
    return scores[:, 1:] if view.n_classes == 2 else scores


def labels(view):
    drawn = draw_forests(view, ROUNDS, generator())
    return fit_labels_by_forest([view], observe_trees(view), [start(view)], [drawn], RATES)[0]


def both(q):
    return torch.cat([1 - q, q], dim=1) if q.shape[1] == 1 else q


def curved(n, seed=0):
    """A label that follows products and squares of columns, which linear functions of them do not give."""
    rng = torch.Generator().manual_seed(seed)
    x = {name: {s: torch.randn(n, 4, generator=rng) for s in ("train", "test")} for name in ("active", "passive_1")}
    y = {}
    for s in ("train", "test"):
        a, p = x["active"][s], x["passive_1"][s]
        total = a[:, 0] * a[:, 1] + a[:, 2] + p[:, 0] * p[:, 1] + p[:, 2].square() - 1
        y[s] = (total + torch.randn(n, generator=rng) > 0).long()
    return y, grow_trees(build_from_numbers(x, y), exchange="masked", rounds=20, depth=4)


@pytest.mark.long
def test_with_many_rows_for_each_split_they_beat_labels_that_follow_from_columns(monkeypatch):
    y, trees = curved(3000)
    view = passive(trees, known=80)
    monkeypatch.setattr(module, "ROWS_PER_SPLIT", 0)
    found = auc(both(labels(view)), y["train"])
    others = [start(view), fit_labels_by_columns([view], observe_trees(view), [start(view)], RATES)[0]]
    assert found > max(auc(both(q), y["train"]) for q in others) + 0.02


@pytest.mark.long
def test_with_few_rows_and_known_labels_they_beat_labels_of_rows_by_themselves():
    """Classes of several clusters, and ten known labels."""
    columns, classes = make_classification(
        2000, 20, n_informative=8, n_redundant=4, n_clusters_per_class=3, flip_y=0.1, class_sep=0.8, random_state=3
    )
    x, halves = torch.from_numpy(columns).float(), {"train": slice(1000), "test": slice(1000, None)}
    dealt = {"active": x[:, ::2], "passive_1": x[:, 1::2]}
    federation = build_from_numbers(
        {name: {s: own[rows] for s, rows in halves.items()} for name, own in dealt.items()},
        {s: torch.from_numpy(classes[rows]) for s, rows in halves.items()},
    )
    y, view = (
        torch.from_numpy(classes[:1000]),
        passive(grow_trees(federation, exchange="masked", rounds=20, depth=4), 10),
    )
    found = auc(both(labels(view)), y, 10)
    by_row = auc(both(fit_labels_by_row([view], observe_trees(view), [start(view)], RATES)[0]), y, 10)
    assert found > by_row
    assert found > auc(both(start(view)), y, 10) + 0.1


@pytest.mark.sampled
@pytest.mark.parametrize("n_classes", [2, 4])
def test_auxiliary_rows_keep_their_labels(n_classes):
    _, y, trees = world(n=300, rounds=5, n_classes=n_classes)
    view = passive(trees)
    found = both(labels(view))
    assert (found.argmax(dim=1) == y["train"])[:KNOWN].all()
    torch.testing.assert_close(found.sum(dim=1), torch.ones(300, dtype=torch.float64), atol=1e-5, rtol=0)
    assert right(found, y["train"]) > 1.5 / n_classes


def test_a_forest_taught_by_training_rows_scores_others_better_than_nodes():
    _, y, trees = world(n=1500, rounds=5)
    view, q = passive(trees), y["train"][:, None].float()
    seen = replay_boosting(observe_trees(view, everywhere=True), q, "train", RATES)
    found = score_by_forest(view, seen, q, next(draw_forests(view, 1, generator())))
    assert set(found) == {"train", "test"}
    assert auc(both(found["test"].sigmoid()), y["test"], 0) > auc(both(seen.scores["test"].sigmoid()), y["test"], 0)


def test_few_rows_are_drawn_and_the_rest_predicted(monkeypatch):
    _, y, trees = world(n=400, rounds=5)
    view = passive(trees)
    monkeypatch.setattr(module, "MAX_FITTED_ROWS", 100)
    found = both(labels(view))
    assert auc(found, y["train"]) > 0.7


@pytest.mark.long
def test_the_same_generator_gives_the_same_labels():
    view = passive(world(n=300, rounds=3)[2])
    first, again = (labels(replace(view)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.long
@pytest.mark.parametrize("n_classes", [2, 3])
def test_several_views_at_once_are_as_one_after_the_other(n_classes):
    view = passive(world(n=120, rounds=3, n_classes=n_classes)[2])
    views = [view, view.restrict(torch.arange(0, KNOWN, 2)), view.restrict(torch.arange(KNOWN - 7))]
    trees, starts = observe_trees(view), [start(one) for one in views]

    def learned(chosen, trees, starts, rates):
        return fit_labels_by_forest(
            chosen, trees, starts, [draw_forests(one, ROUNDS, generator()) for one in chosen], rates
        )

    for found in (fit_labels_by_columns, fit_labels_by_row, learned):
        together = found(views, trees, starts, RATES)
        for place, one in enumerate(views):
            alone = found([one], trees, [starts[place]], RATES)[0]
            torch.testing.assert_close(together[place], alone, atol=0.02, rtol=0)
