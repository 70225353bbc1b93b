"""The largest entries leave untouched, by the source's strict comparison, and everything else is zero."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.base.errors import UsageError
from vflsec.defenses.compress import Compression


def compressed(g, strength):
    return Compression(strength).on_gradient(g, None)


def naive(g, strength):
    """Sorts, as the source does, and compares one entry at a time."""
    flat = g.flatten().tolist()
    kept = round((1 - strength) * len(flat))
    ranked = sorted((abs(x) for x in flat), reverse=True)
    threshold = ranked[kept - 1] if kept else float("inf")
    return torch.tensor([x if abs(x) > threshold else 0.0 for x in flat]).reshape(g.shape)


@pytest.mark.parametrize(
    ("strength", "expected"),
    [(0.5, [[0.0, -4.0, 0.0, 0.0]]), (0.25, [[3.0, -4.0, 0.0, 0.0]]), (0.75, [[0.0] * 4]), (1.0, [[0.0] * 4])],
)
def test_known_answers(strength, expected):
    """Of four, half leaves two, of which the smaller is the threshold itself."""
    assert torch.equal(compressed(torch.tensor([[3.0, -4.0, 1.0, 2.0]]), strength), torch.tensor(expected))


@settings(max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]))
def test_equals_the_naive_version(seed, rows, strength):
    g = torch.randn(rows, 20, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(compressed(g, strength), naive(g, strength))


@pytest.mark.parametrize(("strength", "left"), [(0.9, 99), (0.75, 249), (0.5, 499), (0.25, 749), (0.1, 899)])
def test_the_share_is_exact_whatever_floats_make_of_it(strength, left):
    g = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    assert int((compressed(g, strength) != 0).sum()) == left


def test_ties_with_the_threshold_are_zeroed():
    assert torch.equal(compressed(torch.tensor([[1.0, -1.0, 2.0, 1.0]]), 0.25), torch.tensor([[0.0, 0.0, 2.0, 0.0]]))
    assert torch.equal(compressed(torch.ones(3, 2), 0.1), torch.zeros(3, 2))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)])
def test_small_batches(shape):
    assert torch.equal(compressed(torch.ones(shape), 0.5), torch.zeros(shape))


def test_what_a_stronger_setting_lets_through_a_weaker_one_does_too():
    g = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    sets = [compressed(g, strength) != 0 for strength in (0.1, 0.4, 0.8, 0.95)]
    assert all((strong <= weak).all() for weak, strong in pairwise(sets))


def test_a_share_above_one_is_refused():
    with pytest.raises(UsageError, match="expected 0 <= strength <= 1, got 1.5"):
        Compression(1.5)


@pytest.mark.sampled
@pytest.mark.parametrize("attack", ["norm", "direction", "averaging", "spectral"])
def test_more_compression_never_leaks_more(leak, attack):
    found = [leak(attack, "compress", strength) for strength in (0.0, 0.5, 0.9)]
    assert found[0] >= found[1] >= found[2]
    assert found[2] < found[0] - 0.15
