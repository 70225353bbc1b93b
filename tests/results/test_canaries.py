"""Lower bounds of epsilon: known values, naive versions, and games whose epsilon is known."""

import math

import epsilon_bounds
import numpy as np
import pytest
from scipy import integrate, stats

from vflsec.results import canaries


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.8, 6.0])
@pytest.mark.parametrize("delta", [1e-5, 0.01])
def test_mu_is_converted_as_an_integral_of_the_privacy_loss_says(mu, delta):
    """Delta is the integral of (p - e^epsilon q)+ over two Gaussians at a distance of mu."""
    epsilon = epsilon_bounds.gaussian_epsilon(mu, delta)

    def excess(x):
        return stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x)

    start = epsilon / mu + mu / 2  # where the densities differ by e^epsilon
    found = integrate.quad(excess, start, start + 12, epsabs=1e-14)[0]
    assert epsilon > 0
    assert found == pytest.approx(delta, rel=1e-6)


def test_a_distance_that_delta_covers_has_no_epsilon():
    assert epsilon_bounds.gaussian_epsilon(0.0, 1e-5) == epsilon_bounds.gaussian_epsilon(-1.0, 1e-5) == 0.0
    assert epsilon_bounds.gaussian_epsilon(0.01, 0.01) == 0.0  # total variation .004


def test_the_least_parameters_are_those_of_the_best_tests():
    """A test between two mechanisms of a known parameter, at any threshold, gives back the parameter."""
    thresholds = np.linspace(-1, 2, 7)
    gaussian = epsilon_bounds.gaussian(stats.norm.sf(thresholds), stats.norm.sf(thresholds - 0.7))
    np.testing.assert_allclose(gaussian, 0.7)
    kept = 1 / (1 + math.exp(-2.0))  # randomized response of epsilon 2, in which a share of .01 is shown
    kept = 0.01 + 0.99 * kept
    np.testing.assert_allclose(epsilon_bounds.approximate(0.01)(np.array([1 - kept]), np.array([kept])), 2.0)
    inside = np.linspace(0.05, 1.45, 5)
    laplace = epsilon_bounds.laplace(1)(stats.laplace.sf(inside), stats.laplace.sf(inside - 1.5))
    assert np.all(laplace <= 1.5)
    np.testing.assert_allclose(laplace, 1.5, rtol=2e-3)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_the_power_against_one_laplace_release_has_a_closed_form(epsilon):
    """Dong, Roth and Su, proposition A.6."""
    for fpr in (0.001, 0.05, 0.2, 0.45, 0.7, 0.99):
        if fpr < math.exp(-epsilon) / 2:
            missed = 1 - math.exp(epsilon) * fpr
        else:
            missed = math.exp(-epsilon) * (1 / (4 * fpr) if fpr <= 0.5 else 1 - fpr)
        found = epsilon_bounds.laplace_power(fpr, epsilon, 1)
        assert 1 - missed - 1e-9 <= found <= 1 - missed + epsilon / 1000


@pytest.mark.parametrize("releases", [2, 5])
def test_no_test_of_laplace_releases_has_more_power_and_the_best_comes_close(releases):
    """Neither of several entries, however the difference is divided among them, nor of several releases."""
    rng, own, n = np.random.default_rng(0), 3.0 / releases, 200_000
    for division in ([1.0], [0.5, 0.5], [0.8, 0.2]):
        shift = own * np.array(division)
        losses = []
        for present in (0, 1):
            noised = rng.laplace(size=(n, releases, len(shift))) + present * shift
            losses.append((np.abs(noised) - np.abs(noised - shift)).sum(axis=(1, 2)))
        thresholds = np.linspace(-2.85, 2.95, 9)  # not at sums of atoms, which float arithmetic divides
        fpr, tpr = ((loss[:, None] >= thresholds).mean(axis=0) for loss in losses)
        allowed = np.array([epsilon_bounds.laplace_power(rate, 3.0, releases) for rate in fpr])
        assert np.all(tpr < allowed + 0.004)  # three standard deviations
        assert len(division) > 1 or np.all(tpr > allowed - 0.008)


@pytest.mark.parametrize(("right", "guesses", "tossed"), [(9, 10, 10), (40, 50, 60), (33, 60, 100), (12, 12, 30)])
@pytest.mark.parametrize("delta", [0.0, 1e-4, 1e-3])
def test_a_single_run_is_bounded_as_an_enumeration_says(right, guesses, tossed, delta):
    """Theorem 5.2, by sums over all numbers of right guesses."""

    def naive(epsilon):
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        mass = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]

        def tail(v):
            return sum(mass[max(v, 0) :])

        more = max((tail(right - i) - tail(right)) / i for i in range(1, tossed + 1))
        return tail(right) + 2 * tossed * delta * more

    for epsilon in (0.0, 0.3, 1.0, 2.5):
        found = canaries.bound_p_value(right, guesses, tossed, epsilon, delta)
        assert found == pytest.approx(min(1.0, naive(epsilon)), rel=1e-9)
    grid = np.arange(0.0, 6.0, 0.001)
    left = next(epsilon for epsilon in grid if naive(epsilon) > 0.05)  # the least that is not refuted
    assert canaries.bound_epsilon(right, guesses, tossed, delta) == pytest.approx(left, abs=0.0011)


def test_without_a_delta_a_single_run_is_bounded_by_clopper_and_pearson():
    low = stats.binomtest(70, 90, alternative="greater").proportion_ci(0.95).low
    assert canaries.bound_epsilon(70, 90, 200) == pytest.approx(math.log(low / (1 - low)), abs=1e-5)
    assert canaries.bound_epsilon(45, 90, 200) == canaries.bound_epsilon(0, 0, 200) == 0.0
    with pytest.raises(ValueError, match="right <= guesses <= tossed"):
        canaries.bound_epsilon(3, 2, 5)


def test_rates_have_clopper_pearson_bounds():
    hits = np.array([0, 3, 20])
    by_scipy = [stats.binomtest(int(k), 20, alternative="greater").proportion_ci(0.99).low for k in hits]
    np.testing.assert_allclose(canaries.bound_rate(hits, 20, 0.01), by_scipy, atol=1e-12)


def test_guesses_leave_out_what_is_not_sure():
    """Of 4,000 coins every fourth is shown; the others have noise around zero."""
    rng = np.random.default_rng(0)
    coins = rng.integers(2, size=4000)
    shown = rng.random(4000) < 0.25
    scores = np.where(shown, 10.0 * (2 * coins - 1), rng.normal(size=4000))
    right, guesses, tossed = canaries.count_confident(scores, coins)
    assert tossed == 3000
    assert right > 0.99 * guesses
    assert guesses == pytest.approx(750, abs=80)
    assert canaries.count_confident(scores[:0], coins[:0]) == (0, 0, 0)


def test_a_score_that_is_turned_round_or_constant_shows_nothing():
    rng = np.random.default_rng(0)
    coins = rng.integers(2, size=1000)
    for scores in (np.zeros(1000), -coins):
        assert canaries.bound_epsilon(*canaries.count_confident(scores, coins)) < 0.2
    assert epsilon_bounds.epsilon_at_least(np.ones(500), np.zeros(500), 0.0) == 0.0
    assert epsilon_bounds.epsilon_at_least(np.zeros(500), np.zeros(500), 0.0, tradeoff="gaussian") == 0.0
    assert epsilon_bounds.epsilon_at_least([], [], 0.0) == 0.0


def test_of_trials_in_unequal_numbers_none_is_counted_twice():
    rng = np.random.default_rng(0)
    found = [
        epsilon_bounds.at_least(rng.normal(size=200), rng.normal(0.5, size=4000), epsilon_bounds.gaussian)
        for _ in range(200)
    ]
    assert stats.binomtest(sum(x > 0.5 for x in found), 200, 0.05, alternative="greater").pvalue > 1e-3
    assert np.mean(found) > 0.15
