"""Noise on delta^C, added under encryption, and on the scores: exactly as drawn, or refused."""

import secrets

import numpy as np
import pytest
from scipy.stats import kstest

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.arithmetic.linear_sgd import LinearSgd
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.companies.side import draw_normal

WIDTH, OUTPUTS, ROWS = 5, 2, 9


def turn(layout, delta, noise):
    """Play one turn; return delta^C as C decrypts it, and W."""
    keys = Keys.generate(1024)
    rng = np.random.default_rng(0)
    weights = np.round(rng.normal(size=(WIDTH, OUTPUTS)) * 2**20) / 2**20
    c = PassiveRole(keys, layout, optimizer=LinearSgd(), batches=1)
    p = ActiveRole(keys.public, layout, weights, optimizer=LinearSgd(), batches=1)
    p.scores(c.scores(p.mask_scores(c.features(rng.normal(size=(ROWS, WIDTH))))))
    noised = c.gradient(p.mask_gradient(delta), 0.0)
    return c.embedding_gradient(p.embedding_gradient(delta, noised, noise)), weights


def layout(**options):
    return CipherLayout(width=WIDTH, outputs=OUTPUTS, batch=ROWS, bits=1024, **{"delta": "outer", **options})


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 100.0])
def test_c_sees_the_sum_and_nothing_else(scale):
    rng = np.random.default_rng(1)
    delta = np.round(rng.uniform(-1, 1, size=(ROWS, OUTPUTS)) * 2**20) / 2**20
    noise = scale * rng.normal(size=(ROWS, WIDTH))
    found, weights = turn(layout(), delta, noise)
    unit = 2.0**-23  # the blur adds half of it at most where every row is sent: a unit of delta times a weight of 1
    assert np.abs(found - delta @ weights.T - noise).max() <= unit / 2 + 2.0**-51


@pytest.mark.parametrize(
    ("noise", "options", "said"),
    [
        (np.zeros((ROWS, WIDTH)), {"delta": "rank1"}, "expected delta=outer"),
        (np.zeros((ROWS, WIDTH - 1)), {}, "expected noise"),
        (np.full((ROWS, WIDTH), np.nan), {}, "expected finite noise"),
        (np.full((ROWS, WIDTH), np.inf), {}, "expected finite noise"),
        (np.full((ROWS, WIDTH), 512.0), {}, "below 512"),
    ],
)
def test_other_noise_is_refused_before_anything_is_sent(noise, options, said):
    with pytest.raises(UsageError, match=said):
        turn(layout(**options), np.zeros((ROWS, OUTPUTS)), noise)


def scored(layout, noise):
    """Return what p learns of the scores, and the exact ones."""
    keys, rng = Keys.generate(1024), np.random.default_rng(0)
    weights, mu = (np.round(rng.normal(size=size) * 2**20) / 2**20 for size in ((WIDTH, OUTPUTS), (ROWS, WIDTH)))
    c = PassiveRole(keys, layout, optimizer=LinearSgd(), batches=1)
    p = ActiveRole(keys.public, layout, weights, optimizer=LinearSgd(), batches=1)
    return p.scores(c.scores(p.mask_scores(c.features(mu)), noise)), mu @ weights


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 100.0])
def test_p_sees_the_sum_of_score_and_noise(scale):
    noise = scale * np.random.default_rng(2).normal(size=(ROWS, OUTPUTS))
    found, exact = scored(layout(), noise)
    assert np.abs(found - exact - noise).max() <= 2.0**-23 + 2.0**-48  # half a unit of the features


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (np.zeros((ROWS, OUTPUTS + 1)), "expected noise"),
        (np.full((ROWS, OUTPUTS), np.nan), "expected finite noise"),
        (np.full((ROWS, OUTPUTS), 2048.0), "below 2048"),
    ],
)
def test_other_noise_on_scores_is_refused(noise, said):
    with pytest.raises(UsageError, match=said):
        scored(layout(), noise)


def test_noise_is_normal_and_new_at_every_call():
    found, other = (draw_normal(secrets.randbits, (500, 40)) for _ in range(2))
    assert kstest(found.ravel(), "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found.ravel(), other.ravel())[0, 1]) < 0.05
    keyed = [draw_normal(lambda bits: 7, (500, 40)) for _ in range(2)]
    assert (keyed[0] == keyed[1]).all(), "the key is all that it depends on"
