"""LiRA and the classifier reach closed forms, RMIA is its formula, and all find rows learned by heart."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from vflsec.attacks.lira import LikelihoodRatio
from vflsec.attacks.membership import MembershipInference
from vflsec.attacks.rmia import RobustMembershipInference
from vflsec.attacks.shadow_classifier import ShadowClassifier, _make_features, _score_classes
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Shadows, View
from vflsec.data.partition import DataSpec
from vflsec.inference.shadows import log_odds
from vflsec.results import metrics
from vflsec.run.adversary import draw_variants
from vflsec.run.federation import Candidates, build_federation, build_method
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec
from vflsec.run.training import get_shadows
from vflsec.testing.federations import make_toy_cell

N, SHADOWS = 3000, 256
AUC_ERROR = np.sqrt((2 * N + 1) / (12 * N * N))  # of a guess that knows nothing, which varies most


def halves(shadows, n, seed=0):
    """Which of the first n of 2n candidates each shadow was trained on (S, 2n), as the engine draws them."""
    target = Candidates.draw(seed, n, n)
    inside = {"train": torch.ones(n, dtype=torch.bool), "test": torch.zeros(n, dtype=torch.bool)}
    return torch.stack([target.deal(k).gather(inside) for k in range(shadows)])


def gaussian(d, *, shadows, n, seed=0, spread=0.0, modes=False):
    """A view of 2n candidates and who is a member: phi is normal, and being trained on adds d standard deviations.

    Means differ by candidate, and standard deviations by ``spread`` on a logarithmic scale. With ``modes``, being
    trained on adds or subtracts d, by a coin for each model; phi of others has mean and variance of this mixture.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    mean, sd = 3 * normal(2 * n), (spread * normal(2 * n)).exp()
    labels = torch.randint(3, (2 * n,), generator=rng)
    member = halves(2, n, seed + 1)[0]
    members = halves(shadows, n, seed)

    def logits(inside):
        noise, shift = normal(*inside.shape), d * inside
        if modes:
            noise = torch.where(inside, noise, math.hypot(1, d) * noise)
            shift = torch.where(torch.rand(inside.shape, generator=rng) < 0.5, shift, -shift)
        phi = mean + sd * (noise + shift)
        z = torch.full((*inside.shape, 3), -math.log(2), dtype=torch.float64)  # the others add up to exp(0)
        return z.scatter(-1, labels[:, None].expand(*inside.shape, 1), phi[..., None])

    none = torch.zeros(0, dtype=torch.long)
    view = View("active", "active", 2, {"candidates": torch.zeros(2 * n, 1)}, None, none, none,
                labels={"candidates": labels}, predictions={"candidates": logits(member)},
                shadows=Shadows(logits(members), members))  # fmt: skip
    return view, member.long()


def by_heart(seed, *, epochs=100, lr=5e-3, shadows=32):
    """The question to the active party of a federation that learned 300 random labels, with its shadows."""
    train, model = TrainSpec(epochs=epochs, batch=64, lr=lr), ModelSpec(bottom=(64,))
    cell = make_toy_cell(seed=seed, signal="none", rows=1050, data=DataSpec(n_labeled=300), train=train, model=model)
    trained = build_method(cell).fit(build_federation(cell, "cpu"))
    question = ask(MembershipInference(), trained, "active", AuxSpec(n=20))
    return question._replace(view=replace(question.view, shadows=get_shadows(cell, shadows, "cpu")))


def scores(attack, view):
    return attack(view, seed=0).scores["candidates"].numpy()


def exploded(view, factor=100.0):
    """The same view, with one shadow whose logits are that many times as large."""
    logits, members = view.shadows
    larger = torch.where(torch.arange(len(logits))[:, None, None] == 3, factor * logits, logits)
    return replace(view, shadows=Shadows(larger, members))


def auc(attack, view, member):
    return metrics.auc(scores(attack, view), np.asarray(member))


def tpr(attack, view, member, fpr=0.01):
    return metrics.tpr_at(scores(attack, view), np.asarray(member), fpr=fpr)


@pytest.fixture(scope="module")
def learned():
    return [by_heart(seed) for seed in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("d", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("options", [{"variance": "global"}, {"variance": "candidate"}, {"mode": "offline"}], ids=str)
def test_gaussian_confidences_give_the_closed_form(d, options):
    """No test of phi finds more: AUC = Phi(d / sqrt 2), and TPR = Phi(d + Phi^-1(FPR))."""
    view, member = gaussian(d, shadows=SHADOWS, n=N)
    attack = LikelihoodRatio(**options)
    assert auc(attack, view, member) == pytest.approx(stats.norm.cdf(d / np.sqrt(2)), abs=4 * AUC_ERROR)
    expected = stats.norm.cdf(d + stats.norm.ppf(0.01))
    slope = stats.norm.pdf(d + stats.norm.ppf(0.01)) / stats.norm.pdf(stats.norm.ppf(0.01))
    error = np.sqrt((expected * (1 - expected) + slope**2 * 0.01 * 0.99) / N)  # of members, and of the threshold
    assert tpr(attack, view, member) == pytest.approx(expected, abs=4 * error)


@pytest.mark.long
def test_candidates_that_vary_differently_have_variances_of_their_own():
    view, member = gaussian(1.5, shadows=SHADOWS, n=N, spread=1.0)
    expected = stats.norm.cdf(1.5 / np.sqrt(2))
    own, pooled = (auc(LikelihoodRatio(variance=kind), view, member) for kind in ("candidate", "global"))
    assert own == pytest.approx(expected, abs=4 * AUC_ERROR)
    assert pooled < expected - 4 * AUC_ERROR


def test_few_shadows_share_a_variance_and_many_do_not():
    few, many = (gaussian(1.0, shadows=count, n=50)[0] for count in (62, 64))
    for view, kind in ((few, "global"), (many, "candidate")):
        assert np.array_equal(scores(LikelihoodRatio(), view), scores(LikelihoodRatio(variance=kind), view))


@pytest.mark.parametrize("options", [{}, {"variance": "candidate"}, {"mode": "offline"}], ids=str)
def test_four_shadows_are_enough_to_run(options):
    view, member = gaussian(2.0, shadows=4, n=2000)
    assert auc(LikelihoodRatio(**options), view, member) > 0.65


def test_the_score_is_the_formula_candidate_by_candidate():
    view, _ = gaussian(1.0, shadows=10, n=20)
    y, (logits, members) = view.labels["candidates"], view.shadows
    found = scores(LikelihoodRatio(variance="candidate"), view)
    offline = scores(LikelihoodRatio(variance="candidate", mode="offline"), view)
    phi, of_shadows = log_odds(view.predictions["candidates"], y).numpy(), log_odds(logits, y).numpy()
    for i in range(40):
        inside, outside = (of_shadows[members[:, i].numpy() == one, i] for one in (True, False))
        m_in, m_out = (stats.norm(one.mean(), one.std(ddof=1)) for one in (inside, outside))
        assert found[i, 1] - found[i, 0] == pytest.approx(m_in.logpdf(phi[i]) - m_out.logpdf(phi[i]))
        assert offline[i, 1] - offline[i, 0] == pytest.approx((phi[i] - m_out.mean()) / m_out.std())


def test_log_odds_are_exact_where_probabilities_are_rounded():
    z = torch.tensor([[100.0, 0.0, 0.0], [0.0, 1000.0, 0.0]])
    assert log_odds(z, torch.tensor([0, 0])).tolist() == pytest.approx([100 - np.log(2), -1000])


def test_offline_does_not_read_shadows_with_the_candidate():
    view, _ = gaussian(1.0, shadows=16, n=50)
    logits, members = view.shadows
    other = replace(
        view, shadows=Shadows(torch.where(members[..., None], torch.randn(logits.shape).double(), logits), members)
    )
    attack = LikelihoodRatio(mode="offline")
    assert np.array_equal(scores(attack, view), scores(attack, other))
    assert not np.array_equal(scores(LikelihoodRatio(), view), scores(LikelihoodRatio(), other))


def test_shadows_that_all_agree_give_finite_scores():
    view, _ = gaussian(1.0, shadows=4, n=50)
    flat = replace(view, shadows=Shadows(torch.zeros_like(view.shadows.logits), view.shadows.members))
    for options in ({}, {"variance": "candidate"}, {"mode": "offline"}):
        assert np.isfinite(scores(LikelihoodRatio(**options), flat)).all()
    assert np.unique(scores(LikelihoodRatio(), flat)).tolist() == [0]


@pytest.mark.long
def test_at_low_fpr_it_finds_more_rows_learned_by_heart_than_the_loss(learned):
    """Some rows have the label that other rows suggest: their loss is low, in training or not."""
    loss, lira, rmia, classifier = (
        np.mean(
            [(tpr(attack, q.view, y), auc(attack, q.view, y)) for q in learned for y in q.truth.labels.values()], axis=0
        )
        for attack in (
            MembershipInference(mode="loss"),
            LikelihoodRatio(),
            RobustMembershipInference(),
            ShadowClassifier(),
        )
    )
    assert lira[0] > 2 * loss[0]
    assert rmia[0] > 2 * loss[0]
    assert min(lira[1], rmia[1], classifier[1]) > loss[1] + 0.03


@pytest.mark.long
def test_the_attacked_federation_is_drawn_like_its_shadows(learned):
    """It is attacked as well as each shadow would be, by the others: neither knows more of its members."""
    view, truth = learned[0].view, learned[0].truth.labels["candidates"]
    logits, members = view.shadows
    found = []
    for k in range(len(members)):
        others = torch.arange(len(members)) // 2 != k // 2  # nor the one on the other half
        scene = replace(view, predictions={"candidates": logits[k]}, shadows=Shadows(logits[others], members[others]))
        found.append(auc(LikelihoodRatio(), scene, members[k].long()))
    own = auc(LikelihoodRatio(), view, truth)
    assert abs(own - np.mean(found)) < 3 * np.std(found, ddof=1)


@pytest.mark.long
def test_a_model_that_learned_nothing_tells_nothing():
    error = np.sqrt(601 / (12 * 300 * 300))
    for seed in range(3):
        question = by_heart(seed, epochs=1, lr=1e-9, shadows=4)
        for attack in (
            LikelihoodRatio(),
            LikelihoodRatio(mode="offline"),
            RobustMembershipInference(),
            ShadowClassifier(),
        ):
            assert auc(attack, question.view, question.truth.labels["candidates"]) == pytest.approx(0.5, abs=4 * error)


def test_a_candidate_without_enough_shadows_is_refused():
    view, _ = gaussian(1.0, shadows=4, n=20)
    logits, members = view.shadows
    lacking = replace(view, shadows=Shadows(logits[:3], members[:3]))
    for attack in (LikelihoodRatio(), RobustMembershipInference(), ShadowClassifier()):
        with pytest.raises(InsufficientView, match="2 shadow federations.*each candidate"):
            attack(lacking, seed=0)


@pytest.mark.parametrize("attack", [LikelihoodRatio, RobustMembershipInference, ShadowClassifier])
@pytest.mark.parametrize("shadows", [2, 63])
def test_too_few_shadows_or_an_odd_number_are_refused(attack, shadows):
    with pytest.raises(UsageError, match=f"at least 4, got {shadows}"):
        attack(shadows=shadows)


@pytest.mark.parametrize("options", [{}, {"gamma": 1.1}, {"mode": "offline"}, {"mode": "offline", "a": 1.0}], ids=str)
def test_rmia_is_the_share_of_pairs(options):
    attack = RobustMembershipInference(shadows=8, **options)
    view, _ = gaussian(1.0, shadows=8, n=30)
    y, (logits, members) = view.labels["candidates"], view.shadows
    p = view.predictions["candidates"].softmax(dim=1)[torch.arange(60), y]
    of_shadows = logits.softmax(dim=2)[:, torch.arange(60), y]
    p_in, p_out = ((of_shadows * own).sum(dim=0) / own.sum(dim=0) for own in (members, ~members))
    prior = (p_in + p_out) / 2 if attack.mode == "online" else ((1 + attack.a) * p_out + 1 - attack.a) / 2
    pairs = (p / prior)[:, None] / (p / prior)[None, :]
    expected = (pairs >= attack.gamma * (1 - 1e-12)).double().mean(dim=1)
    assert scores(attack, view)[:, 1] == pytest.approx(expected.numpy() - 0.5, abs=1e-6)


def test_gamma_keeps_the_order_of_candidates_and_ties_some():
    view, _ = gaussian(1.0, shadows=16, n=500)
    one, two = (scores(RobustMembershipInference(gamma=gamma), view)[:, 1] for gamma in (1.0, 1.5))
    assert len(np.unique(two)) < len(np.unique(one)) == 1000
    assert (np.diff(two[np.argsort(one)]) >= 0).all()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_it_beats_chance_and_never_the_optimum(mode):
    n, d = 2000, 1.0
    view, member = gaussian(d, shadows=64, n=n)
    found, error = auc(RobustMembershipInference(mode=mode), view, member), np.sqrt((2 * n + 1) / (12 * n * n))
    assert 0.5 + 4 * error < found < stats.norm.cdf(d / np.sqrt(2)) + 4 * error
    assert auc(RobustMembershipInference(mode=mode), *gaussian(0.0, shadows=64, n=n)) == pytest.approx(
        0.5, abs=4 * error
    )


def test_a_search_varies_the_weight_of_offline_shadows_alone():
    assert draw_variants(RobustMembershipInference(), 4, np.random.default_rng(0)) == []
    found = draw_variants(RobustMembershipInference(mode="offline"), 4, np.random.default_rng(0))
    assert sorted(variant.a for variant in found) == [0.0, 0.6, 1.0]


def test_extreme_logits_give_finite_scores():
    view, _ = gaussian(1.0, shadows=4, n=20)
    view.predictions["candidates"].mul_(1e4)
    view.shadows.logits.mul_(1e4)
    for options in ({}, {"mode": "offline"}, {"mode": "offline", "a": 1.0}):
        assert np.isfinite(scores(RobustMembershipInference(**options), view)).all()


@pytest.mark.parametrize(
    ("options", "match"), [({"gamma": 0.9}, "expected gamma >= 1, got 0.9"), ({"a": 2}, "expected 0 <= a <= 1, got 2")]
)
def test_impossible_weights_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        RobustMembershipInference(**options)


@pytest.mark.sampled
@pytest.mark.parametrize("d", [0.0, 0.5, 1.5])
def test_the_classifier_comes_near_the_closed_form(d):
    """No function of phi finds more, and at d = 0 there is nothing to be found."""
    view, member = gaussian(d, shadows=64, n=N)
    expected = stats.norm.cdf(d / np.sqrt(2))
    assert expected - 0.03 < auc(ShadowClassifier(), view, member) < expected + 4 * AUC_ERROR


@pytest.mark.long
def test_the_classifier_finds_two_modes_that_ratios_miss():
    """LiRA sees mean and variance, which are equal; the best test is the ratio of densities."""
    d, n = 3.0, 1000
    scene = gaussian(d, shadows=64, n=n, modes=True)
    found, lira, rmia = (
        auc(attack, *scene) for attack in (ShadowClassifier(), LikelihoodRatio(), RobustMembershipInference())
    )
    x = np.linspace(-20, 20, 4001)
    inside, outside = stats.norm.pdf(x - d) + stats.norm.pdf(x + d), stats.norm.pdf(x, scale=np.hypot(1, d))
    inside, outside = (density[np.argsort(inside / outside)] / density.sum() for density in (inside, outside))
    best = inside @ (outside.cumsum() - outside / 2)
    assert best - 0.03 < found < best + 4 * np.sqrt((2 * n + 1) / (12 * n * n))
    assert found > max(lira, rmia) + 0.1


def test_statistics_of_a_shadow_are_those_of_the_others():
    """Neither it nor the shadow on the other half is in them: equal for both, they do not tell who was trained on."""
    view, _ = gaussian(1.0, shadows=10, n=20)
    y, (logits, members) = view.labels["candidates"], view.shadows
    found, k = _score_classes(logits, y), torch.arange(10)
    features = _make_features(found, found, members, left_out=k ^ 1)
    for one in range(10):
        others = k // 2 != one // 2
        alone = _make_features(found[:, one], found[:, others], members[others])
        assert torch.allclose(features[one], alone)
        phi = log_odds(logits, y)[others].masked_fill(~members[others], torch.nan).numpy()
        assert np.allclose(alone[:, 0], log_odds(logits, y)[one].numpy() - np.nanmean(phi, axis=0))
        assert np.allclose(alone[:, 12], np.nanstd(phi, axis=0, ddof=1))


@pytest.mark.parametrize("attack", [LikelihoodRatio(), RobustMembershipInference(), ShadowClassifier()], ids=str)
def test_one_exploded_shadow_costs_little(attack):
    view, member = gaussian(1.5, shadows=16, n=1000)
    assert auc(attack, exploded(view), member) > auc(attack, view, member) - 0.02


def test_an_exploded_shadow_is_left_out():
    view, _ = gaussian(1.0, shadows=16, n=50)
    assert LikelihoodRatio()(exploded(view), seed=0).budget == {"shadows": 15}
    assert LikelihoodRatio()(exploded(view, 3.0), seed=0).budget == {"shadows": 16}


def test_equal_seeds_give_equal_guesses():
    view, _ = gaussian(1.0, shadows=16, n=500)
    assert np.array_equal(scores(ShadowClassifier(), view), scores(ShadowClassifier(), view))
