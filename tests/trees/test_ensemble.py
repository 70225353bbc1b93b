"""Parties route rows by their own splits, and the active party adds up the values of leaves."""

import pytest
import torch

from vflsec.base.sparse_rows import SparseRows
from vflsec.trees.ensemble import Shape, Splits


@pytest.fixture
def splits():
    """Of three trees: the root of the second at x0 > 1, its right child at x2 > 0."""
    made = Splits(3, 2, 3)
    made.add(1, torch.tensor([1, 3]), torch.tensor([0, 2]), torch.tensor([1.0, 0.0]))
    return made


ROWS = torch.tensor([[1.0, 0, 5], [1.5, 0, 5], [2.0, 9, 0], [0.0, 9, -1]])


def test_rows_go_where_their_values_say(splits):
    nodes = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1]])
    assert splits.send_down(ROWS, 0, nodes).tolist() == [[0, 2], [0, 0], [0, 3], [0, 2]]
    assert splits.send_down(ROWS, 1, torch.tensor([[3, 1]] * 4)).tolist() == [[7, 0], [7, 0], [6, 0], [6, 0]]


def test_where_a_party_owns_no_split_it_says_nothing(splits):
    assert not splits.send_down(ROWS, 0, torch.tensor([[1, 2, 3]] * 4))[:, [0, 1]].any()
    assert splits.send_down(ROWS, 0, torch.zeros(4, 0, dtype=torch.long)).shape == (4, 0)


def test_the_representation_has_a_direction_for_each_own_split(splits):
    assert splits.width == 2
    assert splits(ROWS).tolist() == [[-1, 1], [1, 1], [1, -1], [-1, -1]]
    assert Splits(3, 2, 3)(ROWS).tolist() == [[0]] * 4
    assert Splits(3, 2, 3).width == 1


def test_sparse_rows_are_as_dense_ones(splits):
    sparse = SparseRows(ROWS, torch.arange(3).expand(4, -1).contiguous(), 3)
    nodes = torch.tensor([[1, 3]] * 4)
    assert torch.equal(splits.send_down(sparse, 1, nodes), splits.send_down(ROWS, 1, nodes))
    assert torch.equal(splits(sparse), splits(ROWS))


def test_splits_drawn_at_random_are_as_many(splits):
    torch.manual_seed(0)
    before = splits.column.clone()
    splits.reset_parameters()
    assert torch.equal(splits.column >= 0, before >= 0)
    assert (splits.column < 3).all()


def test_logits_add_up_the_leaves_of_each_output():
    shape = Shape(4, 1, 2, 2)
    shape.value[:, 2], shape.value[:, 3] = torch.tensor([1.0, 2, 4, 8]), torch.tensor([10.0, 20, 40, 80])
    leaves = torch.tensor([[2, 2, 2, 2], [3, 2, 2, 3]])
    assert shape.logits(leaves).tolist() == [[5, 10], [14, 82]]
    assert shape.logits(leaves[:, :2], 2).tolist() == [[4, 8], [40, 8]]
    assert shape.logits(leaves[:, :0]).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (Splits(2, 2, 3), "column", 3),
        (Splits(2, 2, 3), "column", -2),
        (Splits(2, 2, 3), "threshold", float("nan")),
        (Shape(2, 2, 1, 2), "owner", 2),
        (Shape(2, 2, 1, 2), "grown", 3),
        (Shape(2, 2, 1, 2), "grown", -1),
        (Shape(2, 2, 1, 2), "value", float("inf")),
    ],
)
def test_states_that_no_trees_have_are_not_loaded(module, name, value):
    states = {key: one.clone() for key, one in module.state_dict().items()}
    module.load_state_dict(states)
    states[name].view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"expected {name} from .*, found {value}"):
        module.load_state_dict(states)
