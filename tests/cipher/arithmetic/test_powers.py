"""Every product of powers is what pow gives."""

import math
import random
from typing import ClassVar

import gmpy2
import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given
from hypothesis import strategies as st

from vflsec.cipher.arithmetic.powers import (
    MEMORY,
    FixedBase,
    FixedWindow,
    Pippenger,
    Straus,
    _split_digits,
    find_fixed_base_window,
    invert_all,
    plan_straus,
)

MODULUS = mpz(2**127 - 1)  # a prime
units = st.integers(1, int(MODULUS) - 1).map(mpz)


def naive(bases, exponents):
    return math.prod(pow(int(b), e, int(MODULUS)) for b, e in zip(bases, exponents, strict=True)) % MODULUS


@given(st.lists(units, min_size=1, max_size=12))
def test_inverses(bases):
    assert all(a * b % MODULUS == 1 for a, b in zip(bases, invert_all(bases, MODULUS), strict=True))


@given(st.lists(st.tuples(units, st.integers(0, 2**64 - 1)), min_size=1, max_size=6), st.integers(1, 20))
def test_straus(pairs, products):
    bases, exponents = zip(*pairs, strict=True)
    powers = Straus(bases, MODULUS, bits=64, products=products)
    for e in (exponents, exponents[::-1]):  # one table serves many
        assert powers.product(plan_straus(e, powers.window)) == naive(bases, e)


@given(st.lists(st.tuples(units, st.integers(-(2**24), 2**24)), min_size=1, max_size=6), st.integers(1, 20))
def test_fixed_windows(pairs, products):
    bases, exponents = zip(*pairs, strict=True)
    powers = FixedWindow(bases, MODULUS, bits=24, products=products)
    for e in (exponents, exponents[::-1], [-(2**24)] * len(bases), [2**24] * len(bases), [0] * len(bases)):
        assert powers.product(e) == naive(bases, e)


class Logged:
    """A number that logs the sizes of all factors that it is multiplied by."""

    sizes: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, value):
        self.value = mpz(value)

    def __mul__(self, other):
        other = mpz(getattr(other, "value", other))
        Logged.sizes.append((self.value.bit_length() > 64, other.bit_length() > 64))
        return Logged(self.value * other)

    __rmul__ = __mul__

    def __mod__(self, modulus):
        return Logged(self.value % modulus)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_work_depends_on_no_exponent(monkeypatch, count):
    """Gradients of zero, of one unit, and of the largest size take the same multiplications, none of them by 1."""
    monkeypatch.setattr(gmpy2, "powmod", lambda b, e, m: Logged(pow(getattr(b, "value", b), int(e), m)))
    rng = random.Random(0)  # noqa: S311
    bases = [mpz(rng.randrange(2**100, int(MODULUS))) for _ in range(count)]
    for powers in (FixedWindow(bases, MODULUS, bits=23, products=4), Pippenger(bases, MODULUS, 23)):
        if isinstance(powers, FixedWindow):
            powers._tables = [[Logged(power) for power in table] for table in powers._tables]
        else:
            powers._factor = Logged(powers._factor)
        logs = []
        for exponents in (
            [0] * count,
            [1] * count,
            [-1] * count,
            [2**23] * count,
            [-(2**23)] * count,
            [rng.randrange(-(2**23), 2**23) for _ in range(count)],
        ):
            Logged.sizes = []
            found = powers.product(exponents)
            assert found.value == naive(bases, exponents)
            logs.append(Logged.sizes)
        assert all(log == logs[0] for log in logs)
        assert sum(not all(pair) for pair in logs[0]) <= 3 * powers.digits + powers.window  # by the 1 to start from


@pytest.mark.parametrize("bits", [1, 7, 23, 27])
@given(data=st.data())
def test_pippenger(bits, data):
    exponents = st.integers(-(2**bits), 2**bits) | st.sampled_from([-(2**bits), 0, 2**bits])
    pairs = data.draw(st.lists(st.tuples(units, exponents), min_size=1, max_size=70))
    bases, drawn = zip(*pairs, strict=True)
    powers = Pippenger(bases, MODULUS, bits)
    assert powers.product(drawn) == naive(bases, drawn)
    assert powers.product([2**bits] * len(bases)) == naive(bases, [2**bits] * len(bases))


@given(
    st.data(), st.sampled_from([mpz(15), MODULUS, mpz(2**64 - 59)]), st.integers(8, 300), st.sampled_from([1, 40, 1000])
)
def test_a_fixed_base(data, root, bits, uses):
    square = int(root**2)
    units = st.integers(1, square - 1).filter(lambda value: math.gcd(value, square) == 1).map(mpz)
    base, subset = data.draw(units), data.draw(st.lists(units, max_size=20))
    table = FixedBase(base, root, bits, uses=uses, subset=subset)
    exponents = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=5))
    chosen = data.draw(st.integers(0, 2 ** len(subset) - 1))
    found = table.powers([e + (chosen << table.top) for e in exponents])
    extra = math.prod(x for i, x in enumerate(subset) if chosen >> i & 1)
    assert found == [pow(int(base), e, square) * extra % square for e in exponents]


@pytest.mark.sampled
@pytest.mark.parametrize("window", range(1, 17))
@given(data=st.data())
def test_digits_are_those_of_each_exponent(window, data):
    places = data.draw(st.integers(1, 12))
    exponents = data.draw(st.lists(st.integers(0, 2 ** (window * places) - 1), min_size=1, max_size=5))
    found = np.array(_split_digits(exponents, window, places)).T.tolist()
    assert found == [[e >> window * k & (1 << window) - 1 for k in range(places)] for e in exponents]


def test_many_uses_take_a_wider_window_up_to_the_memory():
    narrow, wide, widest = (find_fixed_base_window(2048, 1024, uses) for uses in (10, 10_000, 10**9))
    assert narrow < wide <= widest
    assert -(-1024 // widest) * 256 << widest <= MEMORY < -(-1024 // (widest + 1)) * 304 << widest + 1
