"""A3 and A4: float masks bare the low-order bits, small masks average out; uniform wide integer masks do neither."""

import re
from fractions import Fraction

import numpy as np
import phe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.attacks import small_masks
from vflsec.attacks.low_bits import LowBits, solve
from vflsec.attacks.small_masks import SmallMasks, find_narrowest
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.testing.recordings import attack_recording


def recorded(folder, mu, masked, share, precision, rate=None):
    """Return the recordings of C and p of one step: what C decrypts, and p's share of W as the truth."""
    layout = CipherLayout(width=mu.shape[1], batch=max(len(mu), 1), outputs=masked.shape[1])
    exact = np.array([int(Fraction(float(w)) * (1 << 64)) for w in share.ravel()], dtype=object).reshape(share.shape)
    with RecordingWriter(
        folder / "passive", Header(role="passive", layout=layout, score_precision=precision)
    ) as recorder:
        recorder.begin(0, rate=rate)
        recorder.note("mu", mu)
        recorder.note("masked_scores", masked)
        recorder.note("share", np.zeros_like(exact))
    with RecordingWriter(
        folder / "active", Header(role="active", layout=layout, score_precision=precision)
    ) as recorder:
        recorder.begin(0, rate=rate)
        recorder.note("share", exact)
    return Recording(folder / "passive"), Recording(folder / "active")


def leak_of(c, truth):
    """Return the leak of W by its low-order bits."""
    (block,) = attack_recording(LowBits(), c, truth)["leak"].values()
    return block


def float_masked(mu, share, masks):
    """Return what C decrypts of [[mu W~ + r]] with phe's float encodings: exact integers and their precision."""
    public, private = phe.generate_paillier_keypair(n_length=512)
    found = []
    for row, mask in zip(mu, masks, strict=True):
        encrypted = [public.encrypt(float(value)) for value in row]
        total = sum(
            (e * float(w) for e, w in zip(encrypted[1:], share[1:], strict=True)), encrypted[0] * float(share[0])
        )
        total = total + float(mask)
        plain = private.raw_decrypt(total.ciphertext())
        found.append((plain if plain < public.n // 2 else plain - public.n, total.exponent))
    least = min(exponent for _, exponent in found)
    values = [value * 16 ** (exponent - least) for value, exponent in found]
    return np.array(values, dtype=object)[:, None], -4 * least


@pytest.mark.parametrize("size", [2.0**10, 2.0**30])
def test_fourteen_scores_under_float_masks_give_the_weights_exactly(tmp_path, size):
    rng = np.random.default_rng(1)
    mu, share = rng.normal(size=(14, 10)), 0.3 * rng.normal(size=(10, 1))
    masked, precision = float_masked(mu, share[:, 0], rng.uniform(-size, size, size=14))
    c, truth = recorded(tmp_path, mu, masked, share, precision)
    leak = leak_of(c, truth)
    assert (leak.metric, leak.headline, leak.n, leak.chance) == ("exact", 1.0, 10, 0.0)


@pytest.mark.parametrize("bits", [12, 52, 104])
def test_integer_masks_at_the_unit_of_the_message_bare_no_bit(tmp_path, bits):
    rng = np.random.default_rng(2)
    mu = np.round(rng.normal(size=(128, 10)) * 2**20) / 2**20
    share = np.round(0.3 * rng.normal(size=(10, 1)) * 2**28) / 2**28
    exact = (mu * 2**20).astype(int).astype(object) @ (share * 2**28).astype(int).astype(object)
    masks = np.array([int(rng.integers(0, 1 << 52)) * 2 ** max(0, bits - 52) for _ in range(128)], dtype=object)
    masks = np.array([m % (1 << bits) + int(rng.integers(0, 1 << min(bits, 52))) for m in masks], dtype=object)[:, None]
    c, truth = recorded(tmp_path, mu, exact + masks, share, 48)
    assert leak_of(c, truth).headline == 0.0
    (note,) = attack_recording(LowBits(), c)["notes"]
    assert "bare in 0 of 1" in note
    assert "; one bare bit" in note  # 118 rows more than features


def test_few_rows_notice_only_several_bare_bits(tmp_path):
    rng = np.random.default_rng(2)
    mu, masks = rng.normal(size=(20, 10)), rng.integers(0, 1 << 52, size=(20, 1)).astype(object)
    c, _ = recorded(tmp_path, np.round(mu * 2**20) / 2**20, masks, np.zeros((10, 1)), 48)
    assert "; 4 bare bits" in attack_recording(LowBits(), c)["notes"][0]  # 10 rows more than features


def test_masks_that_skip_their_low_bits_are_caught(tmp_path):
    rng = np.random.default_rng(3)
    mu = np.round(rng.normal(size=(30, 4)) * 2**20) / 2**20
    share = np.round(0.3 * rng.normal(size=(4, 1)) * 2**28) / 2**28
    exact = (mu * 2**20).astype(int).astype(object) @ (share * 2**28).astype(int).astype(object)
    masks = np.array([int(rng.integers(0, 1 << 60)) << 34 for _ in range(30)], dtype=object)[:, None]
    c, truth = recorded(tmp_path, mu, exact + masks, share, 48)
    assert leak_of(c, truth).headline == 1.0


def test_one_bare_output_of_several_counts(tmp_path):
    rng = np.random.default_rng(4)
    mu = np.round(rng.normal(size=(30, 4)) * 2**20) / 2**20
    share = np.round(0.3 * rng.normal(size=(4, 2)) * 2**28) / 2**28
    exact = (mu * 2**20).astype(int).astype(object) @ (share * 2**28).astype(int).astype(object)
    masks = np.array([[int(rng.integers(0, 1 << 60)) << 34, int(rng.integers(0, 1 << 60))] for _ in range(30)], object)
    c, truth = recorded(tmp_path, mu, exact + masks, share, 48)
    assert leak_of(c, truth).headline == 0.5
    assert attack_recording(LowBits(), c)["leak"]["weights"].metrics == {"share": 0.5}


@settings(max_examples=60)
@given(st.data())
def test_a_system_modulo_a_power_of_two_is_solved_where_it_was_made(data):
    bits, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    entry = st.integers(-(1 << 20), 1 << 20)
    weights = data.draw(st.lists(entry, min_size=width, max_size=width))
    matrix = data.draw(st.lists(st.lists(entry, min_size=width, max_size=width), min_size=width, max_size=8))
    values = [sum(a * w for a, w in zip(row, weights, strict=True)) for row in matrix]
    found = solve(matrix, values, bits)
    assert found is not None
    assert all((a - b) % (1 << found.known) == 0 for a, b in zip(found.weights, weights, strict=True))
    if found.known:
        assert all(-(1 << found.known - 1) <= w < 1 << found.known - 1 for w in found.weights)


@settings(max_examples=60)
@given(st.data())
def test_elimination_agrees_with_trying_all(data):
    bits, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    entry = st.integers(0, (1 << bits) - 1)
    matrix = data.draw(st.lists(st.lists(entry, min_size=width, max_size=width), min_size=width, max_size=4))
    values = data.draw(st.lists(entry, min_size=len(matrix), max_size=len(matrix)))
    every = [[]]
    for _ in range(width):
        every = [[*one, w] for one in every for w in range(1 << bits)]
    fits = [
        w
        for w in every
        if all(
            (sum(a * b for a, b in zip(row, w, strict=True)) - v) % (1 << bits) == 0
            for row, v in zip(matrix, values, strict=True)
        )
    ]
    found = solve(matrix, values, bits)
    assert (found is None) == (not fits)
    if found and found.known:  # what is certain is the same in all solutions
        assert len({tuple(x % (1 << found.known) for x in w) for w in fits}) == 1


def test_masks_of_1024_average_out_over_80000_samples(tmp_path):
    rng = np.random.default_rng(0)
    mu, w = rng.normal(size=(80_000, 10)), 0.3 * rng.normal(size=(10, 1))
    scores = mu @ w + rng.uniform(-1024, 1024, size=(80_000, 1))
    center = np.sqrt(((find_narrowest(mu, scores) - w) ** 2).mean())
    squares = np.sqrt(((np.linalg.lstsq(mu, scores, rcond=None)[0] - w) ** 2).mean())
    assert 0.05 < center < 0.13
    assert 1.6 < squares < 2.6


@pytest.mark.parametrize(("width", "recovered"), [(4.0, (0.99, 1.0)), (2.0**40, (0.0, 0.0))])
def test_small_masks_give_the_weights_and_wide_ones_do_not(tmp_path, width, recovered):
    rng = np.random.default_rng(5)
    mu, w = rng.normal(size=(4000, 10)), 0.3 * rng.normal(size=(10, 1))
    masked = np.vectorize(lambda v: int(v * 2**30), otypes=[object])(
        mu @ w + rng.uniform(-width, width, size=(4000, 1))
    )
    c, truth = recorded(tmp_path, mu, masked, w, 30)
    leak = attack_recording(SmallMasks(), c, truth)["leak"]["parameters"]
    assert (leak.headline > 0.99) == (recovered[0] > 0)
    assert leak.headline <= recovered[1]
    alone = attack_recording(SmallMasks(), c)
    assert alone["leak"]["scores"].metric == "consistency"
    assert (alone["leak"]["scores"].headline > 0.99) == (recovered[0] > 0)
    (note,) = alone["notes"]
    assert re.search(r"two halves .*differ by \d+\.\d %; ", note)
    end = r"W shows, p = 0\.001" if recovered[0] else r"no sign that W.*<= 0\.001\)"
    assert re.search(f"; {end}$", note)


def leaks(folder, seeds, width, *, rows=180, features=4):
    """How often a recording of ``rows`` masked scores is said to show W."""
    shows = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        scales = np.logspace(0, -2, features)  # a feature that hardly varies has a weight that anything explains
        mu, w = rng.normal(size=(rows, features)) * scales, rng.choice([-1.0, 1.0], size=(features, 1))
        exact = mu @ w + rng.uniform(-width, width, size=(rows, 1))
        masked = np.vectorize(lambda v: int(v * 2**30), otypes=[object])(exact)
        (folder / str(seed)).mkdir()
        c, _ = recorded(folder / str(seed), mu, masked, w, 30)
        shows += "; W shows, p" in attack_recording(SmallMasks(), c)["notes"][0]
    return shows


@pytest.mark.statistical
def test_wide_masks_are_not_said_to_leak(tmp_path):
    """By accident one audit in a thousand is; two of 200 have a probability of 0.02."""
    assert leaks(tmp_path, 200, 2.0**40) <= 1


@pytest.mark.long
def test_small_masks_are_said_to_leak(tmp_path):
    assert leaks(tmp_path, 20, 1.0) == 20


@pytest.mark.long
def test_the_level_is_kept_where_masks_hide_everything(monkeypatch):
    """At 5 % instead of 0.1 %, of 100 at most 12 are rejected with a probability of 0.999, at least one with 0.99."""
    monkeypatch.setattr(small_masks, "PERMUTATIONS", 199)
    monkeypatch.setattr(small_masks, "ENOUGH", 20)
    found = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        mu, scores = rng.normal(size=(60, 3)), rng.uniform(-1, 1, size=(60, 2))
        found.append(
            small_masks.get_p_value(mu, scores, [find_narrowest(mu[part::2], scores[part::2]) for part in (0, 1)])
        )
    assert 1 <= sum(p <= 0.05 for p in found) <= 12


def test_the_narrowest_band_is_that_of_the_dense_programme():
    from scipy.optimize import linprog

    rng = np.random.default_rng(6)
    mu, v = rng.normal(size=(300, 3)), rng.normal(size=(300, 1))
    x = find_narrowest(mu, v)
    columns, ones = np.column_stack([mu, np.ones(300)]), np.ones((300, 1))
    dense = linprog(
        [0, 0, 0, 0, 1],
        A_ub=np.block([[columns, -ones], [-columns, -ones]]),
        b_ub=np.concatenate([v[:, 0], -v[:, 0]]),
        bounds=(None, None),
    )
    assert np.ptp(v - mu @ x) / 2 == pytest.approx(dense.fun)


def test_an_update_between_batches_separates_them(tmp_path):
    rng = np.random.default_rng(7)
    mu = rng.normal(size=(16, 2))
    layout = CipherLayout(width=2, batch=16)
    with RecordingWriter(tmp_path / "passive", Header(role="passive", layout=layout, score_precision=30)) as recorder:
        for number in range(20):
            recorder.begin(number, rate=0.1)
            recorder.note("mu", mu)
            recorder.note("masked_scores", np.zeros((16, 1), dtype=object))
            recorder.note("share", np.zeros((2, 1), dtype=object))
    assert "from 16 samples" in attack_recording(SmallMasks(), Recording(tmp_path / "passive"))["notes"][0]


def test_without_masked_scores_nothing_is_measured(tmp_path):
    with RecordingWriter(
        tmp_path / "passive", Header(role="passive", layout=CipherLayout(width=2, batch=16))
    ) as recorder:
        recorder.begin(0, rate=0.1)
        recorder.note("mu", np.ones((16, 2)))
    c = Recording(tmp_path / "passive")
    assert attack_recording(LowBits(), c)["status"] == "unmeasured"
    assert attack_recording(SmallMasks(), c)["status"] == "unmeasured"
