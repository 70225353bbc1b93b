"""What each party can decrypt or read is masked: at the right width, freshly, and at the message's own unit."""

import math

import numpy as np
import pytest
from scipy import stats

from vflsec.cipher.arithmetic.codec import cut, pack

RATE = 0.1
TURNS = 12


def plaintexts(keys, message, data=None):
    """What C can decrypt, by phe."""
    n = keys.private.public_key.n
    data = message.ciphers if data is None else data
    size = n.bit_length() // 4
    return [keys.private.raw_decrypt(value) for value in cut(data, size, len(data) // size, "ciphertexts")]


def slots(values, slot, count):
    return [value >> slot * i & (1 << slot) - 1 for value in values for i in range(count)]


@pytest.fixture(scope="module")
def heard(keys, make_pair, problem):
    """A few turns, all of whose batches are alike, and the layout: what depends on data is the same in each."""
    task = problem(6, 1)
    mu, y = task.batch(7)
    delta = task.delta(mu @ task.weights, y)
    turns = []
    for _ in range(TURNS):
        pair = make_pair(task.weights, batch=7)
        pair.scores(mu)
        pair.learn(delta, RATE)
        turns.append(pair.said)
    return turns, pair.c.layout


def scaled(values, bound, sigma):
    """Masked values as fractions of the range of masks."""
    return [(value - bound) / (bound << sigma) for value in values]


def is_uniform(fractions):
    return stats.kstest(fractions, "uniform").pvalue > 1e-4


def test_masked_scores_are_uniform_at_the_width_agreed(keys, heard):
    turns, layout = heard
    packing = layout.scores
    found = [v for said in turns for v in slots(plaintexts(keys, said[1]), packing.slot, 7)]
    assert len(found) == 7 * TURNS == len(set(found))
    assert is_uniform(scaled(found, layout.score_bound, layout.sigma))
    for wrong in (-1, 1):  # half or twice as wide
        assert not is_uniform(scaled(found, layout.score_bound, layout.sigma + wrong))


def test_masked_gradients_are_uniform_at_the_width_agreed(keys, heard):
    turns, layout = heard
    packing = layout.gradients
    count = packing.rows * packing.columns
    found = [v for said in turns for v in slots(plaintexts(keys, said[3]), packing.slot, count)]
    assert len(set(found)) == len(found) == TURNS * packing.rows * packing.blocks * count
    assert is_uniform(scaled(found, layout.gradient_bound, layout.sigma))
    for wrong in (-1, 1):
        assert not is_uniform(scaled(found, layout.gradient_bound, layout.sigma + wrong))


def test_what_p_reads_of_the_gradient_is_noise_at_the_width_agreed(make_pair, problem):
    task = problem(6, 1)
    mu, y = task.batch(7)
    delta, found = task.delta(mu @ task.weights, y), []
    for _ in range(TURNS):
        pair = make_pair(task.weights, batch=7)
        pair.scores(mu)
        noised = pair.c.gradient(pair.p.mask_gradient(delta), RATE)
        layout = pair.p.layout
        values = cut(noised.values, layout.gradient_bytes, 6, "gradients")
        found += [a - b for a, b in zip(values, pair.p._gradient_masks, strict=True)]
    width = layout.gradient_bound << layout.sigma
    assert is_uniform([value / width for value in found])
    assert not is_uniform([value / width * 2 for value in found])
    assert not is_uniform([value / width / 2 for value in found])


def test_scores_cross_modulo_the_ring(heard):
    """Under p's masks, and with C's share in them: uniform on the whole ring."""
    turns, layout = heard
    found = [value for said in turns for value in cut(said[2].values, 8, 7, "scores")]
    assert is_uniform([value / 2.0**layout.ring for value in found])


def test_equal_inputs_give_unlinkable_messages(keys, heard):
    turns, _ = heard
    size = keys.private.public_key.n.bit_length() // 4
    seen = []
    for said in turns:
        features, masked, _, gradient, noised, delta = said
        for data in (features.columns, features.packs, masked.ciphers, gradient.ciphers, noised.share, delta.ciphers):
            seen += cut(data, size, len(data) // size, "ciphertexts")
    assert len(set(seen)) == len(seen)
    equal = [plaintexts(keys, None, said[0].columns) for said in turns]
    assert all(found == equal[0] for found in equal)  # and yet one plaintext


def test_nothing_that_p_sends_is_a_function_of_cs_randomness(keys, make_pair, problem):
    """C knows the randomness of its ciphertexts; the products of their powers alone would tell it the exponents."""
    task = problem(6, 1)
    mu, _ = task.batch(7)
    n2 = keys.private.public_key.n**2
    residues = []
    for _ in range(2):
        pair = make_pair(task.weights, batch=7)
        features = pair.c.features(mu)
        for _ in range(2):  # p answers the same ciphertexts twice
            pair.p.turn = 0
            masked = pair.p.mask_scores(features)
            [ciphertext] = cut(masked.ciphers, 256, 1, "ciphertexts")
            [plaintext] = plaintexts(keys, masked)
            residues.append(ciphertext * pow(1 + keys.private.public_key.n * plaintext, -1, n2) % n2)
    assert len(set(residues)) == 4


@pytest.mark.parametrize("form", ["rank1", "outer"])
def test_exact_products_have_no_common_divisor(keys, make_pair, problem, form):
    """Without noise up to half a unit of W, the greatest common divisor of rows is |delta|, and of columns |W|."""
    task = problem(6, 1)
    mu, y = task.batch(7)
    pair = make_pair(task.weights, batch=7, delta=form)
    delta = task.delta(pair.scores(mu), y)
    pair.learn(delta, RATE)
    layout = pair.c.layout
    packing, n = layout.deltas, keys.private.public_key.n
    half = pack([1 << packing.slot - 1] * (packing.columns * packing.rows), packing.slot)
    rows = 1 if form == "rank1" else 7
    values = [
        value - (1 << packing.slot - 1)
        for plaintext in plaintexts(keys, pair.said[-1])
        for value in slots([(plaintext + half) % n], packing.slot, packing.columns * min(packing.rows, rows))
    ]
    table = np.array(values[: rows * 6], object).reshape(rows, 6)
    assert all(math.gcd(*row) < 64 for row in table.tolist())
    if form == "outer":
        assert all(math.gcd(*column) < 64 for column in table.T.tolist())
    exact = [round(x * 2**layout.delta_precision) for x in delta[:, 0].tolist()]
    units = [round(x * 2**layout.weight_precision) for x in task.weights[:, 0].tolist()]
    for i, row in zip([int(np.abs(delta).argmax())] if form == "rank1" else range(7), table.tolist(), strict=True):
        blur = abs(exact[i]) if form == "rank1" else max(abs(exact[i]), 1 << layout.weight_precision)
        assert all(abs(v - exact[i] * w) <= 1.5 * blur for v, w in zip(row, units, strict=True))


def test_ratios_do_not_betray_the_grid_of_float32(make_pair, problem):
    """A probability less one is a multiple of 2^-24: exact ratios to the longest row would give its length."""
    task = problem(6, 1)
    pair = make_pair(task.weights, batch=128)
    mu, _ = task.batch(128)
    delta = -np.ldexp(np.random.default_rng(0).integers(1, 2**18, (128, 1)).astype(float), -24)
    delta[0] = -12_345_677 * 2.0**-24
    pair.scores(mu)
    down = pair.learn(delta, RATE)
    assert np.allclose(down, delta @ task.weights.T, rtol=0, atol=3e-7)
    ratios = np.frombuffer(pair.said[-1].coefficients, "<f4").astype(float)
    places = (ratios * delta[0, 0] * 2.0**24)[1:] % 1
    assert is_uniform(places)


def test_p_never_sees_the_first_weights_if_c_adds_its_own(make_pair, problem):
    task = problem(6, 1)
    share0 = task.rng.normal(size=(6, 1))
    pair = make_pair(task.weights, batch=7, share0=share0)
    assert np.allclose(pair.weights, task.weights + share0, atol=1e-15)
    assert np.allclose(pair.scores(task.batch(7)[0]).shape, (7, 1))


def test_a_score_does_not_tell_the_features_to_who_knows_the_weights(make_pair):
    """An exact score of two features is a congruence modulo either weight: it would give both, whole."""
    first, second = 80_530_637, -41_875_931  # W in units; prime to each other
    weights = np.ldexp(np.array([[first], [second]], float), -28)
    mu = np.random.default_rng(0).normal(size=(8, 2)).clip(-1.9, 1.9)
    pair = make_pair(weights, batch=8)
    z = pair.scores(mu)
    assert np.allclose(z, mu @ weights, atol=1e-6)
    units = np.rint(np.ldexp(mu, 22)).astype(int).tolist()

    def solved(score):
        found = score * pow(second, -1, first) % first
        return found - first if found > first // 2 else found

    exact = [a * first + b * second for a, b in units]
    assert [solved(score) for score in exact] == [b for _, b in units]
    heard = [round(math.ldexp(score, 50)) for score in z[:, 0].tolist()]
    assert not any(solved(score) == b for score, (_, b) in zip(heard, units, strict=True))
    off = [(h - e) / 2.0**28 for h, e in zip(heard, exact, strict=True)]
    assert max(map(abs, off)) <= 0.5
    assert len(set(off)) == 8
