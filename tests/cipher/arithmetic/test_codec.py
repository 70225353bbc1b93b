"""Numbers survive units, slots, the ring and bytes; what does not fit is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.cipher.arithmetic import codec

finite = st.floats(-16, 16)


@given(st.lists(finite, min_size=1))
def test_encoding_is_exact_to_half_a_unit(values):
    units = codec.encode(np.array(values), 20, 4, "x")
    assert units.dtype == np.int64
    assert np.abs(codec.decode(units.tolist(), 20) - values).max() <= 2.0**-21


@pytest.mark.parametrize(
    ("value", "why"), [(np.nan, "finite x, got nan"), (-np.inf, "finite x, got -inf"), (16.1, r"\|x\| <= 16, got 16.1")]
)
def test_what_has_no_integer_is_refused(value, why):
    with pytest.raises(UsageError, match=why):
        codec.encode(np.array([1.0, value]), 20, 4, "x")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (16.5, r"16\.5.*column age.*feature_bits = 5"),
        (-32.0, "32.*column age.*feature_bits = 5"),
        (33.0, "set feature_bits = 6"),
        (2.0**16, "set feature_bits = 16"),
        (2.0**17, "sent: make it smaller"),
        (np.nan, "nan in column age"),
    ],
)
def test_the_column_and_the_bits_that_it_needs_are_named(value, said):
    x = np.array([[1.0, 15.0], [value, 2.0]])
    with pytest.raises(UsageError, match=said):
        codec.encode(x, 22, 4, "features", ["age", "debt"])
    if said.rpartition(" ")[2].isdigit():
        codec.encode(x, 22, int(said.rpartition(" ")[2]), "features")


@pytest.mark.parametrize("rows", [3, 7, 100, 128])
def test_what_float32_rounds_above_a_bound_is_within_it(rows):
    """The mean loss's gradient of a row that is wholly wrong is -1/B in float32, and B times that may be above one."""
    assert codec.encode(np.array([np.float64(np.float32(-1 / rows)) * rows]), 23, 0, "delta").tolist() == [-(2**23)]
    with pytest.raises(UsageError, match=r"\|x\| <= 1, got 1.00000012"):
        codec.encode(np.array([1 + 2.0**-23]), 23, 0, "x")


@given(st.integers(1, 80), st.data())
def test_slots_hold_what_was_packed(slot, data):
    values = data.draw(st.lists(st.integers(0, 2**slot - 1), min_size=1, max_size=9))
    packed = codec.pack(values, slot)
    assert packed == sum(value << slot * i for i, value in enumerate(values))
    assert codec.unpack(packed, slot, len(values)) == values
    with pytest.raises(ProtocolError, match="overflows its slots"):
        codec.unpack(packed + (1 << slot * len(values)), slot, len(values))


@given(st.integers(2, 80), st.data())
def test_signed_slots_hold_what_was_packed_modulo_n(slot, data):
    bound = data.draw(st.integers(1, 2 ** (slot - 1) - 1))
    values = data.draw(st.lists(st.integers(-bound, bound), min_size=1, max_size=9))
    modulus = (1 << slot * 9 + 2) - 1
    packed = codec.pack(values, slot) % modulus
    assert codec.unpack_signed(packed, slot, len(values), bound, modulus) == values
    values[0] = bound + 1
    with pytest.raises(ProtocolError, match="weights have grown|overflows its slots"):
        codec.unpack_signed(codec.pack(values, slot) % modulus, slot, len(values), bound, modulus)


@given(st.integers(48, 64), st.data())
def test_the_ring_is_centered_and_adds_up(bits, data):
    a, b = (data.draw(st.integers(-(2 ** (bits - 2)), 2 ** (bits - 2) - 1)) for _ in range(2))
    total = codec.to_ring([a], bits) + codec.to_ring([b], bits)
    assert codec.center(total, bits).tolist() == [a + b]


@given(st.lists(st.integers(-(2**127), 2**127 - 1)))
def test_bytes_hold_what_was_joined(values):
    assert codec.cut(codec.join(values, 16, signed=True), 16, len(values), "numbers", signed=True) == values


def test_bytes_of_another_length_are_refused():
    with pytest.raises(ProtocolError, match="3 numbers of 4 bytes.*11"):
        codec.cut(bytes(11), 4, 3, "numbers")


@given(st.integers(1, 2**200))
def test_uniform_stays_below_its_count(count):
    assert codec.draw(count, lambda bits: (1 << bits) - 1) < count
    assert codec.draw(count, lambda bits: 0) == 0


def test_uniform_is_uniform():
    """Over a count that is no power of two, where a remainder of too few bits would be lopsided."""
    rng = np.random.default_rng(0)
    drawn = [codec.draw(3, lambda bits: int.from_bytes(rng.bytes(9), "little") >> 72 - bits) for _ in range(3000)]
    assert np.abs(np.bincount(drawn) - 1000).max() < 4 * np.sqrt(3000 * 2 / 9)
