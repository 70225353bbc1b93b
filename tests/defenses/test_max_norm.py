"""All rows have the expected squared norm of the longest, along their own line; a wrong scale would be noticed."""

import pytest
import torch
from scipy import stats

from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.defenses.max_norm import MaxNorm


def noised(g, strength=1.0, seed=0):
    """What leaves in place of ``g``."""
    release = Release("active", "passive_1", Kind.GRADIENT, 0, "train", "value", None, None, make_rng(seed, "noise"))
    return MaxNorm(strength).on_gradient(g, release)


def batch(rows=20000, width=8):
    """Rows of very unequal norms, in float64."""
    rng = make_rng(1, "batch")
    norms = torch.linspace(0.01, 1, rows, dtype=torch.float64)[:, None]
    return torch.nn.functional.normalize(torch.randn(rows, width, generator=rng, dtype=torch.float64), dim=1) * norms


def factors(g, released):
    """The number that each row was multiplied by, less one."""
    return (released * g).sum(dim=1) / g.square().sum(dim=1) - 1


def test_at_strength_1_every_row_has_the_expected_squared_norm_of_the_longest():
    g = torch.tensor([[0.1, 0.0], [0.0, 0.5], [1.0, 1.0], [3.0, 4.0]]).repeat(20000, 1)
    means = noised(g).square().sum(dim=1).reshape(-1, 4).mean(dim=0)
    assert means.tolist() == pytest.approx([25.0] * 4, rel=0.03)


@pytest.mark.parametrize("strength", [0.1, 1.0, 4.0])
def test_deviation_of_the_factor(strength):
    g = batch()
    norms = g.norm(dim=1)
    expected = strength * (1 / norms.square() - 1).sqrt()
    z = (factors(g, noised(g, strength)) / expected)[:-1]  # the longest has no noise
    assert float(z.std()) == pytest.approx(1, rel=0.02)
    assert stats.kstest(z, "norm").pvalue > 0.01
    assert stats.kstest(z / 1.1, "norm").pvalue < 1e-6  # a scale 10 % off is rejected
    assert stats.kstest(z / 0.9, "norm").pvalue < 1e-6


def test_each_row_stays_on_its_line_and_the_longest_as_it_is():
    g = batch(rows=50)
    released = noised(g)
    assert torch.allclose(released, (1 + factors(g, released))[:, None] * g)
    assert torch.equal(released[-1], g[-1])


def test_rows_of_zero_norm_stay_zero():
    g = torch.ones(6, 3)
    g[::2] = 0
    g[1] = 5
    released = noised(g)
    assert torch.equal(released[::2], g[::2])
    assert not torch.equal(released[3], g[3])
    assert torch.equal(noised(torch.zeros(4, 3)), torch.zeros(4, 3))


def test_rows_whose_squares_vanish_in_float32_are_noised():
    g = torch.tensor([[1e-30, -1e-30], [1.0, 0.0]])
    assert float(noised(g)[0].norm()) > 1e-3


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (1, 1), (3, 0)])
def test_small_batches(shape):
    assert torch.equal(noised(torch.ones(shape)), torch.ones(shape))


def test_more_strength_hides_the_class_of_the_long_rows_better():
    """The adversary of the norm attack, on rows of which those of one class are twice as long."""
    g = torch.ones(4000, 4)
    g[2000:] *= 2
    aucs = []
    for strength in (0.0, 0.3, 1.0):
        norms = noised(g, strength).norm(dim=1) if strength else g.norm(dim=1)
        aucs.append(stats.mannwhitneyu(norms[2000:], norms[:2000]).statistic / 2000**2)
    assert aucs[0] == 1
    assert aucs == sorted(aucs, reverse=True)


def test_repeated_releases_average_out():
    """The adaptive adversary: who hears the same row n times is left with 1/sqrt(n) of the noise."""
    g = batch(rows=50)
    rng = make_rng(0, "noise")
    release = Release("a", "b", Kind.GRADIENT, 0, "train", "value", None, None, rng)
    mean = torch.stack([MaxNorm(1.0).on_gradient(g, release) for _ in range(400)]).mean(dim=0)
    expected = float((50 - g.square().sum()) ** 0.5) / 20
    assert float((mean - g).norm()) == pytest.approx(expected, rel=0.3)
