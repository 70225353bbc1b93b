"""Nodes that tell much of labels are withheld, with their siblings, and passive parties learn no more of the tree."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vflsec.base.seeds import make_rng
from vflsec.core import registry
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.defenses.id_lmid import NodeInformation
from vflsec.testing.federations import make_toy_federation


def told(nodes, labels, strength):
    nodes = torch.tensor(nodes, dtype=torch.int16)
    nodes = nodes[:, None] if nodes.dim() == 1 else nodes
    labels = None if labels is None else torch.tensor(labels)
    release = Release("active", "passive_1", Kind.NODES, 0, "train", "value", None, labels, make_rng(0, "noise"))
    found = NodeInformation(strength).on_nodes(nodes, release)
    assert found.dtype == torch.int16
    return found.squeeze(1).tolist()


def bits(labels, everyone):
    """KL of the labels in a node from those of all rows, by its definition."""
    found = 0.0
    for label in set(labels):
        p, q = labels.count(label) / len(labels), everyone.count(label) / len(everyone)
        found += p * math.log2(p / q)
    return found


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=40),
    st.floats(0.1, 100),
)
def test_a_node_is_told_exactly_if_neither_it_nor_its_sibling_exceeds_the_threshold(rows, strength):
    nodes, labels = [node for node, _ in rows], [label for _, label in rows]
    of_node = {n: [y for m, y in rows if m == n] for n in set(nodes)}
    told_bits = {n: bits(own, labels) if n else 0.0 for n, own in of_node.items()}
    pairs = {n: max(told_bits[n], told_bits.get(n ^ 1, 0.0) if n > 1 else 0.0) for n in of_node}
    if any(abs(pair - 1 / strength) < 1e-9 for pair in pairs.values()):
        return
    assert told(nodes, labels, strength) == [0 if pairs[n] > 1 / strength else n for n in nodes]


def test_a_pure_node_of_balanced_classes_tells_one_bit():
    nodes, labels = [2, 2, 3, 3], [0, 0, 1, 1]
    assert told(nodes, labels, 0.99) == nodes
    assert told(nodes, labels, 1.01) == [0] * 4


@pytest.mark.parametrize("strength", [2.0, 10.0, 1e6])
def test_a_pure_node_is_never_told_nor_its_sibling(strength):
    nodes = [4, 4, 5, 5, 5, 5, 6, 6, 7, 7]
    labels = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0]
    assert told(nodes, labels, strength) == [0] * 6 + [6, 6, 7, 7]


def test_the_root_is_always_told():
    assert told([1, 1, 1, 1], [0, 0, 0, 1], 1e9) == [1] * 4


def test_strength_zero_and_unknown_labels_change_nothing():
    assert told([2, 2, 3, 3], [0, 0, 1, 1], 0.0) == [2, 2, 3, 3]
    assert told([2, 2, 3, 3], None, 100.0) == [2, 2, 3, 3]
    assert told([], [], 100.0) == []


def test_a_class_without_a_row_makes_no_difference():
    assert told([2, 2, 3, 3], [0, 0, 2, 2], 2.0) == [0] * 4


def test_each_tree_is_judged_by_itself():
    nodes = [[2, 2], [2, 3], [3, 2], [3, 3]]
    assert told(nodes, [0, 0, 1, 1], 2.0) == [[0, 2], [0, 3], [0, 2], [0, 3]]


def test_what_is_withheld_stays_as_it_is_at_the_sender():
    nodes = torch.tensor([[2], [3]])
    release = Release(
        "active", "passive_1", Kind.NODES, 0, "train", "value", None, torch.tensor([0, 1]), make_rng(0, "noise")
    )
    assert NodeInformation(5.0).on_nodes(nodes, release).tolist() == [[0], [0]]
    assert nodes.tolist() == [[2], [3]]


# In training


def federation_of_one_column(rows=300, **defenses):
    """The passive party's one column tells the label, but for one of ten rows; the active party's tells nothing."""
    federation = make_toy_federation(rows=rows, columns=2, signal="none")
    y = federation.active.labels["train"]
    rng = make_rng(0, "columns")
    for party in federation.parties.values():
        party.features["train"] = torch.randn(len(y), 2, generator=rng)
    wrong = torch.rand(len(y), generator=rng) < 0.1
    federation.passive[0].features["train"][:, 0] += 10.0 * torch.where(wrong, 1 - y, y)
    return federation


def trained(*defenses, federation=None, **options):
    federation = federation or federation_of_one_column()
    federation.active.defenses = defenses
    heard = []
    federation.channel.taps.append(heard.append)
    settings = {"rounds": 2, "depth": 3, "leaf_rows": 5, **options}
    registry.build("methods", "secureboost", TrainSpec(), ModelSpec(), **settings).fit(federation)
    return federation, heard


def splits(federation, name="passive_1"):
    """(tree, node) of the splits of a party."""
    return [tuple(place) for place in torch.nonzero(federation.parties[name].modules["splits"].column >= 0).tolist()]


def nodes_told(heard):
    found = [m for m in heard if m.kind is Kind.NODES and m.receiver == "passive_1"]
    return {(m.step, int(node)) for m in found for node in m.payload["value"].unique() if node}


def test_passive_parties_own_no_splits_below_what_they_split_themselves():
    open_, _ = trained()
    assert any(node > 1 for _, node in splits(open_)), "or there is nothing to withhold"
    hidden, heard = trained(NodeInformation(1e6))
    assert {node for _, node in splits(hidden)} == {1}
    assert {node for _, node in nodes_told(heard)} == {1}
    below = [node for _, node in splits(hidden, "active") if node > 1]
    assert below, "the active party goes on alone"


def test_histograms_are_of_nodes_that_were_told():
    _, heard = trained(NodeInformation(20.0))
    asked = {(m.step, int(n)) for m in heard if m.kind is Kind.HISTOGRAM for n in m.payload["nodes"]}
    assert asked <= nodes_told(heard)
    split = {(m.step, int(n)) for m in heard if m.kind is Kind.CONTROL and m.receiver == "passive_1"
             for n in m.payload["nodes"]}  # fmt: skip
    assert split <= nodes_told(heard)


def test_strength_zero_changes_no_bit():
    (plain, said), (defended, heard) = trained(), trained(NodeInformation(0.0))
    for name, party in plain.parties.items():
        state = defended.parties[name].modules.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in party.modules.state_dict().items())
    assert len(said) == len(heard)


def test_a_node_too_small_to_be_split_hides_its_sibling():
    """A pure node of few rows is known to whoever is told its sibling, or all nodes below it, and their parent."""
    federation = federation_of_one_column()
    y = federation.active.labels["train"]
    few = torch.nonzero(y == 1)[:12, 0]
    x = torch.randn(len(y), 2, generator=make_rng(1, "columns"))
    federation.passive[0].features["train"] = x
    x[:, 0] = 0
    x[few, 0] = 5.0  # the best split cuts off twelve rows of one class
    _, open_ = trained(federation=federation, rounds=1, leaf_rows=10)
    assert {(0, 2)} <= nodes_told(open_)
    assert (0, 3) not in nodes_told(open_), "it is too small"
    _, heard = trained(NodeInformation(1.5), federation=federation, rounds=1, leaf_rows=10)
    assert nodes_told(heard) == {(0, 1)}


def test_it_reads_the_labels_that_other_defenses_leave():
    label_dp = registry.build("defenses", "label-dp", 1.0)
    runs = []
    for flip in (False, True):
        federation = federation_of_one_column()
        if flip:  # the noisy labels stay as they are
            noisy = label_dp.on_labels

            def flipped(y, noisy=noisy, **more):
                return noisy(1 - y, **more)

            label_dp.on_labels = flipped
            federation.active.labels["train"] = 1 - federation.active.labels["train"]
        runs.append(trained(label_dp, NodeInformation(30.0), federation=federation, graft=True)[1])
    a, b = ([m for m in heard if m.sender != m.receiver] for heard in runs)
    assert len(a) == len(b)
    assert all(x.kind == y.kind and x.payload.keys() == y.payload.keys() for x, y in zip(a, b, strict=True))
    nodes = [(x, y) for x, y in zip(a, b, strict=True) if x.kind is Kind.NODES]
    assert all(torch.equal(x.payload["value"], y.payload["value"]) for x, y in nodes)
