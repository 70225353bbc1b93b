"""Aggregation and heads of the top model, and untrained copies of a bottom model."""

import pytest
import torch
from torch import nn

from vflsec.nn.encoders import MLPBottom, reinitialize
from vflsec.nn.top import Top, aggregate

A, B = torch.tensor([[1.0, 4.0]]), torch.tensor([[3.0, 2.0]])


@pytest.mark.parametrize(
    ("how", "expected"), [("concat", [1, 4, 3, 2]), ("sum", [4, 6]), ("mean", [2, 3]), ("max", [3, 4])]
)
def test_aggregation(how, expected):
    assert aggregate([A, B], how).tolist() == [expected]


@pytest.mark.parametrize("parties", [2, 4])
@pytest.mark.parametrize("aggregation", ["concat", "sum", "mean", "max"])
@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_logits_of_any_batch(parties, aggregation, head, rows):
    top = Top([3] * parties, 4, aggregation=aggregation, head=head, hidden=5)
    assert top([torch.ones(rows, 3)] * parties).shape == (rows, 4)


def test_without_a_head_the_aggregate_is_the_logits():
    assert torch.equal(Top([2, 2], 2, aggregation="sum", head="none", hidden=1)([A, B]), A + B)


def test_a_logistic_head_of_two_classes_has_one_output():
    top = Top([2, 2], 2, aggregation="concat", head="linear", hidden=1, logistic=True)
    logits = top([A, B])
    assert top.head.weight.shape == (1, 4)
    assert logits.tolist() == [[0, (torch.cat([A, B], dim=1) @ top.head.weight.T + top.head.bias).item()]]
    three = Top([2, 2], 3, aggregation="concat", head="linear", hidden=1, logistic=True)
    assert three([A, B]).shape == (1, 3), "of three it is softmax regression"


def test_unequal_widths_are_for_concatenation_only():
    assert Top([2, 3], 2, aggregation="concat", head="linear", hidden=1)([A, torch.ones(1, 3)]).shape == (1, 2)
    with pytest.raises(AssertionError, match="can only be concatenated"):
        Top([2, 3], 2, aggregation="sum", head="linear", hidden=1)
    with pytest.raises(AssertionError, match="embeddings are the logits"):
        Top([3, 3], 2, aggregation="sum", head="none", hidden=1)


def test_a_bottom_ends_without_activation():
    assert [type(layer) for layer in MLPBottom(3, [5, 4], 2)] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in MLPBottom(3, [], 2)] == [nn.Linear]


def test_untrained_is_drawn_anew_and_touches_nothing():
    bottom = MLPBottom(3, [5], 2)
    weight, state = bottom[0].weight.clone(), torch.get_rng_state()
    fresh, again, other = reinitialize(bottom, 1), reinitialize(bottom, 1), reinitialize(bottom, 2)
    assert torch.equal(bottom[0].weight, weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(fresh[2].weight, again[2].weight)
    for another in (bottom, other):
        assert not torch.equal(fresh[2].weight, another[2].weight)
