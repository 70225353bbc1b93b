"""A2: exact fixed-point products have W as their divisors; blurred ones have none."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.attacks.common_divisor import CommonDivisor
from vflsec.cipher.recording import Recording, RecordingWriter
from vflsec.testing.recordings import LinearRun, attack_recording


def rewritten(folder, c, change):
    """Return C's recording with another delta^C; ``change`` gets the integers delta (B,) and W (g,)."""
    rng = np.random.default_rng(0)
    with RecordingWriter(folder / "other", c.header) as recorder:
        for step in c.steps():
            delta, w = rng.integers(-(1 << 22), 1 << 23, size=128), rng.integers(-(1 << 28), 1 << 28, size=10)
            recorder.begin(step.number, rate=step.rate)
            recorder.note("embedding_gradient", np.ldexp(change(delta, w, rng).astype(float), -51))
            share = np.array([int(v) << 36 for v in w], dtype=object)[:, None]
            recorder.note("share", share)
    return Recording(folder / "other")


def truth(folder, header):
    """Return p's recording with a share of zero, so that all of W is in C's."""
    from msgspec.structs import replace

    with RecordingWriter(folder / "active", replace(header, role="active")) as recorder:
        for number in range(2):
            recorder.begin(number, rate=0.1)
            recorder.note("share", np.array([0] * 10, dtype=object)[:, None])
    return Recording(folder / "active")


def audited(folder, change):
    c, _ = LinearRun().record(folder)
    c = rewritten(folder, c, change)
    return attack_recording(CommonDivisor(), c, truth(folder, c.header))


def leak_of(found):
    """Return the share of W that is right to the unit."""
    (block,) = found["leak"].values()
    return block.headline


def test_all_weights_are_read_from_exact_products(tmp_path):
    finding = audited(tmp_path, lambda delta, w, rng: np.outer(delta, w))
    assert leak_of(finding) == 1.0
    assert (finding["leak"]["parameters"].metric, finding["leak"]["parameters"].chance) == ("exact", 0)


def test_noise_below_a_unit_of_the_weights_leaves_no_divisor(tmp_path):
    def blurred(delta, w, rng):
        return np.outer(delta, w) + rng.integers(0, np.abs(delta)[:, None] + 1, size=(128, 10))

    finding = audited(tmp_path, blurred)
    assert leak_of(finding) == 0.0
    assert finding["status"] == "ok"


def test_one_exact_batch_of_two_is_not_averaged_away(tmp_path):
    exact = iter([True, False])

    def first_exact(delta, w, rng):
        blur = 0 if next(exact) else rng.integers(0, np.abs(delta)[:, None] + 1, size=(128, 10))
        return np.outer(delta, w) + blur

    finding = audited(tmp_path, first_exact)
    assert leak_of(finding) == 1.0


def test_a_single_exact_row_tells_its_loss_gradient(tmp_path):
    def first_exact(delta, w, rng):  # as if a row were sent alone, all others being real multiples of it
        ratio = np.float32(delta / delta[0])
        return ratio[:, None] * (delta[0] * w).astype(float)[None]

    c, _ = LinearRun().record(tmp_path)
    finding = attack_recording(CommonDivisor(), rewritten(tmp_path, c, first_exact))
    assert finding["leak"]["weights and loss gradients"].metrics == {"share": 1.0}
    assert finding["notes"] == ["2 of 2 columns and rows of delta^C have a common divisor: |W_j|, |delta_i|"]


def test_numbers_that_a_float_has_rounded_are_not_measured(tmp_path):
    finding = audited(tmp_path, lambda delta, w, rng: np.outer(delta, w) * 16.0)
    assert finding["status"] == "unmeasured"


@settings(max_examples=20)
@given(st.integers(2, 1 << 20), st.lists(st.integers(1, 1 << 20), min_size=8, max_size=20))
def test_the_divisor_of_multiples_is_a_multiple_of_the_weight(w, deltas):
    assert np.gcd.reduce(np.array(deltas) * w) % w == 0


def test_several_outputs_are_not_measured(tmp_path):
    c, _ = LinearRun(outputs=3).record(tmp_path)
    finding = attack_recording(CommonDivisor(), c)
    assert "expected one output, got 3" in finding["notes"][0]
    assert finding["status"] == "unmeasured"


def test_floats_of_a_simulation_are_no_fixed_point(tmp_path):
    c, _ = LinearRun().record(tmp_path)
    assert attack_recording(CommonDivisor(), c)["status"] == "unmeasured"


def test_numbers_rounded_to_a_larger_unit_have_no_divisor(tmp_path):
    c, p = LinearRun(rounding=2.0**-24).record(tmp_path)
    finding = attack_recording(CommonDivisor(), c)
    assert finding["leak"]["weights and loss gradients"].headline == 0.0
    assert finding["notes"][0].startswith("no column or row of")
    assert leak_of(attack_recording(CommonDivisor(), c, p)) == 0.0
