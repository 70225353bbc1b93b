"""Moved on shares, weights are those that torch's SGD moves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.linear_sgd import PRECISION, LinearSgd

UNIT = 2.0**PRECISION


@pytest.mark.long
@pytest.mark.parametrize(("momentum", "decay"), [(0, 0), (0.9, 0), (0, 0.1), (0.99, 1e-3)])
def test_it_is_torchs(momentum, decay):
    rng = np.random.default_rng(0)
    start = rng.normal(size=6)
    parameter = torch.nn.Parameter(torch.tensor(start))
    theirs = torch.optim.SGD([parameter], 0.1, momentum, weight_decay=decay)
    ours, share, velocity = LinearSgd(momentum, decay), [round(x * UNIT) for x in start], [0] * 6
    for step in range(60):
        gradient = rng.normal(size=6)
        rate = theirs.param_groups[0]["lr"] = 0.1 / (1 + step)
        parameter.grad = torch.tensor(gradient)
        theirs.step()
        share, velocity = ours.step(share, velocity, [round(x * UNIT) for x in gradient], rate)
    assert np.allclose(np.array(share, float) / UNIT, parameter.detach().numpy(), rtol=0, atol=1e-13)


@given(st.floats(0, 0.999), st.floats(0, 1), st.lists(st.integers(0, 2**160), min_size=1, max_size=30))
def test_shares_add_up_whatever_the_noise(momentum, decay, noises):
    """Masks a hundred bits larger than the weights leave no trace but rounding, however long they are carried on."""
    sgd = LinearSgd(momentum, decay)
    whole, p, c = ([2**62], [0]), ([2**62 - 2**140], [0]), ([2**140], [0])
    for noise in noises:
        whole = sgd.step(*whole, [2**60], 0.1)
        p, c = sgd.step(*p, [2**60 + noise], 0.1), sgd.step(*c, [-noise], 0.1)
        assert abs(p[0][0] + c[0][0] - whole[0][0]) < 100 * len(noises) ** 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"optimizer": "adam"}, "optimizer sgd .*adam"),
        ({"optimizer": "adagrad"}, "it is not linear"),
        ({"optimizer": "sgd", "clip": 1.0}, "no clipping .*clip=1"),
        ({"optimizer": "sgd", "momentum": 1.0}, "expected momentum < 1, got 1.0"),
        ({"optimizer": "sgd", "momentum": -0.1}, "expected momentum >= 0, got -0.1"),
        ({"optimizer": "sgd", "weight_decay": float("nan")}, "expected weight_decay >= 0, got nan"),
        ({"optimizer": "sgd", "weight_decay": float("inf")}, "finite weight_decay.*inf"),
    ],
)
def test_what_shares_cannot_follow_is_refused(settings, why):
    with pytest.raises(UsageError, match=why):
        LinearSgd.build(**settings)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(UsageError, match="expected a finite learning rate >= 0"):
        LinearSgd().step([1], [0], [1], rate)
