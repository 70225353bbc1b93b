"""The optimum is a general solver's, the noise is that of the optimum, and the bound holds where it is said to."""

import logging
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.defenses.marvell import Marvell, get_moments, solve
from vflsec.run import engine
from vflsec.run import spec as specs


def release_to(labels, *, seed=0, receiver="passive_1", phase="train"):
    rng = make_rng(seed, "noise")
    return Release("active", receiver, Kind.GRADIENT, 0, phase, "value", None, labels, rng)


def noised(g, labels, strength=1.0, **options):
    """What leaves in place of ``g``."""
    return Marvell(strength, **options).on_gradient(g, release_to(labels))


def gaussians(rows=20000, d=6, u=0.2, v=0.6, g=1.0, p=0.25, seed=1):
    """Gradients (rows, d) of two isotropic Gaussian classes, and their labels."""
    rng = make_rng(seed, "gaussians")
    y = (torch.arange(rows) < p * rows).long()
    delta = torch.ones(d, dtype=torch.float64) * math.sqrt(g / d)
    deviation = torch.tensor([u, v], dtype=torch.float64).sqrt()[y]
    x = torch.randn(rows, d, generator=rng, dtype=torch.float64) * deviation[:, None] + delta * y[:, None]
    return x, y


def random_problems(n=50):
    rng = np.random.default_rng(5)
    for _ in range(n):
        u, v, g = np.exp(rng.uniform(-3, 2, size=3))
        d, p, s = int(rng.integers(2, 40)), rng.uniform(0.05, 0.95), np.exp(rng.uniform(-2, 3))
        yield u, v, g, d, p, s * g


def sum_kl(x, u, v, g, d):
    """The objective as the paper writes it, of x = (l10, l11, l20, l21)."""
    l10, l11, l20, l21 = x
    across = (l20 + u) / (l21 + v) + (l21 + v) / (l20 + u)
    return ((d - 1) * across + (l10 + u + g) / (l11 + v) + (l11 + v + g) / (l10 + u)) / 2 - d


def general_optimum(u, v, g, d, p, power, starts=6):
    """The least objective that SLSQP finds over all four unknowns, none of which is taken to be zero."""
    costs = np.array([1 - p, p, (1 - p) * (d - 1), p * (d - 1)])  # of unknowns in units of P
    ordered = np.array([[1, 0, -1, 0], [0, 1, 0, -1]], dtype=float)
    rng, best = np.random.default_rng(0), math.inf
    for _ in range(starts):
        start = rng.dirichlet(np.ones(4)) / costs
        found = optimize.minimize(
            lambda x: sum_kl(x * power, u, v, g, d),
            start,
            method="SLSQP",
            bounds=[(0, None)] * 4,
            constraints=[
                {"type": "eq", "fun": lambda x: costs @ x - 1, "jac": lambda _: costs},
                {"type": "ineq", "fun": lambda x: ordered @ x, "jac": lambda _: ordered},
            ],
            options={"ftol": 1e-15, "maxiter": 500},
        )
        x = np.maximum(found.x, 0)
        x[:2] = np.maximum(x[:2], x[2:])
        best = min(best, sum_kl(x / (costs @ x) * power, u, v, g, d))  # of a point that is exactly feasible
    return best


# The solver


@pytest.mark.sampled
@pytest.mark.parametrize("problem", list(random_problems()), ids=range(50))
def test_the_objective_is_that_of_a_general_constrained_solver(problem):
    u, v, g, d, p, power = problem
    noise = solve(*problem)
    assert noise.sum_kl == pytest.approx(sum_kl(noise[:4], u, v, g, d), rel=1e-9, abs=1e-12)
    assert noise.sum_kl == pytest.approx(general_optimum(*problem), rel=1e-6)
    assert noise.l10 >= noise.l20 >= 0
    assert noise.l11 >= noise.l21 >= 0
    assert min(noise.l20, noise.l21) == 0
    spent = (1 - p) * (noise.l10 + (d - 1) * noise.l20) + p * (noise.l11 + (d - 1) * noise.l21)
    assert spent == pytest.approx(power, rel=1e-9)


def test_the_mirror_image():
    """Which class is called positive makes no difference."""
    a, b = solve(0.3, 0.9, 2.0, 7, 0.2, 4.0), solve(0.9, 0.3, 2.0, 7, 0.8, 4.0)
    assert (a.l10, a.l11, a.l20, a.l21, a.sum_kl) == pytest.approx((b.l11, b.l10, b.l21, b.l20, b.sum_kl), rel=1e-7)


def test_equal_variances_need_no_orthogonal_noise_and_equal_classes_equal_noise():
    for variance in (0.0, 0.5):
        noise = solve(variance, variance, 1.0, 9, 0.5, 3.0)
        assert (noise.l20, noise.l21) == (0, 0)
        assert (noise.l10, noise.l11) == pytest.approx((3.0, 3.0))
        assert noise.sum_kl == pytest.approx(1 / (3 + variance))


def test_in_one_dimension_there_is_nothing_orthogonal():
    noise = solve(0.1, 0.4, 1.0, 1, 0.3, 2.0)
    grid = [(l10, (2 - 0.7 * l10) / 0.3) for l10 in np.linspace(0, 2 / 0.7, 20001)]
    least = min(sum_kl((a, b, 0, 0), 0.1, 0.4, 1.0, 1) for a, b in grid)
    assert noise.l20 == noise.l21 == 0
    assert noise.sum_kl == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("variances", [(0, 1), (1, 0), (0, 0), (1e-60, 2e-60), (0.1, 1e9)])
@pytest.mark.parametrize("power", [1e-6, 1.0, 1e9])
def test_extreme_problems_have_finite_answers(variances, power):
    noise = solve(*variances, 1.0, 12, 0.01, power)
    assert all(math.isfinite(number) and number >= 0 for number in noise)


def test_more_power_leaves_less_divergence():
    left = [solve(0.2, 0.6, 1.0, 5, 0.3, power).sum_kl for power in (0.1, 1, 10, 100, 1e4)]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 1e-3


# The noise


def test_moments():
    x, y = gaussians(rows=64, d=3)
    found = get_moments(x, y == 1)
    negative, positive = x[y == 0], x[y == 1]
    delta = positive.mean(dim=0) - negative.mean(dim=0)
    assert found.u == pytest.approx(float(negative.var(dim=0, correction=0).mean()))
    assert found.v == pytest.approx(float(positive.var(dim=0, correction=0).mean()))
    assert (found.g, found.p) == pytest.approx((float(delta @ delta), 0.25))


@pytest.mark.long
@pytest.mark.parametrize(("u", "v"), [(0.2, 0.6), (0.6, 0.2)])
@pytest.mark.parametrize("strength", [0.5, 4.0])
def test_scale_of_the_noise(u, v, strength):
    """Along Delta and orthogonal to it, of both classes; as a whole, P."""
    x, y = gaussians(rows=80000, u=u, v=v)
    found = get_moments(x, y == 1)
    want = solve(found.u, found.v, found.g, 6, found.p, strength * found.g)
    noise = noised(x, y, strength) - x
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(strength * found.g, rel=0.02)
    line = found.delta / found.delta.norm()
    basis = torch.linalg.svd(line[None], full_matrices=True).Vh[1:]  # (d-1, d), orthogonal to the line
    for c, variance, across in ((0, want.l10, want.l20), (1, want.l11, want.l21)):
        of_class = noise[y == c]
        for part, expected in ((of_class @ line, variance), ((of_class @ basis.T).flatten(), across)):
            if expected == 0:
                assert float(part.abs().max()) < 1e-12
                continue
            z = part / math.sqrt(expected)
            assert float(z.std()) == pytest.approx(1, rel=0.02)
            assert stats.kstest(z, "norm").pvalue > 0.01
            assert stats.kstest(z / 1.1, "norm").pvalue < 1e-6  # a scale 10 % off is rejected
            assert stats.kstest(z / 0.9, "norm").pvalue < 1e-6


@pytest.mark.parametrize("variances", ["same", "zero"])
def test_other_variances_put_all_noise_along_delta(variances):
    x, y = gaussians(rows=2000)
    noise = noised(x, y, 2.0, variances=variances) - x
    assert int(torch.linalg.matrix_rank(noise)) == 1
    assert int(torch.linalg.matrix_rank(noised(x, y, 2.0) - x)) == 6


def auc(score, y):
    score, y = np.asarray(score), np.asarray(y)
    n, m = (y == 1).sum(), (y == 0).sum()
    return stats.mannwhitneyu(score[y == 1], score[y == 0]).statistic / (n * m)


def log_density(x, mean, line, along, across):
    """Of a Gaussian with variance ``along`` a unit vector and ``across`` everywhere else."""
    centered = x - mean
    on_line = centered @ line
    rest = centered.square().sum(dim=1) - on_line.square()
    return -(on_line.square() / along + rest / across + math.log(along) + (x.shape[1] - 1) * math.log(across)) / 2


@pytest.mark.parametrize(("u", "v"), [(0.2, 0.6), (0.6, 0.2), (0.3, 0.3)])
@pytest.mark.parametrize("strength", [1.0, 4.0, 25.0])
def test_no_score_beats_the_bound_on_gaussian_gradients(u, v, strength):
    """Not even the likelihood ratio of an adversary who knows everything but the labels, which is the best of all."""
    x, y = gaussians(u=u, v=v)
    found = get_moments(x, y == 1)
    noise = solve(found.u, found.v, found.g, 6, found.p, strength * found.g)
    released = noised(x, y, strength)
    line = found.delta / found.delta.norm()
    means = [x[y == c].mean(dim=0) for c in (0, 1)]
    ratio = log_density(released, means[1], line, noise.l11 + found.v, noise.l21 + found.v)
    ratio -= log_density(released, means[0], line, noise.l10 + found.u, noise.l20 + found.u)
    eps = noise.sum_kl
    bound = 0.5 + math.sqrt(eps) / 2 - eps / 8
    chance = 2 * math.sqrt(1 / 12 * (1 / 5000 + 1 / 15000))  # two standard errors
    assert eps < 4
    assert bound < 0.97, "a bound that says something"
    assert auc(ratio, y) < bound + chance
    for score in (released.norm(dim=1), released @ line):
        assert abs(auc(score, y) - 0.5) < bound - 0.5 + chance
    assert auc(x @ line, y) > 0.85, "undefended it is plain"


def test_dynamic_mode_reaches_its_detection_error():
    x, y = gaussians()
    found = get_moments(x, y == 1)
    for error in (0.2, 0.4, 0.49):
        noise, power = Marvell(0.1, error=error)._search(found, 6)
        steps = math.log(power / (0.1 * found.g)) / math.log(1.5)
        assert 0.5 - math.sqrt(noise.sum_kl) / 4 >= error
        assert steps == pytest.approx(round(steps)), "s is multiplied by 1.5"
        less = solve(found.u, found.v, found.g, 6, found.p, power / 1.5)
        assert 0.5 - math.sqrt(less.sum_kl) / 4 < error, "and no more often than needed"
        added = noised(x, y, 0.1, error=error) - x
        assert float(added.square().sum(dim=1).mean()) == pytest.approx(power, rel=0.05)
    assert Marvell(25.0, error=0.1)._search(found, 6)[1] == 25 * found.g, "enough already"


# The edges


@pytest.mark.parametrize("only", [0, 1])
def test_a_batch_of_one_class_is_never_released_clean(only, caplog):
    x, _ = gaussians(rows=4000)
    with caplog.at_level(logging.INFO, "vflsec"):
        noise = noised(x, torch.full((4000,), only), 2.0) - x
    assert "white noise" in caplog.text
    expected = 2 * float(x.norm(dim=1).max()) / math.sqrt(6)
    assert float(noise.std()) == pytest.approx(expected, rel=0.02)


def test_after_a_batch_of_two_classes_it_has_their_power():
    x, y = gaussians(rows=4000)
    defense, ones = Marvell(2.0), torch.ones(4000, dtype=torch.long)
    defense.on_gradient(x, release_to(y))
    power = 2 * get_moments(x, y == 1).g
    noise = defense.on_gradient(x, release_to(ones)) - x
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(power, rel=0.05)
    for other in ({"receiver": "passive_2"}, {"phase": "finetune"}):  # whose gradients have another scale
        noise = defense.on_gradient(x, release_to(ones, **other)) - x
        assert float(noise.std()) == pytest.approx(2 * float(x.norm(dim=1).max()) / math.sqrt(6), rel=0.05)


def test_equal_means_are_noised_like_one_class():
    x = torch.ones(4000, 3) + 1e-3
    y = torch.arange(4000) % 2
    noise = noised(x, y) - x
    assert float(noise.std()) == pytest.approx(float(x[0].norm()) / math.sqrt(3), rel=0.03)


def test_one_dimension():
    x, y = gaussians(d=1)
    found = get_moments(x, y == 1)
    assert float((noised(x, y) - x).square().mean()) == pytest.approx(found.g, rel=0.03)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (1, 1), (2, 1), (2, 5), (3, 0)])
def test_small_batches(shape):
    x = torch.arange(float(math.prod(shape))).reshape(shape) + 1
    released = noised(x, torch.arange(shape[0]) % 2)
    assert released.shape == shape
    assert torch.isfinite(released).all()
    assert x.numel() == 0 or not torch.equal(released, x)


def test_without_labels_it_is_refused():
    with pytest.raises(UsageError, match="labels .*active has none"):
        noised(torch.ones(2, 3), None)


def test_further_rows_without_labels_get_the_power_of_those_that_have_some():
    """As FedCVT sends them, after the labeled ones of each step."""
    x, y = gaussians(rows=4000)
    defense = Marvell(2.0)
    defense.on_gradient(x, release_to(y))
    noise = defense.on_gradient(x, release_to(None)) - x
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(2 * get_moments(x, y == 1).g, rel=0.05)


def test_more_than_two_classes_are_refused_before_training():
    settings = {"dataset": "toy", "data": {"options": {"rows": 300, "classes": 3}}, "train": {"epochs": 1}}
    swept = {**settings, "strengths": [1], "attacks": [{"name": "logistic"}]}
    for options, match in [({}, "got 3 classes: name the one"), ({"positive": 3}, "positive in 0 to 2, got 3")]:
        with pytest.raises(UsageError, match=match):
            engine.check(specs.read({**swept, "defenses": [{"name": "marvell", "options": options}]}))
        fixed = [{"name": "marvell", "strength": 1.0, "options": options}]
        with pytest.raises(UsageError, match=match):
            engine.check_training(specs.read({**settings, "fixed": fixed}))
    engine.check(specs.read({**swept, "defenses": [{"name": "marvell", "options": {"positive": 2}}]}))


def test_labels_of_a_third_class_are_refused_even_so():
    with pytest.raises(UsageError, match="got 3 classes"):
        noised(torch.ones(3, 2), torch.tensor([0, 1, 2]))


def test_a_named_class_is_hidden_among_all_others():
    x, y = gaussians(rows=2000)
    renamed = torch.where(y == 1, 2, torch.arange(2000) % 2)
    assert torch.equal(noised(x, renamed, positive=2), noised(x, y))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"error": 0.5}, "expected 0 <= error < 0.5, got 0.5"),
        ({"error": -0.1}, "expected 0 <= error < 0.5"),
    ],
)
def test_impossible_options_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        Marvell(1.0, **options)


def test_repeated_releases_average_out():
    """The adaptive adversary, against whom no bound is stated: 1/sqrt(n) of the noise is left of n releases."""
    x, y = gaussians(rows=200)
    defense, release = Marvell(4.0), release_to(y)
    mean = torch.stack([defense.on_gradient(x, release) for _ in range(400)]).mean(dim=0)
    assert float((mean - x).norm()) == pytest.approx(float((noised(x, y, 4.0) - x).norm()) / 20, rel=0.2)
