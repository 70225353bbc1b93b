"""What is added is perpendicular, and the length that results is uniform; a wrong scale would be noticed."""

import pytest
import torch
from scipy import stats

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.defenses.perp import PerpendicularNoise


def noised(g, strength=1.0, seed=0, **options):
    """What leaves in place of ``g``."""
    release = Release("active", "passive_1", Kind.GRADIENT, 0, "train", "value", None, None, make_rng(seed, "noise"))
    return PerpendicularNoise(strength, **options).on_gradient(g, release)


def batch(rows=4000, width=8):
    """Rows of very unequal norms, in float64."""
    rng = make_rng(1, "batch")
    g = torch.randn(rows, width, generator=rng, dtype=torch.float64)
    return g * torch.rand(rows, 1, generator=rng, dtype=torch.float64) ** 3


@pytest.mark.parametrize(("strength", "lower", "upper"), [(1.0, 1.0, 10.0), (4.0, 1.0, 10.0), (1.0, 2.0, 3.0)])
def test_the_norm_is_uniform_between_the_bounds(strength, lower, upper):
    g = batch()
    norms = noised(g, strength, lower=lower, upper=upper).norm(dim=1) / g.norm(dim=1).max() / strength
    uniform = ("uniform", (lower, upper - lower))
    assert float(norms.mean()) == pytest.approx((lower + upper) / 2, rel=0.02)
    assert stats.kstest(norms, *uniform).pvalue > 0.01
    assert stats.kstest(norms / 1.1, *uniform).pvalue < 1e-6  # a scale 10 % off is rejected
    assert stats.kstest(norms / 0.9, *uniform).pvalue < 1e-6


def test_what_is_added_is_perpendicular_and_has_no_preferred_direction():
    g = batch()
    noise = noised(g) - g
    assert float((noise * g).sum(dim=1).abs().max()) < 1e-10
    fixed = torch.zeros(4000, 5, dtype=torch.float64)
    fixed[:, 0] = 1
    angles = torch.nn.functional.normalize(noised(fixed) - fixed, dim=1)[:, 1:]
    assert float(angles.mean(dim=0).abs().max()) < 4 * (0.25 / 4000) ** 0.5
    assert angles.square().mean(dim=0).tolist() == pytest.approx([0.25] * 4, rel=0.1)


def test_a_row_longer_than_its_target_leaves_as_it_is():
    g = torch.eye(3)
    g[0] /= 100
    released = noised(g, 0.05)
    assert torch.equal(released[1:], g[1:])
    assert 0.05 <= float(released[0].norm()) <= 0.5


def test_a_row_of_zeros_gets_the_target_norm_and_a_batch_of_zeros_stays():
    g = torch.ones(6, 3)
    g[::2] = 0
    norms = noised(g)[::2].norm(dim=1) / 3**0.5
    assert bool(((norms >= 0.999) & (norms <= 10.001)).all())
    assert torch.equal(noised(torch.zeros(5, 3)), torch.zeros(5, 3))


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (0, 1), (3, 0)])
def test_small_batches(shape):
    assert noised(torch.ones(shape)).shape == shape


def test_nothing_is_perpendicular_to_a_number():
    with pytest.raises(UsageError, match="of width 2.*got 1"):
        noised(torch.ones(4, 1))


@pytest.mark.parametrize(
    ("bounds", "match"),
    [
        ({"lower": -1.0}, "expected lower >= 0"),
        ({"lower": 11.0}, r"lower=11\.0 and upper=10\.0"),
        ({"upper": float("inf")}, "finite upper"),
        ({"upper": float("nan")}, "finite upper"),
    ],
)
def test_impossible_bounds_are_refused(bounds, match):
    with pytest.raises(UsageError, match=match):
        PerpendicularNoise(1.0, **bounds)


def test_repeated_releases_average_out():
    """The adaptive adversary: who hears the same row n times is left with 1/sqrt(n) of the noise."""
    g = batch(rows=50)
    rng = make_rng(0, "noise")
    release = Release("a", "b", Kind.GRADIENT, 0, "train", "value", None, None, rng)
    mean = torch.stack([PerpendicularNoise(1.0).on_gradient(g, release) for _ in range(400)]).mean(dim=0)
    assert float((mean - g).norm()) == pytest.approx(float((noised(g) - g).norm()) / 20, rel=0.2)
