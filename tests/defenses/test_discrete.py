"""Entries leave as the nearest point of the grid that the formula says, clipped only where asked for."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.base.errors import UsageError
from vflsec.defenses.discrete import Discretization


def rounded(g, strength, **options):
    return Discretization(strength, **options).on_gradient(g, None)


def naive(g, bins, bound, clip):
    """The nearest of all points of the grid, found by looking at each."""
    spacing, reach = 2 * bound / bins, float(g.abs().max())
    points = torch.arange(-(reach // spacing) - 1, reach // spacing + 2, dtype=torch.float64) * spacing
    g = g.double().clamp(-bound, bound) if clip else g.double()
    return points[(g[..., None] - points).abs().argmin(dim=-1)]


@settings(max_examples=50)
@given(st.integers(0, 1000), st.sampled_from([6, 12, 18, 24]), st.sampled_from([0.03, 1.0]), st.booleans())
def test_equals_the_naive_version(seed, bins, bound, clip):
    g = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed)) * 2 * bound
    found = rounded(g, 2 / bins, bound=bound, clip=clip)
    assert torch.allclose(found.double(), naive(g, bins, bound, clip), atol=1e-5 * bound)


def test_the_source_bounds_nothing():
    g = torch.tensor([[0.9, -5.2, 0.2]])
    assert torch.equal(rounded(g, 0.5, bound=1.0), torch.tensor([[1.0, -5.0, 0.0]]))
    assert torch.equal(rounded(g, 0.5, bound=1.0, clip=True), torch.tensor([[1.0, -1.0, 0.0]]))


def test_without_a_bound_the_largest_entry_sets_the_scale():
    g = torch.tensor([[0.9, -4.0, 1.1, 2.9]])
    assert torch.equal(rounded(g, 0.5), torch.tensor([[0.0, -4.0, 2.0, 2.0]]))
    assert torch.equal(rounded(g * 1024, 0.5), rounded(g, 0.5) * 1024)


def test_no_entry_moves_by_more_than_half_a_step():
    g = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    moved = (rounded(g, 0.3, bound=1.0) - g).abs()
    assert float(moved.max()) <= 0.15 + 1e-6
    assert float(moved.square().mean()) == pytest.approx(0.3**2 / 12, rel=0.05)  # of a uniform remainder


@pytest.mark.parametrize("strength", [2.0, 7.0])
def test_a_grid_coarser_than_everything_lets_nothing_out(strength):
    assert torch.equal(rounded(torch.tensor([[0.3, -1.0], [0.9, 1.0]]), strength), torch.zeros(2, 2))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 2)])
def test_empty_and_zero_batches(shape):
    assert torch.equal(rounded(torch.zeros(shape), 0.5), torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "match"),
    [({"bound": 0.0}, "expected bound > 0, got 0.0"), ({"clip": True}, "clip to, got none")],
)
def test_impossible_options_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        Discretization(0.5, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("strength", [1.0, 1.5, 1.7])
def test_what_norm_gains_by_rounding_it_could_have_had_without(leak, strength):
    """A known exception to "a coarser grid never leaks more": of ``norm`` alone, and of no information.

    Rounding is a function of what would have left. An attacker of the same federation undefended, who rounds what it
    received before it takes lengths, does as well: ``norm`` reads clean gradients badly, and gains where only the
    longer rows are left to count.
    """
    rounded_at_home = leak("norm", "discrete", 0.0, read=lambda g: rounded(g, strength))
    assert leak("norm", "discrete", strength) <= rounded_at_home + 0.02
    assert leak("direction", "discrete", strength) <= leak("direction", "discrete", 0.0) + 0.005


@pytest.mark.sampled
@pytest.mark.parametrize("attack", ["norm", "direction", "averaging"])
def test_a_coarser_grid_never_leaks_more(leak, attack):
    found = [leak(attack, "discrete", strength) for strength in (0.0, 1 / 3, 1.0, 1.9)]
    assert all(coarse <= fine + 0.02 for fine, coarse in pairwise(found))
    assert found[-1] < found[0] - 0.15
