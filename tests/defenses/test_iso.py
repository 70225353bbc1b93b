"""The noise has the scale of the formula, on the rows of the formula, and a wrong scale would be noticed."""

import math

import pytest
import torch
from scipy import stats

from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.defenses.iso import IsotropicNoise

HOOKS = {"gradient": "on_gradient", "embedding": "on_embedding", "parameters": "on_parameters"}


def noised(value, strength, point="gradient", seed=0):
    """What leaves in place of ``value``."""
    rng = make_rng(seed, "iso")
    release = Release("active", "passive_1", Kind(point), 0, "train", "value", None, None, rng)
    return getattr(IsotropicNoise(strength, at=[point]), HOOKS[point])(value, release)


def batch(rows=4000, width=8):
    """Rows of very unequal norms: the scale must come from the largest."""
    rng = make_rng(1, "batch")
    return torch.randn(rows, width, generator=rng) * torch.rand(rows, 1, generator=rng) ** 3


@pytest.mark.sampled
@pytest.mark.parametrize("point", ["gradient", "embedding"])
@pytest.mark.parametrize("strength", [0.1, 1.0, 25.0])
def test_deviation_is_lambda_times_the_largest_norm_over_root_m(point, strength):
    x = batch()
    expected = strength * float(x.norm(dim=1).max()) / math.sqrt(8)
    noise = noised(x, strength, point) - x
    assert float(noise.std()) == pytest.approx(expected, rel=0.02)
    z = noise.flatten().double().numpy() / expected
    assert stats.kstest(z, "norm").pvalue > 0.01
    assert stats.kstest(z / 1.1, "norm").pvalue < 1e-6  # a scale 10 % off is rejected
    assert stats.kstest(z / 0.9, "norm").pvalue < 1e-6


def test_the_expected_row_norm_is_lambda_times_the_largest():
    x = batch()
    noise = noised(x, 5.0) - x
    assert float(noise.square().sum(dim=1).mean().sqrt()) == pytest.approx(5 * float(x.norm(dim=1).max()), rel=0.02)


def test_noise_is_white():
    x = batch()
    correlation = torch.corrcoef((noised(x, 1.0) - x).T)
    assert float((correlation - torch.eye(8)).abs().max()) < 4 / math.sqrt(len(x))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((6, 500), (6, 500)), ((3000,), (1, 3000)), ((6, 20, 5, 5), (6, 500)), ((6, 50, 10), (6, 500))],
)
def test_rows_of_a_parameter_tensor(shape, rows):
    """The first axis counts the rows; one dimension is one row; norms and m are of those rows."""
    p = torch.randn(shape, generator=make_rng(2, "p")) * 3
    p[..., 0] = 9.0
    released = noised(p, 1.0, "parameters")
    expected = float(p.reshape(rows).norm(dim=1).max()) / math.sqrt(rows[1])
    assert released.shape == p.shape
    assert float((released - p).std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * p.numel()))


@pytest.mark.parametrize("point", list(HOOKS))
def test_of_zero_rows_nothing_but_zero_leaves(point):
    assert torch.equal(noised(torch.zeros(5, 3), 25.0, point), torch.zeros(5, 3))


def test_a_zero_row_among_others_is_noised_like_them():
    x = torch.ones(2000, 2)
    x[::2] = 0
    noise = noised(x, 1.0) - x
    assert float(noise[::2].std()) == pytest.approx(1.0, rel=0.05)
    assert float(noise[1::2].std()) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (1, 1), (3, 0)])
def test_small_batches(shape):
    assert noised(torch.ones(shape), 1.0).shape == shape


def test_repeated_releases_average_out():
    """The adaptive adversary: who hears the same row n times is left with 1/sqrt(n) of the noise."""
    x = batch(rows=50)
    rng = make_rng(0, "iso")
    release = Release("a", "b", Kind.GRADIENT, 0, "train", "value", None, None, rng)
    mean = torch.stack([IsotropicNoise(1.0).on_gradient(x, release) for _ in range(400)]).mean(dim=0)
    single = float((noised(x, 1.0) - x).norm())
    assert float((mean - x).norm()) == pytest.approx(single / 20, rel=0.2)
