"""The moving average of weights."""

import pytest
import torch
from torch import nn

from vflsec.nn.siamese import update_average


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.995])
def test_k_updates_towards_a_fixed_network(momentum):
    target, online = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    start, goal, left = target.weight.clone(), online.weight.clone(), target.bias.clone()
    for k in range(1, 6):
        update_average(target, online, momentum)
        torch.testing.assert_close(target.weight, momentum**k * start + (1 - momentum**k) * goal)
    torch.testing.assert_close(target.bias, momentum**5 * left + (1 - momentum**5) * online.bias)
    assert torch.equal(online.weight, goal)


def test_a_moving_goal_is_weighted_by_its_age():
    target, online = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    values = [8.0, 1.0, -3.0, 4.0]
    for module, value in zip([target, online, online, online], values, strict=True):
        nn.init.constant_(module.weight, value)
        if module is online:
            update_average(target, online, 0.75)
    expected = 0.75**3 * 8 + 0.25 * (0.75**2 * 1 + 0.75 * -3 + 4)
    assert target.weight.item() == pytest.approx(expected, abs=1e-14)


def test_momentum_one_leaves_the_target_as_it_is():
    target, online = nn.Linear(3, 2), nn.Linear(3, 2)
    before = target.weight.clone()
    update_average(target, online, 1.0)
    assert torch.equal(target.weight, before)


def test_running_statistics_are_the_targets_own():
    target, online = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    online(torch.randn(9, 3) * 5 + 7)
    nn.init.constant_(online.weight, 3.0)
    before = {name: value.clone() for name, value in target.named_buffers()}
    update_average(target, online, 0.5)
    assert target.weight.tolist() == [2, 2, 2]
    assert len(before) == 3
    for name, value in target.named_buffers():
        assert torch.equal(value, before[name])


def test_frozen_targets_are_updated_and_no_graph_is_kept():
    target, online = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    update_average(target, online, 0.0)
    torch.testing.assert_close(target.weight, online.weight)
    assert not target.weight.requires_grad


def test_networks_of_different_depth_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        update_average(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), 0.5)
