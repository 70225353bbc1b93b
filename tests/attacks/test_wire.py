"""A8: the form of a common Paillier library's messages gives away much, that of ours nothing."""

import re
from functools import partial

import msgspec
import numpy as np
import phe
import pytest

from vflsec.attacks.wire import Wire, WireExponents, _Powers
from vflsec.cipher.arithmetic.keys import MODES
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.testing.recordings import EncryptedRun, LinearRun, attack_recording, compute_gradient


class Features(msgspec.Struct, tag=True):
    columns: bytes
    exponents: list[int]


class MaskedScores(msgspec.Struct, tag=True):
    ciphers: bytes
    exponents: list[int]


class NoisedGradient(msgspec.Struct, tag=True):
    share: bytes
    exponents: list[int]


class EncryptedDelta(msgspec.Struct, tag=True):
    ciphers: bytes
    exponents: list[int]


@pytest.fixture(scope="module")
def keys():
    return phe.generate_paillier_keypair(n_length=512)


def wire(numbers, *, secure):
    """Return ciphertexts, made fresh or not before they leave, and exponents."""
    data = b"".join(e.ciphertext(be_secure=secure).to_bytes(128, "little") for e in numbers)
    return data, [e.exponent for e in numbers]


def read(recording):
    """Return the share of faulty messages, what was read, and what could not be tested."""
    found = attack_recording(Wire(), recording)
    note, *untested = found["notes"]
    return found["leak"]["messages"].headline, note, [line.removeprefix("not measured: ") for line in untested]


def naive(folder, keys, *, secure, positives=0.24, batch=48, width=3, steps=6, seed=0):
    """Record PrADA's steps as a user of phe would write them: one number, one float, one ciphertext."""
    public, _ = keys
    rng = np.random.default_rng(seed)
    n = public.n.to_bytes(64, "little")
    layout = CipherLayout(width=width, batch=batch)
    share = 0.3 * rng.normal(size=width)
    with (
        RecordingWriter(folder / "passive", Header(role="passive", layout=layout, n=n)) as c,
        RecordingWriter(folder / "active", Header(role="active", layout=layout, n=n)) as p,
    ):

        def send(message, sender, receiver):
            sender.message("sent", message)
            receiver.message("received", message)

        for step in range(steps):
            for recorder in (c, p):
                recorder.begin(step, rate=0.1)
                recorder.note("rows", np.arange(batch) + step * batch)
            mu = rng.normal(size=(batch, width))
            labels = (rng.random(batch) < positives).astype(int)
            z = np.log(positives / (1 - positives)) + mu @ share + (labels - positives)
            p.note("labels", labels)
            em = [[public.encrypt(float(v)) for v in row] for row in mu]
            send(Features(*wire([e for row in em for e in row], secure=secure)), c, p)
            masked = []
            for row in em:
                total = row[0] * float(share[0])
                for e, w in zip(row[1:], share[1:], strict=True):
                    total = total + e * float(w)
                masked.append(total + float(rng.uniform(-1024, 1024)))
            send(MaskedScores(*wire(masked, secure=secure)), p, c)
            e = [public.encrypt(float(v)) for v in rng.normal(size=width)]
            send(NoisedGradient(*wire(e, secure=secure)), c, p)
            delta = compute_gradient(z[:, None], labels)[:, 0]
            whole = [a + float(w) for a, w in zip(e, share, strict=True)]
            send(EncryptedDelta(*wire([a * float(d) for a in whole for d in delta], secure=secure)), p, c)
    return Recording(folder / "passive"), Recording(folder / "active")


def test_what_a_common_library_sends_is_found(tmp_path, keys):
    c, p = naive(tmp_path, keys, secure=False)
    value, note, _ = read(c)
    assert value == 1.0  # every message has some fault
    assert "clear in EncryptedDelta: 6 messages" in note
    assert "EncryptedDelta not re-randomized: 6 messages" in note
    assert read(p)[0] > 0


def test_obfuscation_leaves_the_exponents(tmp_path, keys):
    c, p = naive(tmp_path, keys, secure=True, steps=2)
    _, note, _ = read(c)
    assert "not re-randomized" not in note
    assert "clear in EncryptedDelta: 2 messages" in note
    assert attack_recording(WireExponents(), c, p, n=20)["leak"]["train"].metric == "auc"


@pytest.mark.parametrize(("positives", "least", "most"), [(0.24, 0.71, 0.77), (0.05, 0.9, 0.96), (0.02, 0.94, 0.99)])
def test_exponents_of_loss_gradients_rank_the_labels(keys, positives, least, most):
    """The exponent of delta alone, as phe chooses it: the rarer class 1, the larger are its loss gradients."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    x = rng.normal(size=(8000, 10))
    z = x @ rng.normal(size=10) / 3 + 0.3 * rng.normal(size=8000)
    y = (z > np.quantile(z, 1 - positives)).astype(int)
    delta = LogisticRegression().fit(x, y).predict_proba(x)[:, 1] - y
    exponents = [phe.EncodedNumber.encode(keys[0], float(d)).exponent for d in delta]
    assert least < roc_auc_score(y, exponents) < most


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delta", ["rank1", "outer"])
def test_ours_has_no_fault(tmp_path, delta, mode):
    run = LinearRun(steps=10, width=2, batch=40)
    c, p = EncryptedRun(run=run, delta=delta, inference=1, mode=mode).record(tmp_path)
    for recording, other in ((c, p), (p, c)):
        value, note, _ = read(recording)
        assert value == 0
        assert note.startswith("no fault")
        assert (
            attack_recording(WireExponents(), recording, other, n=20)["status"] == "unmeasured"
        )  # no exponents to rank by


class Bare(ActiveRole):
    """Adds masks and forgets to re-randomize."""

    def _release(self, ciphertexts, masks):
        n, square = self.ciphertexts.n, self.ciphertexts.square
        pairs = zip(ciphertexts, masks, strict=True)
        return self.ciphertexts.write(cipher * (1 + n * mask) % square for cipher, mask in pairs)


@pytest.mark.long
def test_answers_that_are_not_fresh_are_found_without_a_key(tmp_path):
    run = EncryptedRun(run=LinearRun(steps=30, width=2, batch=80), delta="outer", active=Bare)
    c, _ = run.record(tmp_path)
    value, note, _ = read(c)
    assert "MaskedScores not re-randomized" in note
    assert "EncryptedDelta not re-randomized" in note
    assert value > 0


class BareGradient(ActiveRole):
    """Forgets to re-randomize the masked gradient alone."""

    def mask_gradient(self, delta):
        self._release = partial(Bare._release, self)
        try:
            return super().mask_gradient(delta)
        finally:
            del self._release


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("delta", "outputs"), [("rank1", 1), ("outer", 1), ("rank1", 3)])
def test_a_masked_gradient_that_is_not_fresh_is_found_in_ps_recording(tmp_path, mode, delta, outputs):
    """Its exponents are the loss gradients. C's recording does not have them, and says so."""
    run = LinearRun(steps=3, width=2, batch=12, outputs=outputs)
    c, p = EncryptedRun(run=run, mode=mode, delta=delta, active=BareGradient).record(tmp_path)
    assert "MaskedGradient not re-randomized: 3 messages" in read(p)[1]
    assert any(line.startswith("re-randomization of MaskedGradient: ") for line in read(c)[2])
    (tmp_path / "fresh").mkdir()
    _, p = EncryptedRun(run=run, mode=mode, delta=delta).record(tmp_path / "fresh")
    assert "MaskedGradient tested by 3 products" in read(p)[1]
    assert read(p)[1].startswith("no fault")


@pytest.mark.parametrize("mode", MODES)
def test_powers_of_known_or_small_exponents_are_found_under_any_key(tmp_path, mode):
    run = EncryptedRun(run=LinearRun(steps=1, width=2, batch=8), active=Bare, mode=mode)
    c, p = run.record(tmp_path)
    assert "EncryptedDelta not re-randomized: 1 message" in read(c)[1]  # a power of 24 bits
    assert "MaskedScores not re-randomized" not in read(c)[1]  # C does not know the weights
    assert "EncryptedDelta not re-randomized: 1 message" in read(p)[1]
    assert "MaskedScores not re-randomized: 1 message" in read(p)[1]  # p does
    assert read(c)[0] > 0 < read(p)[0]


@pytest.mark.long
def test_a_recording_of_subgroup_keys_says_what_is_not_measured(tmp_path):
    run = LinearRun(steps=30, width=2, batch=80)  # enough bits under a standard key, see above
    c, p = EncryptedRun(run=run, mode="subgroup", active=Bare, delta="outer").record(tmp_path)
    assert any("MaskedScores: all Jacobi symbols are 1" in line for line in read(c)[2])
    assert "MaskedScores tested by 4 products" in read(p)[1]
    (tmp_path / "few").mkdir()
    c, _ = EncryptedRun(run=LinearRun(steps=1, width=2, batch=8)).record(tmp_path / "few")
    assert re.search("MaskedScores: . bits? .*40", "; ".join(read(c)[2]))


@pytest.mark.parametrize("bits", [5, 8])
def test_small_powers_are_found_and_no_others(bits):
    n = 1000003 * 1000033
    powers = _Powers(CipherLayout(width=2), n)
    for x in (0, 1, -1, 7, -(2**bits), 2**bits):
        assert powers._is_small_power(12345, pow(12345, x, n), bits)
    for x in (2**bits * 5, -(2**bits) * 5, 10**8):
        assert not powers._is_small_power(12345, pow(12345, x, n), bits)


class Stale(PassiveRole):
    """Takes the same randomizers twice."""

    def _encrypt(self, plaintexts):
        fresh = self.pool.take(len(plaintexts))
        self._old = getattr(self, "_old", fresh)[: len(plaintexts)] + fresh[len(getattr(self, "_old", fresh)) :]
        n, square = self.ciphertexts.n, self.ciphertexts.square
        pairs = zip(plaintexts, self._old, strict=True)
        return self.ciphertexts.write((1 + n * (m % n)) * r % square for m, r in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_randomizers_used_twice_are_found(tmp_path, mode):
    c, _ = EncryptedRun(run=LinearRun(steps=2, width=2, batch=8), passive=Stale, mode=mode).record(tmp_path)
    assert "used before in Features" in read(c)[1]


class Unmasked(PassiveRole):
    """Encrypts without a randomizer."""

    def _encrypt(self, plaintexts):
        n, square = self.ciphertexts.n, self.ciphertexts.square
        return self.ciphertexts.write((1 + n * (m % n)) % square for m in plaintexts)


@pytest.mark.parametrize("mode", MODES)
def test_ciphertexts_without_a_randomizer_are_found(tmp_path, mode):
    c, _ = EncryptedRun(run=LinearRun(steps=1, width=2, batch=8), passive=Unmasked, mode=mode).record(tmp_path)
    value, note, _ = read(c)
    assert "no randomizer in Features: 1 message" in note
    assert value > 0


@pytest.mark.parametrize("mode", MODES)
def test_exponents_in_clear_are_found(tmp_path, mode):
    c, _ = EncryptedRun(run=LinearRun(steps=1, width=2, batch=8), mode=mode).record(tmp_path)
    with RecordingWriter(tmp_path / "told", c.header) as recorder:
        recorder.begin(0, rate=0.1)
        recorder.message("received", MaskedScores(b"", [-3, -4]))
    assert "clear in MaskedScores: 1 message" in read(Recording(tmp_path / "told"))[1]


def test_without_messages_nothing_is_measured(tmp_path):
    c, _ = LinearRun(steps=1).record(tmp_path)
    assert attack_recording(Wire(), c)["status"] == "unmeasured"
