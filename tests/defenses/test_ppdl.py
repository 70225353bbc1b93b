"""What leaves is what the source's loop lets through, with the stated noise, and nothing leaves in clear."""

import pytest
import torch
from games import at_least, opposite_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vflsec.base.errors import UsageError
from vflsec.defenses import ppdl
from vflsec.defenses.ppdl import SparseVector

WEAK = 1e-12  # noise far below anything else


def sparse(g, strength, release, seed=0, **options):
    return SparseVector(strength, **options).on_gradient(g, release(seed))


def naive(heights, thresholds):
    """The source's loop: one entry at a time, the next threshold after each release."""
    found, number = [], 0
    for place, height in enumerate(heights):
        if number == len(thresholds):
            break
        if height >= thresholds[number]:
            found.append(place)
            number += 1
    return found


@settings(max_examples=200)
@given(st.lists(st.integers(-3, 3), max_size=12), st.lists(st.integers(-3, 3), max_size=6))
def test_the_choice_equals_the_naive_version(heights, thresholds):
    assert ppdl._find_crossings(heights, thresholds) == naive(heights, thresholds)


def test_the_scales_are_those_of_the_source(monkeypatch, release):
    """Epsilon 1.8, of 40 entries a tenth: epsilon_1 is 1.6, epsilon_2 is .4, c is 4, s_1 is 5 and s_2 is 20."""
    scales = []
    monkeypatch.setattr(ppdl, "_draw_laplace", lambda like, scale, rng: scales.append(scale) or torch.zeros_like(like))
    sparse(torch.ones(4, 10), 1 / 1.8, release)
    assert scales == pytest.approx([10.0, 5.0, 20.0])


def test_without_noise_clipped_entries_above_tau_leave(release):
    g = torch.tensor([[0.5, -0.5, 5e-5, -5e-5], [5e-4, -5e-4, 0.0, 2.0]], dtype=torch.float64)
    expected = torch.tensor([[1e-3, -1e-3, 0.0, 0.0], [5e-4, -5e-4, 0.0, 1e-3]], dtype=torch.float64)
    assert torch.allclose(sparse(g, WEAK, release, released=1.0), expected, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("released", "most"), [(0.1, 10), (0.25, 25), (0.5, 50), (0.001, 1)])
def test_no_more_than_c_entries_leave(release, released, most, seed):
    g = torch.randn(10, 10, generator=torch.Generator().manual_seed(seed))
    assert int((sparse(g, 1 / 1.8, release, seed, released=released) != 0).sum()) <= most
    assert int((sparse(g, WEAK, release, seed, released=released) != 0).sum()) == most


def test_nothing_leaves_in_clear_where_entries_run_out(release):
    """The source's flaw: with .75, about half of the entries pass, and it sends the others as they are."""
    g = 1 + torch.rand(100, 10, generator=torch.Generator().manual_seed(0))
    out = sparse(g, 1 / 1.8, release, released=0.75)
    assert float(out.abs().max()) <= 1e-3 * (1 + 1e-6)
    assert 0.3 < float((out != 0).float().mean()) < 0.7


def test_the_noise_of_values_is_laplace_of_that_scale(release):
    n, scale = 100_000, 0.02
    g = torch.zeros(n // 10, 10, dtype=torch.float64)
    out = sparse(g, scale / (9 * n), release, released=1.0, gamma=0.5).flatten()
    z = out[out != 0].numpy() / scale
    assert len(z) > n / 10
    assert stats.kstest(z, "laplace").pvalue > 0.01
    assert stats.kstest(z / 1.1, "laplace").pvalue < 1e-4  # a scale 10 % off is rejected
    assert stats.kstest(z / 0.9, "laplace").pvalue < 1e-4


@pytest.mark.parametrize("size", [0.5, 1e6])  # at the bound on magnitudes, and far beyond
def test_two_opposite_gradients_are_as_alike_as_epsilon_says(release, size):
    """An empirical lower bound on epsilon, of the event that a positive value leaves, stays below what is stated."""
    game = opposite_gradients(SparseVector(0.1, gamma=0.5), size)
    assert list(game.spent) == [{"epsilon": 10.0, "delta": 0.0}]
    assert 0.5 < at_least(game, 0.0) < 10  # something does get through


def test_releases_add_up():
    assert SparseVector(0.5).privacy_spent(20) == {"epsilon": 40.0, "delta": 0.0}
    assert SparseVector(0.0).privacy_spent(20) is None


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_batches(release, shape):
    assert sparse(torch.zeros(shape), 1.0, release).shape == shape


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"released": 0.0}, "expected 0 < released <= 1, got 0.0"),
        ({"gamma": 0.0}, "expected gamma > 0"),
        ({"tau": -1.0}, "expected tau > 0"),
        ({"gamma": 0.6}, r"expected 0 < 2\*gamma <= 1, got 1.2"),
    ],
)
def test_impossible_options_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        SparseVector(1.0, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("attack", ["norm", "direction", "averaging", "spectral"])
def test_it_hides_all_at_the_papers_epsilon(leak, attack):
    assert leak(attack, "ppdl", 1 / 1.8) == pytest.approx(0.5, abs=0.08)


@pytest.mark.long
@pytest.mark.parametrize("attack", ["direction", "averaging", "spectral"])
def test_a_smaller_epsilon_leaks_less(leak, attack):
    found = [leak(attack, "ppdl", strength) for strength in (0.0, 1e-6, 1e-5, 1e-3)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[1] - 0.2
