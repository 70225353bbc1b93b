"""Sealed training keeps its epsilon against those who know all but one label, and only with all of its noise."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats

from vflsec.cipher.noise import compute_delta
from vflsec.core.message import Step
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.spec import DefenseSpec

DELTA, EPOCHS, GAMES = 1e-5, 2, 100


def build(epsilon, rows, **options):
    """Return sealed training of split learning on toy data."""
    cell = make_cell(
        dataset="toy",
        data=DataSpec(options={"rows": rows}),
        method="fedsplitnn",
        method_options={},
        train=TrainSpec(),
        model=ModelSpec(bottom=(2,)),
        seed=0,
        defenses=(DefenseSpec(name="sealed", strength=1 / epsilon, options={"epochs": EPOCHS, "lr": 0.5, **options}),),
    )
    federation, method = build_federation(cell, "cpu"), build_method(cell)
    method.build(federation)
    return method.split(federation)


def list_models(training):
    return [training.scores, *(training.bottoms[party.name] for party in training.federation.passive)]


def play(training, games, rng):
    """Return (games,) log-likelihood ratios of label 1 of row 0 given all noised sums, and (games,) true labels.

    The adversary knows all columns, weights and other labels, sees the sums of every party, and knows the deviation of
    their noise: with Gaussian noise no statistic tells more.
    """
    rows = torch.arange(len(training.targets))
    fresh = [copy.deepcopy(model.state_dict()) for model in list_models(training)]
    ratios, truth = np.zeros(games), rng.integers(2, size=games)
    for game, label in enumerate(truth):
        for model, state in zip(list_models(training), fresh, strict=True):
            model.load_state_dict(state)
        optimizers = [torch.optim.Adam(model.parameters(), training.plan.lr) for model in list_models(training)]
        for epoch in range(EPOCHS):
            expected = []
            for guess in (0, 1):  # without noise, the models as they are
                training.targets[0] = guess
                expected.append(read_sums(training, Step(epoch, "train", rows, training.targets), noise=False))
            training.targets[0] = int(label)
            released = read_sums(training, Step(epoch, "train", rows, training.targets), noise=True)
            for optimizer in optimizers:
                optimizer.step()
            far, near = ((released - sums).square().sum() for sums in expected)
            ratios[game] += float(far - near) / (2 * training.scale**2)
    return ratios, truth


def read_sums(training, step, *, noise):
    """Return what all parties learn from a batch, the active one as well; their models have it as gradients."""
    draw = training._draw
    if not noise:
        training._draw = lambda like: torch.zeros(like.shape, dtype=torch.float64)
    training._update(step, [])
    training._draw = draw
    gradients = [p.grad.flatten() for model in list_models(training) for p in model.parameters()]
    return torch.cat(gradients).double() * len(step.rows)


def bound_epsilon(ratios, truth, delta):
    """Return what the games show of epsilon at least, with a confidence of 99.9 % over all thresholds."""
    best, thresholds = 0.0, np.quantile(ratios, np.linspace(0.02, 0.98, 25))
    level = 0.001 / (2 * 2 * len(thresholds))
    ones, zeros = ratios[truth == 1], ratios[truth == 0]
    for sign in (1, -1):
        a, b = (sign * ones, sign * zeros) if sign == 1 else (-zeros, -ones)
        for threshold in thresholds:
            hits, errors = (a > sign * threshold).sum(), (b > sign * threshold).sum()
            least = stats.beta.ppf(level, hits, len(a) - hits + 1) if hits else 0.0
            most = stats.beta.ppf(1 - level, errors + 1, len(b) - errors) if errors < len(b) else 1.0
            if least > delta:
                best = max(best, math.log((least - delta) / most))
    return best


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_games_show_no_more_than_the_stated_epsilon(epsilon):
    training, rng = build(epsilon, rows=30), np.random.default_rng(0)
    ratios, truth = play(training, GAMES, rng)
    assert bound_epsilon(ratios, truth, DELTA) <= epsilon
    assert compute_delta(training.plan.mu, epsilon) == pytest.approx(DELTA)
    # A ratio is normal, with mean mu^2 / 2 towards the truth and deviation mu, or less if weights are shorter than 1.
    towards = ratios * np.where(truth, 1, -1)
    assert towards.mean() <= training.plan.mu**2 / 2 + 4 * training.plan.mu / math.sqrt(GAMES)


@pytest.mark.statistical
def test_the_games_refute_a_mechanism_with_too_little_noise():
    training = build(1.0, rows=30)
    training.scale /= 16
    ratios, truth = play(training, GAMES, np.random.default_rng(0))
    assert bound_epsilon(ratios, truth, DELTA) > 1.0


@pytest.mark.parametrize("left_out", [True, False])
def test_only_with_noise_in_the_active_partys_own_learning_do_later_sums_stay_in_bounds(left_out):
    """All rows are alike and labels are even: without noise one label decides which way Adam moves the head."""
    training = build(1.0, rows=400, lr=0.02)
    for party in training.federation.parties.values():
        party.features["train"][:] = party.features["train"][0].clone()
    labels = torch.arange(len(training.targets)) % 2
    rows = torch.arange(len(labels) // 2 * 2)
    with torch.no_grad():
        training.top.head.bias.zero_()
        training.top.head.weight.zero_()
    state = [copy.deepcopy(model.state_dict()) for model in list_models(training)]
    released = []

    def draw(like):  # of the active party's own sum, which either has no noise or is released, and the same to both
        if left_out or like.shape != (sum(p.numel() for p in training.scores.parameters()),):
            return torch.zeros(like.shape, dtype=torch.float64)
        if not released:
            released.append(like + torch.randn(like.shape, generator=torch.Generator().manual_seed(0)))
        return (released[0] - like).double()

    sums = []
    for label in (0, 1):
        training.targets = labels.clone()
        training.targets[0] = label
        for model, before in zip(list_models(training), state, strict=True):
            model.load_state_dict(before)
        training._draw = draw
        step = Step(0, "train", rows, training.targets[rows])
        training._update(step, [torch.optim.Adam(training.scores.parameters(), training.plan.lr)])
        training._draw = lambda like: torch.zeros(like.shape, dtype=torch.float64)
        sums.append(read_sums(training, step, noise=True))
    moved = float(torch.linalg.vector_norm(sums[1] - sums[0]))
    bound = training._bound_change() + 1e-4
    assert (moved > 3 * bound) if left_out else (moved <= bound), (moved, bound)
