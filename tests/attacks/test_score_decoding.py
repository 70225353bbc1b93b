"""Features of few values are decoded from one score; continuous ones are not measured."""

import itertools

import numpy as np
import pytest

from vflsec.attacks.score_decoding import ScoreDecoding
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.testing.recordings import attack_recording

WIDTH = 10


def recordings(folder, mu, passes, rates):
    """Steps of the same rows, with the scores of ``passes`` and learning rates, as both roles record them."""
    layout = CipherLayout(width=mu.shape[1], outputs=passes[0].shape[1], batch=len(mu))
    for role in ("passive", "active"):
        with RecordingWriter(folder / role, Header(role=role, layout=layout)) as recorder:
            for number, (scores, rate) in enumerate(zip(passes, rates, strict=True)):
                recorder.begin(number, rate=rate)
                recorder.note("rows", np.arange(len(mu)) + number * len(mu))
                recorder.note(*(("mu", mu) if role == "passive" else ("scores", scores)))
    return Recording(folder / "passive"), Recording(folder / "active")


def found(folder, mu, passes, rates=(None,)):
    c, p = recordings(folder, mu, passes, rates)
    return attack_recording(ScoreDecoding(), p, c, n=3 * WIDTH)


def leak(*arguments, **options):
    """Return the share of rows of which every feature is right."""
    return found(*arguments, **options)["leak"]["train"]


@pytest.fixture
def bits():
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, (400, WIDTH)).astype(float), rng.normal(size=(WIDTH, 1))


def test_binary_features_are_read_from_one_score(tmp_path, bits):
    mu, weights = bits
    block = leak(tmp_path, mu, [mu @ weights + 0.3])
    assert (block.metric, block.headline, block.n) == ("exact", 1.0, 400 - 3 * WIDTH)
    assert block.chance < 0.02


@pytest.mark.parametrize("noise", [0.01, 10.0])
def test_with_noise_it_is_right_as_often_as_the_nearest_combination(tmp_path, bits, noise):
    mu, weights = bits
    z = mu @ weights + noise * np.random.default_rng(1).normal(size=(400, 1))
    value = leak(tmp_path, mu, [z]).headline
    tried = np.array(list(itertools.product([0.0, 1.0], repeat=WIDTH)))
    nearest = np.abs(z - (tried @ weights).T).argmin(axis=1)  # by the true weights
    assert value == pytest.approx((tried[nearest] == mu).all(axis=1).mean(), abs=0.1)
    assert value < (0.5 if noise < 1 else 0.02)


def test_several_outputs_are_used_together(tmp_path, bits):
    mu, _ = bits
    rng = np.random.default_rng(2)
    scores = [mu @ rng.normal(size=(WIDTH, c)) + 0.1 * rng.normal(size=(400, c)) for c in (1, 8)]
    shares = []
    for name, one in zip("ab", scores, strict=True):
        (tmp_path / name).mkdir()
        shares.append(leak(tmp_path / name, mu, [one]).headline)
    assert shares[0] < 0.1
    assert shares[1] > 0.9


def test_only_steps_under_the_same_weights_are_put_together(tmp_path, bits):
    """The weights change after the second step, in which something is learned."""
    mu, weights = bits
    passes = [mu @ w for w in (weights, weights, -2 * weights)]
    c, p = recordings(tmp_path, mu, passes, (None, 0.1, None))
    block = attack_recording(ScoreDecoding(), p, c, n=9 * WIDTH)["leak"]["train"]
    assert block.headline == 1.0
    assert 800 - 9 * WIDTH < block.n < 800  # of the first two steps, without the known rows among them


@pytest.mark.parametrize("kind", ["continuous", "too few rows", "too many combinations"])
def test_it_is_not_measured(tmp_path, bits, kind):
    (mu, weights), n = bits, 3 * WIDTH
    if kind == "continuous":
        mu = mu + np.random.default_rng(3).normal(size=mu.shape)
    elif kind == "too few rows":
        mu, n = mu[:50], WIDTH
    else:
        mu = np.random.default_rng(4).integers(0, 5, mu.shape).astype(float)
    c, p = recordings(tmp_path, mu, [mu @ weights], (None,))
    assert attack_recording(ScoreDecoding(), p, c, n=n)["status"] == "unmeasured"


def test_without_the_truth_no_sample_is_known(tmp_path, bits):
    mu, weights = bits
    _, p = recordings(tmp_path, mu, [mu @ weights], (None,))
    assert "needs auxiliary labels" in attack_recording(ScoreDecoding(), p)["notes"][0]
