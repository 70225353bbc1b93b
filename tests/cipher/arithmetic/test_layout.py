"""Slots hold the worst case, for every layout that can be built; others are refused."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.layout import SPARE_BITS, CipherLayout, Packing

settings = st.fixed_dictionaries(
    {
        "width": st.integers(1, 70),
        "outputs": st.integers(1, 12),
        "batch": st.integers(1, 300),
        "bits": st.sampled_from([1024, 2048, 3072]),
        "sigma": st.integers(40, 80),
        "ring": st.integers(56, 64),
        "feature_precision": st.integers(16, 24),
        "delta_bits": st.integers(0, 6),
    }
)


def layouts(kw):
    try:
        return CipherLayout(**kw)
    except UsageError:
        assume(False)


@given(settings.map(layouts))
def test_no_slot_overflows_in_the_worst_case(layout):
    top = (1 << layout.sigma) - 1
    score = layout.width * layout.feature_bound * ((1 << layout.ring) - 1)
    assert score <= layout.score_bound
    assert 2 * score + score * top + layout.score_bound < 1 << layout.scores.slot
    gradient = layout.batch * layout.feature_bound * layout.delta_bound
    assert gradient == layout.gradient_bound
    assert 2 * gradient + gradient * (top + 1) <= 1 << layout.gradients.slot
    noised = (2 * gradient + (gradient << layout.sigma)) * layout.gradients.rows + (gradient << layout.sigma)
    assert noised < 1 << 8 * layout.gradient_bytes
    delta = layout.outputs * layout.delta_bound * layout.weight_bound
    assert delta < 1 << layout.deltas.slot - 1
    for packing in (layout.scores, layout.gradients, layout.deltas):
        assert packing.slot * packing.columns * packing.rows <= layout.bits - 1 - SPARE_BITS
        assert packing.rows <= layout.batch
    for packing in (layout.gradients, layout.deltas):
        assert (packing.blocks - 1) * packing.columns < layout.width <= packing.blocks * packing.columns


@given(settings.map(layouts))
def test_two_processes_compare_what_they_agree_on(layout):
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CipherLayout)
    assert again == layout
    assert again.fingerprint(12345) == layout.fingerprint(12345) != layout.fingerprint(12347)
    assert again.fingerprint(12345) != msgspec.structs.replace(layout, sigma=81).fingerprint(12345)


@pytest.mark.parametrize(
    ("bits", "scores", "gradients", "deltas"),
    [(2048, (134, 15), (97, 2), (63, 3)), (3072, (134, 22), (97, 3), (63, 4))],
)
def test_the_layout_of_128_samples_of_ten_features(bits, scores, gradients, deltas):
    layout = CipherLayout(width=10, bits=bits)
    assert layout.scores == Packing(scores[0], 1, scores[1], 1)
    assert layout.gradients == Packing(gradients[0], 10, gradients[1], 1)
    assert layout.deltas == Packing(deltas[0], 10, deltas[1], 1)


def test_a_row_that_does_not_fit_one_ciphertext_spans_several():
    layout = CipherLayout(width=64, batch=128)
    assert layout.gradients == Packing(97, 16, 1, 4)
    assert layout.gradients.count(128) == 512


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"width": 0}, "expected width > 0, got 0"),
        ({"outputs": 0}, "expected outputs > 0, got 0"),
        ({"batch": -1}, "expected batch > 0, got -1"),
        ({"width": 2**63 - 1}, "at most 65536"),
        ({"bits": 512}, "expected 1024 <= bits <= 16384, got 512"),
        ({"bits": 2047}, "whole bytes, got 2047"),
        ({"bits": 1026}, "whole bytes, got 1026"),
        ({"sigma": 39}, "expected 40 <= sigma <= 128, got 39"),
        ({"ring": 65}, "expected 48 <= ring <= 64, got 65"),
        ({"ring": 52}, r"expected ring >= feature_precision \+ weight_precision \+ 3 = 53, got 52"),
        ({"delta": "row"}, "unknown delta 'row'"),
        ({"order": "next"}, "unknown order 'next'"),
        ({"delta_precision": 40}, "expected 8 <= delta_precision <= 32, got 40"),
    ],
)
def test_layouts_that_cannot_be_are_refused(settings, why):
    with pytest.raises(UsageError, match=why):
        CipherLayout(**{"width": 10, **settings})


def test_more_outputs_than_features_send_every_row():
    assert CipherLayout(width=10, outputs=10).low_rank
    assert not CipherLayout(width=9, outputs=10).low_rank
    assert not CipherLayout(width=10, delta="outer").low_rank
