"""Encrypted training is float64 training: weights, scores and the features' gradient, in every form and setting."""

import numpy as np
import pytest

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd

RATE = 0.1


def compare(pair, task, *, steps, rows, share0=0.0, rate=RATE, optimizer=None):
    """Train both ways on equal batches; return the largest differences of W, delta^C and z."""
    optimizer = optimizer or LinearSgd()
    momentum, decay = float(optimizer.momentum), float(optimizer.weight_decay)
    w, v = task.weights + share0, np.zeros_like(task.weights)
    worst_down = worst_up = 0.0
    for step in range(steps):
        eta = rate(step) if callable(rate) else rate
        mu, y = task.batch(rows(step) if callable(rows) else rows)
        z = pair.scores(mu)
        down = pair.learn(task.delta(z, y), eta)
        true = task.delta(mu @ w, y)
        before = w
        v = momentum * v + mu.T @ true / len(mu) + decay * w
        w = w - eta * v
        used = w if pair.p.layout.order == "paper" else before
        worst_up = max(worst_up, np.abs(z - mu @ before).max())
        worst_down = max(worst_down, np.abs(down - true @ used.T).max())
    return np.abs(pair.weights - w).max(), worst_down, worst_up


# A pack of 1024 bits is filled by seven samples. A hundred steps at C > 1 take longer than the quick tests may.
LONG = [pytest.param(g, c, 9, 100, marks=pytest.mark.long) for g, c in ((1, 10), (10, 3), (15, 10))]
QUICK = [(1, 1, 7, 100), (1, 1, 9, 30), (10, 1, 9, 100), (10, 1, 7, 30), (15, 1, 7, 100), (15, 1, 9, 30)]
QUICK += [(1, 3, 9, 20), (10, 3, 7, 20), (15, 10, 9, 3)]


@pytest.mark.long
@pytest.mark.parametrize(("width", "outputs", "rows", "steps"), QUICK + LONG)
def test_training_is_that_of_float64(make_pair, problem, width, outputs, rows, steps):
    task = problem(width, outputs)
    pair = make_pair(task.weights, batch=9, steps=steps)
    assert pair.c.layout.scores.rows == 7
    assert pair.p.layout.low_rank == (outputs <= width)
    weights, down, up = compare(pair, task, steps=steps, rows=rows)
    assert weights < 1e-6
    assert down < 1e-6
    assert up < 3e-6  # features are rounded to 2^-22


@pytest.mark.long
def test_with_a_key_of_2048_bits(make_pair, problem):
    task = problem(10, 1)
    pair = make_pair(task.weights, keys=Keys.generate(2048), batch=8, steps=100)
    assert max(compare(pair, task, steps=100, rows=8)[:2]) < 1e-6


def test_in_subgroup_mode(make_pair, problem):
    task = problem(10, 1)
    pair = make_pair(task.weights, keys=Keys.generate(1024, "subgroup"), batch=8, steps=15)
    assert max(compare(pair, task, steps=15, rows=8)[:2]) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        {"delta": "outer"},
        {"order": "paper"},
        {"order": "paper", "delta": "outer"},
        {"ring": 56, "feature_precision": 20, "sigma": 64},
        {"delta_bits": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("outputs", [1, 3])
def test_every_setting_gives_the_same_training(make_pair, problem, settings, outputs):
    task = problem(10, outputs)
    pair = make_pair(task.weights, batch=8, steps=10, **settings)
    assert max(compare(pair, task, steps=10, rows=8)[:2]) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize(
    "optimizer", [LinearSgd(0.9), LinearSgd(0.0, 0.01), LinearSgd(0.99, 0.001)], ids=["0.9", "decay", "0.99"]
)
@pytest.mark.parametrize("width", [1, 10])
def test_momentum_decay_a_schedule_and_cs_own_share(make_pair, problem, optimizer, width):
    task = problem(width, 1)
    share0 = task.rng.normal(size=task.weights.shape) * 0.1
    pair = make_pair(task.weights, batch=8, steps=40, optimizer=optimizer, share0=share0)
    shape = {"steps": 40, "rows": lambda step: 8 if step % 10 else 3, "rate": lambda step: 0.02 / (1 + step)}
    assert max(compare(pair, task, share0=share0, optimizer=optimizer, **shape)[:2]) < 1e-6


def test_the_printed_order_is_another_gradient(make_pair, problem):
    """At W_{t+1}: off by eta delta dW^T, which a learning rate of 0.1 shows."""
    downs = []
    for order in ("current", "paper"):
        task = problem(10, 1)
        pair = make_pair(task.weights, batch=8, order=order)
        mu, y = task.batch(8)
        delta = task.delta(pair.scores(mu), y)
        downs.append(pair.learn(delta, RATE))
    gradient = mu.T @ delta / len(mu)
    assert np.allclose(downs[0] - downs[1], RATE * delta @ gradient.T, atol=1e-6)
    assert np.abs(downs[0] - downs[1]).max() > 1e-3


@pytest.mark.parametrize("order", ["current", "paper"])
def test_p_may_update_before_or_after_it_answers(make_pair, problem, order):
    downs = []
    for first in (False, True):
        task = problem(10, 1)
        pair = make_pair(task.weights, batch=8, order=order)
        pair.updates_first = first
        mu, y = task.batch(8)
        downs.append(pair.learn(task.delta(pair.scores(mu), y), RATE))
        assert pair.p.updates == 1
    assert np.allclose(*downs, rtol=0, atol=1e-6)  # what blurs and rounding noise leave of equality


@pytest.mark.sampled
@pytest.mark.parametrize("outputs", [1, 3, 10])
def test_rank_one_and_outer_tell_the_same(make_pair, problem, outputs):
    task = problem(10, outputs)
    mu, y = task.batch(12)
    found = {}
    for form in ("rank1", "outer"):
        pair = make_pair(task.weights, batch=12, delta=form)
        found[form] = pair.learn(task.delta(pair.scores(mu), y), RATE)
        assert pair.said[-1].rank == (outputs if form == "rank1" else 12)  # a softmax lacks one, of zeros then
    assert np.allclose(found["rank1"], found["outer"], rtol=0, atol=3e-7)


def test_a_defense_changes_what_is_released_and_not_what_is_learned(make_pair, problem):
    task = problem(10, 1)
    pair = make_pair(task.weights, batch=8, delta_bits=2)
    mu, y = task.batch(8)
    delta = task.delta(pair.scores(mu), y)
    released = delta + task.rng.normal(size=delta.shape)
    down = pair.learn(delta, RATE, released)
    assert np.allclose(down, released @ task.weights.T, atol=1e-6)
    assert np.allclose(pair.weights, task.weights - RATE * mu.T @ delta / 8, atol=1e-7)


@pytest.mark.parametrize("form", ["rank1", "outer"])
def test_a_gradient_of_zero_is_zero(make_pair, problem, form):
    task = problem(10, 1)
    pair = make_pair(task.weights, batch=8, delta=form)
    pair.scores(task.batch(8)[0])
    assert (pair.learn(np.zeros((8, 1)), RATE) == 0).all()
    assert np.allclose(pair.weights, task.weights, atol=1e-15)


def test_inference_sends_no_rows_and_learns_nothing(make_pair, problem):
    task = problem(10, 3)
    pair = make_pair(task.weights, batch=8)
    mu, y = task.batch(8)
    assert np.allclose(pair.scores(mu, learns=False), mu @ task.weights, atol=1e-5)
    assert pair.said[0].packs == b""
    with pytest.raises(UsageError, match="batch that the model learns"):
        pair.p.mask_gradient(task.delta(mu @ task.weights, y))
    assert np.allclose(pair.scores(mu[:1]), mu[:1] @ task.weights, atol=1e-5)


def test_a_saved_state_goes_on_as_if_nothing_had_happened(make_pair, problem):
    weights = []
    for stop in (False, True):
        task = problem(10, 1)
        settings = {"batch": 8, "optimizer": LinearSgd(0.9, 0.01)}
        pair = make_pair(task.weights, seed=1, **settings)
        compare(pair, task, steps=3, rows=8)
        if stop:
            other = make_pair(np.ones((10, 1)), seed=1, **settings)
            other.c.load(pair.c.state()), other.p.load(pair.p.state())
            pair = other
            assert pair.c.turn == pair.p.turn == 3
        mu, y = task.batch(8)
        pair.learn(task.delta(pair.scores(mu), y), RATE)
        weights.append(pair.weights)
    assert np.allclose(*weights, rtol=0, atol=1e-8)


def test_a_saved_state_of_another_shape_is_refused(make_pair, problem):
    task = problem(10, 1)
    pair, other = make_pair(task.weights, batch=8), make_pair(task.weights[:5], batch=8)
    with pytest.raises(UsageError, match=r"\(5, 1, 32\).*\(10, 1, 32\)"):
        other.c.load(pair.c.state())


def test_a_saved_state_that_lacks_something_is_refused(make_pair, problem):
    pair = make_pair(problem(10, 1).weights, batch=8)
    with pytest.raises(UsageError, match="without updates, velocity"):
        pair.p.load({name: value for name, value in pair.p.state().items() if name in ("share", "turn")})


def test_a_gradient_that_could_not_be_answered_can_be_sent_again(make_pair, problem):
    """C moves its share only once its answer is made: moved twice, the weights would be lost."""
    task = problem(10, 1)
    pair, other = (make_pair(task.weights, batch=8, seed=4) for _ in range(2))
    mu, y = task.batch(8)
    for one, fails in ((pair, True), (other, False)):
        delta = task.delta(one.scores(mu), y)
        message = one.p.mask_gradient(delta)
        if fails:
            take, one.c.pool.take = one.c.pool.take, None
            with pytest.raises(TypeError):
                one.c.gradient(message, RATE)
            assert one.c.updates == 0
            one.c.pool.take = take
        one.p.update(one.c.gradient(message, RATE), RATE)
    assert np.allclose(pair.weights, other.weights, rtol=0, atol=1e-8)
    assert pair.c.updates == pair.p.updates == 1


def test_equal_masks_give_equal_results_whatever_the_randomizers(make_pair, problem):
    """So that a run in two processes can be held against one in process, bit for bit."""
    runs = []
    for _ in range(2):
        task = problem(10, 1)
        pair = make_pair(task.weights, batch=8, seed=3)
        mu, y = task.batch(8)
        z = pair.scores(mu)
        runs.append((z, pair.learn(task.delta(z, y), RATE), pair.weights, pair.said))
    for a, b in zip(runs[0][:3], runs[1][:3], strict=True):
        assert np.array_equal(a, b)
    assert runs[0][3][2].values == runs[1][3][2].values
    assert runs[0][3][0].columns != runs[1][3][0].columns
