"""Features of few values are decoded from one score; continuous ones are not measured."""

import itertools

import numpy as np
import pytest

from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.secure.transcripts.audit import Truth
from vflsec.secure.transcripts.score_decoding import ScoreDecoding

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
    return ScoreDecoding()(p, Truth(p, c))


@pytest.fixture
def bits():
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, (400, WIDTH)).astype(float), rng.normal(size=(WIDTH, 1))


def test_binary_features_are_read_from_one_score(tmp_path, bits):
    mu, weights = bits
    finding = found(tmp_path, mu, [mu @ weights + 0.3])
    (figure,) = finding.figures
    assert (figure.value, figure.n, finding.verdict) == (1.0, 400 - 3 * WIDTH, "leaks")
    assert figure.chance < 0.02


@pytest.mark.parametrize("noise", [0.01, 10.0])
def test_with_noise_it_is_right_as_often_as_the_nearest_combination(tmp_path, bits, noise):
    mu, weights = bits
    z = mu @ weights + noise * np.random.default_rng(1).normal(size=(400, 1))
    (figure,) = found(tmp_path, mu, [z]).figures
    tried = np.array(list(itertools.product([0.0, 1.0], repeat=WIDTH)))
    nearest = np.abs(z - (tried @ weights).T).argmin(axis=1)  # by the true weights
    assert figure.value == pytest.approx((tried[nearest] == mu).all(axis=1).mean(), abs=0.1)
    assert figure.value < 0.5 if noise < 1 else figure.value < 0.02


def test_several_outputs_are_used_together(tmp_path, bits):
    mu, _ = bits
    rng = np.random.default_rng(2)
    scores = [mu @ rng.normal(size=(WIDTH, c)) + 0.1 * rng.normal(size=(400, c)) for c in (1, 8)]
    shares = []
    for name, one in zip("ab", scores, strict=True):
        (tmp_path / name).mkdir()
        shares.append(found(tmp_path / name, mu, [one]).figures[0].value)
    assert shares[0] < 0.1
    assert shares[1] > 0.9


def test_only_steps_under_the_same_weights_are_put_together(tmp_path, bits):
    """The weights change after the second step, in which something is learned."""
    mu, weights = bits
    passes = [mu @ w for w in (weights, weights, -2 * weights)]
    (figure,) = found(tmp_path, mu, passes, rates=(None, 0.1, None)).figures
    assert (figure.value, figure.n) == (1.0, 800 - 3 * WIDTH)


@pytest.mark.parametrize("kind", ["continuous", "too few rows", "too many combinations"])
def test_it_is_not_measured(tmp_path, bits, kind):
    mu, weights = bits
    if kind == "continuous":
        mu = mu + np.random.default_rng(3).normal(size=mu.shape)
    elif kind == "too few rows":
        mu = mu[: 6 * WIDTH - 1]
    else:
        mu = np.random.default_rng(4).integers(0, 5, mu.shape).astype(float)
    assert found(tmp_path, mu, [mu @ weights]).verdict == "unmeasured"


def test_without_the_truth_it_is_not_measured(tmp_path, bits):
    mu, weights = bits
    _, p = recordings(tmp_path, mu, [mu @ weights], (None,))
    assert ScoreDecoding()(p).verdict == "unmeasured"
