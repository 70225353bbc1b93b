"""Lattice sums: exact, of the size that is stated, deaf to hostile bytes, and their noise tells nothing of weights."""

import os
import secrets
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import kstest

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher import lattice
from vflsec.cipher.lattice import (
    DEGREE,
    FLOOD_BITS,
    FLOODED,
    MAX_PIECES,
    MODULUS,
    PRIMES,
    WEIGHT_BITS,
    LatticeKeys,
    LatticePublic,
    SumsLayout,
    draw_flood,
    draw_mask,
    pack_residues,
    unpack_residues,
)

LARGEST = 1 << WEIGHT_BITS


@pytest.fixture(scope="module")
def keys():
    return LatticeKeys()


@pytest.fixture(scope="module")
def public(keys):
    return LatticePublic(keys.public)


def draw(shape, largest=LARGEST, seed=0):
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape)


def exchange(keys, public, values, weights, rows=100):
    """Return masked sums as decrypted, and as they should be."""
    layout = SumsLayout(values.size, weights.shape[1])
    mask, blocks = draw_mask(layout.sums), (weights[k : k + rows] for k in range(0, len(weights), rows))
    sealed = keys.seal(values, layout)
    weighed = public.weigh(sealed, blocks, mask, layout)
    assert (len(sealed), len(weighed)) == (layout.size_of_values, layout.size_of_sums)
    return keys.open(weighed, layout), (values.ravel() @ weights + mask) % MODULUS


@pytest.mark.parametrize(
    ("values", "sums", "rows"),
    [((1, 1), 1, 1), ((7, 3), 5, 4), ((300, 1), 40, 7), ((129, 10), 33, 1290), ((5, 2), 9000, 3)],
)
def test_sums_are_exact(keys, public, values, sums, rows):
    opened, expected = exchange(keys, public, draw(values), draw((values[0] * values[1], sums), seed=1), rows)
    assert (opened == expected).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_are_exact_in_several_pieces(keys, public, sign):
    values, weights = np.full((9000, 1), sign * LARGEST), np.full((9000, 40), LARGEST)
    assert SumsLayout(9000, 40).pieces > 1
    opened, expected = exchange(keys, public, values, weights)
    assert (opened == expected).all()


def test_weights_of_zero_are_no_case_of_their_own(keys, public):
    weights = np.zeros((20, 3), dtype=np.int64)
    opened, expected = exchange(keys, public, draw((20, 1)), weights)
    assert (opened == expected).all()


def test_a_layout_is_small_and_says_what_does_not_fit():
    layout = SumsLayout(2048, 256)
    assert (layout.pieces, layout.products) == (4, 16)
    assert layout.size_of_values + layout.size_of_sums < 2.3e6
    assert len(range(DEGREE)[layout.places]) == layout.columns == 16
    SumsLayout(MAX_PIECES * DEGREE, 1)
    for values, sums in ((MAX_PIECES * DEGREE + 1, 1), (0, 1), (1, 0)):
        with pytest.raises(UsageError, match="lower batch"):
            SumsLayout(values, sums)


def test_masks_and_floods_fill_their_ranges():
    mask = draw_mask(4000)
    assert ((mask >= 0) & (mask < MODULUS)).all()
    assert kstest(mask / MODULUS, "uniform").pvalue > 1e-6
    floods = [draw_flood() for _ in range(4000)]
    assert kstest([(x / 2**FLOOD_BITS + 1) / 2 for x in floods], "uniform").pvalue > 1e-6


class Spy:
    """The evaluator of SEAL, which keeps each ciphertext before and after its primes are dropped."""

    def __init__(self, lattice):
        self.lattice, self.evaluator, self.kept = lattice, lattice.evaluator, []

    def __getattr__(self, name):
        return getattr(self.evaluator, name)

    def mod_switch_to_inplace(self, ciphertext, level):
        self._copy(ciphertext)
        self.evaluator.mod_switch_to_inplace(ciphertext, level)
        self._copy(ciphertext)

    def _copy(self, ciphertext):
        self.kept.append(self.lattice.load_ciphertext(self.lattice.read_ciphertext(ciphertext)))


def measure_noise(keys, public, values, weights, monkeypatch):
    """Return the noise of each sum before primes are dropped, and the least noise budget before and after."""
    spy = Spy(public._lattice)
    monkeypatch.setattr(public._lattice, "evaluator", spy)
    _, expected = exchange(keys, public, values, weights)
    layout, noise, q = SumsLayout(values.size, weights.shape[1]), [], int(np.prod(PRIMES[:FLOODED], dtype=object))
    secret = read_secret(keys)
    for product, ciphertext in enumerate(spy.kept[::2]):
        residues = public._lattice.read_ciphertext(ciphertext).astype(object)
        lifts = [q // p * pow(q // p, -1, p) for p in PRIMES[:FLOODED]]
        first, second = (sum(r * lift for r, lift in zip(poly, lifts, strict=True)) % q for poly in residues)
        for place, sum_ in zip(range(DEGREE)[layout.places], expected[product * layout.columns :], strict=False):
            rotated = np.concatenate([secret[: place + 1][::-1], -secret[place + 1 :][::-1]])
            phase = int(first[place] + second @ rotated) - (q * int(sum_) + MODULUS // 2) // MODULUS
            noise.append((phase + q // 2) % q - q // 2)
    budget = [min(map(keys._decryptor.invariant_noise_budget, spy.kept[k::2])) for k in (0, 1)]
    return np.array(noise, dtype=object), budget


def read_secret(keys):
    """Return the secret polynomial: a ciphertext whose second polynomial is q/t decrypts to it."""
    residues, q = np.zeros((2, FLOODED, DEGREE), dtype=np.uint64), int(np.prod(PRIMES[:FLOODED], dtype=object))
    residues[1, :, 0] = [q // MODULUS % p for p in PRIMES[:FLOODED]]
    plain = keys._lattice.api.Plaintext()
    keys._decryptor.decrypt(keys._lattice.load_ciphertext(residues), plain)
    secret = np.array([plain[k] if k < plain.coeff_count() else 0 for k in range(DEGREE)], dtype=object)
    secret[secret == MODULUS - 1] = -1
    assert set(secret) == {-1, 0, 1}
    return secret


def test_noise_of_any_weights_is_within_its_bound_and_far_below_the_flood(keys, public, monkeypatch):
    monkeypatch.setattr(lattice, "draw_flood", lambda: 0)
    n = DEGREE + 100
    values = np.full((n, 1), LARGEST)
    values[1::2] *= -1
    # Both have sums of zero. Columns differ, since equal weights meet errors that cancel once in a hundred keys.
    large = LARGEST * np.random.default_rng(0).choice([-1, 1], size=(n // 2, 8)).repeat(2, axis=0)
    small = np.zeros((n, 8), dtype=np.int64)
    ranges = []
    for weights in (large, small):
        noise, _ = measure_noise(keys, public, values, weights, monkeypatch)
        ranges.append(max(abs(noise)))
        assert ranges[-1] < 22 * np.abs(weights).sum() + 2**13
    assert ranges[0] > 2**10 * ranges[1]  # without the flood weights are seen
    assert ranges[0] * 2**40 < 2**FLOOD_BITS
    assert 22 * MAX_PIECES * DEGREE * LARGEST * 2**40 < 2**FLOOD_BITS


def test_noise_that_leaves_is_uniform_and_leaves_a_budget(keys, public, monkeypatch):
    values, weights = np.full((64, 1), LARGEST), np.full((64, 400), LARGEST)
    noise, budget = measure_noise(keys, public, values, weights, monkeypatch)
    assert kstest(((noise / 2**FLOOD_BITS + 1) / 2).astype(float), "uniform").pvalue > 1e-6
    assert min(budget) >= 1


@pytest.mark.parametrize("what", ["public", "sealed", "weighed"])
def test_bytes_of_a_hostile_peer_are_refused_in_a_line_or_are_numbers(keys, public, what):
    layout, weights = SumsLayout(30, 4), draw((30, 4))
    sealed = keys.seal(draw((30, 1)), layout)
    valid, use = {
        "public": (keys.public, LatticePublic),
        "sealed": (sealed, lambda data: public.weigh(data, [weights], draw_mask(4), layout)),
        "weighed": (
            public.weigh(sealed, [weights], draw_mask(4), layout),
            lambda data: keys.open(data, layout),
        ),
    }[what]
    wrong = [
        b"",
        valid[:-1],
        valid + b"\0",
        valid * 2,
        b"\xff" * len(valid),
        secrets.token_bytes(len(valid)),
        bytes(16),
    ]
    for data in wrong + ([bytes(len(valid))] if what != "weighed" else []):
        with pytest.raises(ProtocolError, match="expected") as refused:
            use(data)
        assert "\n" not in str(refused.value)
    for _ in range(4):
        flipped = bytearray(valid)
        flipped[secrets.randbelow(len(valid))] ^= 1 << secrets.randbelow(8)
        try:
            use(bytes(flipped))
        except ProtocolError as refused:
            assert "residues" in str(refused)  # noqa: PT017  (most are residues too)


def test_a_key_that_hides_nothing_is_refused(keys):
    layout, key = SumsLayout(3, 2), np.ones((2, len(PRIMES), DEGREE), dtype=np.uint64)  # the second polynomial is 1
    public = LatticePublic(pack_residues(key))
    with pytest.raises(ProtocolError, match="that hide numbers, but SEAL says"):
        public.weigh(keys.seal(draw((3, 1)), layout), [draw((3, 2))], draw_mask(2), layout)


def test_a_system_without_files_in_memory_gives_the_same(keys, public, monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    opened, expected = exchange(keys, public, draw((9, 1)), draw((9, 2), seed=1))
    assert (opened == expected).all()


def test_residues_are_packed_without_loss():
    residues = np.stack([np.array([[0, 1, p // 3, p - 1]], dtype=np.uint64) for p in PRIMES], axis=1)
    packed = pack_residues(residues)
    assert len(packed) == 4 * 23
    assert (unpack_residues(packed, residues.shape, "residues") == residues).all()
    residues[0, 2, 1] = PRIMES[2]
    with pytest.raises(ProtocolError, match="below their primes as sums"):
        unpack_residues(pack_residues(residues), residues.shape, "sums")


def test_weights_beyond_the_bound_are_refused(keys, public):
    with pytest.raises(UsageError, match="weights up to 2\\^16"):
        exchange(keys, public, draw((3, 1)), np.full((3, 2), -LARGEST - 1))


def test_other_keys_open_to_something_else(keys, public):
    opened, expected = exchange(LatticeKeys(), public, draw((9, 1)), draw((9, 6)))
    assert (opened != expected).all()


def test_without_the_package_the_way_out_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(UsageError, match="pip install 'vflsec\\[sealed\\]'"):
        LatticeKeys()


def test_the_package_is_imported_with_a_first_key_alone():
    code = "import sys, vflsec, vflsec.cipher.lattice; sys.exit('tenseal' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
