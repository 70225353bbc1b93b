"""Nodes that rows share, bounds on columns and sums over nodes, out of the messages of federated trees."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.sources import list_sources
from vflsec.inference.trees.bounds import find_bounds
from vflsec.inference.trees.histograms import PossibleBins, Unit
from vflsec.inference.trees.nodes import (
    collect_nodes,
    compute_components,
    get_components,
    list_splits,
    take_at_place,
    weigh_components,
)
from vflsec.inference.trees.values import _project, solve_bins
from vflsec.run.adversary import get_adversary
from vflsec.run.adversary import observe as view_after
from vflsec.testing.federations import build_from_numbers
from vflsec.testing.federations import grow_trees as trees_on

N = 400


def grow_trees(*, seed=0, n=N, n_classes=2, parties=2, width=3, twice=False, **options):
    """Trees on columns of each party, and on a label that depends on the first of each.

    ``twice``: test rows are copies of training rows.
    """
    rng = torch.Generator().manual_seed(seed)
    names = ["active", *(f"passive_{k}" for k in range(1, parties))]
    x = {name: {s: torch.randn(n, width, generator=rng) for s in ("train", "test")} for name in names}
    if twice:
        x = {name: {"train": own["train"], "test": own["train"].clone()} for name, own in x.items()}
    total = {s: sum(x[name][s][:, 0] for name in names) + torch.randn(n, generator=rng) for s in ("train", "test")}
    cuts = torch.quantile(total["train"], torch.arange(1, n_classes) / n_classes)
    y = {s: torch.bucketize(t, cuts) for s, t in total.items()}
    return trees_on(build_from_numbers(x, y, n_classes=n_classes, seed=seed), **options)


def view_of(trees, party="passive_1", known=40, **fields):
    parties = get_adversary(trees.trained.federation, party)
    return replace(view_after(trees.trained, parties, torch.arange(known), trees.get_messages(party)), **fields)


def leaves(trees):
    federation, method = trees.trained.federation, trees.trained.method
    with federation.pause_recording():
        return method.leaves(federation, "train", 0, method.rounds, "predict")


def path(node):
    return {node >> k for k in range(node.bit_length())}


def test_entries_at_places_and_their_gradient_are_those_of_an_index():
    rng = torch.Generator().manual_seed(0)
    sums, weights = torch.randn(2, 3, 5, generator=rng), torch.randn(2, 3, 40, 4, generator=rng)
    place = torch.randint(5, (40, 4), generator=rng)
    entries, gradients = [], []
    for take in (take_at_place, lambda x, places: x[..., places]):
        x = sums.clone().requires_grad_()
        entries.append(take(x, place))
        gradients.append(torch.autograd.grad((entries[-1] * weights).sum(), x)[0])
    assert torch.equal(*entries)
    assert torch.equal(*gradients)


def test_a_row_has_the_nodes_on_the_way_to_its_leaf():
    trees = grow_trees(rounds=6)
    found, reached = collect_nodes(view_of(trees), "active"), leaves(trees)
    for row in range(0, N, 37):
        for tree in range(6):
            own = set(found.nodes["train"][row, tree].tolist()) - {0}
            leaf = int(reached[row, tree])
            assert own <= path(leaf)
            assert own >= path(leaf // 2), "every node but a leaf is told before it is split"


def untold(message):
    """The same message if it does not say where rows are."""
    if message.kind is not Kind.NODES:
        return message
    return replace(message, payload={"value": torch.zeros_like(message.payload["value"])})


def test_nodes_that_are_not_told_are_unknown():
    view = view_of(grow_trees())
    hidden = tuple(untold(m) for m in view.messages if m.sender == "active" and m.split == "train")
    assert collect_nodes(replace(view, messages=hidden), "active") is None


def test_an_adversary_that_is_not_adaptive_reads_one_tree():
    trees = grow_trees(rounds=4)
    found = collect_nodes(view_of(trees, adaptive=False), "active")
    assert found.trees.tolist() == [0]


def test_trees_of_one_round_are_of_one_round():
    for exchange in ("plain", "masked"):
        view = view_of(grow_trees(rounds=3, n_classes=3, exchange=exchange))
        assert collect_nodes(view, "active").rounds.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def naive(view, kept=None):
    """Standardized columns, one for each node, of training rows."""
    nodes, columns = collect_nodes(view, "active"), []
    for t, tree in enumerate(nodes.trees.tolist()):
        own = nodes.nodes["train"][:, t]
        for node in sorted(set(own[own > 1].tolist())):
            inside = (own == node).any(axis=1).astype(float)
            if inside.std() > 0 and (kept is None or node in kept.get(tree, set())):
                columns.append((inside - inside.mean()) / inside.std() / (1 + nodes.rounds[t]) ** 0.5)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("rounds", [2, 10])
def test_components_are_those_of_standardized_columns_of_nodes(rounds):
    trees = grow_trees(rounds=rounds)
    view = view_of(trees)
    points, values = get_components(view, "active")["train"]
    exact = np.linalg.svd(naive(view), compute_uv=False)
    np.testing.assert_allclose(values[:5], exact[:5], rtol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(points, axis=0), values, rtol=1e-6)


def test_all_components_have_the_kernel_of_shared_nodes():
    trees = grow_trees(rounds=2)
    view = view_of(trees)
    columns = naive(view)
    table = weigh_components(*get_components(view, "active")["train"], 1).numpy()
    expected = columns @ columns.T
    np.testing.assert_allclose(table @ table.T * expected[0, 0] / (table[0] @ table[0]), expected, atol=1e-6 * N)


@pytest.mark.parametrize("power", [1, 3])
def test_the_columns_of_a_table_have_one_variance(power):
    """So that a model which standardizes them keeps the kernel."""
    trees = grow_trees()
    table = weigh_components(*get_components(view_of(trees), "active")["train"], power)
    deviations = table.std(dim=0)
    torch.testing.assert_close(deviations, deviations[:1].expand_as(deviations))


def test_at_prediction_a_row_has_the_components_of_a_training_row_like_it():
    """Test rows that are copies of training rows are told only nodes that the party splits, and agree on these."""
    view = view_of(grow_trees(rounds=8, twice=True))
    both = get_components(view, "active", everywhere=True)
    np.testing.assert_allclose(both["test"][0], both["train"][0], atol=1e-9)
    assert set(get_components(view, "active")) == {"train"}
    kept = {t: {v for i in nodes for v in (i, 2 * i, 2 * i + 1)} for t, nodes in list_splits(view, "active").items()}
    exact = np.linalg.svd(naive(view, kept), compute_uv=False)
    np.testing.assert_allclose(both["train"][1][:5], exact[:5], rtol=1e-3)


def test_a_tree_that_a_row_is_not_told_of_says_nothing_of_it():
    trees = grow_trees(rounds=5)
    known = collect_nodes(view_of(trees), "active")
    known.nodes["train"][7] = 0
    points, _ = compute_components(known, "train")["train"]
    np.testing.assert_allclose(points[7], 0, atol=1e-12)


def test_parties_that_collude_know_what_either_is_told():
    trees = grow_trees(parties=3, rounds=4)
    together = collect_nodes(view_of(trees, "passive_1+passive_2"), "active")
    for party in ("passive_1", "passive_2"):
        alone = collect_nodes(view_of(trees, party), "active")
        assert ((alone.nodes["train"] == 0) | (alone.nodes["train"] == together.nodes["train"])).all()


def test_sources_have_tables_of_trees():
    trees = grow_trees()
    passive, active = list_sources(view_of(trees)), list_sources(view_of(trees, "active", victim="passive_1"))
    for power in (1, 3, 9):
        assert passive[f"nodes from active in train: power {power}"].table["train"].shape == (N, 32)
        assert set(passive[f"nodes from active in predict: power {power}"].table) == {"train", "test"}
    on_columns = list_sources(view_of(trees, victim="active"))
    assert on_columns["nodes from active in train"].table["train"].shape == (N, 32)
    assert {"nodes from passive_1 in predict", "bounds from passive_1", "bounds from passive_1: solved"} <= set(active)


@pytest.mark.parametrize("exchange", ["plain", "masked"])
def test_what_a_party_notes_of_its_own_is_no_source(exchange):
    assert not any("gradient" in name for name in list_sources(view_of(grow_trees(exchange=exchange), "active")))


def truth(trees, known, split):
    """The number of each unit of each row: the middle quantile of its bin."""
    party = trees.trained.federation.parties["passive_1"]
    bin_of = trees.trained.method._bins["passive_1"].assign(party.features[split])
    return np.stack([known.weights[bin_of[:, unit.column], u] for u, unit in enumerate(known.units)], axis=1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_bounds_hold_the_truth(split):
    trees = grow_trees(rounds=20)
    known = find_bounds(view_of(trees, "active"), "passive_1")
    exact = truth(trees, known, split)
    assert (known.lowest[split] <= exact + 1e-9).all()
    assert (exact <= known.highest[split] + 1e-9).all()
    assert (known.lowest[split] < known.highest[split]).any()


def test_as_many_sums_as_rows_give_every_bin():
    trees = grow_trees(n=60, rounds=60, depth=3, exchange="masked", leaf_rows=1)
    view = view_of(trees, "active")
    known = find_bounds(view, "passive_1")
    np.testing.assert_allclose(solve_bins(view, "passive_1"), truth(trees, known, "train"), atol=1e-3)
    without = replace(view, messages=tuple(m for m in view.messages if m.kind is not Kind.HISTOGRAM))
    guessed = solve_bins(without, "passive_1")
    assert np.abs(guessed - truth(trees, known, "train")).max() > 0.1


def test_sums_add_to_bounds():
    trees = grow_trees(rounds=10)
    view = view_of(trees, "active")
    known = find_bounds(view, "passive_1")
    exact = truth(trees, known, "train")
    errors = [((one - exact) ** 2).mean() for one in (solve_bins(view, "passive_1"), known.expected["train"])]
    assert errors[0] < 0.9 * errors[1]


def test_shares_are_the_nearest_ones_that_are_allowed():
    rng = np.random.default_rng(0)
    x, allowed = rng.normal(size=(50, 4)), rng.random((50, 4)) < 0.7
    allowed[:, 0] = True
    found = _project(x, allowed)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert (found >= 0).all()
    assert not found[~allowed].any()
    others = np.where(allowed[:, None], rng.dirichlet(np.full(4, 0.3), (50, 2000)), 0)
    others /= others.sum(axis=2, keepdims=True).clip(1e-300)
    valid = others.sum(axis=2) > 0.5
    distances = np.where(valid, ((others - x[:, None]) ** 2).sum(axis=2), np.inf).min(axis=1)
    assert (((found - x) ** 2).sum(axis=1) <= distances + 1e-12).all()


def test_histograms_of_nodes_that_are_not_told_are_left_out():
    trees = grow_trees(rounds=5)
    view = view_of(trees, "active")
    known = find_bounds(view, "passive_1")
    hidden = tuple(untold(m) if m.sender == "active" else m for m in view.messages)
    found = solve_bins(replace(view, messages=hidden), "passive_1")
    np.testing.assert_allclose(found, known.expected["train"])


def test_expected_numbers_mean_the_same_of_rows_that_histograms_give_away_and_of_others():
    known = find_bounds(view_of(grow_trees(n=200, rounds=10, twice=True), "active"), "passive_1")
    exact = known.lowest["train"] == known.highest["train"]
    assert exact.mean() > (known.lowest["test"] == known.highest["test"]).mean() + 0.1
    np.testing.assert_allclose(known.expected["train"], known.expected["test"])


def test_rows_that_can_be_in_each_bin_are_counted_as_one_by_one():
    rng = np.random.default_rng(0)
    units = (Unit(0, 0, 5, ordered=True), *(Unit(1, b, b, ordered=False) for b in range(6, 9)))
    low, high = (rng.integers(0, 6, (50, 4)) for _ in range(2))
    low[:, 1:], high[:, 1:] = 0, rng.integers(0, 2, (50, 3))
    possible, rows = PossibleBins(units, low, high), rng.choice(50, 30, replace=False)
    assert (high[:, 0] < low[:, 0]).any(), "in no bin at all"
    for start, stop in ((0, 6), (6, 9)):
        one_by_one = [possible.find_rows(rows, b).sum() for b in range(start, stop)]
        np.testing.assert_array_equal(possible.numbers(rows, start, stop), one_by_one)


def test_a_category_is_the_one_to_whose_bin_a_row_goes_right():
    """Bins 0 to 3 are of categories, of which 1 and 3 are split; of a row in neither, 0 and 2 remain."""
    rows = torch.arange(6)
    category = torch.tensor([0, 1, 2, 3, 1, 0])
    setup = {"column": torch.zeros(4, dtype=torch.long), "ordered": torch.zeros(4, dtype=torch.bool)}
    messages = [Message(Kind.CONTROL, "passive_1", "active", 0, "train", setup)]
    counts = torch.stack([torch.zeros(4), torch.zeros(4), torch.tensor([2.0, 2, 1, 1])], dim=1)[None].double()
    for tree, b in enumerate((1, 3)):
        histogram = {"value": counts, "nodes": torch.tensor([1])}
        messages.append(Message(Kind.HISTOGRAM, "passive_1", "active", tree, "train", histogram))
        control = {"nodes": torch.tensor([1]), "bins": torch.tensor([b])}
        messages.append(Message(Kind.CONTROL, "active", "passive_1", tree, "train", control))
        child = {"value": 2 + (category == b).long()[:, None]}
        messages.append(Message(Kind.NODES, "passive_1", "active", tree, "train", child, rows))
    none = torch.zeros(0, dtype=torch.long)
    view = View("active", "active", 4, {"train": torch.zeros(6, 1)}, None, none, none, tuple(messages))
    found = find_bounds(view, "passive_1").expected["train"]
    unsure = [2 / 3, 0, 1 / 3, 0]
    np.testing.assert_allclose(found, [unsure, [0, 1, 0, 0], unsure, [0, 0, 0, 1], [0, 1, 0, 0], unsure])


def test_the_more_trees_the_better_the_order():
    found = []
    for rounds in (2, 40):
        trees = grow_trees(rounds=rounds, seed=1)
        known = find_bounds(view_of(trees, "active"), "passive_1")
        theirs = trees.trained.federation.parties["passive_1"].features["test"][:, 0]
        found.append(spearmanr(known.expected["test"][:, 0], theirs).statistic)
    assert found[0] + 0.05 < found[1]
    assert found[1] > 0.9
