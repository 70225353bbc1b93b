"""A replay of boosting is the training itself if labels and nodes are known."""

import math

import numpy as np
import pytest
import torch

from vflsec.core import registry
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.inference.trees.replay import Ensemble, Rates, observe_trees, replay_boosting
from vflsec.testing.federations import make_tiny_federation

SMALL = {"rounds": 4, "depth": 3, "leaf_rows": 4, "bins": 8}
SHOWN = {  # rounds whose nodes a passive party sees
    "secureboost": {0, 1, 2, 3},
    "secureboost-rl": {1, 2, 3},
    "secureboost-turns": {1, 3},
    "secureboost-layers": {0, 1, 2, 3},
}


def test_one_tree_by_hand():
    """The start is logit(1/4), so that p = 1/4; nodes have G = 2/4 - 1 and 2/4, and H = 2 * 3/16."""
    trees = Ensemble({"train": np.array([[2], [2], [3], [3]])}, np.array([0]), np.array([0]), {})
    targets = torch.tensor([[1.0], [0], [0], [0]], dtype=torch.double)
    found = replay_boosting(trees, targets, "train", Rates(0.5, 1.0))
    start, h = math.log(1 / 3), 3 / 16
    values = [0.5 * 0.5 / (2 * h + 1)] * 2 + [-0.5 * 0.5 / (2 * h + 1)] * 2
    np.testing.assert_allclose(found.scores["train"][:, 0], start + np.array(values))
    others = np.array([-0.25, 0.75, -0.25, -0.25]) * 0.5 / (h + 1)
    np.testing.assert_allclose(found.left_out[:, 0], start + others)


def naive(trees, q, learning_rate, l2):
    """Scores with and without each row's own target, in loops over rows."""
    n, outputs = q.shape
    share = q.mean(axis=0)
    start = np.log(share / (1 - share)) if outputs == 1 else np.log(share)
    scores, left_out = np.tile(start, (n, 1)), np.tile(start, (n, 1))
    nodes = trees.nodes["train"]
    for r in sorted(set(trees.rounds)):
        e = np.exp(scores)
        p = e / (1 + e) if outputs == 1 else e / e.sum(axis=1, keepdims=True)
        for t in np.flatnonzero(trees.rounds == r):
            k = trees.outputs[t]
            for i in range(n):
                inside = [j for j in range(n) if nodes[j, t] == nodes[i, t] > 0]
                counted = [j for j in inside if r not in trees.drawn or trees.drawn[r][j]]
                for own, table in ((counted, scores), ([j for j in counted if j != i], left_out)):
                    if inside:
                        g = sum(p[j, k] - q[j, k] for j in own)
                        h = sum(p[j, k] * (1 - p[j, k]) for j in own)
                        table[i, k] -= learning_rate * g / (h + l2) if h + l2 else 0
    return scores, left_out


@pytest.mark.parametrize("l2", [0.5, 2.0])
@pytest.mark.parametrize(("outputs", "shown"), [(1, slice(None)), (3, slice(None)), (3, [0, 2, 4, 5, 6, 7, 8])])
def test_own_targets_are_left_out_as_in_a_loop_over_rows(outputs, shown, l2):
    rng, n, rounds = np.random.default_rng(0), 40, 3
    q = rng.dirichlet(np.ones(max(2, outputs)), n)[:, -outputs:]
    nodes = rng.integers(0, 5, (n, rounds * outputs))  # 0 is unknown, and some nodes have one row
    trees = np.arange(rounds * outputs)
    drawn = {1: rng.random(n) < 0.5}
    known = Ensemble({"train": nodes[:, shown]}, trees[shown] // outputs, trees[shown] % outputs, drawn)
    found = replay_boosting(known, torch.from_numpy(q), "train", Rates(0.7, l2))
    scores, left_out = naive(known, q, 0.7, l2)
    np.testing.assert_allclose(found.scores["train"], scores, atol=1e-12)
    np.testing.assert_allclose(found.left_out, left_out, atol=1e-12)


def test_what_is_left_out_depends_on_the_own_target_no_more():
    """In a tree of the first round, but for the share of classes at the start, which is kept."""
    nodes, q = np.array([[2], [2], [2], [3], [3], [3]]), torch.tensor([[1.0], [0], [1], [0], [1], [0]])
    swapped = q[[1, 0, 2, 3, 4, 5]]  # rows 0 and 1 share the node
    one, other = (
        replay_boosting(Ensemble({"train": nodes}, np.zeros(1, int), np.zeros(1, int), {}), x, "train", Rates(1, 1))
        for x in (q, swapped)
    )
    np.testing.assert_allclose(one.left_out[[0, 1]], other.left_out[[1, 0]])
    np.testing.assert_allclose(one.left_out[2:], other.left_out[2:])
    assert one.left_out[0] != one.left_out[1]


def test_without_a_penalty_a_row_alone_in_its_node_has_no_value():
    trees = Ensemble({"train": np.array([[2], [3], [3]])}, np.zeros(1, int), np.zeros(1, int), {})
    found = replay_boosting(trees, torch.tensor([[1.0], [0], [1]]), "train", Rates(1.0, 0.0))
    assert found.left_out[0, 0] == pytest.approx(math.log(2))


def trained(classes, *, parties=2, name="secureboost", silent=False, **options):
    """A recorded training on random columns: the view of the passive parties, the method, true labels and leaves."""
    federation = make_tiny_federation(parties=parties, rows=240, columns=4, classes=classes)
    if silent:  # constant columns cannot be split
        federation.active.features = {s: torch.zeros_like(x) for s, x in federation.active.features.items()}
    heard = []
    federation.channel.taps.append(heard.append)
    method = registry.build("methods", name, TrainSpec(), ModelSpec(), **{**SMALL, **options})
    method.fit(federation)
    method.predict(federation, "test")
    names = list(federation.parties)[1:]
    features = {s: federation.parties[names[0]].features[s] for s in ("train", "test")}
    messages = tuple(m for m in heard if m.readers & set(names))
    none = torch.zeros(0, dtype=torch.long)
    view = View("+".join(names), "passive", classes, features, None, none, none, messages, parties=tuple(features))
    shape = method.shape(federation)
    leaves = method.leaves(federation, "train", 0, int(shape.grown), "predict")
    y = torch.nn.functional.one_hot(federation.active.labels["train"], classes).double()
    targets = y[:, 1:] if classes == 2 else y
    return view, leaves.numpy(), targets, (shape.start + shape.logits(leaves)).numpy()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("options", [{}, {"rows": 0.5}, {"learning_rate": 0.1, "l2": 5.0}, {"exchange": "plain"}])
def test_true_labels_give_the_scores_of_a_recorded_training_in_which_only_passive_parties_split(
    classes, parties, options
):
    view, leaves, targets, scores = trained(classes, parties=parties, silent=True, **options)
    trees = observe_trees(view)
    np.testing.assert_array_equal(trees.nodes["train"], leaves)
    settings = {"learning_rate": 0.3, "l2": 1.0, **options}
    found = replay_boosting(trees, targets, "train", Rates(settings["learning_rate"], settings["l2"]))
    assert scores.std(axis=0).min() > 0.1
    np.testing.assert_allclose(found.scores["train"], scores, atol=1e-10)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", SHOWN)
def test_the_same_trees_are_replayed_whoever_splits_them_if_leaves_are_known(classes, name):
    view, leaves, targets, scores = trained(classes, name=name)
    outputs = targets.shape[1]
    numbers = np.arange(leaves.shape[1])
    known = Ensemble({"train": leaves}, numbers // outputs, numbers % outputs, {})
    found = replay_boosting(known, targets, "train", Rates(0.3, 1.0))
    np.testing.assert_allclose(found.scores["train"], scores, atol=1e-10)
    seen = observe_trees(view)
    places = seen.rounds * outputs + seen.outputs
    shown = seen.nodes["train"].any(axis=0)
    assert set(seen.rounds[shown].tolist()) == SHOWN[name]
    for t in np.flatnonzero(shown):  # what is told is the leaf, or a node on the way to it
        node, leaf = seen.nodes["train"][:, t], leaves[:, places[t]]
        assert all(a in {b >> k for k in range(4)} for a, b in zip(node.tolist(), leaf.tolist(), strict=True))


@pytest.mark.parametrize(("share", "drawn"), [(1.0, 240), (0.25, 60)])
def test_a_party_knows_the_rows_of_which_it_gets_derivatives(share, drawn):
    view, *_ = trained(3, rows=share)
    found = observe_trees(view).drawn
    assert {r: int(of_round.sum()) for r, of_round in found.items()} == dict.fromkeys(range(4), drawn)


def test_rows_of_every_split_have_nodes_of_own_splits_or_none():
    view, leaves, *_ = trained(2)
    seen = observe_trees(view, everywhere=True)
    assert set(seen.nodes) == {"train", "test"}
    told = seen.nodes["train"] - 1
    assert 0 < (told == 0).mean() < 1
    on_the_way = np.stack([told == leaves >> k for k in range(4)]).any(axis=0)
    assert on_the_way[told > 0].all()


def test_nothing_is_observed_without_nodes():
    view, *_ = trained(2)
    assert observe_trees(View(view.party, "passive", 2, view.features, None, view.aux_rows, view.aux_labels)) is None
