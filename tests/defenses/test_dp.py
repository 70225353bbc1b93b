"""Differential privacy: the noise has the scale that is accounted for, and the account is that of known formulas."""

import math
import warnings

import numpy as np
import pytest
import torch
from games import Game, at_least, either_label, gaussian, labels_by_their_gradients, opposite_rows
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy import stats

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.defenses.gaussian_dp import ORDERS, GaussianDP, compute_epsilon, find_multiplier
from vflsec.defenses.label_dp import LabelDP
from vflsec.defenses.laplace_dp import LaplaceDP
from vflsec.run.spec import parse_defense

DELTA = 1e-5
NOISES = {GaussianDP: (2, stats.norm), LaplaceDP: (1, stats.laplace)}


def released(defense, value, point="gradient", rng=None):
    release = Release("a", "b", Kind(point), 0, "train", "value", None, None, rng or make_rng(0, "dp"))
    return getattr(defense, f"on_{point}")(value, release)


@pytest.mark.sampled
@pytest.mark.parametrize("made", NOISES)
@pytest.mark.parametrize(("point", "strength"), [("gradient", 0.5), ("gradient", 20.0), ("embedding", 3.0)])
def test_noise_is_strength_times_the_sensitivity(made, point, strength):
    x = torch.zeros(4000, 8)
    scale = strength * 2 * 0.7 / (4000 if point == "gradient" else 1)
    noise = released(made(strength, at=[point], clip=0.7), x, point)
    distribution = NOISES[made][1]
    assert float(noise.std()) == pytest.approx(scale * distribution.std(), rel=0.02)
    z = noise.flatten().double().numpy() / scale
    assert stats.kstest(z, distribution.cdf).pvalue > 0.01
    assert stats.kstest(z / 1.1, distribution.cdf).pvalue < 1e-6  # a scale 10 % off is rejected
    assert stats.kstest(z / 0.9, distribution.cdf).pvalue < 1e-6


@pytest.mark.parametrize("made", NOISES)
@pytest.mark.parametrize("point", ["gradient", "embedding"])
def test_each_row_is_clipped_by_itself(made, point):
    """A row's own loss is what is clipped: what is sent of a batch of n is one n-th of that. Small rows stay."""
    x = torch.randn(50, 6, generator=make_rng(1, "rows"), dtype=torch.float64) * torch.logspace(-4, 2, 50)[:, None]
    bound = 0.2 / (50 if point == "gradient" else 1)
    clipped = released(made(1e-12, at=[point]), x, point)
    norms, before = (torch.linalg.vector_norm(rows, ord=NOISES[made][0], dim=1) for rows in (clipped, x))
    assert torch.allclose(norms, before.clamp(max=bound), rtol=1e-6)
    assert torch.allclose(torch.nn.functional.cosine_similarity(clipped, x), torch.ones(50, dtype=torch.float64))
    assert 0 < int((before < bound).sum()) < 50


@pytest.mark.parametrize("made", NOISES)
@pytest.mark.parametrize("point", ["gradient", "embedding"])
@pytest.mark.parametrize("text", ["strength=0", "epsilon=inf"])
def test_no_protection_is_the_identity(made, point, text):
    spec = parse_defense(f"{made.name}:{text}")
    x = torch.randn(20, 3, generator=make_rng(2, "rows")) * 100
    defense = made(spec.strength, at=[point], **spec.options)
    rng = make_rng(0, "dp")
    state = rng.get_state()
    assert released(defense, x, point, rng) is x
    assert torch.equal(rng.get_state(), state)
    assert defense.privacy_spent(5) is None


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 30.0])
def test_one_release_costs_what_the_analytic_formula_says(sigma):
    exact = gaussian(sigma, 1, DELTA)
    assert exact <= compute_epsilon(sigma, 1, DELTA, "prv") <= exact + 0.02
    assert exact <= compute_epsilon(sigma, 1, DELTA, "rdp") <= 1.15 * exact


@pytest.mark.parametrize(("sigma", "releases"), [(4.0, 20), (20.0, 300), (0.8, 60)])
def test_a_composed_run_costs_what_opacus_says_by_hand(sigma, releases):
    renyi = RDPAccountant()
    for _ in range(releases):
        renyi.step(noise_multiplier=sigma, sample_rate=1.0)
    assert compute_epsilon(sigma, releases, DELTA) == pytest.approx(renyi.get_epsilon(DELTA, alphas=ORDERS), rel=1e-9)
    exact = gaussian(sigma, releases, DELTA)
    assert exact <= compute_epsilon(sigma, releases, DELTA) <= 1.15 * exact
    if exact < 50:
        with np.errstate(divide="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            numerical = PRVAccountant()
            numerical.history = [(sigma, 1.0, releases)]
            assert compute_epsilon(sigma, releases, DELTA, "prv") == pytest.approx(
                numerical.get_epsilon(DELTA), rel=1e-9
            )
        assert exact <= compute_epsilon(sigma, releases, DELTA, "prv") <= exact + 0.02
    assert GaussianDP(sigma).privacy_spent(releases) == {
        "epsilon": compute_epsilon(sigma, releases, DELTA),
        "delta": DELTA,
    }


def test_a_tiny_noise_has_a_finite_epsilon_with_either_accountant():
    """PRV's grid would take minutes and gigabytes, and end in infinity."""
    assert compute_epsilon(0.01, 300, DELTA, "prv") == compute_epsilon(0.01, 300, DELTA, "rdp") < 1e7


@pytest.mark.sampled
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize(("target", "releases"), [(1.0, 20), (8.0, 300), (0.1, 1)])
def test_the_noise_is_the_least_that_keeps_to_the_epsilon(accountant, target, releases):
    sigma = find_multiplier(target, releases, DELTA, accountant)
    assert target * (1 - 1e-3) <= compute_epsilon(sigma, releases, DELTA, accountant) <= target
    made = GaussianDP(1 / target, unit="1/epsilon", accountant=accountant)
    made.plan_releases(releases)
    assert made.scale == sigma
    assert made.privacy_spent(releases)["epsilon"] == pytest.approx(target, rel=1e-3)
    assert made.privacy_spent(2 * releases)["epsilon"] > target  # what was said counts, not what was planned


def test_laplace_adds_up():
    assert LaplaceDP(4.0).privacy_spent(20) == {"epsilon": 5.0, "delta": 0.0}
    made = LaplaceDP(0.5, unit="1/epsilon")
    made.plan_releases(20)
    assert made.scale == 10.0
    assert made.privacy_spent(20) == {"epsilon": 2.0, "delta": 0.0}


def test_an_epsilon_needs_a_known_number_of_releases():
    with pytest.raises(UsageError, match="how often it releases"):
        GaussianDP(1.0, unit="1/epsilon").plan_releases(None)
    with pytest.raises(UsageError, match="larger epsilon"):
        GaussianDP(1e9, unit="1/epsilon", accountant="prv").plan_releases(3)
    GaussianDP(1.0).plan_releases(None)
    for wrong in ({"clip": 0.0}, {"delta": 0.0}, {"delta": 1.0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            GaussianDP(1.0, **wrong)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("eps", [0.5, 2.0])
def test_randomized_response_flips_with_its_probability(classes, eps):
    y = torch.arange(200_000) % classes
    made = LabelDP(1 / eps)
    told = made.on_labels(y, features=y[:, None], n_classes=classes, rng=make_rng(0, "labels"))
    kept = int((told == y).sum())
    p = math.exp(eps) / (math.exp(eps) + classes - 1)
    assert made.compute_keep_probability(classes) == pytest.approx(p)
    assert stats.binomtest(kept, len(y), p).pvalue > 0.01
    for wrong in (0.9 * eps, 1.1 * eps):  # an epsilon 10 % off is rejected
        off = math.exp(wrong) / (math.exp(wrong) + classes - 1)
        assert stats.binomtest(kept, len(y), off).pvalue < 1e-6
    shifts = torch.bincount((told - y) % classes, minlength=classes)[1:]
    assert classes == 2 or stats.chisquare(shifts.numpy()).pvalue > 0.01  # all other classes alike


def test_randomized_response_has_an_exact_epsilon():
    for eps in (0.5, 1.0, 2.0, 3.0, 8.0):
        made = LabelDP(1 / eps)
        kept, flipped = made.compute_keep_probability(5), (1 - made.compute_keep_probability(5)) / 4
        assert math.log(kept / flipped) == pytest.approx(eps, rel=1e-12)
        assert made.privacy_spent(1) == {"epsilon": pytest.approx(eps, rel=1e-12), "delta": 0.0}
    y = torch.arange(10)
    assert LabelDP(0.0).on_labels(y, features=y[:, None], n_classes=10, rng=make_rng(0, "labels")) is y
    assert torch.equal(LabelDP(1e-3).on_labels(y, features=y[:, None], n_classes=10, rng=make_rng(0, "labels")), y)


@pytest.mark.statistical
@pytest.mark.parametrize("made", NOISES)
def test_what_can_be_told_apart_at_worst_stays_below_epsilon_and_comes_close(made):
    """Two neighbors at opposite ends of what clipping leaves, released as often as is accounted for."""
    releases, target = 5, 2.0
    options = {"delta": 0.01} if made is GaussianDP else {}  # what happens once in 100,000 no test sees
    defense = made(1 / target, at=["embedding"], unit="1/epsilon", **options)
    defense.plan_releases(releases)
    game = opposite_rows(defense, releases=releases)
    (spent,) = game.spent
    assert spent["epsilon"] == pytest.approx(target, rel=1e-3)
    assert 0.5 * target < at_least(game, spent["delta"]) < target
    weaker = made(defense.scale / 3, at=["embedding"])
    assert at_least(opposite_rows(weaker, releases=releases), spent["delta"]) > target  # a third of the noise


def test_the_last_bits_of_floats_tell_more_than_epsilon_as_the_card_says():
    """Mironov 2012: beyond C the likelihood ratio is one number; which float it is rounded to depends on the row."""
    made = LaplaceDP(0.5, at=["embedding"], unit="1/epsilon")
    made.plan_releases(1)
    present = torch.arange(40_000) % 2
    heard = released(made, 50.0 * (2.0 * present[:, None] - 1), "embedding", make_rng(3, "trials"))[:, 0]
    ratio = ((heard + made.clip).abs() - (heard - made.clip).abs()).numpy()
    assert at_least(Game(ratio[present == 0], ratio[present == 1], []), 0.0) > 3 > made.privacy_spent(1)["epsilon"]


@pytest.mark.statistical
@pytest.mark.parametrize("eps", [0.5, 2.0])
def test_randomized_labels_come_close_to_their_epsilon(eps):
    game = either_label(LabelDP(1 / eps))
    assert 0.85 * eps < at_least(game, 0.0) < game.spent[0]["epsilon"] == pytest.approx(eps)
    assert at_least(either_label(LabelDP(1 / (1.25 * eps))), 0.0) > eps  # the same audit convicts a quarter more


@pytest.mark.statistical
@pytest.mark.parametrize("text", ["gaussian-dp:epsilon=1", "laplace-dp:epsilon=1", "label-dp:epsilon=1@labels"])
def test_on_the_planted_data_no_label_attack_beats_epsilon(text):
    game, undefended = labels_by_their_gradients(text), labels_by_their_gradients()
    (spent,) = game.spent
    assert spent["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert spent.get("releases", 4) == 4
    found = at_least(game, spent["delta"])
    print(f"{text}: lower bound {found:.3f}, stated {spent['epsilon']:.3f}")  # noqa: T201
    assert found < spent["epsilon"] < at_least(undefended, spent["delta"])
